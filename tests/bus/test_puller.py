"""Pulls against a real broker: every slot ends once, and the priorities are the broker's."""

import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from pipeline.bus import puller, streams
from pipeline.bus.connection import Bus, Message
from pipeline.bus.puller import Delivery, Puller
from pipeline.paths import JETSTREAM
from pipeline.protocol.subjects import Shard
from pipeline.telemetry.metrics import PULLS_ABANDONED
from tests.bus.support import CLASS, STREAM, api, eventually, fresh, shard_of, stored, subject_of, waiting_pulls
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

CREATOR = "anna"
SHARD = shard_of(CREATOR)
DOOMED = """
import asyncio, sys
from pipeline.bus.connection import Bus
from pipeline.bus.puller import Puller
from pipeline.protocol.subjects import Shard

async def main():
    bus = await Bus.connect(sys.argv[1], "doomed")
    puller = Puller(bus, print, print, expires_s=30.0)
    await puller.start()
    puller.offer(Shard("interactive", int(sys.argv[2])), 4, 0)
    await asyncio.sleep(60)

asyncio.run(main())
"""
"""A worker that holds a pull of rank 0 until it is killed."""
QUICK: dict[str, Any] = {"expires_s": 0.5}
LONG: dict[str, Any] = {"expires_s": 30.0}


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return ("asyncio", {"use_uvloop": request.param})


class Worker:
    """A puller, and what its slots have become. It acks at once, so that a slow machine sees nothing twice."""

    def __init__(self, bus: Bus, top_up: int | None = None, **times: float) -> None:
        self.bus = bus
        self.got: list[Delivery] = []
        self.ended: Counter[Shard] = Counter()
        self.offered: Counter[Shard] = Counter()
        self.top_up = top_up
        self.again: Callable[[Shard, int], None] = lambda _shard, _count: None
        self.puller = Puller(bus, self._on_delivery, self._on_ended, **times)

    def offer(self, shard: Shard, batch: int, priority: int) -> None:
        before = self.puller.outstanding(shard)
        self.puller.offer(shard, batch, priority)
        self.offered[shard] += self.puller.outstanding(shard) - before  # nothing, once stopped

    def accounts(self, shard: Shard) -> bool:
        """Every slot offered has been used, has ended, or is outstanding; and none twice."""
        used = sum(delivery.shard == shard for delivery in self.got) - self.puller.surplus
        return self.offered[shard] == used + self.ended[shard] + self.puller.outstanding(shard)

    def _on_delivery(self, delivery: Delivery) -> None:
        self.got.append(delivery)
        self.bus.post(delivery.ack, b"+ACK")
        if self.top_up is not None:
            self.offer(delivery.shard, 1, self.top_up)

    def _on_ended(self, shard: Shard, count: int) -> None:
        self.ended[shard] += count
        self.again(shard, count)


@contextlib.asynccontextmanager
async def working(bus: Bus, top_up: int | None = None, **times: float) -> AsyncIterator[Worker]:
    worker = Worker(bus, top_up, **times)
    await worker.puller.start()
    yield worker
    await worker.puller.stop()
    assert worker.puller.outstanding_total == 0
    assert all(worker.accounts(shard) for shard in worker.offered)


async def publish(bus: Bus, count: int, creator: str = CREATOR) -> None:
    for number in range(count):
        await bus.store(subject_of(creator), str(number).encode(), msg_id=fresh(), timeout_s=5.0)


async def until_waiting(bus: Bus, count: int, within_s: float = 5.0) -> None:
    """Return when so many pulls wait at the shard's consumer: it queues them, so a barrier does not tell."""
    with anyio.fail_after(within_s):
        while await waiting_pulls(bus, SHARD) != count:
            await anyio.sleep(0.005)


async def test_a_delivery_says_where_it_is_from_and_what_it_carries(queue: Bus) -> None:
    async with working(queue) as worker:
        await worker.puller.pull(SHARD, 1, 0)
        worker.offered[SHARD] += 1
        msg_id = fresh()
        await queue.store(subject_of(CREATOR), b"work", msg_id=msg_id, timeout_s=2.0, headers={"Trace": "1"})
        await eventually(lambda: len(worker.got) == 1)
        delivery = worker.got[0]
        assert delivery.shard == SHARD
        assert delivery.subject == f"requests.shard.{SHARD.number}.{CLASS}.{CREATOR}.{CREATOR}"
        assert delivery.ack.startswith(f"$JS.ACK.{STREAM}.s{SHARD.number}.1.")
        assert (delivery.data, delivery.headers) == (b"work", {"Trace": "1", "Nats-Msg-Id": msg_id})


