"""What a change of a worker's role costs under load: `python -m tests.benchmarks.roles [--rounds 5] [--rate 40] [--json]`.

Three workers for both, a gateway and a nats-server, each a process of its own, with simulated engines. Two of the workers go all
six ways from one role to another, again and again, and each change is followed to its end. Printed are, by way, the time from the
order until the new loop says that it takes work, and until nothing of the old one is left; and the latencies of the requests that
were under way during a change beside those of all others. Every reply is checked, token for token.
"""

import sys
from collections import defaultdict
from typing import Annotated

import msgspec
import typer

from pipeline.cli.tables import table
from tests.chaos.roles import Plan, Roles, Turn, run
from tests.chaos.verdict import Report
from tests.percentiles import percentile_ms


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way from role to role, over all rounds. `serves_p50_ms` is None where nothing begins."""

    way: str
    changes: int
    serves_p50_ms: float | None
    serves_max_ms: float | None
    done_p50_ms: float | None
    done_max_ms: float | None


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Of the requests that were under way during a change, or of the others."""

    requests: int
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    ways: list[Way]
    during: Latencies
    others: Latencies
    report: Report


def figures(roles: Roles) -> Figures:
    """A run, summed up."""
    by_way: dict[str, list[Turn]] = defaultdict(list)
    for turn in roles.turns:
        by_way[f"{turn.before} → {turn.after}"].append(turn)
    return Figures(
        ways=[_way(name, turns) for name, turns in by_way.items()],
        during=_latencies(roles.during_s),
        others=_latencies(roles.others_s),
        report=roles.report,
    )


def _way(name: str, turns: list[Turn]) -> Way:
    serves = [turn.serves_s for turn in turns if turn.serves_s is not None]
    done = [turn.done_s for turn in turns]
    return Way(
        way=name,
        changes=len(turns),
        serves_p50_ms=percentile_ms(serves, 50),
        serves_max_ms=percentile_ms(serves, 100),
        done_p50_ms=percentile_ms(done, 50),
        done_max_ms=percentile_ms(done, 100),
    )


def _latencies(times_s: list[float]) -> Latencies:
    return Latencies(
        requests=len(times_s),
        p50_ms=percentile_ms(times_s, 50),
        p99_ms=percentile_ms(times_s, 99),
        max_ms=percentile_ms(times_s, 100),
    )


def main(
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Times that each way is gone.")] = 5,
    rate: Annotated[float, typer.Option("--rate", min=1.0, max=500.0, help="Requests a second.")] = 40.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Change roles under load. Exits with 1 where anything is lost, said twice, or left behind."""
    found = figures(run(Plan(rounds=rounds, rate=rate)))
    print(msgspec.json.encode(found).decode() if as_json else _page(found))
    sys.exit(1 if found.report.failed else 0)


def _page(found: Figures) -> str:
    head = ("WAY", "CHANGES", "SERVES P50 MS", "MAX", "DONE P50 MS", "MAX")
    ways = [["" if cell is None else cell for cell in msgspec.structs.astuple(way)] for way in found.ways]
    whom = [
        [name, *("" if cell is None else cell for cell in msgspec.structs.astuple(latencies))]
        for name, latencies in (("during a change", found.during), ("others", found.others))
    ]
    report = found.report
    return (
        f"{table(head, ways)}\n\n{table(('REQUESTS', 'COUNT', 'P50 MS', 'P99 MS', 'MAX MS'), whom)}\n\n"
        f"{report.completed} of {report.requests} whole, {report.errors} errors, {report.lost} lost, "
        f"{report.duplicate_tokens} tokens twice, {report.missing_tokens} missing, {report.leaked_blocks} blocks and "
        f"{report.leaked_slots} slots left behind."
    )


if __name__ == "__main__":
    typer.run(main)
