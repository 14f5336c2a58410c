"""The gateway as a process."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import httpx
import pytest

from gateway.app import listen_on, serve
from pipeline.config import Config, Gateway, Nats
from pipeline.errors import OperatorError
from tests.gateway.stack import config_for
from tests.nats_server import NatsServer
from tests.ports import free_port

RUN = "from typer import run; from gateway.command import gateway; run(gateway)"

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "vllm", "transformers", "lmcache"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import gateway.app, gateway.command
"""


def test_the_gateway_imports_without_torch_and_vllm() -> None:
    subprocess.run([sys.executable, "-c", BLOCKED], check=True, timeout=30)


def test_a_port_in_use_is_said_in_one_sentence_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OperatorError) as refused:
            serve(config_for("nats://127.0.0.1:1", port=port))
    assert str(refused.value) == (
        f"Port {port} on 127.0.0.1 is in use. Stop what uses it, or choose another with --port or gateway.port."
    )


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_said_to_be_none(host: str) -> None:
    with pytest.raises(OperatorError, match=f"Cannot listen on {host}"):
        listen_on(host, 0)


def test_a_broker_that_is_not_there_is_said_in_one_sentence() -> None:
    with pytest.raises(OperatorError, match="Cannot reach NATS"):
        serve(Config(nats=Nats(url=f"nats://127.0.0.1:{free_port()}", connect_timeout_s=0.5), gateway=Gateway(port=0)))


@contextmanager
def process(nats_url: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`headrace gateway` as a process of its own."""
    environ = os.environ | {"HEADRACE__NATS__URL": nats_url}
    started = subprocess.Popen([sys.executable, "-c", RUN, "--port", str(port)], env=environ, stderr=subprocess.PIPE)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


async def until_healthy(url: str) -> None:
    """Return when the process answers."""
    async with httpx.AsyncClient(trust_env=False) as client:
        with anyio.fail_after(20):
            while True:
                try:
                    if (await client.get(f"{url}/health")).status_code == 200:
                        return
                except httpx.TransportError:
                    await anyio.sleep(0.02)


@pytest.mark.anyio
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_process_ends_cleanly_on_a_signal(broker: NatsServer, number: signal.Signals) -> None:
    port = free_port()
    with process(broker.url, port) as running:
        await until_healthy(f"http://127.0.0.1:{port}")
        running.send_signal(number)
        _, said = await anyio.to_thread.run_sync(lambda: running.communicate(timeout=10))
        assert running.returncode == 0, said.decode()
        assert b"Traceback" not in said
