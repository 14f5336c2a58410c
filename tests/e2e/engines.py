"""Real engines, driven from a process of their own: vLLM's environment, warnings and logs stay out of pytest's.

    python -m tests.e2e.engines reference MODEL CONFIG   one plain vLLM engine, without LMCache
    python -m tests.e2e.engines split MODEL CONFIG       a prefill and a decode engine over a running LMCache server
    python -m tests.e2e.engines hosts MODEL CONFIG CONFIG  prefill over one LMCache server, decode over another
    python -m tests.e2e.engines storm MODEL CONFIG CLASS aborts on a prefill engine while it loads, under a connector class
    python -m tests.e2e.engines warmth MODEL CONFIG      a prefill engine with a small cache, and what its events say of it

Each prints one JSON document to stdout, and nothing else. CONFIG is a TOML file.
"""

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from pipeline import config as configuration
from pipeline.config import Config
from pipeline.errors import EngineFailed
from tests.e2e.hosts import hosts
from tests.e2e.prompts import PROMPTS, REPLY_TOKENS, SPLIT_PROMPTS
from tests.e2e.warmth import warmth
from workers.engines import launch
from workers.engines.port import EngineInfo, EngineUsage, Prefilled
from workers.engines.vllm import VllmEngine, _Usage

SALT: Final = "5a17" * 8

STORM_PROMPTS: Final = 15
STORM_PROMPT_TOKENS: Final = 64
STORM_ROUNDS: Final = 4
STORM_STEP_TOKENS: Final = 64
STORM_BUSY_TOKENS: Final = 1024
"""A load is open to the race from when it is scheduled to the end of that step, and LMCache needs several steps to answer the
look-up before, more of them on a busy machine. So a prompt of 16 steps computes beside the loads, which makes steps long
enough to hit, and one load is given up in each of them."""

FORGET_S: Final = 10.0


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine said. `cached_tokens` of its prompt were loaded."""

    prompt: list[int]
    token_ids: list[int]
    text: str
    cached_tokens: int
    finish_reason: str | None


TakenUp = tuple[list[int], str, int | str | None]
"""All tokens and all text of a reply that was taken up, and what ended it."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """What two engines did with `SPLIT_PROMPTS`, in order. `continued` are replies taken up after so many tokens.

    `begun` has their first tokens from prefill; `begun_to_stop`, and what was `continued_from_stop` and `_from_stop_token`, that
    of a reply whose first token ends it.
    """

    prefill: EngineInfo
    decode: EngineInfo
    prefilled: list[Prefilled]
    prefilled_again: Prefilled
    begun: list[Prefilled]
    begun_to_stop: Prefilled
    replies: list[Reply]
    usage: list[EngineUsage]
    stopped: Reply
    continued: dict[int, TakenUp]
    continued_to_stop: TakenUp
    continued_after_all: TakenUp
    continued_from_stop: TakenUp
    continued_from_stop_token: TakenUp
    children: list[list[str]]
    sockets: list[str]
    seconds: dict[str, float]


class Steps(_Usage):
    """Counts an engine's steps: vLLM speaks to its stat logger at the end of each."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._ended = asyncio.Event()

    def record(self, *args: Any, **kwargs: Any) -> None:
        super().record(*args, **kwargs)
        self._count += 1
        self._ended.set()

    async def after(self, steps: int) -> None:
        """Return when so many more steps have ended: the next is then about to run."""
        target = self._count + steps
        while self._count < target:
            self._ended.clear()
            await self._ended.wait()


