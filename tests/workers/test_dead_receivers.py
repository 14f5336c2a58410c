"""What a killed gateway has left in the queue must not keep the living waiting."""

import time

import anyio
import pytest

from pipeline.limits import CLAIM_PATIENCE_S
from pipeline.protocol.messages import Done
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, Fleet, backlog, config_for, fleet, until

pytestmark = pytest.mark.anyio

SLOTS = 2
LEFT_BEHIND = 16


async def leave_behind(made: Fleet, count: int) -> None:
    """Requests whose gateway answers no claim and says nothing."""
    for number in range(count):
        caller = Caller(made.bus, f"dead-{number}")
        await caller.publish(f"creator-{number}", receiver="gateway-dead/0001-ab")


async def test_what_a_dead_receiver_has_left_waits_outside_until_it_is_known_to_be_gone(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, slots=SLOTS)) as made:
        began_s = time.monotonic()
        await leave_behind(made, LEFT_BEHIND)
        living = await made.ask(within_s=15.0)
        took_s = time.monotonic() - began_s
        assert isinstance(living.end, Done)
        one_by_one_s = LEFT_BEHIND / SLOTS * CLAIM_PATIENCE_S
        assert took_s < one_by_one_s / 2
        with anyio.fail_after(8.0):
            while await backlog(made.bus):
                await anyio.sleep(0.02)
        slots = made.prefill().slots
        await until(lambda: slots.busy == 0)
