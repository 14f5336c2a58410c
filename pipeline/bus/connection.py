"""One process's connection to NATS.

It comes back by itself, for as long as the process lives. What is published is sent now or not at all: nothing waits over a lost
connection, so no stale pull, NAK or presence arrives late, and `Disconnected` says so at once. Handlers are plain functions
that are called as messages are read; what they raise is logged and counted.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Self

import anyio

from pipeline import outside
from pipeline.bus import natspy, store
from pipeline.bus.access import Access, access_of, shown, split
from pipeline.bus.background import Background, handler_failed
from pipeline.bus.calls import Calls
from pipeline.bus.client import Client, Handler, Message
from pipeline.bus.errors import BadSubject, Disconnected, Unanswered
from pipeline.config import Nats
from pipeline.errors import BodyTooLarge, OperatorError
from pipeline.limits import MESSAGE_BYTES_MAX
from pipeline.protocol.subjects import token
from pipeline.telemetry import logs
from pipeline.telemetry.metrics import RECONNECTS

__all__ = ["Bus", "Callback", "Handler", "Message", "Subscription"]

_RECONNECT_WAIT_S: Final = 0.1
"""Between two attempts. A restarted broker is found within this time, and a missing one costs ten refused connects a second."""

_WATCH_PERIOD_S: Final = 2.0
"""A connection that says nothing although it looks alive is noticed after this, and replaced."""

_WATCH_GRACE_S: Final = 1.0
"""More time for an answer to our own PING: after a stall of our own loop it lies in the socket, unread."""

_BARRIER_TIMEOUT_S: Final = 5.0

_CLOSE_S: Final = 2.0
"""A broker that does not read any more does not keep a process from ending."""

_UNKNOWN: Final = "authorization violation"
"""In what the server says to whom it does not know. It ends the connection, so that what follows is only a broken pipe."""

_ADMIT: Final = "Give nats.nkey_seed a key that the server's users name."
_START: Final = "Start it (nats-server -c configs/nats/local.conf, or headrace up), or correct nats.url."

_SAID_MAX: Final = 64
"""Different errors remembered as said while a connection lasts: more are new subjects that are refused, each worth a line."""

_FORBIDDEN: Final = "permissions violation"
"""In what the server says of a subject that we may not use."""

Callback = Callable[[], None]

_log = logs.get("bus")


class _Deaf(Exception):
    """We may not subscribe to our own inbox: every request would wait in vain."""


class Subscription:
    """Interest in a subject, until it is ended in one of two ways."""

    def __init__(self, bus: "Bus", number: int) -> None:
        self._bus = bus
        self._number = number

    async def unsubscribe(self) -> None:
        """End it; messages in flight are dropped."""
        await self._bus.client.forget(self._number)

    async def drain(self) -> None:
        """End it, but let the handler have everything that the server has already sent."""
        try:
            await self._bus.client.drain_one(self._number, self._bus.expect_pong())
        except Disconnected:
            await self._bus.client.forget(self._number)  # what was read is handled, what was not cannot come


class Bus:
    """A connection. Made by `Bus.connect`, and an async context manager that closes it."""

    def __init__(self, inbox_prefix: str) -> None:
        self.client = Client(handler_failed)
        self._inbox_prefix = inbox_prefix
        self._inboxes = 0
        self._calls = Calls(f"{inbox_prefix}.r")
        self._pongs: set[asyncio.Future[bool]] = set()
        self._up = asyncio.Event()
        self._lost: list[Callback] = []
        self._back: list[Callback] = []
        self._closing = False
        self._last_error = self._unknown = ""
        self._said: set[str] = set()
        self._watchdog: Background | None = None

    @classmethod
    async def connect(cls, at: str | Nats, name: str, connect_timeout_s: float | None = None) -> Self:
        """Connect as `name`, to a URL or as a configuration says.

        Raises `OperatorError` where no broker can be reached within `connect_timeout_s` (default: the configuration's), or
        what it lets us do is too little to hear an answer.
        """
        settings = Nats(url=at) if isinstance(at, str) else at
        timeout_s = settings.connect_timeout_s if connect_timeout_s is None else connect_timeout_s
        access = access_of(settings)
        bus = cls(f"{settings.inbox_prefix}.{token(name)}.{outside.token(4)}")
        try:
            with anyio.fail_after(timeout_s):
                await bus._start(access, name, timeout_s)
        except _Deaf as error:
            await bus.close()
            raise OperatorError(
                f"NATS at {_place(settings.url)} does not let us hear answers: {error}.",
                "Set nats.inbox_prefix to what the permissions of this NKey name.",
            ) from None
        except (TimeoutError, OSError, ValueError, natspy.errors.Error) as error:
            reason = bus._unknown or bus._last_error or str(error) or "no answer"
            await bus.close()
            raise OperatorError(
                f"Cannot reach NATS at {_place(settings.url)} within {timeout_s:g} s: {reason}.",
                _ADMIT if bus._unknown else _START,
            ) from None
        return bus

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.close()

    @property
    def connected(self) -> bool:
        """Whether a message would be sent now."""
        return self.client.is_connected

    def inbox(self) -> str:
        """A subject that nobody else has. Tokens may be added to it."""
        self._inboxes += 1
        return f"{self._inbox_prefix}.{self._inboxes:x}"

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """Have `handler` called with every message. The server knows of it when a later `barrier` returns."""
        try:
            return Subscription(self, await self.client.listen(subject, handler))
        except natspy.errors.BadSubjectError:
            raise BadSubject(f"{subject!r} is no subject to subscribe to.") from None
        except natspy.errors.Error as error:
            raise Disconnected(f"Not subscribed to {subject}: {error}.") from None

    async def publish(
        self, subject: str, data: bytes, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a message; waits only for a full socket.

        Raises `Disconnected`, `BadSubject`, and `BodyTooLarge` for what would make the server end the connection.
        """
        _check_size(data, headers)
        if not self.connected:
            raise Disconnected(f"Not sent to {subject}: there is no connection to NATS.")
        try:
            await self.client.publish(subject, data, reply, dict(headers) if headers else None)
        except (natspy.errors.BadSubjectError, natspy.errors.BadHeaderError) as error:
            raise BadSubject(f"Not sent to {subject!r}: {error}.") from None
        except natspy.errors.MaxPayloadError:
            raise BodyTooLarge(f"{len(data)} bytes are more than this NATS server takes.") from None
        except (natspy.errors.Error, OSError, RuntimeError) as error:  # RuntimeError: uvloop's, for a closed socket
            raise Disconnected(f"Not sent to {subject}: {error}.") from None

    def post(self, subject: str, data: bytes, reply: str = "") -> None:
        """Publish a small message from within a handler, which cannot wait. `subject` is our own, and not checked.

        Raises `Disconnected`, also where too much waits for the socket, and `BadSubject` for an answer to who has asked for none:
        the server would end the connection.
        """
        if not subject:
            raise BadSubject("Not sent: nobody has asked for an answer.")
        if not self.connected or not self.client.post(subject, data, reply):
            raise Disconnected(f"Not sent to {subject}: NATS does not take it.")

    async def request(
        self, subject: str, data: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The data of the first answer. Raises `NoResponders`, `Unanswered`, `Disconnected`, and what `publish` raises."""
        call = self._calls.begin(subject)
        try:
            await self.publish(subject, data, call.reply, headers)
        except BaseException:
            self._calls.end(call)
            raise
        return await self._calls.wait(call, timeout_s)

    async def store(
        self, subject: str, data: bytes, msg_id: str, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> int:
        """Publish to a stream; the sequence it was stored under. See `pipeline.bus.store`."""
        return await store.store(self, subject, data, {**(headers or {}), store.MSG_ID: msg_id}, timeout_s)

    async def barrier(self, timeout_s: float = _BARRIER_TIMEOUT_S) -> None:
        """Return when the server has seen everything sent so far. Raises `Disconnected` where it may not have, `Unanswered`."""
        pong = self.expect_pong()
        await self.client.ping(pong)
        try:
            with anyio.fail_after(timeout_s):
                await pong
        except TimeoutError:
            raise Unanswered(f"NATS did not answer a PING within {timeout_s:g} s.") from None

    @property
    def server_version(self) -> str:
        """Of the nats-server that we are connected to."""
        version = self.client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    @property
    def server_max_payload(self) -> int:
        """Bytes of the largest message that it takes."""
        return self.client.max_payload

    def on_disconnect(self, callback: Callback) -> Callback:
        """Have `callback` called when the connection is lost; the result takes it back."""
        self._lost.append(callback)
        return lambda: self._lost.remove(callback)

    def on_reconnect(self, callback: Callback) -> Callback:
        """Have `callback` called when a lost connection is back, with its subscriptions; the result takes it back."""
        self._back.append(callback)
        return lambda: self._back.remove(callback)

    async def wait_connected(self, timeout_s: float) -> None:
        """Return once there is a connection. Raises `Disconnected` after `timeout_s`."""
        if self.connected:
            return
        self._up.clear()  # the loss may not have been told yet
        try:
            with anyio.fail_after(timeout_s):
                await self._up.wait()
        except TimeoutError:
            raise Disconnected("There is no connection to NATS.") from None

    async def close(self) -> None:
        """Send what waits for the socket, and end, within two seconds. Open requests end with `Disconnected`."""
        self._closing = True
        with anyio.move_on_after(_CLOSE_S, shield=True), contextlib.suppress(OSError, RuntimeError):
            if self._watchdog is not None:
                await self._watchdog.stop()
            await self.client.close()
        self._drop_waiters()

    def expect_pong(self) -> "asyncio.Future[bool]":
        """For a PING: done when it is answered, and `Disconnected` when it will not be. Raises that, too."""
        if not self.connected:
            raise Disconnected("There is no connection to NATS.")
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pongs.add(pong)
        pong.add_done_callback(self._pong_over)
        return pong

    async def _start(self, access: Access, name: str, connect_timeout_s: float) -> None:
        self.client.secure(access)
        await self.client.connect(
            list(access.urls),
            name=name,
            tls=access.tls,
            signature_cb=access.nkey.sign if access.nkey else None,
            error_cb=self._on_error,
            disconnected_cb=self._on_lost,
            reconnected_cb=self._on_back,
            max_reconnect_attempts=-1,
            reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]  # seconds, used as a float
            connect_timeout=min(2.0, connect_timeout_s),  # type: ignore[arg-type]
            ping_interval=5,
            inbox_prefix=self._inbox_prefix,
        )
        await self.subscribe(self._calls.subject, self._calls.answered)
        await self.barrier(connect_timeout_s)
        if _FORBIDDEN in self._last_error.lower():
            raise _Deaf(self._last_error)
        self._up.set()
        self._watchdog = Background(self._watch(), "bus watchdog")

    async def _watch(self) -> None:
        """Replace a connection that is silent although it looks alive."""
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            if self.connected and not await self._answers():
                _log.warning("nats_silent", remedy="reconnecting")
                await self.client.force_reconnect()

    async def _answers(self) -> bool:
        pong = self.expect_pong()
        await self.client.ping(pong)
        for timeout_s in (_WATCH_PERIOD_S, _WATCH_GRACE_S):
            await asyncio.wait({pong}, timeout=timeout_s)
        answers = pong.done()  # or the connection has been lost meanwhile, which needs no watchdog
        pong.cancel()
        return answers

    def _pong_over(self, pong: "asyncio.Future[bool]") -> None:
        self._pongs.discard(pong)
        if not pong.cancelled():
            pong.exception()  # fetched, because asyncio logs what nobody has waited for

    async def _on_error(self, error: Exception) -> None:
        """nats-py reports every failed attempt to reconnect: say each thing once."""
        self._last_error = said = str(error) or repr(error)
        if _UNKNOWN in said.lower():
            self._unknown = said
        if said not in self._said:
            self._said = {*self._said, said} if len(self._said) < _SAID_MAX else {said}
            _log.warning("nats_error", error=said)

    async def _on_lost(self) -> None:
        self._up.clear()
        self._drop_waiters()
        if not self._closing:
            _log.warning("nats_lost")
            _call_all(self._lost)

    async def _on_back(self) -> None:
        self._last_error = self._unknown = ""
        self._said.clear()
        self._up.set()
        RECONNECTS.inc()
        _log.info("nats_back")
        _call_all(self._back)

    def _drop_waiters(self) -> None:
        self._calls.lost()
        for pong in list(self._pongs):
            if not pong.done():  # its own callback, which discards it, runs a turn later
                pong.set_exception(Disconnected("The connection to NATS was lost before it answered."))


def _call_all(callbacks: list[Callback]) -> None:
    for callback in list(callbacks):
        try:
            callback()
        except Exception as error:
            handler_failed("a change of the connection", error)


def _check_size(data: bytes, headers: Mapping[str, str] | None) -> None:
    """Headers count, too: "NATS/1.0", a line each, and an empty line, all ended by CR LF."""
    size = len(data)
    if headers:
        size += 12 + sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())
    if size > MESSAGE_BYTES_MAX:
        raise BodyTooLarge(f"A message of {size} bytes is larger than the {MESSAGE_BYTES_MAX} allowed.")


def _place(urls: str) -> str:
    """The addresses without their passwords."""
    return ", ".join(shown(url) for url in split(urls))
