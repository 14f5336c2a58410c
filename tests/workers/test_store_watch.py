"""For how long LMCache has been silent, by a page that answers, fails, is not there, or hangs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import pytest

from pipeline.telemetry import metrics
from tests.bus.support import eventually
from tests.ports import free_port
from workers.store_watch import watch_store

pytestmark = pytest.mark.anyio

PERIOD_S = 0.1


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": False})


def silent_s() -> float:
    return float(metrics.LMCACHE_SILENT_SECONDS._value.get())


@contextmanager
def page(port: int, status: int = 200, hang: threading.Event | None = None) -> Iterator[str]:
    """A health page that answers so, or only once `hang` is set."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if hang is not None:
                hang.wait()
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Page)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/healthcheck"
    finally:
        if hang is not None:
            hang.set()
        server.shutdown()
        server.server_close()
        thread.join()


async def test_silence_grows_while_nobody_answers_and_is_over_with_the_first_answer() -> None:
    port = free_port()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_store, f"http://127.0.0.1:{port}/healthcheck", PERIOD_S)
        await eventually(lambda: silent_s() > 3 * PERIOD_S)
        with page(port):
            await eventually(lambda: silent_s() == 0.0)
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("how", ["unwell", "hanging"])
async def test_a_server_that_is_unwell_or_hangs_is_as_good_as_silent(how: str) -> None:
    metrics.LMCACHE_SILENT_SECONDS.set(0.0)
    hang = threading.Event() if how == "hanging" else None
    with page(free_port(), 500, hang) as url:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_store, url, PERIOD_S)
            await eventually(lambda: silent_s() > 3 * PERIOD_S)
            tasks.cancel_scope.cancel()
