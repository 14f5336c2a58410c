"""One run: connections, a loop, a tally, somebody who watches, and an end that Ctrl-C may bring forward."""

import asyncio
import contextlib
import gc
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from pipeline.bench.connection import Connections
from pipeline.bench.loops import Bounds, Loop
from pipeline.bench.orders import Order
from pipeline.bench.outcome import Slo
from pipeline.bench.tally import Report, Tally
from pipeline.cli import client

IN_FLIGHT_MAX: Final = 8192
"""Requests of an open loop at a time, a socket each. Beyond it they wait, and their latency says so."""

FILES_SPARE: Final = 64
"""Files that are open beside sockets."""

WATCH_PERIOD_S: Final = 0.5
DRAIN_S: Final = 30.0
"""After a first Ctrl-C, what runs gets this long."""


class Plan(msgspec.Struct, kw_only=True):
    """What to do. With `times_s` it is an open loop, else `bounds.in_flight` clients ask in turn. `loop` says it in words."""

    orders: Iterator[Order]
    times_s: Iterator[float] | None
    bounds: Bounds
    loop: str
    timeout_s: float
    slo: Slo | None = None


class Status(msgspec.Struct, frozen=True):
    """Where a run is. `stopping`: nothing more is sent."""

    elapsed_s: float
    tally: Tally
    stopping: bool
    over: bool


Watch = Callable[[Status], None]


async def run(gateway: client.Gateway, headers: Mapping[str, str], plan: Plan, watch: Watch) -> Report:
    """Carry it out. SIGINT and SIGTERM stop sending, a second one gives up what runs; both leave a report."""
    tally = Tally(plan.slo)
    connections = Connections(gateway, headers, plan.timeout_s)
    gc.freeze()  # a long trace is not looked through again and again
    loop, cpu_s = Loop(connections, tally, plan.bounds), time.process_time()
    watching = asyncio.create_task(_keep_watching(loop, tally, watch))
    try:
        with _signals(loop) as signalled:
            await (loop.closed(plan.orders) if plan.times_s is None else loop.open(plan.orders, plan.times_s))
    finally:
        watching.cancel()
        connections.close()
        gc.unfreeze()
    watch(Status(loop.elapsed_s, tally, loop.stopping, over=True))
    return tally.report(plan.loop, interrupted=bool(signalled), cpu_s=time.process_time() - cpu_s)


async def _keep_watching(loop: Loop, tally: Tally, watch: Watch) -> None:
    while True:
        await asyncio.sleep(WATCH_PERIOD_S)
        watch(Status(loop.elapsed_s, tally, loop.stopping, over=False))


@contextlib.contextmanager
def _signals(loop: Loop) -> Iterator[list[int]]:
    """Hear signals, where they can be heard. Yields those that came."""
    came: list[int] = []
    running = asyncio.get_running_loop()

    def heard(number: int) -> None:
        came.append(number)
        if len(came) == 1:
            loop.stop()
            running.call_later(DRAIN_S, loop.leave)
        else:
            loop.leave()

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    for number in numbers:
        running.add_signal_handler(number, heard, number)
    try:
        yield came
    finally:
        for number in numbers:
            running.remove_signal_handler(number)


def in_flight_max() -> int:
    """Sockets that this process may have open, after asking for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = IN_FLIGHT_MAX + FILES_SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return IN_FLIGHT_MAX if soft == resource.RLIM_INFINITY else min(IN_FLIGHT_MAX, soft - FILES_SPARE)
