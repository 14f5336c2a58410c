"""The load: the client of `headrace bench`, on whatever speaks OpenAI's API, and the CPU that the side spends on it."""

import asyncio
import gc
import socket
import time
from collections.abc import Iterator
from typing import Final

import msgspec
import psutil

from pipeline.bench.connection import Connection, Connections
from pipeline.bench.loops import Bounds, Loop
from pipeline.bench.orders import Order
from pipeline.bench.outcome import Outcome, Slo
from pipeline.bench.tally import Report, Tally
from pipeline.cli.client import Gateway
from pipeline.errors import OperatorError
from tests.benchmarks.peers.side import Part, Running, Side

FIRST_REPLY_S: Final = 60.0
"""From when all processes answer until requests do: some routers go on looking for their engines."""

AGAIN_S: Final = 0.2
LOOK_S: Final = 0.5
QUIET_CORES: Final = 0.25
"""In use between two loads: idle engines and brokers take a tenth."""

REQUEST_S: Final = 60.0
IN_FLIGHT_MAX: Final = 2048
HEADERS: Final = {"content-type": "application/json"}


class Shot(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one rate. `cpu_ms`: of a request, the warm-up's among them. `foreign_cores`: what others used then."""

    report: Report
    cpu_ms: dict[Part, float]
    foreign_cores: float
    load_average: float


class QuickConnection(Connection):
    """It acknowledges each packet at once, instead of with what it sends next or after 40 ms."""

    def data_received(self, data: bytes) -> None:
        self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        super().data_received(data)


class QuickConnections(Connections):
    """Of such."""

    async def _connect(self) -> Connection:
        made = await asyncio.get_running_loop().create_connection(QuickConnection, self._host, self._where.port or 80)
        return made[1]


def connections(side: Side) -> Connections:
    """To this side."""
    kind = QuickConnections if side.quick_ack else Connections
    return kind(Gateway(side.url), HEADERS, REQUEST_S)


async def first_reply(side: Side, orders: Iterator[Order]) -> None:
    """Return when a reply has come whole. Raises `OperatorError` where none does."""
    asked, deadline_s = connections(side), time.monotonic() + FIRST_REPLY_S
    while time.monotonic() < deadline_s:
        order, outcome = next(orders), Outcome(due_s=time.perf_counter(), sent_s=time.perf_counter())
        await asked.ask(asked.request(order.creator, None, order.body), outcome)
        if not outcome.code and outcome.first_s is not None:
            return asked.close()
        await asyncio.sleep(AGAIN_S)
    raise OperatorError(f"{side.url} gives no reply: {outcome.message or 'it is empty'}", "Look at its output.")


async def warm_up(side: Side, orders: Iterator[Order], requests: int, in_flight: int) -> None:
    """So many requests, that many at a time."""
    bounds = Bounds(requests=requests, duration_s=None, warm_up_s=0.0, in_flight=in_flight)
    await Loop(connections(side), Tally(), bounds).closed(orders)


async def shoot(
    running: Running,
    orders: Iterator[Order],
    times_s: Iterator[float],
    slo: Slo | None,
    warm_up_s: float,
    seconds: float,
) -> Shot:
    """An open loop of `seconds`, after a warm-up at the same rate."""
    bounds = Bounds(requests=None, duration_s=seconds, warm_up_s=warm_up_s, in_flight=IN_FLIGHT_MAX)
    tally, asked = Tally(slo), connections(running.side)
    gc.freeze()
    load_average, before, own_s, busy_s = psutil.getloadavg()[0], running.cpu_s(), time.process_time(), _busy_s()
    began_s = time.perf_counter()
    await Loop(asked, tally, bounds).open(orders, times_s)
    wall_s = time.perf_counter() - began_s
    spent = {part: used_s - before[part] for part, used_s in running.cpu_s().items()}
    foreign_s = _busy_s() - busy_s - (time.process_time() - own_s) - sum(spent.values())
    asked.close()
    gc.unfreeze()
    return Shot(
        report=tally.report("open"),
        cpu_ms={part: round(used_s * 1000 / max(1, tally.ended), 3) for part, used_s in spent.items()},
        foreign_cores=round(foreign_s / wall_s, 3),
        load_average=round(load_average, 2),
    )


async def quiet(patience_s: float) -> None:
    """Return when nobody uses much of the machine, or patience is at its end."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        busy_s = _busy_s()
        await asyncio.sleep(LOOK_S)
        if (_busy_s() - busy_s) / LOOK_S < QUIET_CORES:
            return


def _busy_s() -> float:
    """Seconds that cores have worked. The kernel knows idle times exactly, and samples the others."""
    times = psutil.cpu_times()
    return (psutil.cpu_count() or 1) * time.perf_counter() - times.idle - times.iowait
