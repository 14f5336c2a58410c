"""Plan against the fleet: `python -m tests.benchmarks.capacity [--seed 1] [--json]`.

Five workloads, each twice over. What `headrace plan` expects: hit rates by formula, waits by its small queue, the highest rate by
division. And what the fleet in virtual time does: real placement, slots and routes, a broker, caches that evict, a link that is
shared. The rate up to which a fleet keeps up is what it completes while it is offered `OVERLOAD` times what plan says it can do.
"""

import itertools
import sys
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
import typer

from pipeline.cli.tables import table
from pipeline.planning import queueing, source
from pipeline.planning.engine import Machine
from pipeline.planning.pulled import Headrace
from pipeline.planning.question import Numbers
from pipeline.planning.queueing import Pool
from pipeline.planning.rates import Memory, Rates
from pipeline.planning.seed import percentile_ms
from pipeline.planning.traffic import Request, requests
from pipeline.planning.workload import Workload

OVERLOAD: Final = 1.2
WITHIN: Final = 0.15
"""What plan may be off by."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet and its load. `warm_s` of traffic fill the caches, `measured_s` are measured."""

    name: str
    load: Workload
    workers: int
    machine: Machine
    warm_s: float
    measured_s: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """First tokens in milliseconds, and the highest rate."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    throughput_per_s: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One workload. `busy` is the fleet's."""

    workload: str
    busy: float
    plan: Figures
    fleet: Figures

    @property
    def off(self) -> float:
        """The largest relative error."""
        plan, fleet = self.plan, self.fleet
        pairs = (
            (plan.ttft_p50_ms, fleet.ttft_p50_ms),
            (plan.ttft_p99_ms, fleet.ttft_p99_ms),
            (plan.throughput_per_s, fleet.throughput_per_s),
        )
        return max(abs(ours / theirs - 1) for ours, theirs in pairs)


SOURCE: Final = Workload(requests_per_s=1000, prefix_tokens=1800, history_tokens=400)

SLOWER: Final = Machine(prefill_tokens_per_s=60_000.0)
"""As an 8B model on one H100."""

CASES: Final = (
    Case(name="source, no hot creator", load=SOURCE, workers=4, machine=Machine(), warm_s=30, measured_s=10),
    Case(
        name="source, hot creator 30 %", load=msgspec.structs.replace(SOURCE, hot_share=0.3), workers=4, machine=Machine(),
        warm_s=30, measured_s=10,
    ),
    Case(
        name="source, hot creator 90 %", load=msgspec.structs.replace(SOURCE, hot_share=0.9), workers=4, machine=Machine(),
        warm_s=30, measured_s=10,
    ),
    Case(
        name="documents, hardly a hit",
        load=Workload(requests_per_s=40, prefix_tokens=500, message_tokens=3500, output_tokens=200, creators=100),
        workers=4, machine=SLOWER, warm_s=40, measured_s=120,
    ),
    Case(
        name="agents, long histories",
        load=Workload(
            requests_per_s=100, prefix_tokens=4000, history_tokens=8000, message_tokens=300, output_tokens=300, creators=50,
            turns_mean=20, turn_gap_s=4.0,
        ),
        workers=8, machine=SLOWER, warm_s=60, measured_s=60,
    ),
)  # fmt: skip


def run(cases: Iterable[Case], seed: int) -> list[Row]:
    """Every case, both ways."""
    rows: list[Row] = []
    for case in cases:
        sys.stderr.write(f"{case.name}\n")
        plan = planned(case)
        rows.append(_row(case, plan, seed))
    return rows


