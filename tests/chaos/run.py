"""One run: a fleet, a load, and what happens to it meanwhile."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import msgspec
import uvloop

from tests.chaos import load, verdict
from tests.chaos.mischief import Kind, Mischief, drawn, progress
from tests.chaos.rest import rest
from tests.chaos.stack import Settings, Stack
from tests.chaos.verdict import Report

DEFAULT_KINDS: Final[tuple[Kind, ...]] = ("prefill", "decode", "pause", "nats", "gateway")

SLOW_S: Final = 1.5
"""A reply that takes longer is told of: more than one thing has gone wrong for it."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is made of. `rolling`: instead of acts, every worker is told to end, in turn. `keep`: leave the logs."""

    requests: int = 1500
    rate: float = 80.0
    seed: int = 1
    kinds: tuple[Kind, ...] = DEFAULT_KINDS
    kills: int = 17
    rolling: bool = False
    keep: Path | None = None
    settings: Settings = Settings()


def run(plan: Plan) -> Report:
    """Start a fleet, trouble it, and judge it. Nothing is left running."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(plan))


async def _run(plan: Plan) -> Report:
    began_s = time.monotonic()
    async with stack(plan.settings, plan.keep) as running:
        trouble, outcomes = await _under_load(running, plan)
        await running.until_all_serve()
        left = await rest(running)
        return verdict.judge(
            outcomes,
            rest=left,
            kills=trouble.done,
            gateway_deaths=[death for gateway in running.gateways() for death in gateway.deaths],
            unasked=running.unasked,
            duration_s=time.monotonic() - began_s,
        )


@asynccontextmanager
async def stack(settings: Settings, keep: Path | None) -> AsyncIterator[Stack]:
    """A stack in a folder of its own, which goes with it unless it is to be kept."""
    folder = keep or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        async with Stack(folder, settings).running() as running:
            yield running
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


async def _under_load(running: Stack, plan: Plan) -> tuple[Mischief, list[load.Outcome]]:
    """The load, with the trouble beside it. Ends when both have."""
    outcomes: list[load.Outcome] = []
    trouble, over = Mischief(running, progress), anyio.Event()
    ask = asking(running, outcomes, plan.requests)
    async with anyio.create_task_group() as tasks:
        if plan.rolling:
            tasks.start_soon(trouble.roll_over, running.workers())
        else:
            acts = drawn(plan.seed, plan.kinds, plan.kills)
            tasks.start_soon(trouble.run, acts, plan.requests / plan.rate, over)
        await load.open_loop(load.orders(plan.requests, f"seed {plan.seed}"), plan.rate, ask)
        over.set()
    return trouble, outcomes


def asking(running: Stack, outcomes: list[load.Outcome], of: int) -> load.Ask:
    """How the loops ask: outcomes are gathered, and progress is told."""
    step = max(1, of // 10)

    async def ask(order: load.Order) -> None:
        outcome = await load.ask([gateway.url for gateway in running.gateways()], order)
        outcomes.append(outcome)
        if outcome.ending == "broken":
            progress(f"request {order.number} broken: {outcome.code} after {outcome.latency_s:.2f} s")
        elif outcome.latency_s > SLOW_S:
            progress(f"request {order.number} took {outcome.latency_s:.2f} s")
        if len(outcomes) % step == 0:
            progress(f"{len(outcomes)} of {of} have ended")

    return ask
