"""nats-py's client, mended where it would lose a message or stay dead.

nats-py 2.16 has seams inside that are not public; this class is the only place that touches them. Each override names what it
mends, and `tests/bus` holds each of them against a real server:

    _send_ping             PING waits in line: nats-py writes it past its queue, so flush() returns before a SUB has left
    _process_pong          a PONG that nobody waits for any more does not end the read loop
    _read_loop             a read loop that an exception has ended reconnects; nats-py stays "connected", and deaf
    _process_err           an -ERR is reported; nats-py closes for good, although max_reconnect_attempts is -1
    _process_info          a server, or who stands before it, cannot talk us out of TLS
    _process_connect_init  nothing waits over a lost connection: what was not sent in time is not sent late
    _connect_to_server     an attempt that failed is closed before the next one is made; over TLS both of its ends are
    _flush_pending         who is cancelled while a full socket is waited for is cancelled; nats-py swallows it
    close                  without a connection nothing is written: uvloop raises for a closed socket
    _process_msg           a handler is called as its message is read: no queue that overflows, no task to be cancelled in
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from pipeline.bus import natspy
from pipeline.bus.access import Access
from pipeline.bus.natspy import PING_PROTO, STALE_CONNECTION, pub_cmd

UNSENT_BYTES_MAX: Final = 2 * 1024 * 1024
"""What may wait for the socket: nats-py's own bound, and two of the largest messages. Above it, `publish` waits."""

_NO_RESPONDERS: Final = "503"


class Message(NamedTuple):
    """A message as a handler gets it. `reply` is empty where nobody waits for an answer."""

    subject: str
    reply: str
    data: bytes
    headers: Mapping[str, str] | None

    @property
    def nobody_listens(self) -> bool:
        """What the broker answers itself, to a question that reached no subscription."""
        return not self.data and self.headers is not None and self.headers.get("Status") == _NO_RESPONDERS


Handler = Callable[[Message], None]
"""Takes a message and returns at once: it runs between two reads of the connection."""


class Client(natspy.Client):
    """One connection. `failed` hears what a handler raised."""

    def __init__(self, failed: Callable[[str, Exception], None]) -> None:
        super().__init__()
        self._failed = failed
        self._handlers: dict[int, Handler] = {}
        self._demands_tls = False
        self._unused: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def secure(self, access: Access) -> None:
        """Before `connect`: whom to name to the server, and whether it must offer TLS."""
        self._demands_tls = access.demands_tls
        self._public_nkey = access.nkey.public if access.nkey else None

    async def listen(self, subject: str, handler: Handler) -> int:
        """Subscribe; the number is for `forget` and `drain`. The server knows of it once a later `ping` is answered."""
        number = self._sid + 1
        self._handlers[number] = handler
        try:
            await self.subscribe(subject, future=self._unused)  # a future, because nats-py then starts no task
        except BaseException:
            self._handlers.pop(number, None)
            raise
        return number

    async def forget(self, number: int) -> None:
        """End a subscription. What is in flight is dropped."""
        self._handlers.pop(number, None)
        await self._unlisten(number)

    async def drain_one(self, number: int, answered: asyncio.Future[bool]) -> None:
        """End a subscription, but hand over what the server had sent. `answered` is done once all of it has come."""
        await self._unlisten(number)
        try:
            await self.ping(answered)
            await answered
        finally:
            self._handlers.pop(number, None)

    async def ping(self, answered: asyncio.Future[bool]) -> None:
        """`answered` is done once the server has seen everything that was sent before this call."""
        await self._send_ping(answered)

    def post(self, subject: str, data: bytes, reply: str) -> bool:
        """Publish without waiting, from a handler. False, and not sent, where too much waits for the socket already."""
        if self._pending_data_size > UNSENT_BYTES_MAX:
            return False
        command = pub_cmd(subject, reply, data)
        self._pending.append(command)
        self._pending_data_size += len(command)
        if self._flush_queue is not None and self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())
        return True

    async def _unlisten(self, number: int) -> None:
        self._subs.pop(number, None)  # so that a reconnect does not subscribe again
        if self.is_connected:
            await self._send_unsubscribe(number)

    async def _send_ping(self, future: "asyncio.Future[bool] | None" = None) -> None:
        self._pongs.append(asyncio.get_running_loop().create_future() if future is None else future)
        if self.is_connected:
            await self._send_command(PING_PROTO)
            await self._flush_pending()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        result = await super()._flush_pending(force_flush)
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
        return result

    async def _process_pong(self) -> None:
        if self._pongs:
            answered = self._pongs.pop(0)
            if not answered.done():
                answered.set_result(True)
            self._pongs_received += 1
            self._pings_outstanding = 0

    async def _read_loop(self) -> None:
        await super()._read_loop()
        task = asyncio.current_task()
        if self.is_connected and task is not None and not task.cancelling():
            await self.force_reconnect()

    async def _process_err(self, err_msg: str) -> None:
        if STALE_CONNECTION in err_msg:
            await super()._process_err(err_msg)
            return
        self._err = natspy.errors.Error(f"nats: {err_msg.strip(chr(39))}")
        await self._error_cb(self._err)  # where the server means to end the connection, it closes the socket itself

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self._demands_tls and not info.get("tls_required"):
            raise natspy.errors.Error("the server offers no TLS")
        await super()._process_info(info, initial_connection)

    async def _connect_to_server(self, server: Any) -> None:
        self._drop_sockets()
        await super()._connect_to_server(server)

    def _drop_sockets(self) -> None:
        for writer in (getattr(self._transport, name, None) for name in ("_io_writer", "_bare_io_writer")):
            if writer is not None:
                writer.transport.abort()

    async def close(self) -> None:
        """Write what waits for the socket, and end for good."""
        if not self.is_connected:
            self._drop_unsent()
        await super().close()
        self._drop_sockets()

    async def _process_connect_init(self) -> None:
        self._drop_unsent()
        await super()._process_connect_init()

    def _drop_unsent(self) -> None:
        self._pending.clear()
        self._pending_data_size = 0

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        handler = self._handlers.get(sid)
        if handler is None:
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        fields = await self._process_headers(headers) if headers else None
        try:
            handler(Message(subject.decode(), reply.decode(), data, fields))
        except Exception as error:  # it would end the read loop
            self._failed(subject.decode(), error)
