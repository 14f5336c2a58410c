"""A lease that is held anew after a doubt is one lease: a forgotten one would keep the message from others long after its job."""

import anyio
import pytest

from pipeline.protocol.messages import Done
from pipeline.protocol.request import Event
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, config_for, fleet, until
from workers.leases import LeaseKeeper

pytestmark = pytest.mark.anyio


async def test_a_doubt_that_the_keeper_of_leases_does_not_share_leaves_no_lease_behind(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, step_s=0.02)) as made:
        worker, caller = made.decode(), Caller(made.bus, "doubtful")
        leases = worker.desk.leases
        assert isinstance(leases, LeaseKeeper)
        await caller.listen()
        await caller.publish("alice", max_tokens=20, ignore_eos=True)
        await until(lambda: caller.frames > 2)
        (job,) = worker._jobs._jobs.values()
        job.happen(Event.DOUBT)
        with anyio.fail_after(5.0):
            reply = await caller.reply()
        assert isinstance(reply.end, Done)
        assert len(reply.ids) == 20
        await until(lambda: not worker._jobs._jobs)
        assert not leases._held
