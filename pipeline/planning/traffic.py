"""Requests as the source has them: creators with personas, conversations that append turns, a history window that moves in steps.

A prompt is a persona, some turns of history, and a new message. Its full blocks of 16 tokens make two runs: the persona's, which
all requests of the creator share, and the history's, which the turns of one conversation share until its window moves. Within a
run the blocks are always used together and from the first on, so a run is a name and a length, and stands for its blocks exactly.
"""

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from pipeline.planning import source

HOT: str = "hot"
"""The token of the hot creator."""


class Request(NamedTuple):
    """One turn. `history` names the run of its window, `blocks` are all full blocks of the prompt, `tokens` all its tokens; the
    first `persona` blocks are the creator's."""

    at_s: float
    creator: str
    conversation: str
    history: int
    blocks: int
    tokens: int
    persona: int = source.PERSONA_BLOCKS


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Of what a prompt consists: a persona, `turns_kept` turns of history and up to `turns_step` - 1 more, a message."""

    persona_tokens: int = source.PERSONA_TOKENS
    turn_tokens: int = source.TURN_TOKENS
    message_tokens: int = source.MESSAGE_TOKENS
    turns_kept: int = source.TURNS_KEPT
    turns_step: int = source.TURNS_STEP

    @property
    def persona_blocks(self) -> int:
        """Full blocks that all requests of a creator share."""
        return self.persona_tokens // source.BLOCK_TOKENS

    def tokens(self, turns: int) -> int:
        """Of a prompt with so many turns of history."""
        return self.persona_tokens + self.turn_tokens * turns + self.message_tokens


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What arrives: `hot_share` of the conversations are with one creator, the others with `creators`, by Zipf."""

    seed: int
    hot_share: float = 0.0
    per_s: float = source.REQUESTS_PER_S
    creators: int = source.CREATORS
    conversations: int = source.CONVERSATIONS
    turns_mean: int = source.TURNS_MEAN
    shape: Shape = Shape()


class _Conversation:
    """One under way: `turns` in its window, `left` until its end."""

    __slots__ = ("creator", "left", "name", "turns", "window")

    def __init__(self, creator: str, name: str, window: int, turns: int, left: int) -> None:
        self.creator, self.name, self.window, self.turns, self.left = creator, name, window, turns, left


def requests(load: Workload) -> Iterator[Request]:
    """Endless, in order of time: a Poisson stream whose turns belong to any of the conversations under way."""
    chance, shape = random.Random(f"{load.seed}/{load.hot_share}"), load.shape
    windows = begun = at_s = 0.0

    def begin() -> _Conversation:
        nonlocal windows, begun
        windows, begun = windows + 1, begun + 1
        creator = HOT if chance.random() < load.hot_share else f"c{zipf(chance.random(), load.creators)}"
        turns = shape.turns_kept + chance.randrange(shape.turns_step)
        left = 1 + int(chance.expovariate(1.0 / load.turns_mean))
        return _Conversation(creator, f"v{begun:.0f}", int(windows), turns, left)

    under_way = [begin() for _ in range(load.conversations)]
    while True:
        at_s += chance.expovariate(load.per_s)
        place = int(chance.random() * load.conversations)
        one = under_way[place]
        tokens = shape.tokens(one.turns)
        blocks = tokens // source.BLOCK_TOKENS
        yield Request(at_s, one.creator, one.name, one.window, blocks, tokens, shape.persona_blocks)
        one.turns += 1
        one.left -= 1
        if one.turns == shape.turns_kept + shape.turns_step:
            windows += 1
            one.turns, one.window = shape.turns_kept, int(windows)
        if not one.left:
            under_way[place] = begin()


def zipf(uniform: float, creators: int) -> int:
    """The number (from 0) of a creator, by Zipf with exponent 1, from a uniform number in [0, 1).

    By the inverse of the continuous law: number k has ln((k + 2) / (k + 1)) / ln(creators + 1), near 1/k. No table, so that 40
    million creators cost nothing.
    """
    return min(creators, int(math.exp(uniform * math.log(creators + 1)))) - 1