class Storm(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an engine whose loads were aborted. `loaded_tokens` shows that there was something to abort.

    `freed`: at the end no request held a block.
    """

    alive: bool
    aborted: int
    loaded_tokens: int
    freed: bool


async def reply(engine: VllmEngine, key: str, prompt: list[int], chat: dict[str, Any], max_tokens: int) -> Reply:
    """A whole reply of a decode engine."""
    token_ids: list[int] = []
    text, cached_tokens, finish_reason = "", 0, None
    async for step in engine.decode(key, prompt, SALT, chat, max_tokens):
        token_ids += step.token_ids
        text += step.text
        cached_tokens, finish_reason = step.cached_tokens, step.finish_reason
    return Reply(
        prompt=prompt, token_ids=token_ids, text=text, cached_tokens=cached_tokens, finish_reason=finish_reason
    )


async def reference(model: str, config: Config) -> list[Reply]:
    """One engine without a connector, set up otherwise as a decode engine is: what every arrangement must equal."""
    launch.apply_environment(config, "decode")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from workers.engines import vllm_chat

    arguments = launch.engine_arguments(config, "decode", model)
    del arguments["kv_transfer_config"]
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        renderer = vllm_chat.renderer(engine)
        return [await _plain(engine, renderer, number) for number in range(len(PROMPTS))]
    finally:
        engine.shutdown(15)


async def _plain(engine: Any, renderer: Any, number: int) -> Reply:
    from workers.engines import vllm_chat

    chat = PROMPTS[number].chat
    prompt = (await vllm_chat.render(engine, renderer, chat, {})).token_ids
    parameters = vllm_chat.sampling(renderer, chat, prompt, REPLY_TOKENS, {}).parameters
    token_ids: list[int] = []
    text, finish_reason = "", None
    async for output in engine.generate({"prompt_token_ids": prompt}, parameters, f"reference-{number}"):
        token_ids += output.outputs[0].token_ids
        text += output.outputs[0].text
        finish_reason = output.outputs[0].finish_reason
    return Reply(prompt=prompt, token_ids=token_ids, text=text, cached_tokens=0, finish_reason=finish_reason)


async def split(model: str, config: Config) -> Split:
    """Every prompt through prefill, then decode. Then what a first use of each engine cannot show."""
    clock = time.monotonic
    marks = {"begin": clock()}
    prefill, decode = VllmEngine(config, "prefill", model), VllmEngine(config, "decode", model)
    try:
        for engine in (prefill, decode):
            await engine.start()
            await engine.warm_up()
        marks["started"] = clock()
        prompts = [(await prefill.render(prompt.chat)).token_ids for prompt in SPLIT_PROMPTS]
        prefilled = [await prefill.prefill(f"p{n}", prompt, SALT) for n, prompt in enumerate(prompts)]
        marks["prefilled"] = clock()
        replies = [
            await reply(decode, f"d{n}", prompt, SPLIT_PROMPTS[n].chat, REPLY_TOKENS)
            for n, prompt in enumerate(prompts)
        ]
        marks["decoded"] = clock()
        again = await prefill.prefill("again", prompts[-1], SALT)
        begun = [
            await prefill.prefill(f"b{n}", prompt, SALT, SPLIT_PROMPTS[n].chat, begins=REPLY_TOKENS)
            for n, prompt in enumerate(prompts)
        ]
        at_once = {"stop": [replies[0].text[0]]}
        begun_to_stop = await prefill.prefill("b", prompts[0], SALT, SPLIT_PROMPTS[0].chat | at_once, begins=8)
        stopped = await _stop_early(decode, prompts[0])
        taken_up = _Continued(decode, prompts[0], SPLIT_PROMPTS[0].chat)
        ids = replies[0].token_ids
        continued = {at: await taken_up.after(ids[:at]) for at in (1, 7, 16, REPLY_TOKENS - 1)}
        for engine in (prefill, decode):
            await engine.check()
        result = Split(
            prefill=prefill.info,
            decode=decode.info,
            prefilled=prefilled,
            prefilled_again=again,
            begun=begun,
            begun_to_stop=begun_to_stop,
            replies=replies,
            usage=[prefill.usage(), decode.usage()],
            stopped=stopped,
            continued=continued,
            continued_to_stop=await taken_up.after(ids[:3], stop=[replies[0].text[8:14]]),
            continued_after_all=await taken_up.after(ids),
            continued_from_stop=await taken_up.after(ids[:1], **at_once),
            continued_from_stop_token=await taken_up.after(ids[:1], stop_token_ids=ids[:1]),
            children=[],
            sockets=[],
            seconds={},
        )
    finally:
        await prefill.close()
        await decode.close()
    marks["closed"] = clock()
    names = list(marks)
    seconds = {later: marks[later] - marks[earlier] for earlier, later in pairwise(names)}
    return msgspec.structs.replace(result, children=_children(), sockets=_sockets(), seconds=seconds)


class _Continued:
    """Takes one reply up where another worker has left it."""

    def __init__(self, decode: VllmEngine, prompt: list[int], chat: dict[str, Any]) -> None:
        self._decode, self._prompt, self._chat = decode, prompt, chat

    async def after(self, delivered: list[int], **fields: Any) -> TakenUp:
        """The reply, of which `delivered` was there."""
        ids, text, stop_reason = list(delivered), "", None
        key = f"continued-{len(delivered)}-{len(fields)}"
        steps = self._decode.decode(key, self._prompt, SALT, self._chat | fields, REPLY_TOKENS, delivered)
        async for step in steps:
            ids += step.token_ids
            text += step.before + step.text
            stop_reason = step.stop_reason
        return ids, text, stop_reason


async def _stop_early(decode: VllmEngine, prompt: list[int]) -> Reply:
    """The first prompt again, with a stop string that is in its reply, across two tokens."""
    whole = await reply(decode, "whole", prompt, SPLIT_PROMPTS[0].chat, REPLY_TOKENS)
    stop = whole.text[8:14]
    return await reply(decode, "stopped", prompt, SPLIT_PROMPTS[0].chat | {"stop": [stop]}, REPLY_TOKENS)


def _children() -> list[list[str]]:
    """Command lines of the processes that this one has left. Python's own resource tracker lives as long as we do."""
    children = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    return [line for line in children if not any("resource_tracker" in part for part in line)]


def _sockets() -> list[str]:
    """What is left in the folder for temporary files, which is this process's alone."""
    return [str(path) for path in Path(tempfile.gettempdir()).rglob("*") if path.is_socket()]


async def storm(model: str, config: Config, connector: str) -> Storm:
    """Store prompts, forget them in HBM, and abort their loads at every step of their way while another prompt computes."""
    engine = VllmEngine(_with_connector(config, connector), "prefill", model)
    engine._usage = steps = Steps()
    rng = random.Random(4938)
    aborted, freed = 0, False
    await engine.start()
    try:
        prompts = [_random_prompt(rng, STORM_PROMPT_TOKENS) for _ in range(STORM_PROMPTS)]
        for number, prompt in enumerate(prompts):
            await engine.prefill(f"store-{number}", prompt, SALT)
        await _forget(engine)
        loaded = (await engine.prefill("load", prompts[0], SALT)).cached_tokens
        with suppress(EngineFailed):
            for turn in range(STORM_ROUNDS):
                await _forget(engine)
                busy = _random_prompt(rng, STORM_BUSY_TOKENS)
                aborted += await _aborts(engine, steps, busy, prompts, f"{turn}")
            freed = await _forget(engine)
            await engine.prefill("after", prompts[0], SALT)
        return Storm(alive=await _alive(engine), aborted=aborted, loaded_tokens=loaded, freed=freed)
    finally:
        await engine.close()


def _with_connector(config: Config, connector: str) -> Config:
    """`config` with another connector class for prefill, `module:Class`, and room in every step beside a long prompt.

    Without that room vLLM begins no load until the long prompt is done.
    """
    module, _, name = connector.partition(":")
    transfer = launch.connector(config, "prefill") | {"kv_connector": name, "kv_connector_module_path": module}
    extra = {**config.prefill.extra, "kv_transfer_config": transfer, "long_prefill_token_threshold": STORM_STEP_TOKENS}
    return msgspec.structs.replace(config, prefill=msgspec.structs.replace(config.prefill, extra=extra))


def _random_prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(tokens)]


