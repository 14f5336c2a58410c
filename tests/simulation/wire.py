"""One process's connection to the simulated broker, from both ends.

`SimClient` is what `pipeline.bus.connection.Bus` sees of nats-py, with its manners: it tries to come back every 0.1 s, subscribes
again, tells its callbacks, and drops what was not sent. `Link` is one TCP connection below it. What is written within one
latency arrives together and in order, as on a socket; what a dead broker or a cut had in flight is gone.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from pipeline.bus.access import Access
from pipeline.bus.background import handler_failed
from pipeline.bus.client import Client, Handler, Message
from pipeline.bus.connection import Bus
from tests.simulation.loop import PROCESS, Process

if TYPE_CHECKING:
    from tests.simulation.broker import SimBroker

RECONNECT_WAIT_S: Final = 0.1

READ_AT_ONCE: Final = 16
"""Messages of one read. What lies in the socket behind them waits for a turn, as with nats-py's 32 KiB."""

BROKER: Final[ContextVar["SimBroker"]] = ContextVar("broker")
"""The broker that a process connects to."""


class Publish(NamedTuple):
    """A message on its way to the broker."""

    subject: str
    reply: str
    data: bytes
    headers: Mapping[str, str] | None


class Subscribe(NamedTuple):
    """Interest in a subject, or its end where `subject` is None."""

    number: int
    subject: str | None


class Ping(NamedTuple):
    """Answered once everything before it has been seen."""

    answered: "asyncio.Future[bool]"


Up = Publish | Subscribe | Ping


class Link:
    """One TCP connection: what goes up and what comes down, in order."""

    def __init__(self, broker: "SimBroker", client: "SimClient") -> None:
        self.broker = broker
        self.client = client
        self.process = client.process
        self.alive = True
        self.subjects: dict[int, str] = {}
        self.stalled_until_s = 0.0
        self._up: list[Up] = []
        self._down: deque[tuple[int, Message] | Ping] = deque()

    def send(self, what: Up) -> None:
        """From the process to the broker."""
        if not self.alive:
            return
        self._up.append(what)
        if len(self._up) == 1:
            self.broker.loop.call_at(self._arrives_s(), self._arrive, context=self.broker.loop.context)

    def deliver(self, what: tuple[int, Message] | Ping) -> None:
        """From the broker to the process: a message for a subscription, or a PONG."""
        if not self.alive:
            return
        self._down.append(what)
        if len(self._down) == 1:
            self.broker.loop.call_at(self._arrives_s(), self._read, context=self.process.context)

    def break_off(self, *, keep_share: float = 0.0) -> None:
        """It is gone, with what was in flight. Of a killed process, the kernel still sends a part of what it had written."""
        for what in self._up[: int(len(self._up) * keep_share)]:
            self.broker.take(self, what)
        self.alive = False
        self._up.clear()
        self._down.clear()

    def _arrives_s(self) -> float:
        return max(self.broker.loop.now_s, self.stalled_until_s) + self.broker.latency_s()

    def _arrive(self) -> None:
        up, self._up = self._up, []
        for what in up:
            if self.alive:
                self.broker.take(self, what)

    def _read(self) -> None:
        """A turn of the read loop: so much of the socket, and the rest in the next turn."""
        for _ in range(min(READ_AT_ONCE, len(self._down))):
            what = self._down.popleft()
            if isinstance(what, Ping):
                if not what.answered.done():
                    what.answered.set_result(True)
            else:
                self.client.got(*what)
            if not self.alive:
                return
        if self._down:
            self.broker.loop.call_soon(self._read, context=self.process.context)


