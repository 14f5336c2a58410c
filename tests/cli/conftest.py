"""A broker of the test alone, and a configuration file that names it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nats_server import NatsServer


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[NatsServer]:
    broker = NatsServer(tmp_path / "nats").start()
    yield broker
    broker.kill9()


@pytest.fixture
def config(broker: NatsServer, tmp_path: Path) -> Path:
    path = tmp_path / "headrace.toml"
    path.write_text(f'[nats]\nurl = "{broker.url}"\n', "utf-8")
    return path
