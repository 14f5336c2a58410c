"""Requests by reference on a real broker: one prompt however often it is rendered, one exchange however often a worker dies."""

import random
from collections.abc import Mapping
from typing import Any

import anyio
import msgspec
import pytest

from pipeline import outside
from pipeline.bus.connection import Bus
from pipeline.bus.kv import Bucket
from pipeline.config import Config, Conversations
from pipeline.limits import EXPIRED_AFTER_S
from pipeline.protocol import conversations as slots
from pipeline.protocol import personas, subjects
from pipeline.protocol.arrangement import Role
from pipeline.protocol.conversations import Slot
from pipeline.protocol.messages import Done, Failed
from pipeline.protocol.personas import Persona
from pipeline.protocol.routes import Route
from pipeline.protocol.turns import Sent, Turn
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, Fleet, Reply, backlog, config_for, fleet, until
from workers import conversations
from workers.engines.port import Rendered
from workers.engines.simulated import SimulatedEngine

pytestmark = pytest.mark.anyio

SYSTEM = "You are Ada, and you answer in verse. " * 20
OTHER = "You are Ada, and you answer in prose. " * 20


class Watched(SimulatedEngine):
    """An engine that remembers what it has rendered."""

    def __init__(self, config: Config, role: Role) -> None:
        super().__init__(config, role)
        self.rendered: list[Mapping[str, Any]] = []

    async def render(self, chat: Mapping[str, Any]) -> Rendered:
        self.rendered.append(chat)
        return await super().render(chat)


def prompts(made: Fleet, name: str = "prefill-1") -> list[list[Any]]:
    """The messages of each prompt that a worker has rendered for a request."""
    engine = made.workers[name].engine
    assert isinstance(engine, Watched)
    return [chat["messages"] for chat in engine.rendered if "id" in chat]


async def put(bus: Bus, system: str = SYSTEM, creator: str = "ada", **template: Any) -> int:
    bucket, persona = Bucket(bus, personas.BUCKET), Persona(creator=creator, system=system, template=template)
    entry = await bucket.read(creator)
    return await bucket.write(creator, personas.write(persona), entry.revision if entry else 0)


async def say(made: Fleet, message: str, conversation: str | None = "c1", **fields: Any) -> Reply:
    fields = {"max_tokens": 6, "ignore_eos": True, **fields}
    return await made.ask(creator="ada", messages=None, message=message, conversation=conversation, **fields)


async def publish(made: Fleet, request: str, message: str, **fields: Any) -> Caller:
    caller = Caller(made.bus, request)
    await caller.listen()
    said = {"messages": None, "message": message, "conversation": "c1", "max_tokens": 6, "ignore_eos": True, **fields}
    await caller.publish("ada", **said)
    return caller


async def kept(bus: Bus, conversation: str = "ada.c1") -> list[Turn]:
    return [turn for _, turn in (await conversations.Conversations(bus).history(conversation)).turns]


async def slot_of(bus: Bus, conversation: str = "ada.c1") -> Slot | None:
    return (await conversations.Conversations(bus)._read(conversation))[0]


async def at_rest(made: Fleet) -> None:
    with anyio.fail_after(8.0):
        while await backlog(made.bus) or await slot_of(made.bus):
            await anyio.sleep(0.01)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def test_persona_history_and_message_make_the_prompt_and_the_exchange_is_kept(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), engine=Watched) as made:
        await put(made.bus)
        first = await say(made, "Hello!")
        second = await say(made, "And you?")
        await at_rest(made)
        system = {"role": "system", "content": SYSTEM}
        assert prompts(made) == [
            [system, user("Hello!")],
            [system, user("Hello!"), assistant(first.text), user("And you?")],
        ]
        told = await kept(made.bus)
        assert [(turn.number, turn.message, turn.reply) for turn in told] == [
            (1, user("Hello!"), first.text),
            (2, user("And you?"), second.text),
        ]
        assert isinstance(second.end, Done)
        assert second.end.usage.cached_tokens >= 160, "the prefix of the first turn"


