"""The simulated broker does what was measured on a real nats-server: each of these has its counterpart in `tests/bus`."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from pipeline import outside
from pipeline.bus import acks, reading
from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import NoResponders
from pipeline.bus.puller import EXPIRES_S, Delivery, Puller
from pipeline.errors import CreatorBusy
from pipeline.protocol.subjects import Shard, ack_of, parse_ack
from tests.simulation.broker import SimBroker
from tests.simulation.loop import Process, VirtualSource, virtual_time
from tests.simulation.wire import BROKER, SimBus
from tests.simulation.world import declare

SHARD = Shard("interactive", 0)
SUBJECT = "requests.in.interactive.c0.c0"
ACK_WAIT_S = 1.0

Story = Callable[[SimBroker, Bus, Bus], Awaitable[None]]


def told(story: Story) -> None:
    """Run a story between two processes and a broker."""
    with virtual_time() as loop:
        outside.use(VirtualSource(loop, 1))
        try:
            broker = SimBroker(loop, 1)
            declare(broker)
            loop.run_until_complete(_between(broker, story))
        finally:
            outside.use(None)


async def _between(broker: SimBroker, story: Story) -> None:
    loop, processes = broker.loop, [Process(name, 1, 1, 0.0) for name in ("one", "two")]
    for process in processes:
        process.context.run(BROKER.set, broker)
    one, two = [await loop.create_task(SimBus.connect("sim", p.name), context=p.context) for p in processes]
    await story(broker, one, two)
    for process in processes:
        process.dead = True
        if tasks := loop.end(process):
            await asyncio.wait(tasks)


async def pulls(
    bus: Bus, came: list[Delivery], ended: list[int], priority: int, batch: int = 1, expires_s: float = 10.0
) -> Puller:
    """A standing pull."""
    puller = Puller(bus, came.append, lambda _, count: ended.append(count), expires_s)
    await puller.start()
    puller.offer(SHARD, batch, priority)
    await asyncio.sleep(0.05)
    return puller


def test_the_lowest_priority_with_a_waiting_pull_is_served() -> None:
    async def story(_: SimBroker, one: Bus, two: Bus) -> None:
        far: list[Delivery] = []
        near: list[Delivery] = []
        await pulls(one, far, [], priority=3)
        await pulls(two, near, [], priority=0)
        for number in range(2):
            await one.store(SUBJECT, b"", msg_id=str(number), timeout_s=1.0)
            await asyncio.sleep(0.05)
        assert (len(near), len(far)) == (1, 1)

    told(story)


def test_a_message_comes_back_after_its_lease_and_any_connection_may_keep_it_or_end_it() -> None:
    async def story(broker: SimBroker, one: Bus, two: Bus) -> None:
        came: list[Delivery] = []
        await pulls(one, came, [], priority=0, batch=3)
        await one.store(SUBJECT, b"", msg_id="m", timeout_s=1.0)
        await asyncio.sleep(0.8)
        await acks.in_progress(two, came[0].ack)
        await asyncio.sleep(0.8)
        assert len(came) == 1
        await asyncio.sleep(0.4)
        assert [parse_ack(delivery.ack).delivered for delivery in came] == [1, 2]
        await acks.nak(two, came[0].ack)
        await asyncio.sleep(0.05)
        assert len(came) == 3, "a NAK of an old delivery works, too"
        await acks.ack(two, came[0].ack)
        assert not broker.js.streams[SHARD.stream].messages

    told(story)


def test_a_message_that_passes_max_age_vanishes_also_while_it_is_leased() -> None:
    async def story(broker: SimBroker, one: Bus, _: Bus) -> None:
        broker.js.streams[SHARD.stream].age_s = 2.0
        came: list[Delivery] = []
        await one.store(SUBJECT, b"leased", msg_id="a", timeout_s=1.0)
        await pulls(one, came, [], priority=0)
        for _renewal in range(5):
            await acks.in_progress(one, came[0].ack)
            await asyncio.sleep(0.3)
        await one.store(SUBJECT, b"young", msg_id="b", timeout_s=1.0)
        assert len(broker.js.streams[SHARD.stream].messages) == 2
        await asyncio.sleep(0.6)
        assert [stored.data for stored in broker.js.streams[SHARD.stream].messages.values()] == [b"young"]
        await asyncio.sleep(2.0)
        assert not broker.js.streams[SHARD.stream].messages
        assert len(came) == 1

    told(story)


def test_what_a_stream_holds_can_be_read_and_deleted_without_consuming_it() -> None:
    async def story(broker: SimBroker, one: Bus, _: Bus) -> None:
        headers = {"Reply-To": "inbox"}
        for number in range(3):
            await one.store(SUBJECT, b"%d" % number, msg_id=str(number), timeout_s=1.0, headers=headers)
        stream = SHARD.stream
        assert await reading.delete(one, stream, 1)
        assert not await reading.delete(one, stream, 1)
        assert await reading.get(one, stream, 1) is None
        state = await reading.state(one, stream)
        assert (state.messages, state.first, state.last) == (2, 2, 3)
        assert state.now_s == pytest.approx(broker.js.now_s, abs=0.01)
        kept = await reading.next_from(one, stream, 1)
        assert kept is not None
        assert (kept.sequence, kept.data, kept.headers["Reply-To"]) == (2, b"1", "inbox")
        assert kept.stored_at_s == pytest.approx(broker.js.streams[stream].messages[2].at_s, abs=1e-5)
        assert await reading.next_from(one, stream, 4) is None

    told(story)


def test_what_is_said_of_no_delivery_hits_none() -> None:
    """A keeper claims as if it held the message, and may be accused as such."""

    async def story(_: SimBroker, one: Bus, two: Bus) -> None:
        came: list[Delivery] = []
        await pulls(one, came, [], priority=0, batch=2)
        await one.store(SUBJECT, b"", msg_id="m", timeout_s=1.0)
        await asyncio.sleep(0.05)
        place = came[0].ack.split(".")[:6]
        await acks.nak(two, ".".join([*place, "0", "0", "0"]))
        await asyncio.sleep(0.05)
        assert len(came) == 1

    told(story)


def test_a_consumer_says_how_far_it_has_delivered_and_hears_who_knows_only_the_sequence() -> None:
    async def story(_: SimBroker, one: Bus, two: Bus) -> None:
        came: list[Delivery] = []
        await pulls(one, came, [], priority=0, batch=3)
        await one.store(SUBJECT, b"", msg_id="m", timeout_s=1.0)
        await asyncio.sleep(0.05)
        info = msgspec.json.decode(await two.request(f"$JS.API.CONSUMER.INFO.{SHARD.queue}", b"", 1.0))
        assert info["delivered"] == {"consumer_seq": 1, "stream_seq": 1}
        await acks.nak(two, ack_of(SHARD.queue, 1, 1))
        await asyncio.sleep(0.05)
        assert [parse_ack(delivery.ack).delivered for delivery in came] == [1, 2]

    told(story)


def test_a_pull_that_brought_nothing_ends_at_its_expiry() -> None:
    async def story(_: SimBroker, one: Bus, __: Bus) -> None:
        ended: list[int] = []
        puller = await pulls(one, [], ended, priority=0, batch=2, expires_s=EXPIRES_S)
        await asyncio.sleep(EXPIRES_S - 0.2)
        assert puller.outstanding_total == 2
        await asyncio.sleep(0.4)
        assert ended == [2]

    told(story)


def test_a_repeated_id_is_stored_once_and_a_full_subject_refuses() -> None:
    async def story(broker: SimBroker, one: Bus, two: Bus) -> None:
        heard: list[Message] = []
        inbox = one.inbox()
        await one.subscribe(inbox, heard.append)
        for _ in range(2):
            await one.publish(SUBJECT, b"", inbox, {"Nats-Msg-Id": "same"})
        await asyncio.sleep(0.05)
        assert b'"duplicate":true' in heard[1].data
        most = int(broker.js.streams[SHARD.stream].config["max_msgs_per_subject"])
        for number in range(most - 1):
            await one.store(SUBJECT, b"", msg_id=str(number), timeout_s=1.0)
        with pytest.raises(CreatorBusy):
            await two.store(SUBJECT, b"", msg_id="more", timeout_s=1.0)

    told(story)


def test_what_is_stored_survives_a_kill_and_connections_come_back_by_themselves() -> None:
    async def story(broker: SimBroker, one: Bus, two: Bus) -> None:
        await one.store(SUBJECT, b"kept", msg_id="m", timeout_s=1.0)
        broker.kill()
        await asyncio.sleep(0.05)
        assert not one.connected
        broker.restart()
        await one.wait_connected(1.0)
        came: list[Delivery] = []
        await asyncio.sleep(0.5)
        await pulls(two, came, [], priority=0)
        assert [delivery.data for delivery in came] == [b"kept"]

    told(story)


def test_where_nobody_listens_a_request_is_told_so_at_once() -> None:
    async def story(broker: SimBroker, one: Bus, _: Bus) -> None:
        asked_s = broker.loop.now_s
        with pytest.raises(NoResponders):
            await one.request("nobody", b"", 1.0)
        assert broker.loop.now_s - asked_s < 0.01

    told(story)


def test_a_frozen_process_wakes_to_everything_at_once() -> None:
    async def story(broker: SimBroker, one: Bus, two: Bus) -> None:
        heard: list[float] = []
        await one.subscribe("words", lambda _: heard.append(broker.loop.now_s))
        await one.barrier()
        process = broker.links_of(_process_of(one))[0].process
        broker.loop.freeze(process)
        for _ in range(3):
            await two.publish("words", b"")
            await asyncio.sleep(0.5)
        assert not heard
        broker.loop.thaw(process)
        await asyncio.sleep(0.0)
        assert heard == [broker.loop.now_s] * 3

    told(story)


def _process_of(bus: Bus) -> Process:
    process = bus.client.process  # type: ignore[attr-defined]
    assert isinstance(process, Process)
    return process
