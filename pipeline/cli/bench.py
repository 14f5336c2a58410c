"""`headrace bench`: a closed loop against the running stack, C requests at a time, and what their clients saw.

With `--scenario`, instead, a fleet in virtual time: `pipeline/planning`.

The prompts are seeded: a persona per creator, which its requests share, and a question of each request's own. The seed holds the
run's time, so that a second bench does not find the caches of the first, unless `--warm` asks for just that.
"""

import asyncio
import math
import random
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import typer

from pipeline.cli import client
from pipeline.cli.options import CaOption, ConfigOption, UrlOption, configuration
from pipeline.errors import OperatorError

WORDS: Final = (
    "river", "stone", "market", "winter", "garden", "letter", "bridge", "window", "island", "summer", "paper", "engine",
    "forest", "mirror", "harbor", "silver", "morning", "valley", "candle", "record", "painter", "thunder", "village",
    "copper", "meadow", "lantern", "orchard", "compass", "feather", "granite",
)  # fmt: skip

PERCENT_SHOWN: Final = 10
"""Progress is told in steps of this many percent."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What to send. `prompt_words` of a prompt are its creator's persona, a word being about one token."""

    requests: int
    concurrency: int
    creators: int
    prompt_words: int
    max_tokens: int
    run: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome. Times in milliseconds, of completed requests; null where there are none."""

    requests: int
    completed: int
    errors: int
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    e2e_p50_ms: float | None
    e2e_p99_ms: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    duration_s: float
    error_messages: dict[str, int]


def bench(
    *,
    requests: Annotated[int, typer.Option("--requests", min=1, help="How many.")] = 20,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, max=1024, help="At a time.")] = 4,
    creators: Annotated[int, typer.Option("--creators", min=1, help="Personas that the requests share.")] = 4,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Of each prompt, about.")] = 200,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Of each reply.")] = 32,
    warm: Annotated[bool, typer.Option("--warm", help="The same prompts in every run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    scenario: Annotated[
        str | None,
        typer.Option("--scenario", help="Instead, a fleet in virtual time: seed or scale.", show_default=False),
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="Of a scenario: simulated is all there is.")] = "simulated",
    duration: Annotated[float, typer.Option("--duration", min=1.0, help="Of a scenario: seconds measured.")] = 40.0,
    seed: Annotated[int, typer.Option("--seed", help="Of a scenario.")] = 1,
    url: UrlOption = None,
    ca: CaOption = None,
    config: ConfigOption = None,
) -> None:
    """Measure the running stack: times, tokens, cache hits. Or, with --scenario, plan for one, without it.

    Example: headrace bench --requests 200 --concurrency 8 --creators 4

    Example: headrace bench --scenario seed --json
    """
    if scenario is not None:
        print(plan(scenario, engine, duration, seed, as_json=as_json))
        return
    gateway = client.gateway(url, ca, configuration(config))
    load = Load(
        requests=requests,
        concurrency=concurrency,
        creators=creators,
        prompt_words=prompt_tokens,
        max_tokens=max_tokens,
        run="warm" if warm else f"{time.time_ns():x}",
    )
    outcome = asyncio.run(run(gateway, load))
    print(msgspec.json.encode(outcome).decode() if as_json else table(outcome))
    raise typer.Exit(1 if outcome.errors else 0)


def plan(scenario: str, engine: str, duration_s: float, seed: int, *, as_json: bool) -> str:
    """Run a scenario; what to print. Raises `OperatorError` for one that there is not."""
    if engine != "simulated":
        raise OperatorError(f"A scenario cannot run on {engine!r}.", "Use --engine simulated.")
    from pipeline.planning import scale
    from pipeline.planning import seed as seeded

    if scenario == "seed":
        by_policy = seeded.run(seed, duration_s, _told)
        return msgspec.json.encode(by_policy).decode() if as_json else seeded.table(by_policy)
    if scenario == "scale":
        at_scale = scale.run(seed, duration_s, _told)
        return msgspec.json.encode(at_scale).decode() if as_json else scale.table(at_scale)
    raise OperatorError(f"There is no scenario {scenario!r}.", "Use --scenario seed or --scenario scale.")


def _told(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


async def run(gateway: client.Gateway, load: Load) -> Report:
    """Send the load, `concurrency` requests at a time, and report."""
    replies: list[client.Reply] = []
    numbers = iter(range(load.requests))

    async def keep_asking() -> None:
        for number in numbers:
            creator, body = prompt(load, number)
            replies.append(await client.chat(gateway, body, creator, lambda _: None))
            _progress(len(replies), load.requests)

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency, load.requests)):
            group.create_task(keep_asking())
    return report(replies, time.perf_counter() - started_s)


def prompt(load: Load, number: int) -> tuple[str, dict[str, Any]]:
    """Creator and body of the request with this number: the same for the same load."""
    creator = f"bench-{number % load.creators}"
    persona = random.Random(f"{load.run}/{creator}").choices(WORDS, k=max(1, load.prompt_words - 20))
    question = " ".join(random.Random(f"{load.run}/{number}").choices(WORDS, k=8))
    body = client.chat_body(
        f"Tell a story about: {question}.", system=" ".join(persona), max_tokens=load.max_tokens, temperature=0
    )
    return creator, body


def report(replies: Sequence[client.Reply], duration_s: float) -> Report:
    """Counts and percentiles."""
    whole = [reply for reply in replies if reply.error is None]
    messages: dict[str, int] = {}
    for reply in replies:
        if reply.error is not None:
            messages[reply.error] = messages.get(reply.error, 0) + 1
    ttfts_s = [reply.ttft_s for reply in whole if reply.ttft_s is not None]
    return Report(
        requests=len(replies),
        completed=len(whole),
        errors=len(replies) - len(whole),
        ttft_p50_ms=percentile_ms(ttfts_s, 50),
        ttft_p99_ms=percentile_ms(ttfts_s, 99),
        e2e_p50_ms=percentile_ms([reply.e2e_s for reply in whole], 50),
        e2e_p99_ms=percentile_ms([reply.e2e_s for reply in whole], 99),
        prompt_tokens=sum(reply.usage.prompt_tokens for reply in whole),
        cached_tokens=sum(reply.usage.cached_tokens for reply in whole),
        output_tokens=sum(reply.usage.completion_tokens for reply in whole),
        duration_s=round(duration_s, 3),
        error_messages=messages,
    )


def percentile_ms(times_s: Sequence[float], percent: int) -> float | None:
    """The nearest-rank percentile, in milliseconds. None of nothing."""
    if not times_s:
        return None
    rank = max(1, math.ceil(len(times_s) * percent / 100))
    return round(sorted(times_s)[rank - 1] * 1000, 2)


def table(outcome: Report) -> str:
    """The report for people."""
    per_s = outcome.completed / outcome.duration_s if outcome.duration_s else 0.0
    cached = outcome.cached_tokens / outcome.prompt_tokens if outcome.prompt_tokens else 0.0
    lines = [
        f"requests     {outcome.requests}, {outcome.completed} whole, {outcome.errors} failed, {per_s:.1f}/s",
        f"first token  p50 {_ms(outcome.ttft_p50_ms)}   p99 {_ms(outcome.ttft_p99_ms)}",
        f"whole reply  p50 {_ms(outcome.e2e_p50_ms)}   p99 {_ms(outcome.e2e_p99_ms)}",
        f"tokens       {outcome.prompt_tokens} prompt ({cached:.0%} cached), {outcome.output_tokens} reply",
        *(f"{count:>6} × {message}" for message, count in outcome.error_messages.items()),
    ]
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _progress(done: int, of: int) -> None:
    step = max(1, of * PERCENT_SHOWN // 100)
    if done % step == 0 or done == of:
        print(f"{done} of {of}", file=sys.stderr, flush=True)