async def test_slots_that_nobody_uses_end_when_their_pull_expires(queue: Bus) -> None:
    async with working(queue, **QUICK) as worker:
        worker.offer(SHARD, 4, 0)
        worker.offer(SHARD, 3, 0)
        await publish(queue, 3)
        await eventually(lambda: len(worker.got) == 3)
        assert worker.puller.outstanding(SHARD) == 4
        await eventually(lambda: worker.puller.outstanding(SHARD) == 0, within_s=1.5)
        assert worker.ended == {SHARD: 4}  # the broker had served the two in turn


async def test_every_slot_ends_once_under_load(queue: Bus) -> None:
    async with working(queue, top_up=0, **QUICK) as worker:
        worker.again = lambda shard, count: worker.offer(shard, count, 0)
        for shard in {shard_of(f"c{number}") for number in range(8)}:
            worker.offer(shard, 3, 0)
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(publish, queue, 100, f"c{number}")
        await eventually(lambda: len(worker.got) == 800)
        await eventually(lambda: sum(worker.ended.values()) >= 12)
        assert worker.puller.surplus == 0
        assert all(worker.puller.outstanding(shard) == 3 for shard in worker.offered)
        assert all(worker.accounts(shard) for shard in worker.offered)


async def test_rank_0_gets_everything_while_it_has_pulls_and_the_next_rank_at_once_after(
    queue: Bus, other: Bus
) -> None:
    async with working(queue) as owner, working(other) as spill:
        spill.offer(SHARD, 8, 1)
        owner.offer(SHARD, 4, 0)
        owner.offer(SHARD, 4, 0)
        await until_waiting(queue, 3)
        await publish(queue, 8)
        await eventually(lambda: len(owner.got) == 8)
        assert spill.got == []
        await publish(queue, 1)
        assert await eventually(lambda: len(spill.got) == 1) < 0.5


async def test_an_owner_that_tops_up_on_delivery_loses_no_message_to_the_next_rank(queue: Bus, other: Bus) -> None:
    async with working(queue, top_up=0) as owner, working(other, top_up=1) as spill:
        spill.offer(SHARD, 4, 1)
        for _ in range(8):
            owner.offer(SHARD, 1, 0)
        for wave in range(25):
            await until_waiting(queue, 8 + 1)
            await publish(queue, 8)
            await eventually(lambda wave=wave: len(owner.got) + len(spill.got) == 8 * (wave + 1))  # type: ignore[misc]
        assert len(spill.got) == 0


async def test_the_pulls_of_a_killed_worker_vanish_with_its_connection(queue: Bus, server: NatsServer) -> None:
    doomed = await anyio.open_process([sys.executable, "-c", DOOMED, server.url, str(SHARD.number)], stdout=None)
    async with working(queue, **LONG) as worker, doomed:
        worker.offer(SHARD, 1, 1)
        await until_waiting(queue, 2, within_s=10.0)
        doomed.kill()
        await until_waiting(queue, 1, within_s=1.0)
        await publish(queue, 1)
        assert await eventually(lambda: len(worker.got) == 1) < 0.5


async def test_messages_in_flight_at_the_stop_still_reach_the_worker(
    queue: Bus, other: Bus, server: NatsServer
) -> None:
    worker = Worker(queue)
    await worker.puller.start()
    worker.offer(SHARD, 50, 0)
    await queue.barrier()
    before = server.sent_to(queue.client.client_id)
    await publish(other, 50)
    # It blocks this loop, so that the last of them lie in the socket, unread.
    server.await_sent_to(queue.client.client_id, before + 50)
    await worker.puller.stop()
    assert len(worker.got) == 50
    worker.puller.offer(SHARD, 1, 0)
    assert worker.puller.outstanding_total == 0


