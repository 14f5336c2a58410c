"""Balancing: what presences say of the workers, and orders to those that are to turn, by the gateway that leads."""

import time
from typing import Any

import anyio
import pytest

from gateway.balancing import Balancing, members_of
from gateway.routing import Routing
from gateway.warm import Warm
from pipeline.bus.background import Background
from pipeline.bus.connection import Bus, Message
from pipeline.limits import BALANCE_PERIOD_S
from pipeline.protocol import subjects
from pipeline.protocol.balancer import Member, Rules
from pipeline.protocol.control import Order, Standing, order_decoder
from pipeline.protocol.messages import Presence, encode
from pipeline.protocol.presence import Presences
from pipeline.telemetry import metrics
from tests.bus.support import eventually
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

AT_ONCE = Rules(patience_s=0.001, settle_s=0.001)


def said(role: Any, worker: str, **fields: Any) -> Presence:
    return Presence(role=role, id=worker, epoch="1", ready=True, **fields)


def split() -> Presences:
    """Two workers for both, one for each part, and decode has asks waiting; two gateways."""
    presences = Presences()
    for peer in (
        said("gateway", "g1"),
        said("gateway", "g2"),
        said("prefill", "w1", serves_as="prefill", built_for="both", slots=4, slots_free=4),
        said("decode", "w2", serves_as="decode", built_for="both", blocks=100, blocks_free=5, full_ratio=1.0),
    ):
        presences.heard(peer, time.monotonic() + 60)
    return presences


def test_a_worker_with_both_loops_is_one_member() -> None:
    members = members_of(
        [
            said("prefill", "b", serves_as="both", built_for="both", slots=2, slots_free=1),
            said("prefill", "p", slots=4),
        ],
        [
            said("decode", "b", serves_as="both", built_for="both", blocks=9, blocks_free=8),
            said("decode", "d", blocks=7),
        ],
    )
    assert members == [
        Member(worker="b", role="both", built_for="both", slots=2, slots_free=1, blocks=9, blocks_free=8),
        Member(worker="p", role="prefill", built_for="prefill", slots=4),
        Member(worker="d", role="decode", built_for="decode", blocks=7),
    ]


@pytest.mark.parametrize(("name", "orders"), [("g1", 1), ("g2", 0)])
async def test_the_gateway_that_leads_orders_who_is_to_turn_and_no_other_does(
    broker: NatsServer, name: str, orders: int
) -> None:
    heard: list[Order] = []
    async with await Bus.connect(broker.url, name) as bus, await Bus.connect(broker.url, "w1") as worker:

        def obey(message: Message) -> None:
            heard.append(order_decoder.decode(message.data))
            worker.post(message.reply, encode(Standing(worker="w1", role="both", state="turning")))

        await worker.subscribe(subjects.control("w1"), obey)
        await worker.barrier()
        presences = split()
        routing = Routing(bus, presences, Warm(bus, presences, time.monotonic), name, 16, time.monotonic)
        balancing = Balancing(bus, presences, routing, AT_ONCE, time.monotonic)
        running = Background(balancing.run(), "balancing")
        if orders:
            await eventually(lambda: len(heard) >= orders, within_s=5.0)
            assert heard[0] == Order("turn", "both")
        else:
            await anyio.sleep(2.5 * BALANCE_PERIOD_S)
        await running.stop()
        assert bool(heard) == bool(orders)


@pytest.mark.parametrize("answer", [None, b"\xc1"])
async def test_a_worker_that_does_not_answer_or_says_what_cannot_be_read_is_left_alone(
    broker: NatsServer, answer: bytes | None
) -> None:
    async with await Bus.connect(broker.url, "g1") as bus:
        if answer is not None:
            said = answer
            await bus.subscribe(subjects.control("*"), lambda message: bus.post(message.reply, said))
            await bus.barrier()
        presences = split()
        routing = Routing(bus, presences, Warm(bus, presences, time.monotonic), "g1", 16, time.monotonic)
        balancing = Balancing(bus, presences, routing, AT_ONCE, time.monotonic)
        ordered = metrics.TURNS.labels(role="both")._value.get()
        await balancing._look()
        await anyio.sleep(0.01)
        await balancing._look()  # its patience is over
        assert metrics.TURNS.labels(role="both")._value.get() == ordered
