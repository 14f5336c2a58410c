"""The first token of a reply comes from prefill, which makes it anyway. What may not begin so, and what is lost, decode makes."""

from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import pytest

from pipeline.bus.connection import Message
from pipeline.protocol.messages import AnyFrame, Done, Tokens, encode, frames_decoder, unpack_ids
from pipeline.telemetry import metrics
from tests.nats_server import NatsServer
from tests.workers.fleet import PROMPT, Caller, Fleet, config_for, fleet, nothing_left, until
from workers.beginning import Beginning
from workers.engines.port import Prefilled
from workers.holding import Holding
from workers.identity import new_identity

pytestmark = pytest.mark.anyio

SLOW_STEP_S = 0.3
"""Of decode: what comes sooner is prefill's."""


class Watched(Caller):
    """A caller that keeps the frames. It may not hear the first so many."""

    def __init__(self, made: Fleet, deaf_to: int = 0) -> None:
        super().__init__(made.bus, "r")
        self.seen: list[AnyFrame] = []
        self._deaf_to = deaf_to

    def _framed(self, message: Message) -> None:
        self.seen += frames_decoder.decode(message.data)
        if len(self.seen) > self._deaf_to:
            super()._framed(message)

    @property
    def tokens(self) -> list[Tokens]:
        return [frame for frame in self.seen if isinstance(frame, Tokens)]


async def watched(made: Fleet, *, deaf_to: int = 0, **fields: Any) -> tuple[Watched, Done]:
    caller = Watched(made, deaf_to)
    await caller.listen()
    await caller.publish("ada", **fields)
    with anyio.fail_after(10.0):
        end = (await caller.reply()).end
    assert isinstance(end, Done)
    await nothing_left(made.bus)
    return caller, end


def recomputed() -> float:
    value: float = metrics.DECODE_RECOMPUTED_TOKENS._value.get()
    return value


def indices(frames: Sequence[Tokens]) -> list[int]:
    return [frame.index for frame in frames]


async def test_prefill_sends_the_first_token_and_decode_goes_on_after_it(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, step_s=SLOW_STEP_S)) as made:
        caller = Watched(made)
        await caller.listen()
        await caller.publish("ada", max_tokens=3, ignore_eos=True)
        await until(lambda: caller.tokens, within_s=SLOW_STEP_S * 0.8)
        assert len(caller.receiver.ids) == 1
        with anyio.fail_after(5.0):
            reply = await caller.reply()
        first, second, third = caller.tokens
        assert first.claim != second.claim == third.claim
        assert indices(caller.tokens) == [0, 1, 2]
        assert isinstance(reply.end, Done)
        assert (len(reply.ids), reply.end.usage.completion_tokens) == (3, 3)
        assert (reply.text, reply.ids) == (reply.end.text, list(caller.receiver.ids))


@pytest.mark.parametrize("fields", [{"seed": 1}, {"n": 2}, {"presence_penalty": 1.0}])
async def test_what_hangs_on_more_than_its_tokens_begins_at_decode(broker: NatsServer, fields: dict[str, Any]) -> None:
    async with fleet(config_for(broker.url)) as made:
        caller, _ = await watched(made, max_tokens=3, ignore_eos=True, **fields)
        assert len({frame.claim for frame in caller.tokens}) == 1


async def test_an_operator_may_have_decode_begin_all(broker: NatsServer) -> None:
    config = config_for(broker.url)
    requests = msgspec.structs.replace(config.requests, prefill_begins=False)
    async with fleet(msgspec.structs.replace(config, requests=requests)) as made:
        caller, _ = await watched(made, max_tokens=3, ignore_eos=True)
        assert len({frame.claim for frame in caller.tokens}) == 1


async def test_without_an_arbiter_decode_begins(broker: NatsServer) -> None:
    """Nobody could say that the first token is there already."""
    async with fleet(config_for(broker.url)) as made:
        frames: list[AnyFrame] = []
        inbox = made.bus.inbox()
        await made.bus.subscribe(inbox, lambda message: frames.extend(frames_decoder.decode(message.data)))
        body = {"messages": PROMPT, "reply_to": inbox, "max_tokens": 3, "ignore_eos": True}
        await made.bus.store("requests.in.interactive.ada.ada", encode(body), msg_id="m", timeout_s=2.0)
        await until(lambda: frames and isinstance(frames[-1], Done))
        tokens = [frame for frame in frames if isinstance(frame, Tokens)]
        assert indices(tokens) == [0, 1, 2]
        assert len({frame.claim for frame in tokens}) == 1


