"""The sides with simulated engines, which take no time for a prompt and `STEP_MS` for a token."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from tests.benchmarks.peers import install
from tests.benchmarks.peers.side import Part, Side, Unit
from tests.benchmarks.peers.site import MODEL, Recipe, Site, headrace, router, url
from tests.ports import free_port

STEP_MS: Final = 4.0
PREFILL_MS: Final = 0.01
"""Of a prompt of any length, in Dynamo's mocker, whose tables know no zero."""

ROOT: Final = Path(__file__).parents[3]

HEADRACE: Final = f"""engine = "simulated"
[prefill]
slots = 64
[decode]
slots = 1024
[simulated]
prefill_overhead_s = 0.0
prefill_tokens_per_s = 1e9
step_s = {STEP_MS / 1000}
step_per_sequence_s = 0.0
kv_blocks = 200_000
lmcache_blocks = 400_000
lmcache_blocks_per_s = 1e9
"""

TABLES: Final = f"""
import sys
import numpy
numpy.savez(
    sys.argv[1], prefill_isl=numpy.array([1.0, 8192.0]), prefill_ttft_ms=numpy.full(2, {PREFILL_MS}),
    decode_active_kv_tokens=numpy.array([0.0, 1e6]), decode_context_length=numpy.array([1.0, 8192.0]),
    decode_itl=numpy.full((2, 2), {STEP_MS}),
)
"""
"""The mocker's timing, as its profiler would have measured it."""


def direct(site: Site) -> Side:
    """One engine, and nothing before it."""
    port = free_port()
    return Side(stages=((engine("engine", port, "front"),),), url=url(port))


def vllm_router(site: Site) -> Side:
    """Round robin over one engine."""
    port, behind = free_port(), free_port()
    front = router(site, port, "--worker-urls", url(behind), "--policy", "round_robin")
    return Side(stages=((engine("engine", behind),), (front,)), url=url(port))


def vllm_router_pd(site: Site) -> Side:
    """One engine for prefill, one for decode."""
    port, prefill, decode = free_port(), free_port(), free_port()
    engines = (engine("prefill", prefill), engine("decode", decode))
    front = router(
        site, port, "--vllm-pd-disaggregation", "--prefill", url(prefill), "--decode", url(decode),
        "--policy", "round_robin",
    )  # fmt: skip
    return Side(stages=(engines, (front,)), url=url(port))


def dynamo(site: Site) -> Side:
    """Frontend and one mocker."""
    return _dynamo(site, {"mocker": ()})


def dynamo_pd(site: Site) -> Side:
    """Frontend and two mockers, for prefill and decode."""
    moved = ("--kv-transfer-bandwidth", "0", "--disaggregation-mode")
    return _dynamo(
        site,
        {"prefill": (*moved, "prefill", "--bootstrap-ports", str(free_port())), "decode": (*moved, "decode")},
        "--enforce-disagg",
    )


def _dynamo(site: Site, mockers: Mapping[str, tuple[str, ...]], *options: str) -> Side:
    """The frontend and mockers by name, which find each other by files."""
    python, port, tables = str(install.python(site.home, install.DYNAMO)), free_port(), site.folder / "timing.npz"
    subprocess.run([python, "-c", TABLES, str(tables)], check=True, timeout=60)
    found_by = site.folder / "discovery"
    found_by.mkdir()
    environment = {
        "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(found_by), "DYN_LOG": "error",
        "DYN_SELF_HOST_METADATA": "0", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    front = (
        python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port),
        "--kv-cache-block-size", "32", "--router-mode", "kv", *options,
    )  # fmt: skip
    mocker = (
        python, "-m", "dynamo.mocker", "--model-path", site.model, "--model-name", MODEL, "--block-size", "32",
        "--planner-profile-data", str(tables),
    )  # fmt: skip

    def unit(name: str, command: tuple[str, ...], part: Part) -> Unit:
        ready, says = f"{url(port)}/v1/models", (MODEL.encode(),)
        return Unit(name=name, command=command, ready=ready, says=says, part=part, environment=environment)

    engines = (unit(name, (*mocker, *more), "engine") for name, more in mockers.items())
    return Side(stages=((unit("frontend", front, "front"), *engines),), url=url(port), quick_ack=True)


def dynamo_pd_late_ack(site: Site) -> Side:
    """The same, asked as Linux acknowledges by itself."""
    return replace(dynamo_pd(site), quick_ack=False)


def engine(name: str, port: int, part: Part = "engine") -> Unit:
    """Ours, in the guise of `vllm serve`."""
    command = (sys.executable, "-m", "tests.benchmarks.peers.engine", "--port", str(port), "--step-ms", f"{STEP_MS}")
    return Unit(
        name=name, command=command, ready=f"{url(port)}/health", part=part, environment={"PYTHONPATH": str(ROOT)}
    )


SIDES: Final[Mapping[str, Recipe]] = {
    "direct": direct,
    "vllm-router": vllm_router,
    "vllm-router-pd": vllm_router_pd,
    "dynamo": dynamo,
    "dynamo-pd": dynamo_pd,
    "dynamo-pd-late-ack": dynamo_pd_late_ack,
    "headrace": lambda site: headrace(site, 1, 1, 0, HEADRACE),
}
