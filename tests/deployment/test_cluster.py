"""The pipeline on the cluster of `configs/`: three brokers over TLS, an NKey for each role, three copies of each stream."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from pipeline.bus import streams
from pipeline.bus.connection import Bus
from pipeline.cli import http
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
TRIES: Final = 4
"""Three waits of 5 s are longer than the 9 s that an election takes at most."""
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
            outcomes.append(await _asked_until_taken(members.gateways, order))

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


async def _asked_until_taken(gateways: list[str], order: load.Order) -> load.Outcome:
    """As a proxy does: what was refused because no broker took it within 5 s, while one was elected, is asked once more."""
    for _ in range(TRIES):
        outcome = await load.ask(gateways, order)
        if outcome.code != "broker_unavailable":
            break
        assert outcome.status == 503
        assert not outcome.text
        await anyio.sleep(outcome.retry_after_s or 1.0)
    return outcome


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


LONG: Final = 600
"""Tokens of a reply that takes three seconds: time to do something to its worker."""


async def test_no_role_lacks_a_permission_for_what_it_does(cluster: Cluster, tmp_path: Path) -> None:
    """Requests by reference, producers, a dead worker, a drain, an operator's commands: the brokers refuse nothing of it."""
    async with fleet(cluster, tmp_path, prefill=2, decode=2, gateways=1) as members:
        await _asked_in_every_way(members)
        assert (await _killed_midway(members, "decode-1"))["usage"]["completion_tokens"] == LONG
        assert (await _drained_midway(members, "decode-2"))["usage"]["completion_tokens"] == LONG
        assert set((await members.stop_all()).values()) == {0}
        assert _refusals(members) == []


async def test_a_worker_for_both_needs_one_key_whatever_its_role_is(cluster: Cluster, tmp_path: Path) -> None:
    """Its own: as both, as prefill beside one that decodes, turned round, with the other one dead, and at its end."""
    async with fleet(cluster, tmp_path, both=2, gateways=1) as members:
        await _asked_in_every_way(members)
        for roles in (("decode", "prefill"), ("both", "both"), ("prefill", "decode"), ("both", "both")):
            for number, role in enumerate(roles, 1):
                done = await members.command("operator", "role", f"both-{number}", role)
                assert done == 0, members.log("command")
            usage = (await _chat(members))["usage"]["headrace"]
            if "both" not in roles:
                served = {"prefill": usage["prefill"], "decode": usage["decode"]}
                assert [served[role] for role in roles] == ["both-1", "both-2"]
        assert (await _killed_midway(members, "both-1"))["usage"]["completion_tokens"] == LONG
        assert (await _drained_midway(members, "both-2"))["usage"]["completion_tokens"] == LONG
        assert set((await members.stop_all()).values()) == {0}
        assert _refusals(members) == []


async def _asked_in_every_way(members: Fleet) -> None:
    """By reference, twice; by a producer that listens, and by one for which its reply is kept; and an operator looks."""
    (text := members.folder / "persona.txt").write_text("You are Ada, and you like the sea.", "utf-8")
    for command in (("persona", "put", "ada", str(text)), ("shards",), ("credits",), ("dlq", "list")):
        assert await members.command("operator", *command) == 0, members.log("command")
    conversation = f"c-{members.folder.name}"
    for _ in range(2):
        usage = (await _chat(members, metadata={"persona": "ada", "conversation": conversation}))["usage"]
        assert usage["prompt_tokens"] > 8
    async with await Bus.connect(members.cluster.nats("producer"), "shop") as shop:
        assert await _heard(shop) == 5
        assert await _kept(shop, members.folder.name) == 5


async def _chat(members: Fleet, *, tokens: int = 5, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": tokens, "ignore_eos": True, **fields}
    headers = {"content-type": "application/json", "x-creator-id": "ada"}
    url = f"{members.gateways[0]}/v1/chat/completions"
    async with http.requested("POST", url, body=json.dumps(body).encode(), headers=headers) as response:
        said = await response.body()
    assert response.status == 200, said
    return json.loads(said)


async def _heard(shop: Bus) -> int:
    """Tokens of a reply that a producer hears on an inbox of its own."""
    inbox, frames = shop.inbox(), list[Any]()
    await shop.subscribe(inbox, lambda message: frames.append(json.loads(message.data)))
    await shop.barrier()
    await shop.store("requests.in.interactive.ada.ada", _event(inbox), inbox, 20.0)
    with anyio.fail_after(20):
        while not frames or frames[-1]["kind"] == "tokens":
            await anyio.sleep(0.05)
    return int(frames[-1]["usage"]["completion_tokens"])


async def _kept(shop: Bus, name: str) -> int:
    """Of one that is kept for it under that name, as soon as it is there."""
    await shop.store("requests.in.interactive.ada.ada", _event(f"replies.shop.{name}"), f"kept-{name}", 20.0)
    with anyio.fail_after(20):
        while not (whole := await shop.request(f"$JS.API.DIRECT.GET.REPLIES.replies.shop.{name}", b"", 5.0)):
            await anyio.sleep(0.1)
    return int(json.loads(whole)["usage"]["completion_tokens"])


def _event(reply_to: str) -> bytes:
    said = [{"role": "user", "content": "Hello"}]
    return json.dumps({"messages": said, "max_tokens": 5, "ignore_eos": True, "reply_to": reply_to}).encode()


async def _killed_midway(members: Fleet, worker: str) -> Any:
    """A reply whose worker, if it is this one, dies in the middle; of two, both get one."""
    replies = list[Any]()

    async def ask() -> None:
        replies.append(await _chat(members, tokens=LONG))

    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(ask)
        await anyio.sleep(1.5)
        os.kill(members.processes[worker].pid, signal.SIGKILL)
        await members.processes.pop(worker).clear()
    assert len(replies) == 6
    return replies[-1]


async def _drained_midway(members: Fleet, worker: str) -> Any:
    """A reply of the last worker, which is told to stop in the middle: it says so, ends the reply, and goes."""
    replies = list[Any]()

    async def ask() -> None:
        replies.append(await _chat(members, tokens=LONG))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.sleep(1.0)
        assert members.ready(worker) == 200
        os.kill(members.processes[worker].pid, signal.SIGTERM)
        with anyio.fail_after(2):
            while members.ready(worker) != 503:
                await anyio.sleep(0.02)
    assert await members.processes.pop(worker).wait() == 0
    return replies[0]
