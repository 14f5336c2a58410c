"""A gateway's requests that were delivered to somebody who is dead, on a real broker with the streams as they are declared."""

import time
from collections.abc import AsyncIterator
from typing import Any, cast

import anyio
import msgspec
import pytest

from gateway.replies import Replies, Reply
from gateway.strays import Search
from gateway.vigil import Vigil
from pipeline import outside
from pipeline.bus import acks, streams
from pipeline.bus.connection import Bus, Message
from pipeline.bus.puller import Delivery, Puller
from pipeline.limits import ACK_WAIT_S, STRAY_OVERDUE_S
from pipeline.paths import JETSTREAM
from pipeline.protocol.accuser import Accuser
from pipeline.protocol.messages import Claim, Fenced, encode
from pipeline.protocol.presence import Presences
from pipeline.protocol.reply import Outbox
from pipeline.protocol.strays import Queued
from pipeline.protocol.subjects import parse_ack
from tests.bus.support import fresh, shard_of, subject_of
from tests.gateway.test_replies import Posted, message
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

CREATOR = "anna"
SHARD = shard_of(CREATOR)


class Watching:
    """A gateway's vigil over one request, which lies in its queue, and a worker that pulls from there."""

    def __init__(self, bus: Bus, worker: Bus) -> None:
        self.replies = Replies(bus, Accuser(outside.monotonic_s()), outside.monotonic_s)
        self.vigil = Vigil(bus, self.replies._accuser, Presences(), self.replies, "me")
        self.got: list[Delivery] = []
        self.bus = bus
        self.puller = Puller(worker, self.got.append, lambda _shard, _count: None, expires_s=30.0)

    async def asks(self) -> Reply:
        reply = self.replies.open(fresh(), outside.monotonic_s(), 60.0)
        sequence = await self.bus.store(subject_of(CREATOR), b"{}", msg_id=reply.request, timeout_s=2.0)
        self.replies.confirm(reply, Queued(SHARD.queue, sequence))
        return reply

    async def delivered(self, times: int) -> Delivery:
        with anyio.fail_after(5.0):
            while len(self.got) < times:
                await anyio.sleep(0.005)
        return self.got[times - 1]


@pytest.fixture
async def watching(broker: NatsServer) -> AsyncIterator[Watching]:
    async with (
        await Bus.connect(broker.url, "me") as bus,
        await Bus.connect(broker.url, "worker") as worker,
        anyio.create_task_group() as tasks,
    ):
        await streams.apply(bus, streams.declared(JETSTREAM))
        watching = Watching(bus, worker)
        await watching.puller.start()
        tasks.start_soon(watching.vigil.run)
        yield watching
        tasks.cancel_scope.cancel()
        await watching.puller.stop()


async def test_what_a_dead_worker_took_and_never_claimed_is_delivered_again_before_its_lease_ends(
    watching: Watching,
) -> None:
    waits_s = []
    for number in range(5):
        await watching.puller.pull(SHARD, 2, 0)
        reply = await watching.asks()
        first = await watching.delivered(2 * number + 1)
        began_s = time.monotonic()
        again = await watching.delivered(2 * number + 2)
        waits_s.append(time.monotonic() - began_s)
        assert parse_ack(again.ack).sequence == parse_ack(first.ack).sequence
        assert parse_ack(again.ack).delivered == 2
        watching.replies.close(reply)
        await acks.ack(watching.bus, again.ack)
    assert min(waits_s) < 0.8 * ACK_WAIT_S, (
        "the lease may be sooner where our own loop stalls meanwhile, but not each time"
    )


async def test_what_waits_for_a_slot_or_is_worked_on_is_left_alone(watching: Watching) -> None:
    waiting = await watching.asks()
    await anyio.sleep(1.0)
    await watching.puller.pull(SHARD, 2, 0)
    delivery = await watching.delivered(1)
    said = Claim(request=waiting.request, claim="c", epoch="1", holder="holder.w", ack=delivery.ack)
    watching.replies.on_claim(message(said))
    assert len(watching.replies.strays) == 0
    assert parse_ack(delivery.ack).delivered == 1


def answer(search: Search, bus: Posted, **info: Any) -> None:
    search.answered(Message(bus.reply, "", msgspec.json.encode(info), None))


@pytest.fixture
def search() -> tuple[Search, Replies, Posted]:
    bus = Posted()
    replies = Replies(cast("Bus", bus), Accuser(0.0), lambda: 0.0)
    return Search(cast("Bus", bus), replies), replies, bus


def test_the_consumer_is_asked_and_a_nak_names_what_it_has_delivered(search: tuple[Search, Replies, Posted]) -> None:
    looking, replies, bus = search
    replies.strays.waits("r", Queued(SHARD.queue, 7), 0.0)
    for now_s in (STRAY_OVERDUE_S, 0.4):
        looking.look(now_s)
        assert bus.take() == [(f"$JS.API.CONSUMER.INFO.{SHARD.queue}", b"")]
        answer(looking, bus, delivered={"consumer_seq": 9, "stream_seq": 8})
    assert bus.take() == [(f"$JS.ACK.{SHARD.queue}.1.7.9.0.0", b"-NAK")]


