"""A gateway's double that keeps connections: answers each request as its script says, piece by piece."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from tests.cli.double import DONE, END, FINISH, HEAD, USAGE, chunked, text

KEPT = HEAD.replace(b"connection: close\r\n", b"")

Script = Callable[[int], Sequence[bytes | float]]
"""By the number of a request: bytes to write, and seconds to wait. What ends with neither `END` nor a body breaks off."""


def reply(*words: str, gap_s: float = 0.0) -> list[bytes | float]:
    """A whole reply of these pieces, with a wait before each."""
    pieces = [piece for word in words for piece in (gap_s, chunked(text(word)))]
    return [KEPT, *pieces, chunked(FINISH), chunked(USAGE), chunked(DONE), END]


def refusal(status: str, body: str, *headers: str) -> bytes:
    """An answer that is no stream."""
    lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", body]).encode()


class Served:
    """What the double has seen."""

    def __init__(self) -> None:
        self.url = ""
        self.connections = 0
        self.heads: list[bytes] = []
        self.bodies: list[Any] = []
        self.at_once = 0
        self.at_once_most = 0


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Served]:
    """Serve on a free port."""
    served, tasks = Served(), set[asyncio.Task[None] | None]()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        served.connections += 1
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                while await _answered(script, served, reader, writer):
                    pass
        finally:
            writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield served
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in tasks if task), return_exceptions=True)


async def _answered(script: Script, served: Served, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Answer one request. False where the connection is to end with it."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"content-length"))
    body = await reader.readexactly(length)
    number = len(served.heads)
    served.heads.append(head)
    served.bodies.append(msgspec.json.decode(body))
    served.at_once += 1
    served.at_once_most = max(served.at_once_most, served.at_once)
    said = b""
    try:
        for piece in script(number):
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                writer.write(piece)
                await writer.drain()
                said = piece
    finally:
        served.at_once -= 1
    return said.endswith((END, b"}"))
