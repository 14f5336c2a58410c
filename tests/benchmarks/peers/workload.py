"""What is asked of the sides, the same of all: bodies with the model's name, by repetition, with texts that nobody has seen."""

import itertools
import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final

from pipeline.bench.orders import Load, Order, encoded, prompt
from pipeline.bench.words import text
from pipeline.cli.client import chat_body
from tests.benchmarks.peers.site import MODEL

CREATORS: Final = 16
PERSONA_WORDS: Final = 256
SAID_WORDS: Final = 48
MESSAGE_WORDS: Final = 16
REPLY_TOKENS: Final = 24
HISTORIES: Final = 500
"""So many different ones: some come again while they are in a cache."""


def hop(run: str) -> Iterator[Order]:
    """2,210 tokens of creators in turn, replies of 30, for ever."""
    load = Load(creators=20, prompt_words=2210, max_tokens=30, run=run)
    for number in itertools.count():
        creator, body = prompt(load, number)
        yield Order(creator, exactly(body))


def small(run: str) -> Iterator[Order]:
    """A persona, one exchange and a message, about 395 tokens with the template; creators by Zipf's law, for ever.

    Personas are the same in every run: a fleet knows its creators.
    """
    chance = random.Random(run)
    weights = list(accumulate(1 / rank for rank in range(1, CREATORS + 1)))
    for number in itertools.count():
        creator = chance.choices(range(CREATORS), cum_weights=weights)[0]
        yield small_order(creator, f"{run}/{chance.randrange(HISTORIES)}", f"{run}/{number}")


def everybody() -> Iterator[Order]:
    """Each creator in turn, for ever, so that personas are warm."""
    for number in itertools.count():
        yield small_order(number % CREATORS, f"warm-up/{number}", f"warm-up/{number}")


def small_order(creator: int, history: str, message: str) -> Order:
    """One request of `small`."""
    said = text(history, 2 * SAID_WORDS).split()
    messages = [
        {
            "role": "system",
            "content": f"You are creator {creator:03d}. {text(f'persona/{creator}', PERSONA_WORDS - 8)}",
        },
        {"role": "user", "content": " ".join(said[:SAID_WORDS])},
        {"role": "assistant", "content": " ".join(said[SAID_WORDS:])},
        {"role": "user", "content": text(message, MESSAGE_WORDS)},
    ]
    body = chat_body("", system=None, max_tokens=REPLY_TOKENS, temperature=0)
    return Order(f"creator-{creator}", exactly(body | {"messages": messages}))


def exactly(body: dict[str, Any]) -> bytes:
    """A body as every side takes it, whose reply has as many tokens as it may have."""
    return encoded(body | {"model": MODEL, "ignore_eos": True})
