"""Fixed arrangements of two workers, and the balancer that is to find the better: `python -m tests.benchmarks.arrangements`.

For each of them a fleet of its own, all at once: two workers for both, a gateway and a nats-server, each a process of its own,
with simulated engines of about the rates of SmolLM2-135M on a core. They cost next to nothing, so that noise of the machine does
not decide, as it does with real engines on few cores. Load and SLO are those of `tests.benchmarks.peers --engines real`: prompts
of about 395 tokens, 256 of them a creator's persona, replies of 24; a first token within 1 s, 99 % of a reply's gaps within
150 ms. What cannot begin within that second is refused, or past what they can do all would be late.

    split       a prefill and a decode worker
    both        two for both
    balanced    begins as the split, and may turn its workers

Printed are the good replies per second at each rate, and the roles at its end.
"""

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
import uvloop

from pipeline.bench import session
from pipeline.bench.arrivals import poisson
from pipeline.bench.loops import Bounds
from pipeline.bench.outcome import Slo
from pipeline.bench.session import Plan
from pipeline.cli.client import Gateway
from pipeline.cli.tables import table
from tests.benchmarks.balancer import roles
from tests.benchmarks.overhead import unwatched
from tests.benchmarks.peers import workload
from tests.benchmarks.peers.site import MODEL
from tests.chaos.stack import Settings, Stack

SLO: Final = Slo(ttft_ms=1000.0, itl_ms=150.0)
RATES: Final = "1,2,4,6,8"
WARM_UP: Final = 32
SETTLED: Final = 0.4
"""Of a rate's time, before what is asked counts: a balancer may have found its arrangement by then."""

ENGINES: Final = {
    "SIMULATED__PREFILL_TOKENS_PER_S": 1000,
    "SIMULATED__PREFILL_OVERHEAD_S": 0.02,
    "SIMULATED__STEP_PER_SEQUENCE_S": 0.006,
    "SIMULATED__LMCACHE_BLOCKS_PER_S": 1000,
    "BOTH__PROMPT_TOKENS_BESIDE_REPLIES": 32,
    "MODEL__SERVED_NAME": MODEL,
    "REQUESTS__PREFILL_BEGINS": "false",
    "REQUESTS__FIRST_TOKEN_S": 1.0,
}
"""The SLO counts each gap, so decode begins: the first gap is as the others."""

BALANCER: Final = {"BALANCER__ENABLED": "true"}


def _fleet(begin_as: tuple[str, str], more: Mapping[str, object]) -> Settings:
    return Settings(
        prefill=0, decode=0, both=2, gateways=1, begin_as=begin_as, step_s=0.03, decode_slots=8,
        more={**ENGINES, **more},
    )  # fmt: skip


FLEETS: Final = {
    "split": _fleet(("prefill", "decode"), {}),
    "both": _fleet(("both", "both"), {}),
    "balanced": _fleet(("prefill", "decode"), BALANCER),
}


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One arrangement at one rate: asked for and good within the window, first tokens and gaps, and its roles at the end."""

    fleet: str
    rate: float
    requests: int
    good_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p99_ms: float | None
    roles: list[str]


def run(rates: list[float], seconds: float) -> list[Cell]:
    """All fleets beside each other, one rate after the other."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(rates, seconds))


async def _run(rates: list[float], seconds: float) -> list[Cell]:
    cells: list[Cell] = []
    async with AsyncExitStack() as stacks:
        folder = Path(stacks.enter_context(tempfile.TemporaryDirectory(prefix="headrace-arrangements-")))
        running: dict[str, Stack] = {}
        for name, settings in FLEETS.items():
            (folder / name).mkdir()
            running[name] = await stacks.enter_async_context(Stack(folder / name, settings).running())
        await asyncio.gather(*(_shoot(name, stack, None, seconds) for name, stack in running.items()))
        for rate in rates:
            sys.stderr.write(f"{rate:g}/s\n")
            cells += await asyncio.gather(*(_shoot(name, stack, rate, seconds) for name, stack in running.items()))
    return cells


async def _shoot(name: str, stack: Stack, rate: float | None, seconds: float) -> Cell:
    """An open loop; without a rate the warm-up, in which every creator asks."""
    warm_up = rate is None
    plan = Plan(
        orders=workload.everybody() if warm_up else workload.small(f"arrangements/{rate:g}"),
        times_s=None if rate is None else poisson(rate, f"{rate:g}"),
        bounds=Bounds(requests=WARM_UP, duration_s=None, warm_up_s=0.0, in_flight=2)
        if warm_up
        else Bounds(requests=None, duration_s=(1 - SETTLED) * seconds, warm_up_s=SETTLED * seconds, in_flight=512),
        loop="open",
        timeout_s=60.0,
        slo=SLO,
    )
    report = await session.run(Gateway(stack.gateways()[0].url), {"content-type": "application/json"}, plan, unwatched)
    return Cell(
        fleet=name,
        rate=rate or 0.0,
        requests=report.requests,
        good_per_s=round((report.goodput.met if report.goodput else 0) / ((1 - SETTLED) * seconds), 2),
        ttft_p50_ms=report.ttft.p50_ms,
        ttft_p99_ms=report.ttft.p99_ms,
        itl_p99_ms=report.itl.p99_ms,
        roles=sorted(roles(stack).values()),
    )


def text(cells: list[Cell]) -> str:
    """The table for people."""
    rows = [
        (
            f"{cell.rate:g}/s", cell.fleet, f"{cell.good_per_s:.2f}", f"{cell.ttft_p50_ms or 0:.0f}",
            f"{cell.ttft_p99_ms or 0:.0f}", f"{cell.itl_p99_ms or 0:.0f}", " + ".join(cell.roles),
        )
        for cell in cells
    ]  # fmt: skip
    return table(("rate", "fleet", "good/s", "TTFT p50 ms", "p99", "ITL p99 ms", "roles at its end"), rows)


def main(
    rates: Annotated[str, typer.Option(help="Requests a second, one after the other.")] = RATES,
    seconds: Annotated[
        float, typer.Option(help="Of each rate, of which the last 60 % count.", min=2.0, max=600.0)
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Hold the balancer against what it chooses from."""
    cells = run([float(rate) for rate in rates.split(",")], seconds)
    print(msgspec.json.encode(cells).decode() if as_json else text(cells))


if __name__ == "__main__":
    typer.run(main)
