"""Sending: at set times whatever comes back (an open loop), or each when another has ended (a closed one)."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from pipeline.bench.connection import Connections
from pipeline.bench.orders import Order
from pipeline.bench.outcome import Outcome
from pipeline.bench.tally import LEFT, Tally

STOP_CHECK_S: Final = 0.25
"""A wait for the next request is looked at this often, for a Ctrl-C."""

EARLY_S: Final = 0.0005
"""Timers go by the millisecond: within half of one it is time."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured after `warm_up_s`: so many requests, those of so many seconds (None: no bound). `in_flight` at a time."""

    requests: int | None
    duration_s: float | None
    warm_up_s: float
    in_flight: int


class Loop:
    """One run over one set of connections."""

    def __init__(self, connections: Connections, tally: Tally, bounds: Bounds) -> None:
        self.stopping = False
        self._leaving = False
        self._connections, self._tally, self._bounds = connections, tally, bounds
        self._began_s = time.perf_counter()
        self._measured = itertools.count()
        self._running: dict[asyncio.Task[None], Outcome] = {}

    @property
    def elapsed_s(self) -> float:
        """Since it began, the warm-up included."""
        return time.perf_counter() - self._began_s

    def stop(self) -> None:
        """Send nothing more; what runs may end."""
        self.stopping = True

    def leave(self) -> None:
        """Give up what runs."""
        self.stopping = self._leaving = True
        for task, outcome in self._running.items():
            outcome.fail(LEFT, "It was still running when the bench was told to leave.")
            task.cancel()

    async def open(self, orders: Iterator[Order], times_s: Iterator[float]) -> None:
        """Send each at its time. Where too many are in flight the next waits, and its latency counts from when it was due."""
        room = asyncio.Semaphore(self._bounds.in_flight)
        began_s: float | None = None
        async with asyncio.TaskGroup() as group:
            for at_s, order in zip(times_s, orders, strict=False):
                request = self._connections.request(order.creator, order.conversation, order.body)
                if began_s is None:
                    began_s = self._began_s = time.perf_counter()  # once there is something to send
                due_s = began_s + at_s
                if not await self._until(due_s):
                    return
                await room.acquire()
                measured = self._admitted(at_s)
                if measured is None:
                    return
                task = group.create_task(self._ask(request, Outcome(due_s=due_s, measured=measured)))
                task.add_done_callback(lambda _: room.release())

    async def closed(self, orders: Iterator[Order]) -> None:
        """Keep `in_flight` requests running."""

        async def keep_asking() -> None:
            for order in orders:
                measured = None if self.stopping else self._admitted(self.elapsed_s)
                if measured is None:
                    return
                request = self._connections.request(order.creator, order.conversation, order.body)
                await self._ask(request, Outcome(due_s=time.perf_counter(), measured=measured))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._bounds.in_flight, self._bounds.requests or self._bounds.in_flight)):
                group.create_task(keep_asking())

    def _admitted(self, at_s: float) -> bool | None:
        """Whether a request of this time is measured; None where it lies beyond the bounds, or the run is stopping."""
        bounds, since_s = self._bounds, at_s - self._bounds.warm_up_s
        if self.stopping or (bounds.duration_s is not None and since_s >= bounds.duration_s):
            return None
        if since_s < 0:
            return False
        return True if bounds.requests is None or next(self._measured) < bounds.requests else None

    async def _until(self, due_s: float) -> bool:
        """Wait for that time, and let the loop turn at least once. False where the run is stopping."""
        await asyncio.sleep(0)
        while not self.stopping and (left_s := due_s - time.perf_counter()) > EARLY_S:
            await asyncio.sleep(min(left_s, STOP_CHECK_S))
        return not self.stopping

    async def _ask(self, request: bytes, outcome: Outcome) -> None:
        if self._leaving:
            return
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = outcome
        self._tally.running += 1
        outcome.sent_s = time.perf_counter()
        try:
            await self._connections.ask(request, outcome)
        finally:
            del self._running[task]
            self._tally.running -= 1
            outcome.ended_s = time.perf_counter()
            self._tally.add(outcome)
