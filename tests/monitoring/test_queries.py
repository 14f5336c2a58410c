"""Every query of every dashboard and rule, asked of a real Prometheus that watches real processes under load and in trouble."""

import os
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec
import pytest

from pipeline.bus.connection import Bus
from tests.chaos import load
from tests.e2e.running import ROOT, Running, await_ready
from tests.monitoring.queries import Query, answerable
from tests.monitoring.server import Prometheus, scraping

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

CONFIG: Final = """
engine = "simulated"
nats = { url = "nats://127.0.0.1:0", monitor_port = 0 }
gateway = { port = 0, creator_in_flight_max = 8 }
lmcache = { port = 0, http_port = 0 }
up = { prefill = 2, decode = 1 }
prefill.slots = 2
simulated.prefill_overhead_s = 0.02
balancer.enabled = true
"""

RATE: Final = 20.0
REQUESTS: Final = 6000
"""More than are sent before all is answered."""

FLOOD: Final = 16
FLOOD_TOKENS: Final = 400
"""Replies of two seconds: they are under way when decode dies."""

FIRES: Final = Query("a dead letter", 'ALERTS{alertname="HeadraceDeadLetters",alertstate="firing"}')

COUNTED: Final = Query("who counts dead letters is watched", 'headrace_dead_letters_kept{job="keeper"} == 0')
"""Before there are any: what is there already when it is looked at first is no increase."""

ANSWERED_S: Final = 120.0
"""Two windows of a minute, on cores that others use as well."""


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": False})


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A `headrace up` of two prefill workers, a decode worker, a keeper and a gateway."""
    config, log = tmp_path / "headrace.toml", tmp_path / "up.log"
    config.write_text(CONFIG, "utf-8")
    environment = {**os.environ, "HEADRACE__UP__STATE_DIR": str(tmp_path)}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli", "up", "--config", str(config)],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        yield await_ready(process, tmp_path / "last.json", log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def targets(metrics: Mapping[str, str]) -> dict[str, list[str]]:
    """Where each job's processes answer. A process is named after its job, and those of which there are several have a number."""
    found: dict[str, list[str]] = {}
    for name, url in sorted(metrics.items()):
        found.setdefault(name.partition("-")[0], []).append(urllib.parse.urlsplit(url).netloc)
    return found


@pytest.mark.anyio
async def test_every_query_of_every_panel_and_rule_has_an_answer(running: Running, tmp_path: Path) -> None:
    with scraping(tmp_path, targets(running.metrics)) as prometheus:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_ask_steadily, running)
            assert await _unanswered(prometheus, [COUNTED]) == []
            tasks.start_soon(_make_trouble, running)
            assert await _unanswered(prometheus, [*answerable(), FIRES]) == []
            tasks.cancel_scope.cancel()
        assert not prometheus.answers("headrace_nothing")
        assert not prometheus.answers("vector(0) / vector(0)")
        groups = prometheus.get("rules")["groups"]
        assert {rule["lastError"] for group in groups for rule in group["rules"] if "lastError" in rule} == set()
        assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}


async def _unanswered(prometheus: Prometheus, queries: Sequence[Query]) -> list[Query]:
    """Those that have no answer until the end of the time that they are given."""
    left = list(queries)
    with anyio.move_on_after(ANSWERED_S):
        while left:
            await anyio.sleep(1)  # a scrape
            answers = [await anyio.to_thread.run_sync(prometheus.answers, query.expr) for query in left]
            left = [query for query, answered in zip(left, answers, strict=True) if not answered]
    return left


async def _ask_steadily(running: Running) -> None:
    """Many creators, one of them a third of all."""
    asked = [
        order if number % 3 else msgspec.structs.replace(order, creator="hot")
        for number, order in enumerate(load.orders(REQUESTS, "watched"))
    ]
    await load.open_loop(asked, RATE, partial(_ask, running))


async def _ask(running: Running, order: load.Order) -> None:
    await load.ask([running.gateway], order)


async def _make_trouble(running: Running) -> None:
    """What a fleet that is well never counts: a request that cannot be read, a creator that asks too much, a worker that dies."""
    async with await Bus.connect(running.nats, "trouble") as bus:
        await bus.store("requests.in.interactive.ada.ada", b"no request", "trouble", 5.0)
    async with anyio.create_task_group() as flood:
        for order in load.orders(FLOOD, "flood"):
            long = {**order.body, "max_tokens": FLOOD_TOKENS}
            flood.start_soon(_ask, running, msgspec.structs.replace(order, creator="flood", body=long))
        await anyio.sleep(1)  # into the replies
        running.kill("decode-1")
