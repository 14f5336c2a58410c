"""Building an `AsyncLLM` and saying what it is. Imports vLLM, so its environment must be set before (`launch.py`)."""

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vllm
from huggingface_hub import try_to_load_from_cache
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from pipeline.config import Config
from pipeline.errors import OperatorError
from pipeline.protocol.arrangement import Role
from workers.engines import launch
from workers.engines.fingerprint import fingerprint
from workers.engines.port import EngineInfo


def build(
    config: Config, role: Role, model_path: str, stat_logger: Callable[..., Any], events_at: Path | None = None
) -> Any:
    """The engine, started: 15 to 20 s on two cores. Blocks. Raises `OperatorError`."""
    arguments = launch.engine_arguments(config, role, model_path, events_at)
    try:
        if "kv_events_config" in arguments:
            arguments["kv_events_config"] = KVEventsConfig(**arguments["kv_events_config"])
        transfer = KVTransferConfig(**arguments.pop("kv_transfer_config"))
        engine_arguments = AsyncEngineArgs(**arguments, kv_transfer_config=transfer)
        return AsyncLLM.from_engine_args(engine_arguments, stat_loggers=[stat_logger])
    except Exception as error:  # vLLM raises whatever its parts raise; all of it means that this set-up does not start
        problem = str(error).strip().splitlines() or [""]
        raise OperatorError(
            f"The {role} engine did not start: {type(error).__name__}: {problem[0]}",
            f"The log above has the cause. Correct the tables model, {role} and lmcache of the configuration.",
        ) from error


def describe(engine: Any, config: Config, model_path: str) -> EngineInfo:
    """What the started engine is."""
    cache = engine.vllm_config.cache_config
    return EngineInfo(
        model=config.model.served_name,
        max_model_len=engine.model_config.max_model_len,
        block_size=cache.block_size,
        chunk_size=config.lmcache.chunk_size,
        kv_blocks=cache.num_gpu_blocks - 1,  # vLLM keeps one, the null block
        fingerprint=fingerprint(_folder(model_path), _facts(engine, model_path)),
    )


def _facts(engine: Any, model_path: str) -> dict[str, str]:
    """All but the files that KV bytes depend on."""
    cache, model = engine.vllm_config.cache_config, engine.model_config
    parallel = engine.vllm_config.parallel_config
    folder = _folder(model_path)
    return {
        # Prepared in another folder it is the same model. A hub's snapshot folder is named by the commit.
        "model": "" if Path(model_path).is_dir() else f"{model_path}@{folder.name if folder else model.revision}",
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "block_size": str(cache.block_size),
        "parallel": f"{parallel.tensor_parallel_size}x{parallel.pipeline_parallel_size}",
        "attention": _attention(engine),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "lmcache": importlib.metadata.version("lmcache"),
    }


def _attention(engine: Any) -> str:
    """What decides how a block's bytes are laid out: on CPU the instruction set, on GPU its generation."""
    if not current_platform.is_cpu():
        return f"{current_platform.device_type} {current_platform.get_device_capability()}"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415  # only a CPU build has it

    cache, model = engine.vllm_config.cache_config, engine.model_config
    return f"cpu {_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)}"


def _folder(model_path: str) -> Path | None:
    """Where the model's files lie. None for a hub id whose files are not in the hub's cache."""
    if Path(model_path).is_dir():
        return Path(model_path)
    cached = try_to_load_from_cache(model_path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None
