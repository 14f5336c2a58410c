"""The records of who has died with a request."""

from typing import Any

import anyio
import pytest

from pipeline.errors import BrokerUnavailable
from pipeline.protocol.messages import Done
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, config_for, fleet, until
from workers.starts import Starts

pytestmark = pytest.mark.anyio


async def test_a_start_that_decode_cannot_record_does_not_fail_the_reply(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, record = list[bool](), Starts.record

    async with fleet(config_for(broker.url, step_s=0.02), decode=2) as made:
        caller = Caller(made.bus, "again")
        await caller.listen()
        await caller.publish("alice", max_tokens=40, ignore_eos=True)
        await until(lambda: caller.frames > 2)
        first = caller.holders[-1].partition(".")[2]

        async def refused(self: Starts, *message: Any) -> list[str]:
            if self is made.prefill().desk.starts:
                return await record(self, *message)
            tried.append(True)
            raise BrokerUnavailable("The broker is away.")

        monkeypatch.setattr(Starts, "record", refused)
        made.kill(first)
        with anyio.fail_after(8.0):
            reply = await caller.reply()
    assert tried
    assert isinstance(reply.end, Done)
    assert len(reply.ids) == 40
