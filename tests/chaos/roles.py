"""Workers change their roles under load: real processes, every reply checked, and what a change costs.

The fleet is workers for both. One after the other they become what `TURNS` says, and each change is followed to its end.
"""

import asyncio
import time
from itertools import takewhile
from typing import Final

import anyio
import msgspec
import uvloop

from pipeline.cli.control import ask
from pipeline.protocol.arrangement import Role, takes
from tests.chaos import load, verdict
from tests.chaos.load import Outcome
from tests.chaos.mischief import progress
from tests.chaos.rest import rest
from tests.chaos.run import asking, stack
from tests.chaos.stack import PROBE_S, ROLES, Settings, Stack
from tests.chaos.verdict import Report

TURNS: Final[tuple[tuple[str, Role], ...]] = (
    ("both-1", "prefill"),
    ("both-2", "decode"),
    ("both-1", "decode"),
    ("both-2", "prefill"),
    ("both-1", "both"),
    ("both-2", "both"),
)
"""All six ways from one role to another."""

DONE_S_MAX: Final = 30.0

REQUESTS_MAX: Final = 5000
"""Two minutes of them: no run takes so long."""

BETWEEN_S: Final = 0.5


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Requests a second go on until all turns are done, each `rounds` times."""

    rate: float = 40.0
    rounds: int = 1
    settings: Settings = Settings(prefill=0, decode=0, both=3, gateways=1)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a role; times in seconds, from the order on.

    `serves_s`: the new loop says that it takes work (None: there is none). `done_s`: nothing of the old one is left.
    """

    worker: str
    before: Role
    after: Role
    began_s: float
    serves_s: float | None
    done_s: float


class Roles(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run, its changes, and the latencies of the requests under way during one, and of all others."""

    report: Report
    turns: list[Turn]
    during_s: list[float]
    others_s: list[float]


def run(plan: Plan) -> Roles:
    """Start the fleet, change its roles under load, and judge it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(plan))


async def _run(plan: Plan) -> Roles:
    began_s = time.monotonic()
    async with stack(plan.settings, None) as running:
        outcomes: list[Outcome] = []
        turns: list[Turn] = []
        over = anyio.Event()
        ask_one = asking(running, outcomes, 1000)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_turn_all, running, plan.rounds, turns, over)
            orders = takewhile(lambda _: not over.is_set(), load.orders(REQUESTS_MAX, "roles"))
            await load.open_loop(orders, plan.rate, ask_one)
        report = verdict.judge(
            outcomes,
            rest=await rest(running),
            kills=[],
            gateway_deaths=[],
            unasked=running.unasked,
            duration_s=time.monotonic() - began_s,
        )
    during = [outcome.latency_s for outcome in outcomes if _during(outcome, turns)]
    others = [outcome.latency_s for outcome in outcomes if not _during(outcome, turns)]
    return Roles(report=report, turns=turns, during_s=during, others_s=others)


async def _turn_all(running: Stack, rounds: int, turns: list[Turn], over: anyio.Event) -> None:
    roles: dict[str, Role] = {}
    await anyio.sleep(4 * BETWEEN_S)
    for _ in range(rounds):
        for worker, after in TURNS:
            turn = await _turn(running, worker, roles.get(worker, "both"), after)
            progress(f"{worker}: {turn.before} → {after} done after {turn.done_s:.2f} s")
            turns.append(turn)
            roles[worker] = after
            await anyio.sleep(BETWEEN_S)
    over.set()


async def _turn(running: Stack, worker: str, before: Role, after: Role) -> Turn:
    came = [role for role in ROLES if takes(after, role) and not takes(before, role)]
    began_s, serves_s = time.monotonic(), None
    standing = await ask(running.bus, worker, "turn", after)
    assert not standing.refused, standing.refused
    with anyio.fail_after(DONE_S_MAX):
        while standing.state == "turning" or (came and serves_s is None):
            if came and serves_s is None and running.takes(came[0], worker):
                serves_s = time.monotonic() - began_s
            await anyio.sleep(PROBE_S)
            standing = await ask(running.bus, worker, "look")
    done_s = time.monotonic() - began_s
    return Turn(worker=worker, before=before, after=after, began_s=began_s, serves_s=serves_s, done_s=done_s)


def _during(outcome: Outcome, turns: list[Turn]) -> bool:
    return any(outcome.began_s <= turn.began_s + turn.done_s and turn.began_s <= outcome.ended_s for turn in turns)
