"""Pulls beyond the free slots, on a real broker: what a backlog costs, and how soon another has what one cannot take."""

import time

import anyio
import pytest

from pipeline.bus.puller import Delivery, Puller
from pipeline.limits import ACK_WAIT_S, PULL_RANK_MAX
from pipeline.protocol.messages import Done
from pipeline.protocol.subjects import Shard, parse_ack, partition
from pipeline.telemetry.metrics import REGISTRY
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, config_for, fleet, until

pytestmark = pytest.mark.anyio

SHARDS = 16
REQUESTS = 64


def deliveries(kind: str) -> float:
    """How many there have been of this kind, in all tests."""
    return REGISTRY.get_sample_value("headrace_deliveries_total", {"kind": kind}) or 0.0


def creators(count: int) -> list[str]:
    """So many creators, of a shard each."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < count:
        found.setdefault(partition(f"c{number}", SHARDS), f"c{number}")
        number += 1
    return list(found.values())


async def test_a_backlog_alone_costs_no_deliveries(broker: NatsServer) -> None:
    """A worker that comes to full shards learns of their backlogs from what it gets: once each, it may take too much."""
    async with fleet(config_for(broker.url, slots=1, prefill_overhead_s=0.02), prefill=0) as made:
        names = creators(SHARDS)
        callers = [Caller(made.bus, f"r-{number}") for number in range(REQUESTS)]
        for number, caller in enumerate(callers):
            await caller.listen()
            await caller.publish(names[number % SHARDS], max_tokens=1)
        before = deliveries("surplus")
        await made.add("prefill", "prefill-1")
        with anyio.fail_after(30.0):
            ends = [(await caller.reply()).end for caller in callers]
        assert all(isinstance(end, Done) for end in ends)
        assert deliveries("surplus") - before <= 2 * SHARDS


async def test_a_message_beyond_the_free_slots_is_anothers_long_before_its_lease_ends(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, slots=1)) as made:
        made.workers["prefill-1"].engine.pause()
        first, second = creators(2)
        taken = Caller(made.bus, "taken")
        await taken.listen()
        await taken.publish(first)
        await until(lambda: made.prefill().slots.busy == 1)
        got: list[Delivery] = []
        puller = Puller(made.bus, got.append, lambda shard, count: puller.offer(shard, count, PULL_RANK_MAX))
        await puller.start()
        puller.offer(Shard("interactive", partition(second, SHARDS)), 1, PULL_RANK_MAX)
        await made.bus.barrier()
        before, published_s = deliveries("surplus"), time.monotonic()
        await Caller(made.bus, "surplus").publish(second)
        await until(lambda: len(got) == 1)
        assert time.monotonic() - published_s < ACK_WAIT_S / 2
        assert deliveries("surplus") == before + 1
        assert parse_ack(got[0].ack).delivered == 2, "the busy worker had it first, and gave it back"
        await puller.stop()
