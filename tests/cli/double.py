"""A gateway's double: answers each connection with prepared bytes, and keeps what it was sent."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunked(piece: bytes) -> bytes:
    """One piece of a chunked body."""
    return f"{len(piece):x}\r\n".encode() + piece + b"\r\n"


def event(json: str) -> bytes:
    """One server-sent event."""
    return f"data: {json}\n\n".encode()


def text(content: str) -> bytes:
    """A piece of a reply, as an event."""
    return event(msgspec.json.encode({"choices": [{"delta": {"content": content}, "finish_reason": None}]}).decode())


FINISH = event('{"choices":[{"delta":{},"finish_reason":"stop"}]}')
USAGE = event(
    '{"choices":[],"usage":{"prompt_tokens":70,"completion_tokens":2,"total_tokens":72,'
    '"prompt_tokens_details":{"cached_tokens":64},'
    '"headrace":{"decode_cached_tokens":64,"prefill_generated_tokens":1,"prefill":"prefill-1","decode":"decode-1"}}}'
)
DONE = b"data: [DONE]\n\n"
WHOLE = HEAD + b"".join(chunked(piece) for piece in (text("Pa"), text("ris"), FINISH, USAGE, DONE)) + END


@asynccontextmanager
async def gateway(*pieces: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Its URL, and the requests that it got. The pieces of the answer are written one by one."""
    requests: list[bytes] = []
    handlers: set[asyncio.Task[None] | None] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())
        await _answer(pieces, requests, reader, writer)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", requests
        await asyncio.gather(*(task for task in handlers if task))


async def _answer(
    pieces: Sequence[bytes], requests: list[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"content-length")), 0)
    requests.append(head + await reader.readexactly(length))
    with suppress(OSError):  # the client may have left
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