async def test_the_http_form_says_the_same(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), engine=Watched) as made:
        await put(made.bus)
        metadata = {"persona": "ada", "conversation": "c1", "team": "crm"}
        first = await made.ask(creator="ada", messages=[user("Hello!")], metadata=metadata)
        await say(made, "And you?")
        assert prompts(made)[1][1:] == [user("Hello!"), assistant(first.text), user("And you?")]


async def test_a_persona_brings_arguments_of_the_template_which_a_request_may_override(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), engine=Watched) as made:
        await put(made.bus, mood="merry", thinking=False)
        await say(made, "Hello!", chat_template_kwargs={"thinking": True})
        engine = made.workers["prefill-1"].engine
        assert isinstance(engine, Watched)
        assert engine.rendered[-1]["chat_template_kwargs"] == {"mood": "merry", "thinking": True}


async def test_without_a_conversation_nothing_is_kept(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), engine=Watched) as made:
        await put(made.bus)
        for _ in range(2):
            assert isinstance((await say(made, "Hello!", None)).end, Done)
        await at_rest(made)
        assert len(prompts(made)[1]) == 2
        assert await backlog(made.bus, "TURNS") == 0
        assert await backlog(made.bus, "KV_conversations") == 0


async def test_a_redelivery_renders_the_same_prompt_whatever_has_been_published_meanwhile(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), prefill=0, engine=Watched) as made:
        await put(made.bus)
        victim = await made.add("prefill", "victim")
        first = await say(made, "Hello!", id="r1")
        victim.engine.pause()
        caller = await publish(made, "r2", "And you?")
        await until(lambda: len(prompts(made, "victim")) == 2)
        before = prompts(made, "victim")[1]
        made.kill("victim")
        await put(made.bus, OTHER)
        word = msgspec.json.encode(Sent(request="r1", text="Something else."))
        await made.bus.store(subjects.chat_sent("ada.c1"), word, msg_id="w1", timeout_s=2.0)
        await made.add("prefill", "prefill-1")
        with anyio.fail_after(8.0):
            reply = await caller.reply()
        assert isinstance(reply.end, Done)
        assert msgspec.json.encode(prompts(made)[0]) == msgspec.json.encode(before)
        assert before[2] == assistant(first.text)
        await at_rest(made)
        await say(made, "What now?")
        assert prompts(made)[1][0]["content"] == OTHER, "the next request has the new version"
        assert prompts(made)[1][2] == assistant("Something else."), "and what was really sent"


async def test_without_a_conversation_the_first_claim_pins_the_version(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), prefill=0, engine=Watched) as made:
        await put(made.bus)
        victim = await made.add("prefill", "victim")
        victim.engine.pause()
        caller = await publish(made, "r1", "Hello!", conversation=None)
        await until(lambda: len(prompts(made, "victim")) == 1)
        made.kill("victim")
        await put(made.bus, OTHER)
        await made.add("prefill", "prefill-1")
        with anyio.fail_after(8.0):
            assert isinstance((await caller.reply()).end, Done)
        assert prompts(made)[0][0]["content"] == SYSTEM


