"""How soon a cancelled request is let go of, at every stage: `python -m tests.benchmarks.cancel [--rounds 30] [--json]`.

A prefill and a decode worker with simulated engines and a real nats-server, in one process, with nothing else to do: so this is
the way of a cancel through the broker and our own code, and no more. Each round is one request, cancelled by `control.cancel`
and as a gateway does it, in turn. From the moment that the cancel is published it is measured

    told    until the engine has broken the work off; where no engine works (queued, waiting for credit, handed off) until the
            request's job has ended, its message acked
    freed   until every slot and block is back as well, which is looked for once a millisecond

For a queued request both include that its worker begins to pull again: it is dropped when its turn comes.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from pipeline.cli.tables import table
from tests.nats_server import NatsServer
from tests.percentiles import percentile_ms
from tests.workers.cancel_stages import STAGES, Met, Way, cancelled, stand

WAYS: Final[tuple[Way, ...]] = ("cancel", "leave")

ROUNDS_MAX: Final = 1000
"""At ten milliseconds a stage, a minute."""


class StageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, over all rounds."""

    stage: str
    told_p50_ms: float
    told_p99_ms: float
    told_max_ms: float
    freed_p50_ms: float
    freed_p99_ms: float
    freed_max_ms: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    rounds: int
    stages: list[StageFigures]


def run(rounds: int) -> Report:
    """Measure on a broker of our own, and leave nothing running. Raises `TimeoutError` where a cancel leaves something."""
    with tempfile.TemporaryDirectory(prefix="headrace-cancel-") as folder:
        broker = NatsServer(Path(folder)).start()
        try:
            return asyncio.run(_run(broker.url, rounds))
        finally:
            broker.kill9()


async def _run(url: str, rounds: int) -> Report:
    met: dict[str, list[Met]] = {stage: [] for stage in STAGES}
    async with stand(url) as at:
        for stage, seen in met.items():
            await cancelled(
                at, stage, WAYS[0], f"{stage}-first".replace(" ", "-")
            )  # what is slow only once is not counted
            for number in range(rounds):
                seen.append(await cancelled(at, stage, WAYS[number % 2], f"{stage}-{number}".replace(" ", "-")))
            sys.stderr.write(f"{stage}: {rounds} rounds\n")
    return Report(rounds=rounds, stages=[_figures(stage, seen) for stage, seen in met.items()])


def _figures(stage: str, seen: Sequence[Met]) -> StageFigures:
    told_s, freed_s = [one.told_s for one in seen], [one.freed_s for one in seen]
    return StageFigures(
        stage=stage,
        told_p50_ms=_ms(told_s, 50),
        told_p99_ms=_ms(told_s, 99),
        told_max_ms=_ms(told_s, 100),
        freed_p50_ms=_ms(freed_s, 50),
        freed_p99_ms=_ms(freed_s, 99),
        freed_max_ms=_ms(freed_s, 100),
    )


def _ms(times_s: Sequence[float], percent: int) -> float:
    figure = percentile_ms(times_s, percent)
    assert figure is not None, "there is one round at least"
    return figure


def text(report: Report) -> str:
    """The report for people."""
    head = ["ms", "told p50", "p99", "max", "freed p50", "p99", "max"]
    return table(head, [msgspec.structs.astuple(figures) for figures in report.stages])


def main(
    rounds: Annotated[int, typer.Option(help="Requests cancelled at each stage.", min=1, max=ROUNDS_MAX)] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Cancel requests at every stage, and measure how soon that is told to the engine, and slots and blocks are back."""
    report = run(rounds)
    sys.stdout.write((msgspec.json.encode(report).decode() if as_json else text(report)) + "\n")


if __name__ == "__main__":
    typer.run(main)
