"""How disaggregated serving has failed elsewhere, one test a failure, by the number it has in our notes on the field.

What needs a real engine or a real HTTP client is where those are: 4 (blocks reused during a write) and 7 (failed loads) in
`tests/e2e`, 14 (oversized payloads) in `tests/gateway`. 2 (a disconnect, at any stage) is `test_cancel.py`.
"""

import random
from typing import Any

import anyio
import msgspec
import pytest

from pipeline.bus.connection import Bus
from pipeline.config import Engine
from pipeline.limits import ASK_SILENT_MAX_S
from pipeline.protocol.credits import GrantState
from pipeline.protocol.messages import Done, Failed
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, Fleet, Reply, config_for, fleet, nothing_left, until
from tests.workers.test_loops import at_rest

pytestmark = pytest.mark.anyio


def whole(reply: Reply) -> Done:
    assert isinstance(reply.end, Done), reply.end
    return reply.end


async def together(made: Fleet, count: int, **fields: Any) -> list[Reply]:
    """So many requests at once, of as many creators."""
    replies: list[Reply] = []

    async def one(number: int) -> None:
        replies.append(await made.ask(creator=f"c{number}", within_s=40.0, **fields))

    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(one, number)
    return replies


async def begun(made: Fleet, request: str, **fields: Any) -> Caller:
    """A request under way."""
    caller = Caller(made.bus, request)
    await caller.listen()
    await caller.publish("alice", **{"max_tokens": 300, "ignore_eos": True, **fields})
    return caller


async def test_01_decode_without_room_does_not_deadlock_prefill_and_queue(broker: NatsServer) -> None:
    # 20 blocks, of which 2 in reserve, 6 a request: three at a time, for 60 requests and 8 prefill slots.
    async with fleet(config_for(broker.url, kv_blocks=20, slots=8)) as made:
        for reply in await together(made, 60, max_tokens=20, ignore_eos=True):
            assert whole(reply).usage.completion_tokens == len(reply.ids) == 20
        await at_rest(made)


async def test_03_a_disconnect_before_the_first_token_does_not_hold_up_the_next_request(broker: NatsServer) -> None:
    # What an engine has begun it ends: a step, which chunked prefill keeps short.
    short_steps = Engine(slots=1, max_num_batched_tokens=16)
    config = msgspec.structs.replace(config_for(broker.url, prefill_tokens_per_s=50.0), prefill=short_steps)
    async with fleet(config) as made:
        caller = await begun(made, "leaver")
        await until(lambda: made.workers["prefill-1"].engine.usage().running > 0)
        caller.leave()
        short = [{"role": "user", "content": "hi"}]
        with anyio.fail_after(1.5):
            whole(await made.ask(creator="next", messages=short, max_tokens=2))


async def test_05_a_dead_prefill_worker_does_not_hold_decode_blocks(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, prefill_overhead_s=5.0)) as made:
        await begun(made, "orphan")
        await until(lambda: made.decode().ledger.count(GrantState.GRANTED) == 1)
        made.kill("prefill-1")
        ledger = made.decode().ledger
        await until(lambda: ledger.free == ledger.blocks, within_s=ASK_SILENT_MAX_S + 0.5)
        assert ledger.totals.expired == 1


async def test_06_waiting_for_room_does_not_let_the_kv_go_wrong(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, kv_blocks=20, slots=4)) as made:
        undisturbed = await made.ask(max_tokens=20, ignore_eos=True)
        made.decode().ledger.free = 0
        caller = await begun(made, "waiter", max_tokens=20)
        await until(lambda: made.decode().ledger.count(GrantState.WAITING) == 1)
        await anyio.sleep(2 * ASK_SILENT_MAX_S)  # longer than any lease of an ask: it lives because it is repeated
        made.decode().ledger.free = made.decode().ledger.blocks
        reply = await caller.reply()
        assert (reply.ids, reply.text) == (undisturbed.ids, undisturbed.text)
        await at_rest(made)


LOSABLE = {
    "an ask": ("prefill-1", "credit."),
    "a verdict": ("decode-1", ""),
    "a handoff": ("prefill-1", "handoff."),
    "a claim": ("prefill-1", "_INBOX.test"),
    "a takeover": ("decode-1", "_INBOX.test"),
}


@pytest.mark.parametrize("what", list(LOSABLE))
async def test_08_one_lost_message_of_any_kind_costs_a_moment_and_not_the_request(
    broker: NatsServer, what: str
) -> None:
    worker, prefix = LOSABLE[what]
    async with fleet(config_for(broker.url)) as made:
        lost = lose_first(made.workers[worker].bus, prefix or made.prefill().desk.verdicts_at)
        with anyio.fail_after(5.0):
            whole(await made.ask(max_tokens=5))
        assert lost, "nothing was lost"
        await at_rest(made)


