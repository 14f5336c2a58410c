"""The simulated engine on an event loop, behind the port, and in several processes."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from pipeline.config import Config, Decode, Engine, LMCache, Model, Simulated
from pipeline.errors import EngineDead, EngineFailed, InvalidField, OperatorError, PromptTooLong
from workers.engines import port
from workers.engines.port import Step
from workers.engines.simulated import SimulatedEngine
from workers.engines.simulated.engine import TIER_VARIABLE, Work
from workers.engines.simulated.reply import EOS

pytestmark = pytest.mark.anyio

FAST = Config(
    engine="simulated",
    prefill=Engine(slots=4),
    decode=Decode(slots=64),
    simulated=Simulated(
        prefill_tokens_per_s=1e6, prefill_overhead_s=0.001, step_s=0.001, step_per_sequence_s=0.00001, kv_blocks=512
    ),
)
CHAT = {
    "messages": [
        {"role": "system", "content": "You are Mira, a cheerful marine biologist. " * 20},
        {"role": "user", "content": "What do whales sing about?"},
    ]
}
SALT = "ab12"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
async def _limit(anyio_backend: str) -> AsyncIterator[None]:
    async with asyncio.timeout(10):
        yield


@asynccontextmanager
async def started(config: Config, *roles: Work) -> AsyncIterator[list[SimulatedEngine]]:
    """Engines of these roles, closed at the end."""
    async with AsyncExitStack() as stack:
        engines = [SimulatedEngine(config, role) for role in roles]
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.close)
        yield engines


def with_(config: Config = FAST, **more: Any) -> Config:
    """`config` with other simulated figures."""
    return msgspec.structs.replace(config, simulated=msgspec.structs.replace(config.simulated, **more))


async def read(
    engine: port.Engine,
    key: str,
    ids: list[int],
    chat: Mapping[str, Any] = CHAT,
    max_tokens: int = 100,
    delivered: Sequence[int] = (),
) -> list[Step]:
    """A reply to its end."""
    return [step async for step in engine.decode(key, ids, SALT, chat, max_tokens, delivered)]


async def rest_of(steps: AsyncIterator[Step]) -> list[Step]:
    """What is left of a reply."""
    return [step async for step in steps]


def tokens_of(steps: list[Step]) -> list[int]:
    return [token_id for step in steps for token_id in step.token_ids]


def text_of(steps: list[Step]) -> str:
    return "".join(step.text for step in steps)


# --------------------------------------------------------------------------------------------------------------
# The port


async def test_it_is_an_engine_and_says_what_it_is() -> None:
    async with started(FAST, "decode") as (simulated,):
        engine: port.Engine = simulated
        await engine.warm_up()
        await engine.check()
        info = engine.info
        assert (info.model, info.max_model_len) == (FAST.model.served_name, FAST.model.max_model_len)
        assert (info.block_size, info.chunk_size, info.kv_blocks) == (32, 32, 512)
        assert int(info.fingerprint, 16) > 0


async def test_only_engines_of_one_set_up_have_one_fingerprint() -> None:
    other = msgspec.structs.replace(FAST, model=Model(dtype="float32"))
    prints = [SimulatedEngine(config, "decode").info.fingerprint for config in (FAST, FAST, other, with_(seed=2))]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


async def test_a_request_passes_through_prefill_and_decode() -> None:
    async with started(FAST, "prefill", "decode") as (prefill, decode):
        ids = (await prefill.render(CHAT)).token_ids
        cold, warm = await prefill.prefill("a", ids, SALT), await prefill.prefill("b", ids, SALT)
        assert (cold.cached_tokens, cold.generated_tokens) == (0, 1)
        assert warm.cached_tokens == (len(ids) - 1) // 32 * 32
        steps = await read(decode, "a", ids)
        assert {step.cached_tokens for step in steps} == {len(ids) // 32 * 32}
        assert [step.finish_reason for step in steps][-1] == "stop"
        assert tokens_of(steps)[-1] == EOS
        assert text_of(steps)


async def test_prompts_under_another_salt_are_not_found() -> None:
    async with started(FAST, "prefill", "decode") as (prefill, decode):
        ids = (await prefill.render(CHAT)).token_ids
        await prefill.prefill("a", ids, SALT)
        assert (await prefill.prefill("b", ids, "cd")).cached_tokens == 0
        other = await rest_of(decode.decode("c", ids, "ef", CHAT, 5))
        assert other[0].cached_tokens == 0


async def test_the_tier_of_a_process_ends_with_its_last_engine() -> None:
    async with started(FAST, "prefill") as (prefill,):
        ids = (await prefill.render(CHAT)).token_ids
        await prefill.prefill("a", ids, SALT)
    async with started(FAST, "decode") as (decode,):
        assert (await read(decode, "a", ids))[0].cached_tokens == 0


@pytest.mark.parametrize("at", [0, 1, 5, 8])
async def test_a_reply_continued_elsewhere_equals_the_uninterrupted_one(at: int) -> None:
    chat = CHAT | {"stop": ["not in it"]}
    async with started(FAST, "decode", "decode") as (first, second):
        ids = (await first.render(chat)).token_ids
        full = await read(first, "a", ids, chat)
        rest = await read(second, "a", ids, chat, max_tokens=100, delivered=tokens_of(full)[:at])
        assert tokens_of(rest) == tokens_of(full)[at:]
        assert rest[0].before + text_of(rest) == text_of(full)
        nothing = await read(second, "b", ids, chat, delivered=tokens_of(full))
        assert [(list(step.token_ids), step.finish_reason) for step in nothing] == [([], "stop")]


@pytest.mark.parametrize("ends_by", ["stop string", "stop token", "length"])
async def test_a_reply_whose_end_has_been_delivered_says_what_was_held_back(ends_by: str) -> None:
    async with started(FAST, "decode", "decode") as (first, second):
        ids = (await first.render(CHAT)).token_ids
        full = await read(first, "a", ids)
        at, max_tokens = 4, 100
        chat: dict[str, Any] = CHAT | {"stop": ["not in it"]}
        if ends_by == "stop string":
            chat = CHAT | {
                "stop": [text_of(full)[len(text_of(full[:at])) - 2 :][:2]],
                "include_stop_str_in_output": True,
            }
        elif ends_by == "stop token":
            chat |= {"stop_token_ids": [tokens_of(full)[at - 1]]}
        else:
            max_tokens = at
        whole = await read(first, "b", ids, chat, max_tokens=max_tokens)
        (nothing,) = await read(second, "c", ids, chat, max_tokens=max_tokens, delivered=tokens_of(whole))
        assert nothing.before + nothing.text == text_of(whole)
        assert (list(nothing.token_ids), nothing.finish_reason) == ([], whole[-1].finish_reason)


async def test_prefill_makes_the_first_token_where_it_is_to_begin_the_reply() -> None:
    async with started(FAST, "prefill", "decode") as (prefill, decode):
        ids = (await prefill.render(CHAT)).token_ids
        begun = await prefill.prefill("a", ids, SALT, CHAT, begins=100)
        whole = await read(decode, "a", ids)
        assert begun.first_id == tokens_of(whole)[0]
        rest = await read(decode, "b", ids, delivered=[begun.first_id])
        assert (tokens_of(rest), rest[0].before) == (tokens_of(whole)[1:], begun.first_text)
        assert (await prefill.prefill("b", ids, SALT, CHAT)).first_id is None


async def test_several_choices_are_as_many_sequences_each_with_its_own_end() -> None:
    async with started(FAST, "decode") as (decode,):
        ids = (await decode.render(CHAT)).token_ids
        alone = await read(decode, "a", ids)
        steps = await read(decode, "b", ids, CHAT | {"n": 3})
        of = [[step for step in steps if step.choice == choice] for choice in range(3)]
        assert tokens_of(of[0]) == tokens_of(alone), "the first choice is what one alone would be"
        assert len({tuple(tokens_of(one)) for one in of}) == 3
        assert sorted(step.choice for step in steps if step.finish_reason is not None) == [0, 1, 2]
        running = decode.decode("d", ids, SALT, CHAT | {"n": 3}, 100)
        await anext(running)
        assert decode.usage().running == 3
        await running.aclose()
        assert (decode.usage().running, decode.usage().waiting) == (0, 0)


async def test_a_client_decides_where_its_reply_ends() -> None:
    async with started(FAST, "decode") as (engine,):
        ids = (await engine.render(CHAT)).token_ids
        long = await read(engine, "a", ids, CHAT | {"ignore_eos": True}, 90)
        assert (len(tokens_of(long)), long[-1].finish_reason) == (90, "length")
        word = text_of(long).split()[6]
        short = await read(engine, "b", ids, CHAT | {"ignore_eos": True, "stop": [f" {word}"]}, 90)
        assert text_of(short) == text_of(long)[: text_of(long).index(f" {word}")]
        assert short[-1].finish_reason == "stop"


async def test_a_reply_never_passes_the_models_context() -> None:
    small = msgspec.structs.replace(FAST, model=Model(max_model_len=300))
    async with started(small, "decode") as (engine,):
        ids = (await engine.render(CHAT)).token_ids
        steps = await read(engine, "a", ids, CHAT | {"ignore_eos": True}, 1000)
        assert (len(ids) + len(tokens_of(steps)), steps[-1].finish_reason) == (300, "length")
        with pytest.raises(PromptTooLong):
            await engine.render({"messages": [{"role": "user", "content": "whale song " * 300}]})
        with pytest.raises(PromptTooLong):
            await engine.prefill("b", list(range(300)), SALT)


async def test_what_cannot_be_rendered_is_refused_before_any_work() -> None:
    async with started(FAST, "prefill") as (engine,):
        with pytest.raises(InvalidField, match="str"):
            await engine.render({"messages": [{"role": "user", "content": 5}]})
        with pytest.raises(InvalidField, match="str"):
            await engine.render(CHAT | {"stop": 5})


async def test_a_chunk_must_be_whole_blocks() -> None:
    engine = SimulatedEngine(msgspec.structs.replace(FAST, lmcache=LMCache(chunk_size=48)), "prefill")
    with pytest.raises(OperatorError, match="48"):
        await engine.start()


# --------------------------------------------------------------------------------------------------------------
# The step loop


async def test_what_one_step_gave_to_all_sequences_is_read_in_one_turn_of_the_loop() -> None:
    turn, counting = 0, True
    turns: dict[str, list[int]] = {}

    def count() -> None:
        nonlocal turn
        turn += 1
        if counting:
            asyncio.get_running_loop().call_soon(count)

    async def note(engine: SimulatedEngine, key: str) -> None:
        async for _ in engine.decode(key, [1] * 40, SALT, {"ignore_eos": True}, 100):
            turns.setdefault(key, []).append(turn)

    async with started(FAST, "decode") as (engine,):
        await engine.warm_up()
        count()
        await asyncio.gather(*(note(engine, str(number)) for number in range(8)))
        counting = False
    all_run = max(seen[0] for seen in turns.values())
    together = {turn for turn in turns["0"] if turn >= all_run}
    assert together
    assert all(len(seen) == 100 and together <= set(seen) for seen in turns.values())


async def test_a_reader_that_falls_behind_gets_its_steps_as_one() -> None:
    async with started(FAST, "decode") as (engine,):
        async with aclosing(engine.decode("slow", [1] * 40, SALT, {"ignore_eos": True}, 10)) as slow:
            first = await anext(slow)
            await read(engine, "other", [2] * 40, {"ignore_eos": True}, 30)
            (rest,) = [step async for step in slow]
        whole = await read(engine, "again", [1] * 40, {"ignore_eos": True}, 10)
        assert [*first.token_ids, *rest.token_ids] == tokens_of(whole)
        assert first.text + rest.text == text_of(whole)
        assert rest.finish_reason == "length"


async def test_a_paused_engine_ends_no_step_until_it_resumes() -> None:
    async with started(FAST, "decode") as (engine,):
        async with aclosing(engine.decode("a", [1] * 40, SALT, {"ignore_eos": True}, 20)) as steps:
            said = tokens_of([await anext(steps)])
            engine.pause()
            with anyio.move_on_after(0.05) as stalled:
                while True:
                    said += (await anext(steps)).token_ids
            assert stalled.cancelled_caught
            assert len(said) < 20
        engine.resume()
        assert len(tokens_of(await read(engine, "b", [1] * 40, {"ignore_eos": True}, 20))) == 20


async def test_usage_tells_what_is_running_and_what_waits() -> None:
    async with started(with_(kv_blocks=10), "decode") as (engine,):
        async with (
            aclosing(engine.decode("a", [1] * 64, SALT, {"ignore_eos": True}, 200)) as one,
            aclosing(engine.decode("b", [2] * 290, SALT, {"ignore_eos": True}, 2)) as two,
        ):
            await anext(one)
            engine.pause()
            waiting = asyncio.create_task(anext(two))
            await asyncio.sleep(0)
            usage = engine.usage()
            assert (usage.running, usage.waiting, usage.preemptions) == (1, 1, 0)
            assert usage.kv_usage_ratio == pytest.approx(0.3)
            engine.resume()
            await one.aclose()
            assert (await waiting).token_ids
        assert engine.usage() == port.EngineUsage(running=0, waiting=0, kv_usage_ratio=0.0, preemptions=0)


async def test_closing_a_decode_or_cancelling_a_prefill_frees_its_blocks_at_once() -> None:
    slow = with_(prefill_tokens_per_s=100.0)
    async with started(slow, "decode") as (engine,):
        steps = engine.decode("a", [1], SALT, {"ignore_eos": True}, 1000)
        await anext(steps)
        prefill = asyncio.create_task(engine.prefill("b", list(range(1000)), SALT))
        while engine.usage().running < 2:
            await anext(steps)
        await steps.aclose()
        assert (engine.usage().running, engine.usage().kv_usage_ratio) == (1, 32 / 512)
        prefill.cancel()
        with pytest.raises(asyncio.CancelledError):
            await prefill
        assert (engine.usage().running, engine.usage().kv_usage_ratio) == (0, 0.0)


# --------------------------------------------------------------------------------------------------------------
# Failures


async def test_an_engine_fails_when_it_is_told_to_and_only_then() -> None:
    async with started(FAST, "prefill") as (engine,):
        engine.fail_next("prefill")
        engine.fail_next("decode", 2)
        await engine.warm_up()
        with pytest.raises(EngineFailed, match="as it was told"):
            await engine.prefill("a", [1] * 40, SALT)
        for key in "bc":
            with pytest.raises(EngineFailed):
                await read(engine, key, [1] * 40)
        await engine.prefill("d", [1] * 40, SALT)
        assert await read(engine, "e", [1] * 40)
        assert engine.usage().kv_usage_ratio == 0.0


async def test_failures_come_at_their_ratio_and_from_the_seed() -> None:
    async def failed(engine: SimulatedEngine) -> list[int]:
        found = []
        for number in range(60):
            try:
                await engine.prefill(str(number), [1] * 40, SALT)
            except EngineFailed:
                found.append(number)
        return found

    fast = with_(failure_ratio=0.3, prefill_overhead_s=0.0)
    async with started(fast, "prefill", "prefill") as engines:
        one, two = [await failed(engine) for engine in engines]
        assert one == two
        assert 8 <= len(one) <= 30


async def test_a_dead_engine_says_so_to_all() -> None:
    async with started(FAST, "decode") as (engine,):
        steps = engine.decode("a", [1] * 40, SALT, {"ignore_eos": True}, 1000)
        await anext(steps)
        prefill = asyncio.create_task(engine.prefill("b", list(range(3000)), SALT))
        await asyncio.sleep(0)
        engine.die("Out of memory.")
        with pytest.raises(EngineDead, match="Out of memory"):
            await rest_of(steps)
        for work in (prefill, engine.check(), engine.prefill("c", [1], SALT), read(engine, "d", [1])):
            with pytest.raises(EngineDead, match="Out of memory"):
                await work
        assert engine.usage().running == 0


async def test_closing_an_engine_ends_what_is_under_way() -> None:
    engine = SimulatedEngine(FAST, "decode")
    with pytest.raises(EngineDead, match="not been started"):
        await engine.check()
    await engine.start()
    steps = engine.decode("a", [1] * 40, SALT, {"ignore_eos": True}, 1000)
    await anext(steps)
    await engine.close()
    with pytest.raises(EngineDead, match="closed"):
        await rest_of(steps)
    await engine.close()


# --------------------------------------------------------------------------------------------------------------
# Several processes

OTHER_PROCESS = """
import asyncio, json, sys
import msgspec
from pipeline.config import Config
from workers.engines.simulated import SimulatedEngine