def test_an_api_that_is_not_there_says_nothing(search: tuple[Search, Replies, Posted]) -> None:
    looking, replies, bus = search
    replies.strays.waits("r", Queued(SHARD.queue, 7), 0.0)
    for now_s in (1.0, 3.0, 5.0):
        looking.look(now_s)
        answer(looking, bus, error={"code": 503})
        looking.answered(Message(bus.reply, "", b"", {"Status": "503"}))
        assert len(bus.take()) == 1


def test_without_a_connection_nothing_is_asked(search: tuple[Search, Replies, Posted]) -> None:
    looking, replies, bus = search
    replies.strays.waits("r", Queued(SHARD.queue, 7), 0.0)
    bus.lost = True
    looking.look(1.0)
    assert bus.said == []


@pytest.mark.anyio
async def test_a_request_is_looked_for_from_when_it_is_stored_until_it_is_claimed_or_over() -> None:
    replies = Replies(cast("Bus", Posted()), Accuser(0.0), lambda: 0.0)
    strays, queued = replies.strays, Queued(SHARD.queue, 7)

    def opened(name: str, at: Queued | None) -> Reply:
        reply = replies.open(name, 0.0, 60.0)
        replies.confirm(reply, at)
        return reply

    def claims(name: str) -> None:
        said = Claim(request=name, claim=f"{name}-1", epoch="1", holder="holder.w", ack="$JS.ACK.x")
        replies.on_claim(Message("c", "answer", encode(said), None))

    left, by_reference = opened("left", queued), opened("by-reference", None)
    assert len(strays) == 1
    replies.close(left)
    assert len(strays) == 0

    claimed = opened("claimed", queued)
    claims("claimed")
    assert len(strays) == 0
    replies.given_back(claimed)
    assert len(strays) == 1
    claims("by-reference")
    replies.given_back(by_reference)
    assert len(strays) == 1, "it goes back unclaimed while its conversation is worked on"

    early = replies.open("early", 0.0, 60.0)
    claims("early")
    replies.confirm(early, queued)
    assert len(strays) == 1, "its claim has come before the word that it is stored"
    for reply in (claimed, by_reference, early):
        replies.close(reply)


def accused(replies: Replies, accuser: Accuser) -> tuple[Reply, Claim]:
    """A request whose holder has been silent until second 2: its message lies in the queue again."""
    held = Claim(request="r", claim="c", epoch="1", holder="holder.w", ack="$JS.ACK.x")
    reply = replies.open("r", 0.0, 60.0)
    replies.confirm(reply, Queued(SHARD.queue, 7))
    replies.on_claim(Message("c", "answer", encode(held), None))
    assert accuser.accuses(held, 2.0)
    replies.given_back(reply)
    return reply, held


@pytest.mark.anyio
async def test_what_was_given_back_for_one_that_was_only_slow_is_left_to_it() -> None:
    bus, accuser = Posted(), Accuser(0.0)
    replies = Replies(cast("Bus", bus), accuser, lambda: 1.0)
    looking = Search(cast("Bus", bus), replies)
    reply, _ = accused(replies, accuser)
    bus.take()

    def looks(now_s: float) -> list[str]:
        looking.look(now_s)
        if bus.said:
            answer(looking, bus, delivered={"consumer_seq": 9, "stream_seq": 8})
        return [subject.removeprefix("$JS.") for subject, _ in bus.take()]

    assert [looks(now_s) for now_s in (2.0, 2.5)][1][1:] == [f"ACK.{SHARD.queue}.1.7.9.0.0"]
    accuser.heard("holder.w", "1", 2.6)
    assert [looks(now_s) for now_s in (3.0, 3.5, 4.0)][1:] == [[], []]
    replies.close(reply)


@pytest.mark.anyio
async def test_who_was_accused_wrongly_and_speaks_before_its_message_is_claimed_goes_on() -> None:
    bus, accuser, times_s = Posted(), Accuser(0.0), [1.0]
    replies = Replies(cast("Bus", bus), accuser, lambda: times_s[0])
    reply, held = accused(replies, accuser)
    times_s[0] = 2.1
    first = Outbox("r", "c").add([5], "Hello")
    replies.on_frames(Message("f", "", encode([first]), None))
    bus.take()
    newer = msgspec.structs.replace(held, claim="d", holder="holder.v")
    replies.on_claim(Message("c", "answer", encode(newer), None))
    assert bus.take() == [("answer", encode(Fenced()))]
    assert reply.receiver.arbiter.last == held
    replies.close(reply)
