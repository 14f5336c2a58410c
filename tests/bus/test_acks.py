"""What a holder says about a message, over whichever connection it has."""

import time

import pytest

from pipeline.bus import acks
from pipeline.bus.connection import Bus
from pipeline.bus.errors import BusError
from pipeline.bus.puller import Delivery, Puller
from pipeline.protocol.subjects import ack_of, parse_ack
from tests.bus.support import api, eventually, fresh, shard_of, stored, subject_of
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

CREATOR = "anna"
SHARD = shard_of(CREATOR)


class Holder:
    """A worker that pulls two messages of one shard, and when each came."""

    def __init__(self, bus: Bus) -> None:
        self.got: list[Delivery] = []
        self.at_s: list[float] = []
        self.puller = Puller(bus, self._on_delivery, lambda _shard, _count: None, expires_s=30.0)

    async def start(self) -> Delivery:
        await self.puller.start()
        await self.puller.pull(SHARD, 2, 0)
        await eventually(lambda: len(self.got) == 1)
        return self.got[0]

    def _on_delivery(self, delivery: Delivery) -> None:
        self.got.append(delivery)
        self.at_s.append(time.monotonic())

    async def again(self, within_s: float) -> float:
        """Seconds until the message came a second time."""
        await eventually(lambda: len(self.got) == 2, within_s)
        return self.at_s[1] - self.at_s[0]


@pytest.fixture
async def holder(queue: Bus) -> Holder:
    await queue.store(subject_of(CREATOR), b"work", msg_id=fresh(), timeout_s=2.0)
    return Holder(queue)


async def test_the_ack_travels_another_connection_keeps_the_lease_and_acks(holder: Holder, other: Bus) -> None:
    held = await holder.start()
    until_s = time.monotonic() + 1.6
    while time.monotonic() < until_s:
        await acks.in_progress(other, held.ack)
        await acks.in_progress_unconfirmed(other, held.ack)
        await eventually(lambda: len(holder.got) == 1)
    assert len(holder.got) == 1
    await acks.ack(other, held.ack)
    assert await stored(other) == 0
    await holder.puller.stop()


async def test_a_lease_that_nobody_keeps_ends_after_ack_wait(holder: Holder) -> None:
    first = parse_ack((await holder.start()).ack)
    assert 0.9 < await holder.again(within_s=2.0) < 1.5
    second = parse_ack(holder.got[1].ack)
    assert (first.delivered, second.delivered) == (1, 2)
    assert first.sequence == second.sequence
    await holder.puller.stop()


async def test_a_message_given_back_comes_at_once(holder: Holder, other: Bus) -> None:
    held = await holder.start()
    await acks.nak(other, held.ack)
    assert await holder.again(within_s=0.5) < 0.5
    await holder.puller.stop()


async def test_a_message_given_back_with_a_delay_comes_after_it(holder: Holder, other: Bus) -> None:
    held = await holder.start()
    await acks.nak(other, held.ack, delay_s=0.2)
    assert 0.19 < await holder.again(within_s=1.0) < 0.6
    await holder.puller.stop()


async def test_who_knows_only_the_sequence_gives_a_message_back(holder: Holder, other: Bus) -> None:
    """One that is named by a delivery which has never been is not heard, and one that is not delivered is left alone."""
    held = parse_ack((await holder.start()).ack)
    later = await other.store(subject_of(CREATOR), b"more", msg_id=fresh(), timeout_s=2.0)
    newest = (await api(other, f"CONSUMER.INFO.{SHARD.queue}"))["delivered"]
    assert newest == {"consumer_seq": newest["consumer_seq"], "stream_seq": held.sequence} | newest
    for sequence, delivery in ((held.sequence, 0), (held.sequence, newest["consumer_seq"] + 1), (later + 1, 1)):
        await acks.nak(other, ack_of(SHARD.queue, sequence, delivery))
    await other.barrier()
    await eventually(lambda: len(holder.got) == 2)
    assert parse_ack(holder.got[1].ack).sequence == later, "the pull's second message"
    await holder.puller.pull(SHARD, 1, 0)
    await acks.nak(other, ack_of(SHARD.queue, held.sequence, newest["consumer_seq"]))
    await eventually(lambda: len(holder.got) == 3, within_s=0.5)
    assert (parse_ack(holder.got[2].ack).sequence, parse_ack(holder.got[2].ack).delivered) == (held.sequence, 2)
    await holder.puller.stop()


async def test_a_terminated_message_is_gone_and_the_reason_is_told(holder: Holder, other: Bus) -> None:
    advisories: list[bytes] = []
    await other.subscribe("$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.>", lambda m: advisories.append(m.data))
    held = await holder.start()
    await acks.term(other, held.ack, "poison")
    await eventually(lambda: len(advisories) == 1)
    assert b'"reason":"poison"' in advisories[0]
    assert await stored(other) == 0
    await holder.puller.stop()


async def test_an_unconfirmed_ack_removes_the_message_too(holder: Holder, other: Bus) -> None:
    held = await holder.start()
    await acks.ack_unconfirmed(other, held.ack)
    await other.barrier()
    assert (await api(other, f"CONSUMER.INFO.{SHARD.stream}.{SHARD.consumer}"))["num_ack_pending"] == 0
    await holder.puller.stop()


async def test_a_holder_learns_that_the_broker_does_not_hear_it(broker: NatsServer) -> None:
    async with await Bus.connect(broker.url, "test") as bus:
        with pytest.raises(BusError):
            await acks.in_progress(bus, "$JS.ACK.NONE.s0.1.1.1.1.0", timeout_s=0.2)
        broker.kill9()
        with pytest.raises(BusError):
            await acks.in_progress(bus, "$JS.ACK.NONE.s0.1.1.1.1.0", timeout_s=0.2)
