"""Ten times more than the fleet can do.

First its peak: closed loops of more and more clients, until more of them get no more replies. Then an open loop of ten times that
rate, with clients that wait only a few seconds. The engines are slow here, so that it is they who are overloaded, and not
the machine that plays gateway and clients.
"""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from tests.chaos import load, verdict
from tests.chaos.load import Outcome, closed_loop, open_loop
from tests.chaos.mischief import progress
from tests.chaos.rest import rest
from tests.chaos.run import asking, stack
from tests.chaos.stack import Settings, Stack

SLOW: Final = Settings(prefill=2, decode=2, gateways=1, step_s=0.04, decode_slots=4)
"""Eight sequences of 20 × 40 ms: ten replies a second. How many are let in is the gateway's own judgement."""

REFUSALS: Final = (429, 503)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`clients` of the closed loops, one after the other; each asks `rounds` times."""

    clients: tuple[int, ...] = (4, 8, 12, 16)
    rounds: int = 4
    times: float = 10.0
    offered_s: float = 10.0
    timeout_s: float = 4.0
    keep: Path | None = None
    settings: Settings = SLOW


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Rates in whole replies per second. `ratio` is that under overload over the peak."""

    peak_per_s: float
    offered_per_s: float
    goodput_per_s: float
    ratio: float
    requests: int
    completed: int
    refused: dict[str, int]
    refused_without_wait: int
    other_errors: dict[str, int]
    lost: int
    served_afterwards: int
    duplicate_tokens: int
    missing_tokens: int
    leaked_blocks: int
    leaked_slots: int
    left_requests: int
    duration_s: float

    @property
    def failed(self) -> bool:
        """Whether a request did not end, or not as it should, or the fleet did not recover.

        A deadline is an end as it should be: clients are impatient, and who came before the rate was known was let in.
        """
        unforeseen = sum(count for code, count in self.other_errors.items() if code != "deadline")
        amiss = self.lost + self.refused_without_wait + unforeseen
        left = self.leaked_blocks + self.leaked_slots + self.left_requests
        return bool(
            amiss or left or self.duplicate_tokens or self.missing_tokens or self.served_afterwards < AFTERWARDS
        )


AFTERWARDS: Final = 8
"""Requests that must be served at once when the crowd has gone."""


def run(plan: Plan) -> Report:
    """Overload a fleet of its own. Nothing is left running."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(plan))


async def _run(plan: Plan) -> Report:
    began_s = time.monotonic()
    async with stack(plan.settings, plan.keep) as running:
        peak = await _peak(running, plan)
        rate = plan.times * peak
        crowd, took_s = await _crowd(running, plan, rate)
        after = await _closed(running, "afterwards", AFTERWARDS, 2)
        left = await rest(running)
    whole = [outcome for outcome in crowd if outcome.ending == "whole"]
    errors = [outcome for outcome in crowd if outcome.ending == "error"]
    refused = [outcome for outcome in errors if outcome.status in REFUSALS]
    amiss = [verdict.tokens_amiss(outcome) for outcome in crowd]
    goodput = len(whole) / took_s
    return Report(
        peak_per_s=round(peak, 2),
        offered_per_s=round(rate, 1),
        goodput_per_s=round(goodput, 2),
        ratio=round(goodput / peak, 3),
        requests=len(crowd),
        completed=len(whole),
        refused=dict(Counter(f"{outcome.status} {outcome.code}" for outcome in refused)),
        refused_without_wait=sum(outcome.retry_after_s is None for outcome in refused),
        other_errors=dict(Counter(outcome.code for outcome in errors if outcome.status not in REFUSALS)),
        lost=len(crowd) - len(whole) - len(errors),
        served_afterwards=sum(outcome.ending == "whole" for outcome in after),
        duplicate_tokens=sum(extra for extra, _ in amiss),
        missing_tokens=sum(missing for _, missing in amiss),
        leaked_blocks=left.blocks,
        leaked_slots=left.slots,
        left_requests=left.requests,
        duration_s=round(time.monotonic() - began_s, 2),
    )


async def _peak(running: Stack, plan: Plan) -> float:
    """Whole replies per second, of the best of the closed loops."""
    rates = []
    for clients in plan.clients:
        began_s = time.monotonic()
        outcomes = await _closed(running, f"{clients} clients", clients * plan.rounds, clients)
        whole = sum(outcome.ending == "whole" for outcome in outcomes)
        rates.append(whole / (time.monotonic() - began_s))
        progress(f"{clients} clients: {rates[-1]:.1f} replies a second")
    return max(rates)


async def _closed(running: Stack, name: str, count: int, clients: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    await closed_loop(load.orders(count, name), clients, asking(running, outcomes, count))
    return outcomes


async def _crowd(running: Stack, plan: Plan, rate: float) -> tuple[list[Outcome], float]:
    """The overload, and the seconds from its first request to its last reply."""
    outcomes: list[Outcome] = []
    count = max(1, round(rate * plan.offered_s))
    began_s = time.monotonic()
    await open_loop(load.orders(count, "crowd", plan.timeout_s), rate, asking(running, outcomes, count))
    return outcomes, time.monotonic() - began_s


def table(report: Report) -> str:
    """The report for people."""
    said = [*sorted(report.refused.items()), *sorted(report.other_errors.items())]
    return "\n".join(
        [
            f"peak       {report.peak_per_s} replies a second",
            f"offered    {report.offered_per_s} requests a second, {report.requests} in all",
            f"goodput    {report.goodput_per_s} replies a second, {report.ratio:.0%} of the peak",
            f"ended      {report.completed} whole, {report.lost} lost",
            *(f"{count:>8} × {what}" for what, count in said),
            f"without    a word on when to come back: {report.refused_without_wait}",
            f"left       {report.leaked_blocks} blocks, {report.leaked_slots} slots, {report.left_requests} requests",
            f"afterwards {report.served_afterwards} of {AFTERWARDS} served",
        ]
    )
