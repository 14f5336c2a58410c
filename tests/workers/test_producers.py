"""What producers are promised who have nothing but a subscription, or not even that."""

import secrets

import anyio
import pytest

from pipeline.bus import reading, streams
from pipeline.bus.connection import Bus, Message
from pipeline.paths import JETSTREAM
from pipeline.protocol.messages import AnyFrame, Done, Tokens, encode, frames_decoder
from tests.nats_server import NatsServer
from tests.workers.fleet import PROMPT, backlog, config_for, fleet, until
from workers import holding

pytestmark = pytest.mark.anyio


async def publish(bus: Bus, reply_to: str) -> None:
    """A request without a claim subject."""
    body = {"messages": PROMPT, "reply_to": reply_to, "max_tokens": 40, "ignore_eos": True}
    await bus.store("requests.in.interactive.ada.ada", encode(body), msg_id=secrets.token_hex(8), timeout_s=2.0)


async def acked(bus: Bus) -> None:
    """Its message is done with."""
    with anyio.fail_after(5.0):
        while await backlog(bus):
            await anyio.sleep(0.02)


async def test_a_worker_that_loses_its_connection_leaves_no_hole_in_the_reply_of_a_subscription(
    broker: NatsServer,
) -> None:
    """It begins again, under another claim: what the connection has lost nobody would ask for."""
    frames: list[AnyFrame] = []
    async with (
        fleet(config_for(broker.url, step_s=0.02)) as made,
        await Bus.connect(broker.url, "producer") as producer,
    ):
        inbox = producer.inbox()

        def came(message: Message) -> None:
            frames.extend(frames_decoder.decode(message.data))

        await producer.subscribe(inbox, came)
        await publish(producer, inbox)
        await until(lambda: len(frames) > 3)
        await made.workers["decode-1"].bus.client.force_reconnect()
        await until(lambda: isinstance(frames[-1], Done))
        await acked(made.bus)
    tokens = [frame for frame in frames if isinstance(frame, Tokens)]
    claims = list(dict.fromkeys(frame.claim for frame in tokens))
    assert len(claims) == 2
    for claim in claims:
        indices = [frame.index for frame in tokens if frame.claim == claim]
        assert indices == list(range(len(indices)))
    assert len(indices) == 40


async def test_a_whole_reply_that_could_not_be_kept_is_made_again(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "KEEP_TIMEOUT_S", 0.3)
    async with fleet(config_for(broker.url)) as made:
        await made.bus.request("$JS.API.STREAM.DELETE.REPLIES", b"", 2.0)
        await publish(made.bus, "replies.ada.r-1")
        await until(lambda: made.decode()._jobs._jobs)
        await until(lambda: not made.decode()._jobs._jobs, within_s=2.0)
        assert await backlog(made.bus) == 1
        await streams.apply(made.bus, streams.declared(JETSTREAM))
        await acked(made.bus)
        kept = await reading.get(made.bus, "REPLIES", 1)
    assert kept is not None
    (end,) = frames_decoder.decode(kept.data)
    assert (kept.subject, type(end), end.index) == ("replies.ada.r-1", Done, 40)
