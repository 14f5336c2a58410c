"""Messages beyond the free slots, while the broker is away, and after the worker stood still."""

import time
from typing import Any

import anyio
import pytest

from pipeline.bus import acks
from pipeline.bus.puller import Delivery
from pipeline.limits import LEASE_SILENT_MAX_S, SURPLUS_HOLD_S
from pipeline.protocol.messages import Done
from pipeline.protocol.subjects import Shard
from tests.nats_server import NatsServer
from tests.workers.fleet import config_for, fleet, until

pytestmark = pytest.mark.anyio

SHARD = Shard("interactive", 0)


def surplus(number: int, delivered: int = 1) -> Delivery:
    """A message that came without a slot for it."""
    ack = f"$JS.ACK.REQUESTS_interactive.s0.{delivered}.{number}.{number}.1795971116501586583.0"
    return Delivery(SHARD, "requests.shard.0.interactive.a.a", ack, b"", None)


async def test_a_surplus_message_that_cannot_be_given_back_takes_nobody_down(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, slots=1)) as made:
        worker, bus = made.prefill(), made.workers["prefill-1"].bus
        broker.kill9()
        await until(lambda: not bus.connected)
        worker.slots.delivered("taken", SHARD, 0, worker.clock())
        for number in (1, 2):
            worker._delivered(surplus(number))
        assert len(worker._held) == 2
        await anyio.sleep(3 * SURPLUS_HOLD_S)
        assert not worker._held
        worker.slots.finished(SHARD.klass)
        broker.start()
        await until(lambda: bus.connected and made.bus.connected)
        assert isinstance((await made.ask()).end, Done)


@pytest.mark.parametrize("stood_still", [False, True])
async def test_what_is_read_first_after_a_standstill_is_not_taken_from_who_has_it_by_now(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch, stood_still: bool
) -> None:
    given_back: list[str] = []

    async def nak(_: Any, ack: str, __: float = 0.0) -> None:
        given_back.append(ack)

    async with fleet(config_for(broker.url, slots=1)) as made:
        worker = made.prefill()
        monkeypatch.setattr(acks, "nak", nak)
        worker.slots.delivered("taken", SHARD, 0, worker.clock())
        if stood_still:
            time.sleep(LEASE_SILENT_MAX_S + 0.1)  # noqa: ASYNC251  the whole process does
        worker._delivered(surplus(1, delivered=2))
        await until(lambda: not worker._held)
        assert len(given_back) == (not stood_still)
        worker.slots.finished("interactive")