async def main():
    told = json.load(sys.stdin)
    engine = SimulatedEngine(msgspec.convert(told["config"], Config), "decode")
    await engine.start()
    ids = (await engine.render(told["chat"])).token_ids
    steps = [step async for step in engine.decode("a", ids, told["salt"], told["chat"], 100)]
    await engine.close()
    print(json.dumps({
        "ids": ids,
        "reply": [token for step in steps for token in step.token_ids],
        "text": "".join(step.text for step in steps),
        "cached": steps[0].cached_tokens,
    }))

asyncio.run(main())
"""


async def test_another_process_finds_the_kv_and_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIER_VARIABLE, str(tmp_path / "lmcache"))
    async with started(FAST, "prefill", "decode") as (prefill, decode):
        ids = (await prefill.render(CHAT)).token_ids
        await prefill.prefill("a", ids, SALT)
        told = msgspec.json.encode({"config": msgspec.to_builtins(FAST), "chat": CHAT, "salt": SALT})
        done = await anyio.run_process(
            [sys.executable, "-c", OTHER_PROCESS], input=told, env=os.environ | {"PYTHONHASHSEED": "7"}, stderr=None
        )
        there = msgspec.json.decode(done.stdout)
        here = await read(decode, "a", ids)
    assert there == {"ids": ids, "reply": tokens_of(here), "text": text_of(here), "cached": len(ids) // 32 * 32}
