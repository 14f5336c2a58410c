"""Obeying an operator while the worker runs: what is asked on `control.worker.<id>`, one order after the other.

What an order does to a worker is decided in `pipeline.protocol.control`.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import msgspec

from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError
from pipeline.limits import ORDERS_WAITING_MAX
from pipeline.protocol import subjects
from pipeline.protocol.control import Order, Standing, State, obey, order_decoder
from pipeline.protocol.messages import encode
from pipeline.telemetry import logs
from workers.loops import Loops

log: Final = logs.get("control")


class Control:
    """One worker's ear for orders. `leaving` says whether it drains already; `leave` makes it drain and end."""

    def __init__(
        self,
        bus: Bus,
        worker: str,
        loops: Loops,
        leaving: Callable[[], bool],
        leave: Callable[[], None],
    ) -> None:
        self._bus, self._worker, self._loops = bus, worker, loops
        self._leaving, self._leave = leaving, leave
        self._orders: asyncio.Queue[Message] = asyncio.Queue(ORDERS_WAITING_MAX)

    @property
    def state(self) -> State:
        """How the worker stands."""
        if self._leaving():
            return "draining"
        if self._loops.paused:
            return "paused"  # also while it follows a changed setting: else `resume` would find it at work already
        return "turning" if self._loops.turning else "serving"

    async def run(self) -> None:
        """Listen and obey, until cancelled."""
        await self._bus.subscribe(subjects.control(self._worker), self._heard)
        while True:
            await self._answer(await self._orders.get())

    def _heard(self, message: Message) -> None:
        """One too many goes unanswered, and is sent again."""
        with contextlib.suppress(asyncio.QueueFull):
            self._orders.put_nowait(message)

    async def _answer(self, message: Message) -> None:
        try:
            refused = await self._obeyed(order_decoder.decode(message.data))
        except msgspec.MsgspecError as error:
            refused = f"it is no order that this version understands: {error}"
        except BusError as error:
            refused = f"the broker was lost half way: {error}"
        loops = self._loops
        standing = Standing(
            worker=self._worker, role=loops.role, state=self.state, under_way=loops.under_way, refused=refused
        )
        with contextlib.suppress(BusError):
            self._bus.post(message.reply, encode(standing))

    async def _obeyed(self, order: Order) -> str:
        """Carry it out. Returns why it is refused."""
        before = self.state
        after, refused = obey(before, self._loops.role, self._loops.built_for, order)
        if refused or after == before:
            return refused
        log.info("ordered", action=order.action, role=order.role)
        await self._carry_out(order)
        return ""

    async def _carry_out(self, order: Order) -> None:
        if order.action == "pause":
            await self._loops.pause()
        elif order.action == "resume":
            await self._loops.resume()
        elif order.role is not None:
            await self._loops.turn(order.role)
        else:
            self._leave()