@pytest.mark.parametrize("when", ["before it is written down", "after it is written down"])
async def test_an_exchange_is_kept_once_when_decode_dies_between_whole_and_ack(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    append, died = conversations.Conversations._append, list[str]()

    async def dying(self: conversations.Conversations, *exchange: Any) -> None:
        if died or when.startswith("after"):
            await append(self, *exchange)
        if not died:
            died.append(when)
            await anyio.sleep_forever()

    monkeypatch.setattr(conversations.Conversations, "_append", dying)
    async with fleet(config_for(broker.url), engine=Watched) as made:
        await put(made.bus)
        reply = await say(made, "Hello!")
        await until(lambda: bool(died))
        made.kill("decode-1")
        await made.add("decode", "decode-2")
        await at_rest(made)
        assert [turn.reply for turn in await kept(made.bus)] == [reply.text]
        assert len(prompts(made)) == 1, "nothing was rendered for it again"


async def test_without_an_arbiter_a_message_that_is_answered_again_does_not_see_its_own_reply(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, died = conversations.Conversations._append, list[bool]()

    async def dying(self: conversations.Conversations, *exchange: Any) -> None:
        await append(self, *exchange)
        if not died:
            died.append(True)
            await anyio.sleep_forever()

    monkeypatch.setattr(conversations.Conversations, "_append", dying)
    async with fleet(config_for(broker.url), engine=Watched) as made:
        await put(made.bus)
        await publish(made, "r1", "Hello!", reply_to="replies.crm.r1", claim_at=None)
        await until(lambda: bool(died))
        made.kill("decode-1")
        await made.add("decode", "decode-2")
        await at_rest(made)
        assert prompts(made) == [prompts(made)[0]] * 2
        assert [turn.request for turn in await kept(made.bus)] == ["r1"]
        assert await backlog(made.bus, "REPLIES") == 1


async def test_a_reply_that_is_continued_elsewhere_is_kept_whole_and_once(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, step_s=0.01), engine=Watched) as made:
        await put(made.bus)
        caller = await publish(made, "r1", "Hello!", max_tokens=40)
        await until(lambda: len(caller.receiver.ids) >= 7)
        made.kill("decode-1")
        await made.add("decode", "decode-2")
        with anyio.fail_after(8.0):
            reply = await caller.reply()
        await at_rest(made)
        assert [turn.reply for turn in await kept(made.bus)] == [reply.text]
        assert len(reply.ids) == 40


async def until_seen(made: Fleet, callers: list[Caller]) -> None:
    """Return when all of these have come to their conversation."""
    with anyio.fail_after(5.0):
        while True:
            slot = await slot_of(made.bus)
            inside = (len(slot.line) + bool(slot.holder)) if slot else 0
            if inside + sum(caller.ended for caller in callers) >= len(callers):
                return
            await anyio.sleep(0.005)


async def test_messages_of_one_conversation_see_all_earlier_replies(broker: NatsServer) -> None:
    config = config_for(broker.url, slots=1, step_s=0.01)
    async with fleet(config, prefill=2, engine=Watched) as made:
        await put(made.bus)
        callers = list[Caller]()
        for number in range(4):  # of two that nobody has seen yet either may enter
            callers.append(await publish(made, f"r{number}", f"Message {number}."))
            await until_seen(made, callers)
        with anyio.fail_after(20.0):
            replies = [await caller.reply() for caller in callers]
        await at_rest(made)
        told = await kept(made.bus)
        assert [turn.number for turn in told] == [1, 2, 3, 4]
        assert [turn.request for turn in told] == ["r0", "r1", "r2", "r3"]
        assert [turn.reply for turn in told] == [reply.text for reply in replies]
        rendered = sorted((*prompts(made), *prompts(made, "prefill-2")), key=len)
        for number, messages in enumerate(rendered):
            history = [part for turn in told[:number] for part in (turn.message, assistant(turn.reply))]
            assert messages[1:] == [*history, user(f"Message {number}.")]


async def test_conversations_do_not_wait_for_each_other(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, step_s=0.02), engine=Watched) as made:
        await put(made.bus)
        long = await publish(made, "long", "Hello!", max_tokens=100)
        await until(lambda: long.frames > 0)
        assert isinstance((await say(made, "Hello!", "c2")).end, Done)
        assert not long.ended


async def test_of_an_editors_words_the_newest_counts(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), engine=Watched) as made:
        await put(made.bus)
        await say(made, "Hello!", id="r1")
        for number, text in enumerate(("Too long.", "Short.")):
            word = msgspec.json.encode({"request": "r1", "text": text})
            await made.bus.store("chat.sent.ada.c1", word, msg_id=f"w{number}", timeout_s=2.0)
        await made.bus.store("chat.sent.ada.c1", b"no word at all", msg_id="w9", timeout_s=2.0)
        await say(made, "And you?")
        assert prompts(made)[1][2] == assistant("Short.")


