"""Messages beyond the free slots, while the broker is away."""

import anyio
import pytest

from pipeline.bus.puller import Delivery
from pipeline.limits import SURPLUS_HOLD_S
from pipeline.protocol.messages import Done
from pipeline.protocol.subjects import Shard
from tests.nats_server import NatsServer
from tests.workers.fleet import config_for, fleet, until

pytestmark = pytest.mark.anyio

SHARD = Shard("interactive", 0)


def surplus(number: int) -> Delivery:
    """A message that came without a slot for it."""
    ack = f"$JS.ACK.REQUESTS_interactive.s0.1.{number}.{number}.1795971116501586583.0"
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