async def _forget(engine: VllmEngine) -> bool:
    """Empty the engine's own prefix cache, so that what it is asked for next it must load from LMCache.

    Refused while any request holds blocks, which an aborted one does for a step or two. False: still refused after a while.
    """
    deadline_s = time.monotonic() + FORGET_S
    try:
        while not await engine._engine.reset_prefix_cache():
            if time.monotonic() > deadline_s:
                return False
    except Exception as error:
        raise EngineFailed("The engine has died.") from error
    return True


async def _aborts(engine: VllmEngine, steps: Steps, busy: list[int], prompts: list[list[int]], turn: str) -> int:
    """Load all prompts beside one that computes; give the first up after one step, the next after two… How many were."""
    computing = asyncio.ensure_future(engine.prefill(f"busy-{turn}", busy, SALT))
    await steps.after(1)
    loads = (
        _give_up(engine.prefill(f"abort-{turn}-{number}", prompt, SALT), steps.after(number + 1))
        for number, prompt in enumerate(prompts)
    )
    _, *given_up = await asyncio.gather(computing, *loads)
    return sum(map(bool, given_up))


async def _give_up(work: Coroutine[Any, Any, Prefilled], signal: Coroutine[Any, Any, None]) -> bool:
    """Cancel `work` at `signal`. False where it was done before."""
    task, bell = asyncio.ensure_future(work), asyncio.ensure_future(signal)
    await asyncio.wait({task, bell}, return_when=asyncio.FIRST_COMPLETED)
    bell.cancel()
    if task.done():
        await task
        return False
    task.cancel()
    await asyncio.wait({task})
    return True


async def _alive(engine: VllmEngine) -> bool:
    try:
        await engine.check()
    except EngineFailed:
        return False
    return True


def main(arguments: list[str]) -> None:
    """Run one of the commands above, and print its result."""
    # vLLM's processes log to stdout, also after we have printed: send all of that to stderr.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    what, model, path, *rest = arguments
    commands: dict[str, Callable[..., Coroutine[Any, Any, object]]] = {
        "reference": reference,
        "split": split,
        "hosts": hosts,
        "storm": storm,
        "warmth": warmth,
    }
    result = asyncio.run(commands[what](model, configuration.load(Path(path), {}), *rest))
    out.write(msgspec.json.encode(result) + b"\n")
    out.close()


if __name__ == "__main__":
    main(sys.argv[1:])
