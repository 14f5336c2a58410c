"""What the broker's own words about a delivery do not prove: why the right to work on a message is a claim, and not its lease."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest

from pipeline.bus import acks, streams
from pipeline.bus.connection import Bus
from pipeline.bus.puller import Delivery, Puller
from pipeline.limits import ACK_WAIT_S
from pipeline.paths import JETSTREAM
from pipeline.protocol.claims import Arbiter
from pipeline.protocol.messages import Claim, Fenced, Go
from pipeline.protocol.subjects import parse_ack
from tests.bus.support import STREAM, api, eventually, fresh, shard_of, stored, subject_of
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

CREATOR = "anna"
SHARD = shard_of(CREATOR)
DELIVERIES = 4
ROUNDS = 5
"""A count that was written in time survives: then the broker is killed once more."""


class Deliveries:
    """Every delivery of the messages of one shard. A pull always stands."""

    def __init__(self, bus: Bus) -> None:
        self.all: list[Delivery] = []
        self.puller = Puller(bus, self._came, lambda shard, count: self.puller.offer(shard, count, 0))

    async def until(self, count: int) -> Delivery:
        """The last of so many."""
        await eventually(lambda: len(self.all) == count, within_s=10.0)
        return self.all[-1]

    def _came(self, delivery: Delivery) -> None:
        self.all.append(delivery)
        self.puller.offer(SHARD, 1, 0)


@pytest.fixture
async def bus(broker: NatsServer) -> AsyncIterator[Bus]:
    async with await Bus.connect(broker.url, "test") as bus:
        await streams.apply(bus, streams.declared(JETSTREAM))
        yield bus


@pytest.fixture
async def deliveries(bus: Bus) -> AsyncIterator[Deliveries]:
    made = Deliveries(bus)
    await made.puller.start()
    made.puller.offer(SHARD, 1, 0)
    yield made
    await made.puller.stop()


def claim_on(delivery: Delivery) -> Claim:
    """The claim that a worker makes on it: one of its own for each delivery."""
    name = fresh("claim")
    return Claim(request="r", claim=name, epoch="1", holder=f"holder.{name}", ack=delivery.ack)


async def test_after_a_broker_was_killed_a_later_delivery_may_count_less_and_gets_the_go_all_the_same(
    broker: NatsServer, bus: Bus, deliveries: Deliveries
) -> None:
    for _ in range(ROUNDS):
        arbiter, before = Arbiter(), len(deliveries.all)
        await bus.store(subject_of(CREATOR), b"work", msg_id=fresh(), timeout_s=5.0)
        for number in range(1, DELIVERIES):
            await acks.nak(bus, (await deliveries.until(before + number)).ack)
        early = claim_on(await deliveries.until(before + DELIVERIES))
        assert isinstance(arbiter.claim(early, []), Go)
        broker.restart()
        late = claim_on(await deliveries.until(before + DELIVERIES + 1))
        assert isinstance(arbiter.claim(late, []), Go)
        assert arbiter.claim(early, []) == Fenced()
        counts = [parse_ack(claim.ack).delivered for claim in (early, late)]
        if counts[1] < counts[0] == DELIVERIES:
            return
        await acks.ack(bus, late.ack, timeout_s=5.0)
    raise AssertionError("No count went back: a killed broker remembers deliveries now, and the rule may go.")


async def first_and_second(bus: Bus, deliveries: Deliveries) -> tuple[Delivery, Delivery]:
    """A message whose first holder was slow, and that a second one holds by now."""
    await bus.store(subject_of(CREATOR), b"work", msg_id=fresh(), timeout_s=2.0)
    first, second = await deliveries.until(1), await deliveries.until(2)
    assert parse_ack(first.ack).delivered < parse_ack(second.ack).delivered
    return first, second


async def test_a_first_holders_ack_removes_the_message_that_a_second_one_holds(
    bus: Bus, deliveries: Deliveries
) -> None:
    first, _ = await first_and_second(bus, deliveries)
    await acks.ack(bus, first.ack)
    assert await stored(bus) == 0


async def test_a_first_holders_nak_takes_the_message_from_the_second(bus: Bus, deliveries: Deliveries) -> None:
    first, second = await first_and_second(bus, deliveries)
    await acks.in_progress(bus, second.ack)
    await acks.nak(bus, first.ack)
    await bus.barrier()
    took_s = await eventually(lambda: len(deliveries.all) == 3, within_s=10.0)
    assert took_s < ACK_WAIT_S / 2, "it did not wait for the second holder's lease"


async def test_a_first_holders_lease_is_renewed_and_answered_while_a_second_one_holds_the_message(
    bus: Bus, deliveries: Deliveries
) -> None:
    first, _ = await first_and_second(bus, deliveries)
    for _ in range(6):
        await acks.in_progress(bus, first.ack)
        await anyio.sleep(ACK_WAIT_S / 4)
    assert len(deliveries.all) == 2, "the first holder kept it from being delivered, though it has lost it"


async def test_a_leased_message_that_passes_max_age_vanishes_under_its_holder(
    broker: NatsServer, tmp_path: Path
) -> None:
    folder = tmp_path / "jetstream"
    shutil.copytree(JETSTREAM, folder)
    file = folder / f"{STREAM}.stream.json"
    short = {"max_age": 1_000_000_000, "duplicate_window": 1_000_000_000}
    file.write_bytes(msgspec.json.encode({**msgspec.json.decode(file.read_bytes()), **short}))
    async with await Bus.connect(broker.url, "test") as bus:
        await streams.apply(bus, streams.declared(folder))
        deliveries = Deliveries(bus)
        await deliveries.puller.start()
        deliveries.puller.offer(SHARD, 1, 0)
        await bus.store(subject_of(CREATOR), b"work", msg_id=fresh(), timeout_s=2.0)
        held = await deliveries.until(1)
        with anyio.fail_after(10.0):
            while await stored(bus):
                await acks.in_progress(bus, held.ack)
                await anyio.sleep(0.1)
        assert len(deliveries.all) == 1, "and nobody is told"
        assert (await api(bus, f"STREAM.INFO.{STREAM}"))["state"]["messages"] == 0
        await deliveries.puller.stop()