async def test_a_conversation_is_not_held_by_who_has_died_once_nothing_of_it_can_come_any_more(
    broker: NatsServer,
) -> None:
    async with fleet(config_for(broker.url), engine=Watched) as made:
        await put(made.bus)
        ghost = Slot(holder="REQUESTS_interactive-9-1.000", by="x", until_s=outside.unix_s() - EXPIRED_AFTER_S + 0.6)
        assert await conversations.Conversations(made.bus)._write("ada.c1", ghost, 0)
        began_s = outside.monotonic_s()
        assert isinstance((await say(made, "Hello!")).end, Done)
        assert 0.5 < outside.monotonic_s() - began_s < 5.0
        await at_rest(made)


async def test_a_message_that_is_cancelled_while_it_waits_leaves_the_line(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, step_s=0.02), engine=Watched) as made:
        await put(made.bus)
        first = await publish(made, "r1", "Hello!", max_tokens=40)
        await until(lambda: first.frames > 0)
        second = await publish(made, "r2", "And you?")
        with anyio.fail_after(2.0):
            while not ((slot := await slot_of(made.bus)) and slot.line):
                await anyio.sleep(0.01)
        second.leave()
        with anyio.fail_after(5.0):
            await first.reply()
        await at_rest(made)
        assert [turn.request for turn in await kept(made.bus)] == ["r1"]


async def test_a_message_that_nobody_wants_any_more_does_not_hold_what_its_dead_worker_had_entered(
    broker: NatsServer,
) -> None:
    async with fleet(config_for(broker.url, step_s=0.02), engine=Watched) as made:
        await put(made.bus)
        caller = await publish(made, "r1", "Hello!", max_tokens=100)
        await until(lambda: caller.frames > 0)
        made.kill("decode-1")
        caller.leave()
        await at_rest(made)
        await made.add("decode", "decode-2")
        assert isinstance((await say(made, "Hello again!")).end, Done)


async def test_a_reply_that_is_not_finished_is_not_history(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, step_s=0.02), engine=Watched) as made:
        await put(made.bus)
        caller = await publish(made, "r1", "Hello!", max_tokens=500)
        await until(lambda: caller.frames > 2)
        caller.leave()
        await at_rest(made)
        assert await kept(made.bus) == []


async def test_a_creator_without_a_persona_is_a_clear_error(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), engine=Watched) as made:
        reply = await say(made, "Hello!")
        assert isinstance(reply.end, Failed)
        error = reply.end.error
        assert (error.status, error.code, error.param) == (404, "persona_not_found", "creator")
        assert "headrace persona put ada" in error.message
        await at_rest(made)
        assert await backlog(made.bus, "DLQ") == 1


async def test_a_version_that_is_not_kept_any_more_is_said_so(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), prefill=0, engine=Watched) as made:
        revision = await put(made.bus)
        victim = await made.add("prefill", "victim")
        victim.engine.pause()
        caller = await publish(made, "r1", "Hello!")
        await until(lambda: len(prompts(made, "victim")) == 1)
        made.kill("victim")
        for number in range(17):
            await put(made.bus, f"Version {number}.")
        await made.add("prefill", "prefill-1")
        with anyio.fail_after(8.0):
            reply = await caller.reply()
        assert isinstance(reply.end, Failed)
        assert f"Version {revision}" in reply.end.error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"message": ""}, "message"),
        ({"message": {"role": "assistant", "content": "no"}}, "message.role"),
        ({"message": "hi", "conversation": 7}, "conversation"),
        ({"messages": [user("hi")], "metadata": {"persona": "eve"}}, "metadata.persona"),
        ({"message": "hi", "messages": [user("hi")]}, "message"),
        ({"messages": [user("hi"), user("ho")], "metadata": {"persona": "ada"}}, "messages"),
    ],
)
async def test_a_malformed_event_names_the_field(broker: NatsServer, fields: dict[str, Any], param: str) -> None:
    async with fleet(config_for(broker.url), engine=Watched) as made:
        reply = await made.ask(creator="ada", **{"messages": None, **fields})
        assert isinstance(reply.end, Failed)
        assert (reply.end.error.param, reply.end.error.status) == (param, 400)