class SimClient:
    """What `Bus` knows of `pipeline.bus.client.Client`."""

    def __init__(self, failed: Callable[[str, Exception], None]) -> None:
        process = PROCESS.get()
        assert process is not None, "a connection belongs to a process"
        self.process: Process = process
        self.broker = BROKER.get()
        self.link: Link | None = None
        self._failed = failed
        self._handlers: dict[int, tuple[str, Handler]] = {}
        self._numbers = 0
        self._closed = False
        self._lost: Callable[[], Awaitable[None]]
        self._back: Callable[[], Awaitable[None]]
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_connected(self) -> bool:
        """Whether what is written now is sent."""
        return self.link is not None and not self.process.dead

    def secure(self, access: Access) -> None:
        """Nobody asks who we are."""

    async def connect(
        self,
        urls: list[str],
        *,
        disconnected_cb: Callable[[], Awaitable[None]],
        reconnected_cb: Callable[[], Awaitable[None]],
        **_: Any,
    ) -> None:
        """Returns once there is a connection."""
        del urls
        self._lost, self._back = disconnected_cb, reconnected_cb
        while not self._attach():
            await asyncio.sleep(RECONNECT_WAIT_S)

    async def listen(self, subject: str, handler: Handler) -> int:
        """Subscribe."""
        self._numbers += 1
        self._handlers[self._numbers] = (subject, handler)
        self._send(Subscribe(self._numbers, subject))
        return self._numbers

    async def forget(self, number: int) -> None:
        """End a subscription; what is in flight is dropped."""
        self._handlers.pop(number, None)
        self._send(Subscribe(number, None))

    async def drain_one(self, number: int, answered: "asyncio.Future[bool]") -> None:
        """End a subscription, but hand over what the broker had sent."""
        if number in self._handlers:
            self._handlers[number] = ("", self._handlers[number][1])  # so that a reconnect does not subscribe again
        self._send(Subscribe(number, None))
        try:
            await self.ping(answered)
            await answered
        finally:
            self._handlers.pop(number, None)

    async def ping(self, answered: "asyncio.Future[bool]") -> None:
        """`answered` is done once the broker has seen everything before this."""
        self._send(Ping(answered))

    async def publish(self, subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        """Send a message."""
        self._send(Publish(subject, reply, data, headers))

    def post(self, subject: str, data: bytes, reply: str) -> bool:
        """Send a message from within a handler."""
        self._send(Publish(subject, reply, data, None))
        return True

    async def force_reconnect(self) -> None:
        """Give this connection up and take a new one."""
        if self.link is not None:
            self.broker.cut(self.link)

    async def close(self) -> None:
        """End for good."""
        self._closed = True
        if self.link is not None:
            link, self.link = self.link, None
            self.broker.left(link)

    # ---- from below

    def got(self, number: int, message: Message) -> None:
        """A message has been read."""
        known = self._handlers.get(number)
        if known is None or self.process.dead:
            return
        try:
            known[1](message)
        except Exception as error:
            self._failed(message.subject, error)

    def lost(self, link: Link) -> None:
        """The socket has been closed from the other end. Runs in the process."""
        if self.link is not link or self._closed or self.process.dead:
            return
        self.link = None
        self._spawn(self._lost())
        self._try_again()

    def _try_again(self) -> None:
        wait_s = RECONNECT_WAIT_S * (0.9 + 0.2 * self.process.chance.random())
        self.broker.loop.call_at(self.broker.loop.now_s + wait_s, self._reconnect, context=self.process.context)

    def _reconnect(self) -> None:
        if self._closed or self.process.dead or self.link is not None:
            return
        if not self._attach():
            self._try_again()
            return
        for number, (subject, _) in self._handlers.items():
            if subject:
                self._send(Subscribe(number, subject))
        self._spawn(self._back())

    def _attach(self) -> bool:
        self.link = self.broker.attach(self)
        return self.link is not None

    def _send(self, what: Up) -> None:
        if self.link is not None and not self.process.dead:
            if isinstance(what, Publish):
                self.broker.watch.sent(self.process, what)
            self.link.send(what)

    def _spawn(self, told: Awaitable[None]) -> None:
        task = self.broker.loop.create_task(cast("Coroutine[Any, Any, None]", told))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class SimBus(Bus):
    """The product's own bus, over a simulated client. Opened by `SimBus.connect` within a process."""

    def __init__(self, inbox_prefix: str) -> None:
        super().__init__(inbox_prefix)
        self.client = cast("Client", SimClient(handler_failed))
        self._pongs = cast("set[asyncio.Future[bool]]", _InOrder())


class _InOrder(dict[Any, None]):
    """As much of a set as `Bus` needs, in order of arrival: a set of futures orders by address."""

    def add(self, item: Any) -> None:
        """Put it last."""
        self[item] = None

    def discard(self, item: Any) -> None:
        """Take it out."""
        self.pop(item, None)