def planned(case: Case) -> Figures:
    """What plan expects."""
    machine, block = case.machine, source.BLOCK_TOKENS
    rates = Rates(
        origin="given",
        prefill_tokens_per_s=machine.prefill_tokens_per_s,
        prefill_overhead_s=machine.overhead_s,
        load_tokens_per_s=machine.link_blocks_per_s * block,
        store_tokens_per_s=machine.link_blocks_per_s * block,
        handover_s=source.HANDOVER_S,
        step_s=source.DECODE_STEP_S,
        step_per_sequence_s=0.0,
        in_order=False,
    )
    memory = Memory(
        prefill_tokens=machine.hbm_blocks * block, decode_tokens=None, lmcache_tokens=machine.lmcache_blocks * block
    )
    pool = Pool(engines=case.workers, slots=machine.slots, lmcache_tokens_per_s=machine.lmcache_blocks_per_s * block)
    numbers = Numbers(case.load)
    asked = numbers.requests(case.load.requests_per_s, memory, case.workers)
    done = queueing.evaluate(asked, rates, pool).prefilled
    ttfts_s = [one.took_s + rates.behind_prefill_s(0, 1) for one in done]
    capacity = queueing.capacity_per_s(
        lambda per_s: numbers.requests(per_s, memory, case.workers),
        rates,
        pool,
        case.load.requests_per_s,
    )
    return Figures(
        ttft_p50_ms=round(percentile_ms(ttfts_s, 50), 1),
        ttft_p99_ms=round(percentile_ms(ttfts_s, 99), 1),
        throughput_per_s=round(capacity, 1),
    )


def _row(case: Case, plan: Figures, seed: int) -> Row:
    trace = _trace(case, seed)
    outcome = Headrace(workers=case.workers, machine=case.machine).run(trace, _warm(case))
    ttfts_s = [one.ttft_s for one in outcome.served]
    fleet = Figures(
        ttft_p50_ms=round(percentile_ms(ttfts_s, 50), 1),
        ttft_p99_ms=round(percentile_ms(ttfts_s, 99), 1),
        throughput_per_s=round(_throughput(case, trace, OVERLOAD * plan.throughput_per_s), 1),
    )
    return Row(workload=case.name, busy=round(sum(outcome.loads) / len(outcome.loads), 3), plan=plan, fleet=fleet)


def _throughput(case: Case, trace: list[Request], per_s: float) -> float:
    """What the fleet completes in a second while more is offered; the same requests, closer together."""
    faster = [request._replace(at_s=request.at_s * case.load.requests_per_s / per_s) for request in trace]
    outcome = Headrace(workers=case.workers, machine=case.machine).run(faster, 0)
    begin_s, end_s = faster[_warm(case) // 2].at_s, faster[-1].at_s
    return sum(begin_s <= one.done_s < end_s for one in outcome.served) / (end_s - begin_s)


def _trace(case: Case, seed: int) -> list[Request]:
    count = _warm(case) + int(case.measured_s * case.load.requests_per_s)
    return list(itertools.islice(requests(case.load.traffic(seed)), count))


def _warm(case: Case) -> int:
    return int(case.warm_s * case.load.requests_per_s)


def text(rows: Iterable[Row]) -> str:
    """The table for people: plan / fleet."""
    head = ("workload", "busy", "first token p50 ms", "p99 ms", "requests/s at most", "off by at most")
    lines = [
        (
            row.workload,
            f"{row.busy:.0%}",
            f"{row.plan.ttft_p50_ms} / {row.fleet.ttft_p50_ms}",
            f"{row.plan.ttft_p99_ms} / {row.fleet.ttft_p99_ms}",
            f"{row.plan.throughput_per_s} / {row.fleet.throughput_per_s}",
            f"{row.off:.1%}{'' if row.off <= WITHIN else '  MISSED'}",
        )
        for row in rows
    ]
    return table(head, lines)


def main(
    seed: Annotated[int, typer.Option("--seed", help="Of the fleet's traffic.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What plan expects against what the fleet in virtual time does."""
    rows = run(CASES, seed)
    sys.stdout.write((msgspec.json.encode({"within": WITHIN, "rows": rows}).decode() if as_json else text(rows)) + "\n")


if __name__ == "__main__":
    typer.run(main)
