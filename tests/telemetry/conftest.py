"""A broker for the tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nats_server import NatsServer


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": False})


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[NatsServer]:
    broker = NatsServer(tmp_path / "nats").start()
    yield broker
    broker.kill9()
