"""A whole gateway on a real broker and a real uvicorn, in the test's own event loop, with the worker double behind it."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import msgspec
from anyio.abc import SocketAttribute

from gateway.app import DRAIN_RATIO, Gateway, Server, create_app, listen_on
from pipeline import tls
from pipeline.bus.connection import Bus
from pipeline.config import Config, Nats, Up
from pipeline.config import Gateway as GatewayConfig
from tests.gateway.worker_double import WorkerDouble

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


class Stack(msgspec.Struct, frozen=True):
    """What a test holds of it."""

    url: str
    client: httpx.AsyncClient
    gateway: Gateway
    server: Server
    worker: WorkerDouble | None

    @property
    def double(self) -> WorkerDouble:
        """The workers behind it."""
        assert self.worker is not None
        return self.worker

    async def ask(self, body: Any = None, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """One chat request; `fields` are added to a friendly body."""
        return await self.client.post(CHAT, json=HELLO | fields if body is None else body, headers=headers)


def config_for(nats_url: str, drain_s: float = 5.0, **gateway: Any) -> Config:
    """The configuration of a gateway under test."""
    return Config(nats=Nats(url=nats_url), gateway=GatewayConfig(**gateway), up=Up(drain_s=drain_s))


@asynccontextmanager
async def stack(
    nats_url: str, drain_s: float = 5.0, source: Path | None = None, **gateway: Any
) -> AsyncIterator[Stack]:
    """A gateway that is ready: it knows of a prefill and a decode worker. It follows the keys in `source`."""
    async with await Bus.connect(nats_url, "double") as bus:
        double = WorkerDouble(bus)
        await double.listen()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(double.run)
            async with serving(config_for(nats_url, drain_s, **gateway), double, source) as served:
                await until_ready(served.client)
                yield served
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def serving(
    config: Config, double: WorkerDouble | None = None, source: Path | None = None
) -> AsyncIterator[Stack]:
    """A gateway that serves, whoever is behind it."""
    with listen_on("127.0.0.1", 0) as sock:
        app = create_app(config, source)
        async with app.router.lifespan_context(app):
            files = tls.server_files(config.gateway)
            server = Server(app, DRAIN_RATIO * config.up.drain_s, files)
            task = asyncio.create_task(server.serve([sock]))
            url, verify = url_of(sock), True if files is None else ssl.create_default_context(cafile=files[0])
            if files is not None:
                url = url.replace("http", "https")
            try:
                async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False, verify=verify) as client:
                    yield Stack(url, client, app.state.gateway, server, double)
            finally:
                server.should_exit = True
                with anyio.CancelScope(shield=True):  # also where the test has failed: uvloop hangs on an open server
                    await task


async def until_ready(client: httpx.AsyncClient) -> None:
    """Return when `/ready` says so."""
    with anyio.fail_after(5):
        while (await client.get("/ready")).status_code != 200:
            await anyio.sleep(0.01)


def url_of(sock: socket.socket) -> str:
    """Where a listening socket is reached."""
    host, port = sock.getsockname()
    return f"http://{host}:{port}"


def events(body: bytes) -> list[Any]:
    """The JSON of each event of a stream, `[DONE]` as itself. Checks the framing to the byte."""
    assert b"\r" not in body
    assert body.endswith(b"\n\n")
    lines = body.removesuffix(b"\n\n").split(b"\n\n")
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    data = [line.removeprefix(b"data: ") for line in lines]
    return [item.decode() if item == b"[DONE]" else msgspec.json.decode(item) for item in data]


def text_of(body: bytes) -> str:
    """The text that a stream adds up to."""
    choices = [choice for event in events(body) if isinstance(event, dict) for choice in event.get("choices", [])]
    return "".join(choice["delta"].get("content", "") for choice in choices)


class Connection:
    """The client's end of it."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self._stream = stream

    async def leave(self) -> None:
        """Close it, whatever is unread."""
        await self._stream.aclose()

    async def until(self, end: bytes) -> bytes:
        """Everything read until `end` has come."""
        read = b""
        with anyio.fail_after(5):
            while end not in read:
                read += await self._stream.receive()
        return read

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        read = bytearray()
        with anyio.fail_after(10):
            try:
                while True:
                    read += await self._stream.receive()
            except anyio.EndOfStream:
                return bytes(read)


@asynccontextmanager
async def connection(served: Stack, body: dict[str, Any], headers: str = "") -> AsyncIterator[Connection]:
    """A chat request on a connection of its own, which a test can leave unread, or leave."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    payload = msgspec.json.encode(body)
    stream = await anyio.connect_tcp(host, int(port))
    length = f"content-length: {len(payload)}\r\n"
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\n{length}{headers}connection: close\r\n\r\n"
    async with stream:
        # What is not read should wait at the server, and not in the kernel.
        stream.extra(SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        await stream.send(head.encode() + payload)
        yield Connection(stream)
