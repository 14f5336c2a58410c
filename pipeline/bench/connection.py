"""The client of the bench: kept-alive connections, and replies read as they arrive.

It must cost less than what it measures, so there is nothing between the socket and the clock: httptools calls back from within
`data_received`, and every piece of text gets the time at which its packet was read. (uvloop's own clock goes by the millisecond.)
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, cast

import httptools
import msgspec

from pipeline.bench.outcome import Outcome
from pipeline.cli import client, http

IDLE_MAX_S: Final = 2.0
"""A connection that was idle for longer is not used again: the server may be closing it, and a request on it would be lost.
Servers keep theirs for 5 s at least."""

_chunk: Final = msgspec.json.Decoder(client.Chunk)


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.idle_since_s = 0.0
        self.usable = False
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._now_s = 0.0
        self._outcome: Outcome | None = None
        self._over: asyncio.Future[None]
        self._rest = b""
        self._body: list[bytes] = []
        self._ended = False

    async def exchange(self, request: bytes, outcome: Outcome) -> None:
        """Send it, and follow the reply to its end. What becomes of it is in `outcome`; cancelled, the connection is lost."""
        self._outcome, self._over = outcome, asyncio.get_running_loop().create_future()
        self._rest, self._ended = b"", False
        self._body.clear()
        self._transport.write(request)
        try:
            await self._over
        finally:
            self._outcome = None
            if not self._over.done() or self._over.cancelled():
                self.close()

    def close(self) -> None:
        """End it, at once."""
        self.usable = False
        self._transport.abort()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.usable = cast("asyncio.Transport", transport), True  # uvloop's is none by name

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._finish("broken_off", f"The connection ended in the middle of a reply{f': {exc}' if exc else ''}.")

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            self._finish("not_understood", f"The answer is none of a gateway: {error}.")
            self.close()

    # Called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._outcome is not None and name.lower() == b"retry-after":
            with suppress(ValueError):  # a date, which we do not send
                self._outcome.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        if self._outcome is not None:
            self._outcome.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        outcome = self._outcome
        if outcome is None:
            return
        if outcome.status != 200:
            self._body.append(piece)
            return
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                self._ended = True
            elif event.startswith(b"data:"):
                self._take(_chunk.decode(event[5:]), outcome)

    def on_message_complete(self) -> None:
        self.usable = self._parser.should_keep_alive()
        self.idle_since_s = self._now_s
        outcome = self._outcome
        if outcome is not None and outcome.status != 200:
            self._finish(*_refusal(outcome.status, b"".join(self._body)))
        elif self._ended:
            self._finish("", "")
        else:
            self._finish("stopped", "The stream stopped before its end.")

    def _take(self, chunk: client.Chunk, outcome: Outcome) -> None:
        for choice in chunk.choices:
            if choice.delta.content:
                outcome.text_came(self._now_s)
        if chunk.usage is not None:
            outcome.usage = chunk.usage
        if chunk.error is not None:
            outcome.fail(str(chunk.error.code or "error"), chunk.error.message)

    def _finish(self, code: str, message: str) -> None:
        outcome = self._outcome
        if outcome is not None and not self._over.done():
            if code:
                outcome.fail(code, message)
            self._over.set_result(None)


def _refusal(status: int, body: bytes) -> tuple[str, str]:
    """Code and message of an answer that is no stream."""
    fault = None
    with suppress(msgspec.DecodeError):
        fault = _chunk.decode(body).error
    return str(fault.code) if fault and fault.code else f"http_{status}", client.refusal(status, body)


class Connections:
    """To one gateway: as many as there are requests at a time. `headers` go with each request."""

    def __init__(self, gateway: client.Gateway, headers: Mapping[str, str], timeout_s: float) -> None:
        self._where = http.split(gateway.url)
        self._host = self._where.hostname or ""  # never empty: `split` has looked
        self._tls = (gateway.trust or ssl.create_default_context()) if self._where.scheme == "https" else None
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []
        path = f"{self._where.path.rstrip('/')}/v1/chat/completions"
        lines = [f"POST {path} HTTP/1.1", f"host: {self._where.netloc.rpartition('@')[2]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = "\r\n".join(lines).encode()

    def request(self, creator: str, conversation: str | None, body: bytes) -> bytes:
        """The bytes of one request. Neither name holds a line break."""
        talk = f"\r\nx-conversation-id: {conversation}" if conversation else ""
        return b"%b\r\nx-creator-id: %b%b\r\ncontent-length: %d\r\n\r\n%b" % (
            self._head, creator.encode(), talk.encode(), len(body), body,
        )  # fmt: skip

    async def ask(self, request: bytes, outcome: Outcome) -> None:
        """One request on some connection. Never raises for what becomes of it; cancelled, it is given up."""
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._kept() or await self._connect()
                await connection.exchange(request, outcome)
            if connection.usable:
                self._idle.append(connection)
        except TimeoutError:
            outcome.fail("timeout", f"No whole reply within {self._timeout_s:g} s.")
        except ssl.SSLCertVerificationError as error:
            outcome.fail(
                "not_trusted", f"The certificate is not trusted: {error.verify_message}. --ca says who signed it."
            )
        except OSError as error:
            outcome.fail("unreachable", f"No connection to {self._where.netloc}: {error.strerror or error}.")

    def close(self) -> None:
        """End all that are idle."""
        for connection in self._idle:
            connection.close()

    def _kept(self) -> Connection | None:
        """The one that was used last: the others grow old, and are closed."""
        oldest_s = time.perf_counter() - IDLE_MAX_S
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since_s >= oldest_s:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        port = self._where.port or (443 if self._tls else 80)
        made = await asyncio.get_running_loop().create_connection(Connection, self._host, port, ssl=self._tls)
        return made[1]
