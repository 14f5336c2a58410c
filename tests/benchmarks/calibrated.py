"""Measured rates against the stack they were measured on: `python -m tests.benchmarks.calibrated [--rounds 2] [--json]`.

Starts the real stack on CPU, one prefill and one decode worker (with --simulated, engines without a model). Then, so often as
told: `headrace calibrate`, what plan makes of those rates, and the same load for real. Two loads, cold prompts of a length that
was not calibrated; the first half before the calibration and half after it, since a machine that others use is not the same for
long:

    first token    one request at a time
    throughput     as many at a time as prefill has slots, for replies of `REPLY_TOKENS`

Plan's figures (`pipeline/planning/closed.py`) come from the calibration, and from the lengths that the load turned out to have.
"""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import typer

from pipeline.bench.words import WORDS
from pipeline.cli import calibrate
from pipeline.cli.client import Gateway, Reply, chat, chat_body
from pipeline.cli.tables import table
from pipeline.config import Config
from pipeline.planning import closed
from pipeline.planning.rates import Measured
from tests.benchmarks.crossover import stack

PROMPT_TOKENS: Final = 600
REPLY_TOKENS: Final = 24
CONCURRENCY: Final = 4
ALONE: Final = 6
TOGETHER: Final = 16
WITHIN: Final = 0.2

SIMULATED: Final = """
prefill_tokens_per_s = 1500.0
prefill_overhead_s = 0.03
step_s = 0.012
step_per_sequence_s = 0.004
lmcache_blocks_per_s = 1000.0
kv_blocks = 700
"""
"""About what SmolLM2-135M does on one core."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Expected and seen."""

    plan: float
    stack: float

    @property
    def off(self) -> float:
        """By how much plan is off."""
        return abs(self.plan / self.stack - 1)


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One calibration and the loads after it."""

    ttft_p50_ms: Pair
    throughput_per_s: Pair
    measured: Measured


async def measured(gateway: Gateway, config: Config) -> Round:
    """Calibrate, expect, send."""
    plan = calibrate.Plan(
        prompt_tokens=1024, rounds=3, batches=(1, 2, 4), reply_tokens=48, slots=config.prefill.slots, filler_tokens=3000
    )
    before, _ = await _asked(gateway, ALONE, 1)
    found = await calibrate.run(gateway, config.model.served_name, plan)
    after, _ = await _asked(gateway, ALONE, 1)
    together, took_s = await _asked(gateway, TOGETHER, CONCURRENCY)
    prompt = statistics.mean(reply.usage.prompt_tokens for reply in before + after)
    output = round(statistics.mean(reply.usage.completion_tokens for reply in together))
    per_s = closed.replies_per_s(found.rates, prompt, output, CONCURRENCY)
    seen_ms = 1e3 * statistics.mean(
        statistics.median(reply.ttft_s or 0.0 for reply in half) for half in (before, after)
    )
    return Round(
        ttft_p50_ms=Pair(plan=closed.first_token_s(found.rates, prompt) * 1e3, stack=seen_ms),
        throughput_per_s=Pair(plan=per_s, stack=len(together) / took_s),
        measured=found,
    )


async def _asked(gateway: Gateway, requests: int, concurrency: int) -> tuple[list[Reply], float]:
    """Replies to prompts that nobody has sent before, so many at a time, and how long all of them took."""
    began_s, numbers, replies = time.perf_counter(), iter(range(requests)), list[Reply]()

    async def keep_asking() -> None:
        for number in numbers:
            persona = " ".join(random.Random(f"{began_s}/{number}").choices(WORDS, k=PROMPT_TOKENS))
            body = chat_body("Go on.", system=persona, max_tokens=REPLY_TOKENS, temperature=0)
            reply = await chat(gateway, body, f"calibrated-{number}", lambda _: None)
            assert reply.error is None, reply.error
            replies.append(reply)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(keep_asking())
    return replies, time.perf_counter() - began_s


def run(rounds: int, *, simulated: bool = False) -> list[Round]:
    """On a stack of our own, which is gone afterwards."""
    with stack("default_max_tokens = 256\n", SIMULATED if simulated else "") as running:
        return [asyncio.run(measured(Gateway(running.gateway), Config())) for _ in range(rounds)]


def text(rounds: Sequence[Round]) -> str:
    """The table for people."""
    lines = [
        (
            what,
            *(f"{pair.plan:,.2f} / {pair.stack:,.2f}" for pair in pairs),
            f"{statistics.median(pair.off for pair in pairs):.0%}",
        )
        for what, pairs in (
            ("first token p50, ms", [one.ttft_p50_ms for one in rounds]),
            ("replies a second", [one.throughput_per_s for one in rounds]),
        )
    ]
    head = ("plan / stack", *(f"round {number + 1}" for number in range(len(rounds))), "off, median")
    return table(head, lines)


def main(
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=10, help="Calibrations, each with its loads.")] = 2,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Engines without a model, of about the same rates.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What calibrated rates predict, against what the real stack does."""
    found = run(rounds, simulated=simulated)
    sys.stdout.write(
        (msgspec.json.encode({"within": WITHIN, "rounds": found}).decode() if as_json else text(found)) + "\n"
    )


if __name__ == "__main__":
    typer.run(main)
