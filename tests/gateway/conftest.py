"""One broker and one gateway for all tests that need no special one."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.gateway.stack import Stack, stack
from tests.nats_server import NatsServer


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    """asyncio's own loop: closing uvloop's never ends where a test that failed has left a server open."""
    return ("asyncio", {"use_uvloop": False})


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker of our own."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    try:
        yield server.start().url
    finally:
        server.stop()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[NatsServer]:
    """A broker of this test alone, for a gateway with other bounds."""
    server = NatsServer(tmp_path / "nats").start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
async def shared(nats_url: str, anyio_backend: Any) -> AsyncIterator[Stack]:
    """A gateway with the default bounds, shared by all."""
    async with stack(nats_url, body_bytes_max=500_000) as started:
        yield started


@pytest.fixture
async def served(shared: Stack) -> AsyncIterator[Stack]:
    """The shared gateway, with a worker that remembers nothing of the last test."""
    await shared.double.forget_all()
    yield shared
    with anyio.fail_after(2):  # every reply is closed, and every place given back
        while len(shared.gateway.replies) or shared.gateway.admission.in_flight:
            await anyio.sleep(0.005)
