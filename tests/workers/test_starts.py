"""The records of who has died with a request."""

import json
from typing import Any

import anyio
import pytest

from pipeline.bus.connection import Bus
from pipeline.errors import BrokerUnavailable
from pipeline.protocol.messages import Done
from pipeline.protocol.subjects import AckSubject, parse_ack
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


def place(number: int) -> AckSubject:
    return parse_ack(f"$JS.ACK.REQUESTS_interactive.s0.2.{number}.1.1750000000000000000.0")


async def recorded(bus: Bus, number: int) -> list[str]:
    """The epochs whose starts of this message are recorded."""
    asked = json.dumps({"subjects_filter": f"$KV.starts.REQUESTS_interactive.{number}.*"}).encode()
    state = json.loads(await bus.request("$JS.API.STREAM.INFO.KV_starts", asked, 5.0))["state"]
    return [subject.rpartition(".")[2] for subject in state.get("subjects") or {}]


async def test_whose_reply_is_written_is_not_blamed_for_a_prompt_that_is_read_beside_it(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        starts, queue = Starts(made.bus, "me"), made.bus
        await starts.write(place(1))
        assert await recorded(queue, 1) == ["me"]
        assert await starts.read(place(2)) == ["me"]
        await starts.write(place(3))
        assert [await recorded(queue, number) for number in (1, 2, 3)] == [[], ["me"], []]
        await starts.take_back(place(2))
        await starts.write(place(3))
        assert await recorded(queue, 3) == ["me"]


async def test_what_is_read_and_written_in_one_process_counts_once_and_not_beside_another(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        starts, queue = Starts(made.bus, "me"), made.bus
        await starts.read(place(1))
        await starts.write(place(1))
        assert await recorded(queue, 1) == ["me"]
        await starts.read(place(2))
        await starts.read(place(3))
        await starts.write(place(3))
        assert [await recorded(queue, number) for number in (1, 2, 3)] == [[], ["me"], []], "3 is written beside 2"