async def test_a_first_token_that_is_lost_is_made_by_decode(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        whole, _ = await watched(made, max_tokens=4, ignore_eos=True)
        caller, end = await watched(made, deaf_to=1, max_tokens=4, ignore_eos=True)
        assert indices(caller.tokens) == [0, 0, 1, 2, 3]
        assert list(caller.receiver.ids) == list(whole.receiver.ids)
        assert end.text == whole.receiver.text


async def test_who_asks_for_the_prompt_gets_it_with_the_first_token(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        caller, end = await watched(made, max_tokens=2, return_token_ids=True)
        first = caller.tokens[0]
        assert first.extra is not None
        assert (first.extra.prompt, first.extra.prompt_tokens) == (end.prompt, end.usage.prompt_tokens)
        assert first.claim != caller.tokens[1].claim


@pytest.mark.parametrize(
    ("ending", "reason", "says_it"),
    [("stop", "stop", False), ("stop_token_ids", "stop", True), ("max_tokens", "length", True)],
)
async def test_a_token_that_ends_the_reply_is_sent_as_well(
    broker: NatsServer, ending: str, reason: str, says_it: bool
) -> None:
    """Or replies that begin with it would be drawn twice, and come too seldom."""
    async with fleet(config_for(broker.url)) as made:
        whole, _ = await watched(made, max_tokens=4, ignore_eos=True)
        first = whole.tokens[0]
        fields: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
        before = recomputed()
        fields[ending] = {"stop": [first.text.strip()], "stop_token_ids": [whole.receiver.ids[0]], "max_tokens": 1}[
            ending
        ]
        caller, end = await watched(made, **fields)
        assert [frame.ids for frame in caller.tokens] == [first.ids]
        assert (end.finish_reason, end.usage.completion_tokens) == (reason, 1)
        assert end.text == caller.receiver.text
        assert recomputed() == before, "decode has computed nothing"
        assert end.text.strip() == (first.text.strip() if says_it else "")


class Posts:
    """A bus, as far as a beginning needs one."""

    def __init__(self) -> None:
        self.frames: list[Tokens] = []

    def post(self, subject: str, payload: bytes) -> None:
        assert subject == "reply"
        self.frames += [frame for frame in frames_decoder.decode(payload) if isinstance(frame, Tokens)]


def begun(**fields: Any) -> tuple[Beginning, Holding, Posts]:
    posts: Any = Posts()
    at = {"reply_to": "reply", "claim_at": "claims"} | fields
    holding = Holding(
        bus=posts, me=new_identity("p"), request="r", claim="c1", ack_subject="", encoding="msgpack", **at
    )
    return Beginning(holding), holding, posts


DONE = Prefilled(cached_tokens=0, generated_tokens=1, first_id=7, first_text=" sea")


def test_it_is_sent_once_and_again_only_to_who_has_nothing_under_the_claim_of_the_day() -> None:
    beginning, holding, posts = begun()
    assert beginning.send({}, [1, 2], DONE)
    assert not beginning.send({}, [1, 2], DONE), "the handoff was refused, and another one is offered"
    holding.claim = "c2"
    beginning.resend(1)
    beginning.resend(0)
    assert [(frame.claim, frame.index, unpack_ids(frame.ids), frame.text) for frame in posts.frames] == [
        ("c1", 0, [7], " sea"),
        ("c2", 0, [7], " sea"),
    ]


def test_where_prefill_has_none_nothing_is_sent() -> None:
    beginning, _, posts = begun()
    assert not beginning.send({}, [1, 2], Prefilled(cached_tokens=0, generated_tokens=0))
    beginning.resend(0)
    assert not posts.frames


@pytest.mark.parametrize(
    ("fields", "may"),
    [({}, True), ({"claim_at": None}, False), ({"reply_to": None}, False), ({"reply_to": "replies.ada.r"}, False)],
)
def test_it_needs_a_receiver_that_says_what_it_has_and_is_sent_tokens(fields: dict[str, Any], may: bool) -> None:
    beginning, _, _ = begun(**fields)
    assert beginning.may({}, []) is may
    assert not beginning.may({}, [1])
    assert not beginning.may({"seed": 1}, [])
