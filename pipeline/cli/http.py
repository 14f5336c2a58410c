"""The smallest HTTP client that the commands need: one request a connection, the body as it comes.

httptools, which the gateway's server uses too, does the parsing. A command line must start quickly and, in a bench, must not be
slower than what it measures: this costs about 0.1 ms a request.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final
from urllib.parse import SplitResult, urlsplit

import httptools

from pipeline.errors import OperatorError

READ_BYTES: Final = 65_536


class Response:
    """Status, headers (lower-case names) and the body as an iterator of pieces."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._head_complete = False
        self.complete = False
        self.headers: dict[str, str] = {}

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._head_complete = True

    def on_body(self, piece: bytes) -> None:
        """Called by the parser."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self.complete = True

    async def read_head(self) -> None:
        """Read until status and headers are known. Raises `ConnectionError` where the connection ends first."""
        while not self._head_complete:
            await self._read()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body. Raises `ConnectionError` where the connection ends before the body does."""
        while True:
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
            if self.complete:
                return
            await self._read()

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def _read(self) -> None:
        data = await self._reader.read(READ_BYTES)
        if not data:
            raise ConnectionError("The server closed the connection in the middle of its answer.")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionError(f"The server's answer is not HTTP: {error}.") from None


@asynccontextmanager
async def requested(
    method: str,
    url: str,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    trust: ssl.SSLContext | None = None,
) -> AsyncIterator[Response]:
    """Send one request; the block reads its response. Leaving the block closes the connection.

    `trust`: for https, whose certificates are good; None: those that the system trusts.

    Raises `OSError` (`ConnectionError` among them) where the server cannot be reached or breaks off.
    """
    where = split(url)
    tls = (trust or ssl.create_default_context()) if where.scheme == "https" else None
    port = where.port or (443 if tls else 80)
    reader, writer = await asyncio.open_connection(where.hostname, port, ssl=tls)
    try:
        writer.write(_head(method, where, headers or {}, len(body)) + body)
        response = Response(reader)
        await response.read_head()
        yield response
    finally:
        writer.close()
        with suppress(OSError):  # it may be broken already
            await writer.wait_closed()


async def get(url: str, timeout_s: float, trust: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    """Status and body of a GET. Raises `OSError` (a timeout is one) where there is no answer."""
    async with asyncio.timeout(timeout_s):
        async with requested("GET", url, trust=trust) as response:
            return response.status, await response.body()


def split(url: str) -> SplitResult:
    """The parts of an http or https URL. Raises `OperatorError` for anything else."""
    parts = urlsplit(url)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # from `port`, when it is none
        valid = False
    if not valid:
        raise OperatorError(f"{url!r} is no URL of a gateway.", "Give one like http://127.0.0.1:8000.")
    return parts


def _head(method: str, where: SplitResult, headers: Mapping[str, str], length: int) -> bytes:
    fields = {"host": where.netloc.rpartition("@")[2], "connection": "close", **headers}
    if length:
        fields["content-length"] = str(length)
    target = (where.path or "/") + (f"?{where.query}" if where.query else "")
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise OperatorError("A header may not hold a line break.", "Correct the creator's name.")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8")