async def test_a_history_that_does_not_fit_is_a_clear_error(broker: NatsServer) -> None:
    config = msgspec.structs.replace(config_for(broker.url), conversations=Conversations(window_turns=3, step_turns=2))
    async with fleet(config, engine=Watched) as made:
        await put(made.bus, "Short.")
        for number in range(3):
            said = Turn(
                number=number + 1, request=f"r{number}", origin=str(number), message=user("sea " * 1500), reply=""
            )
            await made.bus.store("turns.ada.c1", msgspec.json.encode(said), msg_id=f"t{number}", timeout_s=2.0)
        reply = await say(made, "And you?")
        assert isinstance(reply.end, Failed)
        error = reply.end.error
        assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "conversation")
        assert "3 exchanges" in error.message
        assert "begin a new conversation" in error.message
        long = await say(made, "sea " * 4500, "c2")
        assert isinstance(long.end, Failed)
        assert long.end.error.param == "message"
        much = await say(made, "And you?", "c3", max_tokens=5000)
        assert isinstance(much.end, Failed)
        assert much.end.error.param == "max_tokens"


async def test_a_published_persona_is_warm_before_it_is_asked_for(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), engine=Watched) as made:
        await until(lambda: made.prefill().owns("ada"))
        await put(made.bus)
        await until(lambda: len(made.prefill().warm_ups.prefixes.of("ada").ids) > 0)
        reply = await say(made, "Hello!", None)
        assert isinstance(reply.end, Done)
        shared = len(made.prefill().warm_ups.prefixes.of("ada").ids) // 4
        assert reply.end.usage.cached_tokens == shared // 32 * 32 > 0
        await put(made.bus, OTHER)
        salt = made.prefill().warm_ups.prefixes.of("ada").salt
        engine = made.workers["prefill-1"].engine
        assert isinstance(engine, Watched)
        await until(lambda: any(chat["messages"][0]["content"] == OTHER for chat in engine.rendered))
        other = (await engine.render({"messages": [{"role": "system", "content": OTHER}, user("x")]})).token_ids
        await until(lambda: engine.truly_cached_tokens(salt, other) >= 160)


async def test_only_the_owner_warms_a_persona_and_only_when_it_has_time(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), prefill=2, engine=Watched) as made:
        await until(lambda: made.prefill("prefill-1").owns("ada") != made.prefill("prefill-2").owns("ada"))
        owner, other = sorted(("prefill-1", "prefill-2"), key=lambda name: not made.prefill(name).owns("ada"))
        made.prefill(owner)._weigh = lambda: None  # type: ignore[method-assign]
        made.prefill(owner).slots.load = 0.9
        await put(made.bus)
        await until(lambda: bool(made.prefill(owner).persona_warmer._tries))
        await anyio.sleep(0.1)
        assert not made.prefill(owner).warm_ups.prefixes.of("ada").ids
        made.prefill(owner).slots.load = 0.0
        await until(lambda: len(made.prefill(owner).warm_ups.prefixes.of("ada").ids) > 0)
        assert not made.prefill(other).warm_ups.prefixes.of("ada").ids
        await until(lambda: not made.prefill(owner).persona_warmer._tries)


async def test_a_persona_that_its_template_breaks_on_breaks_nothing_else(broker: NatsServer) -> None:
    class Broken(Watched):
        async def render(self, chat: Mapping[str, Any]) -> Rendered:
            if "bad" in (chat.get("chat_template_kwargs") or {}):
                raise TypeError("bad")
            return await super().render(chat)

    async with fleet(config_for(broker.url), engine=Broken) as made:
        await until(lambda: made.prefill().owns("ada"))
        await put(made.bus, bad=True)
        await until(lambda: not made.prefill().persona_warmer._tries)
        reply = await say(made, "Hello!")
        assert isinstance(reply.end, Failed)
        assert reply.end.error.code == "internal_error"
        await put(made.bus)
        assert isinstance((await say(made, "Hello!")).end, Done)
        await at_rest(made)
        assert len(await kept(made.bus)) == 1


