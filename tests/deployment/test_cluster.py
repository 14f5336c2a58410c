"""The pipeline on the cluster of `configs/`: three brokers over TLS, a role's own NKey for every process, three copies of each stream."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from pipeline.bus import streams
from pipeline.bus.connection import Bus
from pipeline.paths import JETSTREAM
from tests.chaos import load
from tests.chaos.verdict import tokens_amiss
from tests.deployment.cluster import Cluster
from tests.deployment.fleet import Fleet, asked, fleet, leader

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

STREAM: Final = "REQUESTS_interactive"
REQUESTS: Final = 450
RATE: Final = 15.0
KILL_AFTER_S: Final = 5.0
RETURN_AFTER_S: Final = 12.0
"""From the death of a leader to its return: longer than an election, which takes up to 9 s."""


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")).running() as running:
        yield running


async def test_a_stream_leader_dies_under_load_and_nothing_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    outcomes: list[load.Outcome] = []
    async with fleet(cluster, tmp_path, prefill=2, decode=2, gateways=2) as members:

        async def ask(order: load.Order) -> None:
            outcomes.append(await load.ask(members.gateways, order))

        async with await Bus.connect(cluster.nats("operator"), "test") as bus, anyio.create_task_group() as tasks:
            assert (await asked(bus, f"STREAM.INFO.{STREAM}"))["config"]["num_replicas"] == 3
            tasks.start_soon(load.open_loop, load.orders(REQUESTS, "leader"), RATE, ask)
            await anyio.sleep(KILL_AFTER_S)
            victim = await leader(bus, STREAM, cluster.nodes)
            cluster.end(victim, signal.SIGKILL)
            killed_s = time.monotonic()
            await leader(bus, STREAM, cluster.nodes)
            await anyio.sleep(killed_s + RETURN_AFTER_S - time.monotonic())
            cluster.start(victim)
        async with await Bus.connect(cluster.nats("operator"), "test") as bus:
            await _until_empty(bus)
            assert await streams.diff(bus, streams.declared(JETSTREAM, 3)) == []
        assert _ends(outcomes) == {"whole": REQUESTS}, [outcome.code for outcome in outcomes if outcome.code]
        assert {tokens_amiss(outcome) for outcome in outcomes} == {(0, 0)}
        assert set((await members.stop_all()).values()) == {0}
        assert _refusals(members) == []


def _ends(outcomes: list[load.Outcome]) -> dict[str, int]:
    endings = [outcome.ending for outcome in outcomes]
    return {ending: endings.count(ending) for ending in set(endings)}


async def _until_empty(bus: Bus) -> None:
    with anyio.fail_after(30):
        while (await asked(bus, f"STREAM.INFO.{STREAM}"))["state"]["messages"]:
            await anyio.sleep(0.1)


def _refusals(members: Fleet) -> list[str]:
    """What the brokers would not let a member do: nothing, if the roles' permissions hold all that they need."""
    logs = (line for path in members.folder.glob("*.log") for line in path.read_text("utf-8").splitlines())
    return [line for line in logs if "violation" in line.lower()]
