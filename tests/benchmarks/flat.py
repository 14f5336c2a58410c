"""Whether a request costs the same however many there are: `python -m tests.benchmarks.flat [--seconds 15] [--json]`.

Real processes, simulated engines that compute in no time, prompts of 2,210 tokens, replies of 30. In turn:

    streams    1 to 500 at a time, a token every 200 ms each, on one prefill and one decode worker
    workers    2 to 8, half of them for each part, under one and the same load

For each, the CPU of all our processes less what they use when nothing is asked of them, a request. Tokens of one step travel
together, so that a stream alone pays for a message what others share: the cost may fall with their number, but must not rise.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
import uvloop

from pipeline.bench import session
from pipeline.bench.arrivals import poisson
from pipeline.bench.loops import Bounds
from pipeline.bench.orders import Load, plain
from pipeline.bench.session import Plan
from pipeline.cli.client import Gateway
from pipeline.cli.tables import table
from tests.benchmarks import overhead
from tests.benchmarks.overhead import CREATORS, ENGINES, PROMPT_WORDS, REPLY_TOKENS
from tests.chaos.stack import Settings, Stack

STEP_S: Final = 0.2
IDLE_S: Final = 4.0
STREAMS: Final = (1, 10, 100, 500)
WORKERS: Final = (2, 4, 8)
RATE: Final = 25.0
"""Requests a second to a fleet of any size."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One size: CPU of a request, in milliseconds, of all processes and of the gateway; what was served; CPU when idle."""

    size: int
    pipeline_cpu_ms: float
    gateway_cpu_ms: float
    requests: int
    idle_cpu_ms_per_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    streams: list[Cost]
    workers: list[Cost]


def run(seconds: float, streams: tuple[int, ...] = STREAMS, workers: tuple[int, ...] = WORKERS) -> Report:
    """All sizes; each is measured for `seconds` at least, and for three replies at least."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(seconds, streams, workers))


async def _run(seconds: float, streams: tuple[int, ...], workers: tuple[int, ...]) -> Report:
    slow = msgspec.structs.replace(ENGINES, step_s=STEP_S)
    async with _fleet(slow) as stack:
        by_streams = [await _at_a_time(stack, count, seconds) for count in streams]
    by_workers: list[Cost] = []
    for count in workers:
        async with _fleet(msgspec.structs.replace(ENGINES, prefill=count // 2, decode=count // 2)) as stack:
            by_workers.append(await _at_a_rate(stack, count, seconds))
    return Report(streams=by_streams, workers=by_workers)


@asynccontextmanager
async def _fleet(settings: Settings) -> AsyncIterator[Stack]:
    """A fleet in a folder of its own, warmed up."""
    with tempfile.TemporaryDirectory(prefix="headrace-flat-") as name:
        async with Stack(Path(name), settings).running() as stack:
            await _measured(stack, Bounds(requests=8, duration_s=None, warm_up_s=0.0, in_flight=4), "warm", None)
            yield stack


async def _at_a_time(stack: Stack, count: int, seconds: float) -> Cost:
    overhead.progress(f"{count} streams")
    requests = max(3, count, round(count * seconds / (STEP_S * REPLY_TOKENS)))
    bounds = Bounds(requests=requests, duration_s=None, warm_up_s=0.0, in_flight=count)
    return await _cost(stack, count, bounds, None)


async def _at_a_rate(stack: Stack, count: int, seconds: float) -> Cost:
    overhead.progress(f"{count} workers")
    return await _cost(stack, count, Bounds(requests=None, duration_s=seconds, warm_up_s=0.0, in_flight=4096), RATE)


async def _cost(stack: Stack, size: int, bounds: Bounds, rate: float | None) -> Cost:
    before = overhead.cpu_s(stack)
    await asyncio.sleep(IDLE_S)
    idle = {part: (after_s - before[part]) / IDLE_S for part, after_s in overhead.cpu_s(stack).items()}
    before, loop = overhead.cpu_s(stack), asyncio.get_running_loop()
    began_s = loop.time()
    served = await _measured(stack, bounds, f"size-{size}", rate)
    took_s, after = loop.time() - began_s, overhead.cpu_s(stack)
    spent_ms = {part: 1000 * (after[part] - before[part] - idle[part] * took_s) / served for part in after}
    return Cost(
        size=size,
        pipeline_cpu_ms=round(sum(spent_ms.values()), 2),
        gateway_cpu_ms=round(spent_ms["gateway-1"], 2),
        requests=served,
        idle_cpu_ms_per_s=round(1000 * sum(idle.values()), 1),
    )


async def _measured(stack: Stack, bounds: Bounds, run_name: str, rate: float | None) -> int:
    """How many were served: all of them."""
    load = Load(creators=CREATORS, prompt_words=PROMPT_WORDS, max_tokens=REPLY_TOKENS, run=run_name)
    plan = Plan(
        orders=overhead.exact(plain(load), {}),
        times_s=None if rate is None else poisson(rate, run_name),
        bounds=bounds,
        loop=run_name,
        timeout_s=120.0,
    )
    headers = {"content-type": "application/json"}
    served = await session.run(Gateway(stack.gateways()[0].url), headers, plan, overhead.unwatched)
    assert served.completed == served.requests > 0, served.errors_by
    return served.requests


def page(report: Report) -> str:
    """The report for people."""
    head = ("", "SIZE", "ALL, MS CPU A REQUEST", "GATEWAY", "REQUESTS", "IDLE, MS CPU A SECOND")
    rows = [
        [what, *msgspec.structs.astuple(cost)]
        for what, costs in (("streams", report.streams), ("workers", report.workers))
        for cost in costs
    ]
    return table(head, rows)


def main(
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, max=120.0, help="Of each size.")] = 15.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the CPU of a request at every size: about three minutes."""
    report = run(seconds)
    sys.stdout.write((msgspec.json.encode(report).decode() if as_json else page(report)) + "\n")


if __name__ == "__main__":
    typer.run(main)