async def test_a_stopped_worker_leaves_no_pull_behind(queue: Bus) -> None:
    async with working(queue) as worker:
        worker.offer(SHARD, 5, 0)
        await queue.barrier()
    async with working(queue) as next_worker:
        next_worker.offer(SHARD, 1, 9)
        await publish(queue, 1)
        await eventually(lambda: len(next_worker.got) == 1)
    assert worker.got == []
    assert worker.ended == {SHARD: 5}


async def test_ranks_beyond_the_last_share_it(queue: Bus) -> None:
    async with working(queue) as worker:
        worker.offer(SHARD, 1, 25)
        await publish(queue, 1)
        await eventually(lambda: len(worker.got) == 1)


async def test_a_refused_pull_ends_after_a_pause_and_not_in_a_storm(queue: Bus) -> None:
    nowhere = Shard(CLASS, 99)
    async with working(queue) as worker:
        worker.again = lambda shard, count: worker.offer(shard, count, 0)
        worker.offer(nowhere, 2, 0)
        took_s = await eventually(lambda: worker.ended[nowhere] >= 6)
        assert took_s > 2.5 * puller.REFUSED_PAUSE_S
        assert worker.puller.outstanding(nowhere) == 2


async def test_slots_of_a_deleted_consumer_end(queue: Bus) -> None:
    async with working(queue) as worker:
        worker.offer(SHARD, 2, 0)
        worker.offer(SHARD, 1, 0)
        await queue.barrier()
        await api(queue, f"CONSUMER.DELETE.{STREAM}.{SHARD.consumer}")
        await eventually(lambda: worker.ended[SHARD] == 3)


async def test_pulls_beyond_what_a_consumer_lets_wait_end(queue: Bus) -> None:
    """One that has `max_waiting` refuses another. (With heartbeats it would ignore it, without a word.)"""
    async with working(queue, **LONG) as worker:
        for _ in range(520):
            worker.offer(SHARD, 1, 0)
        await eventually(lambda: worker.ended[SHARD] == 8, within_s=2.0)
        assert worker.puller.outstanding(SHARD) == 512


async def test_a_lost_delivery_does_not_keep_its_slot_for_ever(queue: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    async with working(queue, **QUICK) as worker:
        for _ in range(3):
            worker.offer(SHARD, 1, 0)
        came = worker.puller._delivered
        lost: list[Message] = []
        abandoned = PULLS_ABANDONED._value.get()
        with monkeypatch.context() as patch:
            patch.setattr(worker.puller, "_delivered", lost.append)
            await publish(queue, 1)
            await eventually(lambda: len(lost) == 1)
        assert worker.puller._delivered == came
        await eventually(lambda: worker.ended[SHARD] == 3)
        assert worker.puller.outstanding(SHARD) == 0
        assert PULLS_ABANDONED._value.get() > abandoned


async def test_p9_after_a_killed_broker_the_next_message_comes_within_a_second(broker: NatsServer) -> None:
    async with await Bus.connect(broker.url, "worker") as bus, await Bus.connect(broker.url, "gateway") as gateway:
        await streams.apply(bus, streams.declared(JETSTREAM))
        async with working(bus, top_up=0) as worker:
            worker.again = lambda shard, count: worker.offer(shard, count, 0)
            for number in range(16):
                worker.offer(Shard(CLASS, number), 2, 0)
            await publish(gateway, 5)
            await eventually(lambda: len(worker.got) == 5)
            with anyio.fail_after(5):
                while await stored(gateway) > 0:
                    await anyio.sleep(0.005)
            broker.kill9()
            await eventually(lambda: not bus.connected)
            worker.offer(SHARD, 1, 0)  # counted, although there is no connection
            broker.start()
            await publish(gateway, 1)
            assert await eventually(lambda: len(worker.got) == 6) < 1.0
            assert worker.puller.surplus == 0
            assert worker.puller.outstanding(SHARD) == 3


async def test_p7_a_reconnect_leaves_no_pull_that_is_not_counted(queue: Bus, other: Bus) -> None:
    async with working(queue) as worker:
        worker.offer(SHARD, 3, 0)
        await queue.barrier()
        await queue.client.force_reconnect()
        await eventually(lambda: worker.ended[SHARD] == 3)
        worker.offer(SHARD, 1, 0)
        await publish(other, 3)
        await eventually(lambda: len(worker.got) == 1)
        await queue.barrier()
        assert len(worker.got) == 1  # the three old slots took nothing
        assert worker.puller.surplus == 0
