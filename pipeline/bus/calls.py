"""Requests that wait for their answer, over one subscription.

Every request has a reply subject of its own under it. A call ends once: with its answer, when its time is over, or with the
connection; nats-py's own requests would sit a lost connection out.
"""

import asyncio
from typing import NamedTuple

from pipeline.bus.client import Message
from pipeline.bus.errors import BusError, Disconnected, NoResponders, Unanswered


class Call(NamedTuple):
    """One request: the subject it asks, the one it is answered on, and the answer's data."""

    subject: str
    reply: str
    answer: asyncio.Future[bytes]


class Calls:
    """The open requests of one connection. There are as many as tasks that await one."""

    def __init__(self, prefix: str) -> None:
        self.subject = f"{prefix}.*"
        self._prefix = prefix
        self._open: dict[str, Call] = {}
        self._count = 0

    def begin(self, subject: str) -> Call:
        """A new call."""
        self._count += 1
        call = Call(subject, f"{self._prefix}.{self._count:x}", asyncio.get_running_loop().create_future())
        self._open[call.reply] = call
        return call

    async def wait(self, call: Call, timeout_s: float) -> bytes:
        """The answer's data. Raises `NoResponders`, `Unanswered` or `Disconnected`."""
        timer = asyncio.get_running_loop().call_later(timeout_s, _late, call, timeout_s)
        try:
            return await call.answer
        finally:
            timer.cancel()
            self.end(call)

    def end(self, call: Call) -> None:
        """Nobody waits for this call any more."""
        self._open.pop(call.reply, None)
        if call.answer.done() and not call.answer.cancelled():
            call.answer.exception()  # fetched, because asyncio logs what a cancelled caller has left behind

    def answered(self, message: Message) -> None:
        """An answer has come, or the broker says that nobody listens."""
        call = self._open.get(message.subject)
        if call is None or call.answer.done():
            return
        if message.nobody_listens:
            call.answer.set_exception(NoResponders(f"Nobody listens on {call.subject}."))
        else:
            call.answer.set_result(message.data)

    def lost(self) -> None:
        """The connection is lost, and every answer with it."""
        for call in self._open.values():
            _fail(call, Disconnected(f"The connection to NATS was lost before {call.subject} answered."))


def _late(call: Call, timeout_s: float) -> None:
    _fail(call, Unanswered(f"No answer from {call.subject} within {timeout_s:g} s."))


def _fail(call: Call, error: BusError) -> None:
    if not call.answer.done():
        call.answer.set_exception(error)
