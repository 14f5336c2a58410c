"""Prompts of known length, for comparing replies: one engine against two, and one engine against the whole pipeline.

They are chats, so that they can be sent to an engine and to a gateway alike. The lengths are in tokens of SmolLM2 with its
chat template applied, and lie on both sides of every edge: under one chunk, exactly full chunks, one more, one less, more than
an engine step. No two prompts share their first chunk, so none finds another's KV.
"""

import random
from typing import Any, Final

import msgspec

CHUNK: Final = 32
REPLY_TOKENS: Final = 24

LENGTHS: Final = (
    9, 17, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 200, 255, 256, 300, 410, 511, 513, 640, 1000, 1500, 2210,
)  # fmt: skip

WORDS: Final = (
    "time", "people", "water", "house", "light", "music", "city", "river", "night", "story", "school", "family", "world",
    "winter", "summer", "country", "question", "answer", "history", "science", "letter", "number",
)  # fmt: skip
"""Each is one token of SmolLM2, at the start of a text and after a space."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A chat of exactly `tokens` prompt tokens."""

    tokens: int
    chat: dict[str, Any]


def prompt(tokens: int) -> Prompt:
    """The prompt of this length: 9, which is an empty system message, or at least 15. Asks for a greedy reply."""
    messages = [{"role": "system", "content": ""}]
    if tokens > 9:
        words = random.Random(tokens).choices(WORDS, k=tokens - 14)
        messages.append({"role": "user", "content": " ".join(words)})
    sampling = {"temperature": 0, "max_tokens": REPLY_TOKENS, "ignore_eos": True}
    return Prompt(tokens=tokens, chat={"messages": messages, **sampling})


PROMPTS: Final = tuple(prompt(tokens) for tokens in LENGTHS)
SPLIT_PROMPTS: Final = PROMPTS[::3]
"""For two engines without a pipeline between them, which gets all."""


def loadable(tokens: int, chunk: int = CHUNK) -> int:
    """Tokens of a stored prompt that another engine loads: full chunks, but never the last token, whose result it needs."""
    return min(tokens // chunk * chunk, tokens - 1)
