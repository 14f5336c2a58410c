"""The sides with real engines: SmolLM2-135M on vLLM for CPU, with the settings of `configs/local.toml`."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from pipeline.config import Config, load
from pipeline.paths import LOCAL_CONFIG
from pipeline.protocol.arrangement import Role
from tests.benchmarks.peers.side import Part, Side, Unit
from tests.benchmarks.peers.site import MODEL, Recipe, Site, headrace, router, url
from tests.ports import free_port
from workers.engines import launch

ROOT: Final = Path(__file__).parents[3]
SEQUENCES: Final = 32

DECODE_BEGINS: Final = "[requests]\nprefill_begins = false\n"
"""The SLO counts each gap: a first token that comes sooner, and so before a longer gap, is worth less to it than a later one."""

BOTH: Final = f"{DECODE_BEGINS}direct_tokens_max = 256\n"
"""A prompt whose creator's persona is warm is computed where it is decoded, in the same steps."""

IN_TIME: Final = "first_token_s = 1.0\n"
"""The SLO's bound: whose reply cannot begin by then is refused, and counts as not good."""

SMALL_STEP: Final = 32
"""Tokens, no fewer than sequences: a long step is the longest gap in every reply beside it; these take 30 to 60 ms of a core."""

BALANCED: Final = "[balancer]\nenabled = true\npatience_s = 2.0\nsettle_s = 4.0\n"
"""Sooner than by default: the load stands for seconds here, and not for minutes."""

SMALL_STEPS: Final = f"[both]\nmax_num_batched_tokens = {SMALL_STEP}\n"

YIELDING: Final = f"[both]\nprompt_tokens_beside_replies = {SMALL_STEP}\n"
"""Small steps only where a reply is being written."""


def vllm(site: Site) -> Side:
    """One engine, with all the machine's cores and the KV memory of two."""
    port = free_port()
    return Side(stages=((serve(site, "vllm", port, core=None, part="front"),),), url=url(port))


def replicas(site: Site, step_tokens: int | None = None) -> Side:
    """Two engines behind a cache-aware router. `step_tokens`: in one step of an engine at most; None: as configured."""
    port, engines = free_port(), (free_port(), free_port())
    more = () if step_tokens is None else ("--max-num-batched-tokens", str(step_tokens))  # the last one counts
    units = tuple(serve(site, f"vllm-{core}", behind, core, more) for core, behind in enumerate(engines))
    front = router(site, port, "--worker-urls", *map(url, engines), "--policy", "cache_aware")
    return Side(stages=(units, (front,)), url=url(port))


def vllm_router_pd(site: Site) -> Side:
    """Prefill and decode over one LMCache server, in shared memory as ours is."""
    config = load(LOCAL_CONFIG)
    store = replace(config.lmcache, port=free_port(), http_port=free_port(), shm_name=f"headrace-peer-{free_port()}")
    config = replace(config, lmcache=store)
    port, prefill, decode = free_port(), free_port(), free_port()
    lmcache = Unit(
        name="lmcache", command=tuple(launch.lmcache_command(config)), environment=launch.lmcache_environment(),
        ready=f"{launch.lmcache_url(config)}/healthcheck", part="engine",
    )  # fmt: skip
    engines = (
        serve(site, "prefill", prefill, 0, transfer(config, "prefill")),
        serve(site, "decode", decode, 1, transfer(config, "decode")),
    )
    front = router(
        site, port, "--vllm-pd-disaggregation", "--prefill", url(prefill), "--decode", url(decode),
        "--policy", "round_robin",
    )  # fmt: skip
    segment = launch.shm_path(config)
    assert segment is not None
    return Side(stages=((lmcache,), engines, (front,)), url=url(port), leftovers=(segment,))


def transfer(config: Config, role: Role) -> tuple[str, ...]:
    """Options of `vllm serve`: LMCache's own connector, set as ours is."""
    module = {"kv_connector": "LMCacheMPConnector", "kv_connector_module_path": CONNECTOR}
    return ("--kv-transfer-config", json.dumps(launch.connector(config, role) | module))


CONNECTOR: Final = "lmcache.integration.vllm.lmcache_mp_connector"


def serve(
    site: Site, name: str, port: int, core: int | None, more: tuple[str, ...] = (), part: Part = "engine"
) -> Unit:
    """`vllm serve`, on one core or with a thread for each."""
    config = load(LOCAL_CONFIG)
    engine = config.both
    if core is None:
        engine = replace(engine, threads=2, kv_cache_bytes=2 * engine.kv_cache_bytes)
    pinned = () if core is None else ("taskset", "-c", str(core))
    command = (
        *pinned, sys.executable, "-m", "tests.e2e.vllm_serve", "serve", site.model, "--served-model-name", MODEL,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", config.model.dtype,
        "--max-model-len", str(config.model.max_model_len), "--block-size", str(config.lmcache.block_size),
        "--max-num-seqs", str(SEQUENCES), "--max-num-batched-tokens", str(engine.max_num_batched_tokens),
        "--kv-cache-memory-bytes", str(engine.kv_cache_bytes), "--enable-prefix-caching",
        "--enable-prompt-tokens-details", "--enforce-eager", "--disable-uvicorn-access-log", *more,
    )  # fmt: skip
    environment = launch.environment(replace(config, both=engine), "both")
    return Unit(
        name=name, command=command, ready=f"{url(port)}/health", part=part,
        environment=environment | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


SIDES: Final[Mapping[str, Recipe]] = {
    "vllm": vllm,
    "vllm-replicas": replicas,
    "vllm-replicas-small-steps": lambda site: replicas(site, SMALL_STEP),
    "vllm-router-pd": vllm_router_pd,
    "headrace-split": lambda site: headrace(site, 1, 1, 0, DECODE_BEGINS),
    "headrace-split-prefill-begins": lambda site: headrace(site, 1, 1, 0, ""),
    "headrace-both": lambda site: headrace(site, 0, 0, 2, BOTH),
    "headrace-both-small-steps": lambda site: headrace(site, 0, 0, 2, f"{BOTH}{SMALL_STEPS}"),
    "headrace-both-yielding": lambda site: headrace(site, 0, 0, 2, f"{BOTH}{YIELDING}"),
    "headrace-balanced": lambda site: headrace(
        site, 0, 0, 2, f"{DECODE_BEGINS}{YIELDING}{BALANCED}", begin_as=("prefill", "decode")
    ),
    "headrace-both-in-time": lambda site: headrace(site, 0, 0, 2, f"{BOTH}{IN_TIME}{SMALL_STEPS}"),
}
