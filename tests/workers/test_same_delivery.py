"""A broker that was killed has forgotten a delivery: it delivers again, under the same ack subject, to a worker that is at it."""

import time

import anyio
import pytest

from pipeline.bus.puller import Delivery
from pipeline.protocol.messages import Done, encode
from pipeline.protocol.subjects import Shard
from tests.nats_server import NatsServer
from tests.workers.fleet import PROMPT, Caller, config_for, fleet, until

pytestmark = pytest.mark.anyio

SHARD = Shard("interactive", 0)


def delivery(caller: Caller) -> Delivery:
    """The caller's request, as the broker hands it out."""
    body = {
        "messages": PROMPT,
        "id": caller.request,
        "reply_to": f"{caller.inbox}.r",
        "claim_at": f"{caller.inbox}.c",
        "max_tokens": 8,
        "ignore_eos": True,
    }
    ack = f"$JS.ACK.REQUESTS_interactive.s0.1.1.1.{time.time_ns()}.0"
    return Delivery(SHARD, "requests.shard.0.interactive.a.a", ack, encode(body), None)


async def test_the_same_delivery_twice_is_two_jobs_of_which_the_later_one_speaks(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, slots=2)) as made:
        worker = made.prefill()
        caller = Caller(made.bus, "twice")
        await caller.listen()
        said = delivery(caller)
        for _ in range(2):
            worker._delivered(said)
        with anyio.fail_after(5.0):
            reply = await caller.reply()
        assert isinstance(reply.end, Done)
        assert len(reply.ids) == 8
        await until(lambda: worker.slots.busy == 0 and not worker._jobs._jobs)
        book = made.decode().ledger
        await until(lambda: book.free == book.blocks)
        assert isinstance((await made.ask()).end, Done), "the worker lives"


async def test_the_same_delivery_twice_without_a_slot_is_held_twice(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, slots=1)) as made:
        worker = made.prefill()
        caller = Caller(made.bus, "held")
        await caller.listen()
        said = delivery(caller)
        for _ in range(3):
            worker._delivered(said)
        assert len(worker._held) == 2
        await until(lambda: not worker._held and worker.slots.busy == 0)
        assert isinstance((await made.ask()).end, Done), "the worker lives"
