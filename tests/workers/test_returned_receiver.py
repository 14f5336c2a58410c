"""A gateway that was taken for gone and is back is served again: also what it sends before it has said that it lives."""

import anyio
import pytest

from pipeline.bus.connection import Bus
from pipeline.protocol import subjects
from pipeline.protocol.messages import Done, Presence, encode
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, backlog, config_for, fleet
from workers import pool

pytestmark = pytest.mark.anyio

RECEIVER = "gateway-x/0001-ab"


async def say(bus: Bus) -> None:
    """The gateway's presence, once."""
    name, _, epoch = RECEIVER.partition("/")
    said = Presence(role="gateway", id=name, epoch=epoch, ready=True)
    await bus.publish(subjects.presence("gateway", name), encode(said))


async def dropped(bus: Bus) -> None:
    """What is in the queue is given up."""
    with anyio.fail_after(8.0):
        while await backlog(bus):
            await anyio.sleep(0.02)


async def test_what_is_dropped_unasked_is_not_claimed_either(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that comes back at that moment would take the claim for a sign that somebody works on it."""
    monkeypatch.setattr(pool, "HEARD_BY_S", -1.0)  # its first sight is enough
    async with fleet(config_for(broker.url)) as made:
        await say(made.bus)
        await Caller(made.bus, "lost").publish("alice", receiver=RECEIVER)
        await dropped(made.bus)
        caller = Caller(made.bus, "later")
        await caller.listen()
        await caller.publish("alice", receiver=RECEIVER)
        await dropped(made.bus)
        await made.bus.barrier()
        assert caller.holders == []


async def test_a_request_of_a_gateway_that_is_back_is_not_dropped_with_those_it_had_lost(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        await say(made.bus)
        await Caller(made.bus, "lost").publish("alice", receiver=RECEIVER)
        await dropped(made.bus)
        caller = Caller(made.bus, "later")
        await caller.listen()
        await caller.publish("alice", receiver=RECEIVER, max_tokens=4)
        await anyio.sleep(0.15)
        await say(made.bus)
        with anyio.fail_after(3.0):
            assert isinstance((await caller.reply()).end, Done)
