"""The bounded load through the `openai` SDK: `python -m tests.clients.sdk_load --url URL --model NAME --report FILE`.

Streams, so many at a time, each with a prompt of its own, and asked for their usage. The key is the variable `OPENAI_API_KEY`.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec
import openai
import typer

from tests.clients.compare import Said
from tests.words import WORDS


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """One reply, whole."""

    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    output_tokens: int


async def ask(sdk: openai.AsyncOpenAI, model: str, prompt: str, reply_tokens: int) -> Ended:
    """One reply. Raises what the SDK does, and `ValueError` where the stream has no text or no usage."""
    asked_s, first_s, usage = time.monotonic(), 0.0, None
    stream = await sdk.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=reply_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        if not first_s and any(choice.delta.content for choice in chunk.choices):
            first_s = time.monotonic()
    if not first_s or usage is None:
        raise ValueError("A stream ended without text, or without usage.")
    return Ended(
        ttft_s=first_s - asked_s,
        e2e_s=time.monotonic() - asked_s,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
    )


async def load(url: str, model: str, prompts: Iterator[str], concurrency: int, reply_tokens: int) -> list[Ended]:
    """A closed loop: `concurrency` askers share the prompts. Nothing is tried again: each request is counted once."""
    ended: list[Ended] = []

    async def asker(sdk: openai.AsyncOpenAI) -> None:
        ended.extend([await ask(sdk, model, prompt, reply_tokens) for prompt in prompts])

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", max_retries=0) as sdk, asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(asker(sdk))
    return ended


def main(
    url: Annotated[str, typer.Option(help="Of a server, without /v1.")],
    model: Annotated[str, typer.Option(help="As it is served there.")],
    report: Annotated[Path, typer.Option(help="Where the figures go.")],
    requests: Annotated[int, typer.Option(min=1)] = 120,
    concurrency: Annotated[int, typer.Option(min=1)] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt, about.")] = 512,
    reply_tokens: Annotated[int, typer.Option(min=1, help="Of each reply.")] = 30,
) -> None:
    """Ask, and write one JSON object."""
    chance = random.Random("sdk load")
    prompts = (" ".join(chance.choices(WORDS, k=prompt_tokens)) for _ in range(requests))
    ended = asyncio.run(load(url.rstrip("/"), model, prompts, concurrency, reply_tokens))
    said = Said(
        requests=len(ended),
        prompt_tokens=sum(one.prompt_tokens for one in ended),
        output_tokens=sum(one.output_tokens for one in ended),
        ttft_ms=1000 * fmean(one.ttft_s for one in ended),
        e2e_ms=1000 * fmean(one.e2e_s for one in ended),
    )
    report.write_bytes(msgspec.json.encode(said))


if __name__ == "__main__":
    typer.run(main)
