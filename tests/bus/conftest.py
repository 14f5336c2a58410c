"""A real broker for all tests of the bus, one of its own for those that kill it, and fresh connections."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.bus import streams
from pipeline.bus.connection import Bus
from pipeline.paths import JETSTREAM
from tests.bus.support import STREAM, api
from tests.nats_server import NatsServer


@pytest.fixture
def anyio_backend() -> Any:
    """asyncio's own loop. Modules that are quick run under uvloop as well."""
    return ("asyncio", {"use_uvloop": False})


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """The broker that tests share."""
    server = NatsServer(tmp_path_factory.mktemp("nats")).start()
    yield server
    server.kill9()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[NatsServer]:
    """A broker of this test alone, to be killed."""
    broker = NatsServer(tmp_path / "nats").start()
    yield broker
    broker.kill9()


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[Bus]:
    """A fresh connection."""
    async with await Bus.connect(server.url, "test") as bus:
        yield bus


@pytest.fixture
async def other(server: NatsServer) -> AsyncIterator[Bus]:
    """Another process's connection."""
    async with await Bus.connect(server.url, "other") as other:
        yield other


@pytest.fixture
async def queue(bus: Bus) -> Bus:
    """The shared broker with all streams declared and no requests in them."""
    await streams.apply(bus, streams.declared(JETSTREAM))
    await api(bus, f"STREAM.PURGE.{STREAM}")
    return bus
