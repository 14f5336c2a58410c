"""What the split costs a reply with nothing beside it: `python -m tests.benchmarks.handover [--prompts 25] [--json]`.

The real stack, as `headrace up` starts it, three times: one engine for both (colocated: no hand-over), and one prefill and one
decode worker, of whom prefill sends the first token (as by default), or decode does (`requests.prefill_begins = false`). A
creator's prefix is warm, and each prompt adds words that nobody has seen. One at a time:

    first token    until the first text
    first gap      from there to the second text: behind a first token of prefill lies the hand-over
    gap            the median of the others
    whole          until the last text
"""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Final

import msgspec
import typer

from pipeline.cli.client import Gateway, chat, chat_body
from pipeline.cli.tables import table
from tests.benchmarks.crossover import stack
from tests.e2e.prompts import WORDS

PREFIX_WORDS: Final = 240
NEW_WORDS: Final = 110
REPLY_TOKENS: Final = 24
UNCOUNTED: Final = 5

WAYS: Final = {
    "colocated": ("", "prefill = 0\ndecode = 0\nboth = 1\n"),
    "split": ("", ""),
    "split, decode begins": ("prefill_begins = false\n", ""),
}
"""Entries of `[requests]` and `[up]`."""


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """One reply's, or the medians of many, in milliseconds."""

    first_token_ms: float
    first_gap_ms: float
    gap_ms: float
    whole_ms: float


def times_of(came_s: Sequence[float]) -> Times:
    """Of a reply whose pieces came so long after it was asked for: at least three."""
    gaps_ms = [1e3 * (later - earlier) for earlier, later in pairwise(came_s)]
    return Times(
        first_token_ms=1e3 * came_s[0],
        first_gap_ms=gaps_ms[0],
        gap_ms=statistics.median(gaps_ms[1:]),
        whole_ms=1e3 * came_s[-1],
    )


def median(times: Sequence[Times]) -> Times:
    """Of each figure."""
    columns = zip(*map(msgspec.structs.astuple, times), strict=True)
    medians = [round(statistics.median(column), 1) for column in columns]
    return Times(**dict(zip(Times.__struct_fields__, medians, strict=True)))


async def measured(gateway: Gateway, prompts: int) -> Times:
    """One reply after the other. The first few, which find nothing warm, do not count."""
    chance = random.Random(prompts)
    persona, times = " ".join(chance.choices(WORDS, k=PREFIX_WORDS)), list[Times]()
    for _ in range(UNCOUNTED + prompts):
        message = " ".join(chance.choices(WORDS, k=NEW_WORDS))
        body = chat_body(message, system=persona, max_tokens=REPLY_TOKENS, temperature=0, ignore_eos=True)
        came_s, began_s = list[float](), time.perf_counter()

        def came(_: str, came_s: list[float] = came_s, began_s: float = began_s) -> None:
            came_s.append(time.perf_counter() - began_s)

        reply = await chat(gateway, body, "ada", came)
        assert reply.error is None, reply.error
        times.append(times_of(came_s))
    return median(times[UNCOUNTED:])


def run(prompts: int) -> dict[str, Times]:
    """Each way in turn, on a stack of its own, which is gone afterwards."""
    found: dict[str, Times] = {}
    for way, (requests, up) in WAYS.items():
        sys.stderr.write(f"{way}\n")
        with stack(requests, up=up) as running:
            found[way] = asyncio.run(measured(Gateway(running.gateway), prompts))
    return found


def text(found: dict[str, Times]) -> str:
    """The table for people."""
    rows = [(way, *(f"{figure:.0f}" for figure in msgspec.structs.astuple(of))) for way, of in found.items()]
    over_ms = found["split"].first_token_ms - found["colocated"].first_token_ms
    head = ("medians, ms", "first token", "first gap", "gap", "whole")
    return f"{table(head, rows)}\nA first token of the split comes {over_ms:.0f} ms behind a colocated one."


def main(
    prompts: Annotated[int, typer.Option(help="Replies of each way.", min=1, max=500)] = 25,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what a hand-over costs a reply with nothing beside it, over a warm hit in one engine."""
    found = run(prompts)
    sys.stdout.write((msgspec.json.encode(found).decode() if as_json else text(found)) + "\n")


if __name__ == "__main__":
    typer.run(main)
