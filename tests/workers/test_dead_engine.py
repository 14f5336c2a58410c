"""A worker whose engine has died takes nothing more, in the half second until its health check ends it."""

import anyio
import pytest

from pipeline.bus.puller import EXPIRES_S
from pipeline.protocol.messages import Done
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, config_for, fleet, until

pytestmark = pytest.mark.anyio


async def test_a_prefill_worker_with_a_dead_engine_gives_its_request_back_and_takes_no_other(
    broker: NatsServer,
) -> None:
    async with fleet(config_for(broker.url, slots=1)) as made:
        worker, caller = made.prefill(), Caller(made.bus, "unlucky")
        made.workers["prefill-1"].engine.die()
        await caller.listen()
        await caller.publish("alice", max_tokens=4)
        await until(lambda: not worker.slots.open)
        await anyio.sleep(EXPIRES_S + 0.5)  # the pulls that stood have ended, or brought it once more
        tried = len(caller.holders)
        await anyio.sleep(1.5)
        assert len(caller.holders) == tried, "nothing comes back to it again and again"
        await made.add("prefill", "prefill-2")
        with anyio.fail_after(5.0):
            assert isinstance((await caller.reply()).end, Done)


async def test_a_decode_worker_with_a_dead_engine_promises_nothing_more(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), decode=2) as made:
        made.workers["decode-1"].engine.die()
        dead = made.decode("decode-1").ledger
        for number in range(60):  # it is asked first in one of four
            if not dead.open:
                break
            reply = await made.ask(creator=f"c{number}", max_tokens=4)
            assert isinstance(reply.end, Done)
            assert reply.end.usage.decode == "decode-2"
        made.decode("decode-2").ledger.open = False  # so that only the dead one is left to ask
        await made.bus.barrier()
        assert not dead.open
        assert dead.totals.granted <= 2