@pytest.mark.parametrize("what", ["tokens", "done"])
async def test_08_one_lost_frame_is_repaired(broker: NatsServer, what: str) -> None:
    async with fleet(config_for(broker.url)) as made:
        caller = Caller(made.bus, "repaired")
        await caller.listen()
        lost = lose_first(made.workers["decode-1"].bus, f"{caller.inbox}.r", holding=what.encode())
        await caller.publish("alice", max_tokens=12, ignore_eos=True)
        with anyio.fail_after(5.0):
            reply = await caller.reply()
        assert whole(reply).usage.completion_tokens == len(reply.ids) == 12
        assert lost
        await at_rest(made)


async def test_09_a_failed_prefill_is_told_within_a_second_and_frees_slot_and_blocks(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        made.workers["prefill-1"].engine.fail_next("prefill")
        with anyio.fail_after(1.0):
            reply = await made.ask()
        assert isinstance(reply.end, Failed)
        await at_rest(made)


async def test_10_a_failed_decode_is_told_and_frees_its_blocks(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        made.workers["decode-1"].engine.fail_next("decode")
        reply = await made.ask(max_tokens=20, ignore_eos=True)
        assert isinstance(reply.end, Failed)
        await at_rest(made)


async def test_11_decode_never_preempts(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, kv_blocks=64, slots=8), prefill=2) as made:
        await together(made, 40, max_tokens=60, ignore_eos=True)
        assert made.workers["decode-1"].engine.usage().preemptions == 0
        assert made.decode().ledger.disagreements == 0
        await at_rest(made)


async def test_12_work_that_was_dequeued_survives_its_worker(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, prefill_overhead_s=0.3)) as made:
        caller = await begun(made, "survivor", max_tokens=5)
        await until(lambda: made.workers["prefill-1"].engine.usage().running > 0)
        made.kill("prefill-1")
        await made.add("prefill", "prefill-2")
        with anyio.fail_after(5.0):
            whole(await caller.reply())
        await at_rest(made)


async def test_13_expired_work_is_dropped_and_the_stream_is_empty_afterwards(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), prefill=0) as made:
        for number in range(20):
            await begun(made, f"stale-{number}", timeout_ms=1)
        await made.add("prefill", "prefill-1")
        await at_rest(made)
        await nothing_left(made.bus)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("tokens", [1, 2, 7])
async def test_15_16_prefill_makes_one_token_and_the_client_gets_exactly_what_it_asked_for(
    broker: NatsServer, field: str, tokens: int
) -> None:
    async with fleet(config_for(broker.url)) as made:
        fields: dict[str, Any] = {field: tokens, "min_tokens": tokens, "ignore_eos": True}
        end = whole(await made.ask(**fields))
        assert (end.usage.completion_tokens, end.usage.prefill_generated_tokens) == (tokens, 1)


async def test_17_a_reply_that_ends_at_once_returns_its_credit(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        reply = await made.ask(max_tokens=40)
        first = reply.text.split()[0]
        end = whole(await made.ask(max_tokens=40, stop=[first]))
        assert (end.finish_reason, end.text.strip()) == ("stop", "")
        await at_rest(made)


async def test_18_usage_says_what_was_cached_and_what_was_made(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        cold, warm = (
            whole(await made.ask(max_tokens=6, ignore_eos=True)),
            whole(await made.ask(max_tokens=6, ignore_eos=True)),
        )
        assert cold.usage.prompt_tokens == warm.usage.prompt_tokens
        assert cold.usage.completion_tokens == warm.usage.completion_tokens == 6
        assert cold.usage.cached_tokens == 0
        assert 0 < warm.usage.cached_tokens < warm.usage.prompt_tokens


async def test_23_random_cancels_leak_no_slot_no_block_and_no_counter(broker: NatsServer) -> None:
    chance = random.Random(23)
    async with fleet(config_for(broker.url, slots=6, step_s=0.002), prefill=2, decode=2) as made:

        async def one(number: int) -> None:
            await anyio.sleep(chance.random())
            caller = await begun(made, f"leaver-{number}", max_tokens=40)
            await anyio.sleep(chance.random() * 0.2)
            caller.leave()

        async with anyio.create_task_group() as tasks:
            for number in range(300):
                tasks.start_soon(one, number)
        await at_rest(made)
        assert made.prefill("prefill-1").queued_tokens == made.prefill("prefill-2").queued_tokens == 0
        whole(await made.ask(max_tokens=4))


def lose_first(bus: Bus, prefix: str, holding: bytes = b"") -> list[str]:
    """Lose the first message of a worker to subjects with this prefix, whose payload holds this; its subject, once lost."""
    lost: list[str] = []
    publish, post = bus.publish, bus.post

    def drops(subject: str, data: bytes) -> bool:
        if lost or not subject.startswith(prefix) or holding not in data:
            return False
        lost.append(subject)
        return True

    async def publish_or_lose(subject: str, data: bytes, *args: Any, **kwargs: Any) -> None:
        if not drops(subject, data):
            await publish(subject, data, *args, **kwargs)

    def post_or_lose(subject: str, data: bytes, *args: Any, **kwargs: Any) -> None:
        if not drops(subject, data):
            post(subject, data, *args, **kwargs)

    bus.publish = publish_or_lose  # type: ignore[method-assign]
    bus.post = post_or_lose  # type: ignore[method-assign]
    return lost
