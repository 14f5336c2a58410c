"""Frames on their way out: one message for a step and a receiver, and a message each where JSON is read."""

import json

import anyio
import pytest

from pipeline.bus import connection
from pipeline.bus.connection import Bus, Message
from pipeline.limits import MESSAGE_BYTES_MAX
from pipeline.protocol.messages import Failed, Tokens, frames_decoder, pack_ids
from tests.nats_server import NatsServer
from tests.workers.fleet import config_for, fleet, nothing_left, until
from workers.frames import FrameSender

pytestmark = pytest.mark.anyio


def frame(request: str) -> Tokens:
    return Tokens(1, request, "c", 0, pack_ids([1]), "x")


async def test_frames_of_one_step_to_one_receiver_travel_as_one_message(broker: NatsServer) -> None:
    async with await Bus.connect(broker.url, "frames") as bus, anyio.create_task_group() as tasks:
        got: list[Message] = []
        await bus.subscribe("to.*", got.append)
        await bus.barrier()
        sender = FrameSender(bus)
        tasks.start_soon(sender.run)
        for request in ("a", "b", "c"):
            sender.send("to.gateway", frame(request), "msgpack")
        sender.send("to.other", frame("d"), "msgpack")
        sender.send("to.json", frame("e"), "json")
        sender.send("to.json", frame("f"), "json")
        await until(lambda: len(got) == 4)
        by_subject = {message.subject: message.data for message in got}
        assert [one.request for one in frames_decoder.decode(by_subject["to.gateway"])] == ["a", "b", "c"]
        assert [one.request for one in frames_decoder.decode(by_subject["to.other"])] == ["d"]
        assert [json.loads(message.data)["request"] for message in got if message.subject == "to.json"] == ["e", "f"]
        tasks.cancel_scope.cancel()


async def test_what_is_too_large_for_one_message_travels_in_several(broker: NatsServer) -> None:
    """A long reply with logprobs that is sent again from its start, for one."""
    async with await Bus.connect(broker.url, "frames") as bus:
        got: list[Message] = []
        await bus.subscribe("to.gateway", got.append)
        large = [Tokens(1, "r", "c", index, pack_ids([index]), "x" * (MESSAGE_BYTES_MAX // 4)) for index in range(10)]
        sender = FrameSender(bus)
        for one in large:
            sender.send("to.gateway", one, "msgpack")
        await sender.flush()
        await bus.barrier()
        assert len(got) == 4
        assert [one for message in got for one in frames_decoder.decode(message.data)] == large


async def test_a_reply_that_is_too_large_to_be_told_whole_ends_with_an_error_at_once(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after its deadline, and with its message acked: the next one would be as large."""
    async with fleet(config_for(broker.url)) as made:
        monkeypatch.setattr(connection, "MESSAGE_BYTES_MAX", 4000)
        reply = await made.ask(max_tokens=900, ignore_eos=True)
        assert isinstance(reply.end, Failed)
        assert (reply.end.error.code, reply.end.error.param) == ("invalid_value", "max_tokens")
        await nothing_left(made.bus)
