"""Frames on their way out: one message for a step and a receiver, and a message each where JSON is read."""

import json

import anyio
import pytest

from pipeline.bus.connection import Bus, Message
from pipeline.protocol.messages import Tokens, frames_decoder, pack_ids
from tests.nats_server import NatsServer
from tests.workers.fleet import until
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
