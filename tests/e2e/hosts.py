"""Two hosts: an LMCache server each, and a tier that they share. What is prefilled at one is decoded at the other."""

import asyncio
import time
from pathlib import Path
from typing import Final

import msgspec

from pipeline import config as configuration
from pipeline.config import Config
from tests.e2e.prompts import CHUNK, PROMPTS, REPLY_TOKENS
from tests.redis_server import RedisServer
from workers.engines.vllm import VllmEngine

AWAITED: Final = PROMPTS[18]
"""Decoded once all its chunks are in the shared tier."""
AT_ONCE: Final = PROMPTS[22]
"""Decoded as soon as it is prefilled, as the pipeline does it: the tier is written behind."""

SALT: Final = "5a17" * 8
SHARED_S: Final = 30.0


class Crossed(msgspec.Struct, frozen=True, kw_only=True):
    """Of each reply: its tokens, and how many of its prompt's decode loaded. `shared_s`: until the tier had all of a prompt."""

    awaited: list[int]
    awaited_cached: int
    at_once: list[int]
    at_once_cached: int
    shared_s: float


async def hosts(model: str, here: Config, there_path: str) -> Crossed:
    """Prefill `here`, decode over the server of the other file."""
    there = configuration.load(Path(there_path), {})
    prefill, decode = VllmEngine(here, "prefill", model), VllmEngine(there, "decode", model)
    tier = RedisServer(here.lmcache.l2[0]["port"])
    try:
        for engine in (prefill, decode):
            await engine.start()
        first = (await prefill.render(AWAITED.chat)).token_ids
        await prefill.prefill("p0", first, SALT)
        shared_s = await _shared(tier, len(first) // CHUNK)
        awaited, awaited_cached = await _reply(decode, "d0", first)
        second = (await prefill.render(AT_ONCE.chat)).token_ids
        await prefill.prefill("p1", second, SALT)
        at_once, at_once_cached = await _reply(decode, "d1", second)
        return Crossed(
            awaited=awaited,
            awaited_cached=awaited_cached,
            at_once=at_once,
            at_once_cached=at_once_cached,
            shared_s=shared_s,
        )
    finally:
        await prefill.close()
        await decode.close()


async def _shared(tier: RedisServer, chunks: int) -> float:
    began_s = time.monotonic()
    while tier.keys() < chunks:
        assert time.monotonic() - began_s < SHARED_S, f"{tier.keys()} of {chunks} chunks are in the shared tier"
        await asyncio.sleep(0.01)
    return time.monotonic() - began_s


async def _reply(decode: VllmEngine, key: str, prompt: list[int]) -> tuple[list[int], int]:
    token_ids, cached = list[int](), 0
    async for step in decode.decode(key, prompt, SALT, AWAITED.chat, REPLY_TOKENS):
        token_ids += step.token_ids
        cached = step.cached_tokens
    return token_ids, cached