async def test_an_error_is_no_history_though_a_reply_was_about_to_be_told(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, kept_ahead = conversations.Conversations.keep, list[str]()

    async def dying(self: conversations.Conversations, *exchange: Any) -> None:
        await keep(self, *exchange)
        kept_ahead.append("")
        await anyio.sleep_forever()

    monkeypatch.setattr(conversations.Conversations, "keep", dying)
    async with fleet(config_for(broker.url), engine=Watched) as made:
        await put(made.bus)
        caller = await publish(made, "r1", "Hello!", max_tokens=5, seed=3)
        await until(lambda: bool(kept_ahead))
        slot = await slot_of(made.bus)
        assert slot is not None
        assert slot.reply
        made.kill("decode-1")
        await made.add("decode", "decode-2")
        with anyio.fail_after(8.0):
            reply = await caller.reply()
        assert isinstance(reply.end, Failed)
        assert reply.end.error.code == "reply_lost"
        await at_rest(made)
        assert await kept(made.bus) == []


async def test_a_persona_is_warmed_where_a_route_sends_its_creator(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), prefill=2, engine=Watched) as made:
        await until(lambda: made.prefill("prefill-1").owns("ada") != made.prefill("prefill-2").owns("ada"))
        owner, other = sorted(("prefill-1", "prefill-2"), key=lambda name: not made.prefill(name).owns("ada"))
        variant = next(number for number in range(100) if made.prefill(other).owns(f"ada~{number}"))
        route = msgspec.json.encode(Route(variants=(variant,), reason="moved"))
        await Bucket(made.bus, "routes").write("ada", route)
        await put(made.bus)
        await until(lambda: len(made.prefill(other).warm_ups.prefixes.of("ada").ids) > 0)
        await until(lambda: not made.prefill(owner).persona_warmer._tries)
        assert not made.prefill(owner).warm_ups.prefixes.of("ada").ids


@pytest.mark.parametrize("seed", [7])
async def test_a_conversation_survives_workers_that_die_all_the_time(broker: NatsServer, seed: int) -> None:
    chance = random.Random(seed)
    made_config = config_for(broker.url, step_s=0.005)
    config = msgspec.structs.replace(made_config, requests=msgspec.structs.replace(made_config.requests, starts_max=20))
    async with fleet(config, prefill=2, decode=2, engine=Watched) as made, anyio.create_task_group() as tasks:
        await put(made.bus)
        seen: list[list[Any]] = []

        async def mischief() -> None:
            for number in range(100):
                await anyio.sleep(chance.uniform(0.1, 0.4))
                victim = chance.choice(sorted(made.workers))
                if victim.startswith("prefill"):
                    seen.extend(prompts(made, victim))
                made.kill(victim)
                role: Role = "prefill" if victim.startswith("prefill") else "decode"
                await made.add(role, f"{role}-{number + 10}")

        tasks.start_soon(mischief)
        callers = [await publish(made, f"r{number}", f"Message {number}.", max_tokens=12) for number in range(8)]
        with anyio.fail_after(50.0):
            replies = [await caller.reply() for caller in callers]
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await at_rest(made)
        told = await kept(made.bus)
        assert sorted(turn.request for turn in told) == [f"r{number}" for number in range(8)], "each once"
        by_request = {caller.request: reply.text for caller, reply in zip(callers, replies, strict=True)}
        assert all(turn.reply == by_request[turn.request] for turn in told)
        assert [turn.number for turn in told] == list(range(1, 9))
        for name in made.workers:
            if name.startswith("prefill"):
                seen.extend(prompts(made, name))
        whole = [part for turn in told for part in (turn.message, assistant(turn.reply))]
        for messages in seen:
            assert messages[1:-1] == whole[: len(messages) - 2], "what it saw is what came before it"
            assert messages[-1] == whole[len(messages) - 2]


async def test_the_slot_of_a_conversation_is_plain_json(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, step_s=0.02), engine=Watched) as made:
        await put(made.bus)
        caller = await publish(made, "r1", "Hello!", max_tokens=20)
        await until(lambda: caller.frames > 0)
        entry = await Bucket(made.bus, slots.BUCKET).read("ada.c1")
        assert entry is not None
        told = msgspec.json.decode(entry.value)
        assert told["holder"].startswith("REQUESTS_interactive-1-")
        assert told["pins"] == {"persona": 1, "last": 0, "sent": 0}
        with anyio.fail_after(5.0):
            await caller.reply()
        await at_rest(made)
