"""What is asked of a fleet: how often, how long, how much of it again. In numbers, or as a trace."""

import math
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from pipeline.errors import OperatorError
from pipeline.planning import traffic

TRACE_BLOCK: Final = 512
"""Tokens of a block in Mooncake's traces: `hash_ids` name the prompt's blocks, the same id the same prefix."""

TRACE_MAX: Final = 1_000_000
"""Lines of a trace that are read: Mooncake's published ones have 23,608 at most."""

Tokens = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class Asked(NamedTuple):
    """One request: its prompt, and of it what each cache can be expected to have. The rest is computed.

    `everywhere` are tokens that all engines have: the prefix of a creator that is spread over them.
    """

    at_s: float
    prompt: int
    hbm: int
    lmcache: int
    output: int
    everywhere: int = 0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Chats: each prompt is a creator's prefix, its conversation's history (on average), a new message. Lengths in tokens.

    A conversation has `turns_mean` turns, one every `turn_gap_s` on average. Its history is a window that moves in steps, as
    `configs` have it: it grows from half its mean to one and a half of it. Creators are Zipf; one more has `hot_share` of all.
    """

    requests_per_s: Annotated[float, msgspec.Meta(gt=0)]
    prefix_tokens: Tokens
    history_tokens: Tokens = 0
    message_tokens: AtLeastOne = 10
    output_tokens: AtLeastOne = 30
    creators: AtLeastOne = 2000
    hot_share: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    turns_mean: AtLeastOne = 30
    turn_gap_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0

    @property
    def prompt_tokens(self) -> int:
        """Of the mean prompt."""
        return self.prefix_tokens + self.history_tokens + self.message_tokens

    @property
    def turn_tokens(self) -> int:
        """What one exchange adds to a history."""
        return self.message_tokens + self.output_tokens

    @property
    def new_tokens(self) -> int:
        """Of a prompt whose conversation goes on: the last reply and the new message, or only this where nothing is kept."""
        return min(self.turn_tokens, self.history_tokens + self.message_tokens)

    @property
    def conversations(self) -> int:
        """Under way at a time."""
        return max(1, round(self.requests_per_s * self.turn_gap_s))

    @property
    def shape(self) -> traffic.Shape:
        """The same, in turns."""
        turns = round(self.history_tokens / self.turn_tokens)
        return traffic.Shape(
            persona_tokens=self.prefix_tokens,
            turn_tokens=self.turn_tokens,
            message_tokens=self.message_tokens,
            turns_kept=turns // 2,
            turns_step=2 * (turns - turns // 2) + 1,
        )

    @property
    def fresh(self) -> float:
        """The share of requests whose history nobody has seen: a conversation begins, or its window has moved."""
        return min(1.0, 1 / (self.turns_mean + 0.5) + 1 / self.shape.turns_step)

    def traffic(self, seed: int) -> traffic.Workload:
        """The same for the fleet in virtual time."""
        return traffic.Workload(
            seed=seed,
            hot_share=self.hot_share,
            per_s=self.requests_per_s,
            creators=self.creators,
            conversations=self.conversations,
            turns_mean=self.turns_mean,
            shape=self.shape,
        )

    def block_hit_rate(self, block_tokens: int) -> float:
        """Full blocks of the mean prompt that are there already, where the conversation goes on and nothing was evicted."""
        blocks = (self.prefix_tokens + self.history_tokens) // block_tokens
        return (blocks - min(blocks, self.turn_tokens // block_tokens)) / blocks if blocks else 0.0


def poisson(per_s: float, chance: random.Random) -> Iterator[float]:
    """Arrival times without end."""
    at_s = 0.0
    while True:
        at_s += chance.expovariate(per_s)
        yield at_s


# --------------------------------------------------------------------------------------------------------------
# Traces


class Line(msgspec.Struct, frozen=True):
    """A request of a Mooncake trace. `timestamp` in milliseconds."""

    timestamp: float
    input_length: AtLeastOne
    output_length: Tokens
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path) -> list[Line]:
    """The requests of a JSONL file, in order of time. Raises `OperatorError` naming the line that is wrong."""
    lines: list[Line] = []
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    lines.append(msgspec.json.decode(text, type=Line))
                if number > TRACE_MAX:
                    raise OperatorError(f"{path} has more than {TRACE_MAX:,} lines.", "Give a part of it.")
    except OSError as error:
        raise OperatorError(f"Cannot read {path}: {error.strerror}.", "Give a trace in Mooncake's form.") from None
    except msgspec.DecodeError as error:
        raise OperatorError(f"{path}, line {number}: {error}.", "Give a trace in Mooncake's form.") from None
    if len(lines) < 2 or lines[-1].timestamp <= lines[0].timestamp:
        raise OperatorError(f"{path} has no two requests at different times.", "Give a longer trace.")
    return sorted(lines, key=lambda line: line.timestamp)


def mean_of(lines: Sequence[Line]) -> Workload:
    """The trace in numbers: means, the prefix being what an infinite cache finds."""
    requests = replay(lines, math.inf, math.inf)
    duration_s = requests[-1].at_s - requests[0].at_s
    prompt = sum(one.prompt for one in requests) // len(requests)
    found = sum(one.hbm for one in requests) // len(requests)
    return Workload(
        requests_per_s=(len(requests) - 1) / duration_s,
        prefix_tokens=min(found, prompt - 1),
        message_tokens=max(1, prompt - found),
        output_tokens=max(1, sum(one.output for one in requests) // len(requests)),
    )


def replay(lines: Sequence[Line], hbm_tokens: float, lmcache_tokens: float) -> list[Asked]:
    """Each request with what two LRU caches of these sizes have of it when it comes."""
    hbm, lmcache = _Lru(hbm_tokens / TRACE_BLOCK), _Lru(lmcache_tokens / TRACE_BLOCK)
    asked: list[Asked] = []
    for line in lines:
        here, there = (min(cache.use(line.hash_ids) * TRACE_BLOCK, line.input_length - 1) for cache in (hbm, lmcache))
        asked.append(Asked(line.timestamp / 1e3, line.input_length, here, max(0, there - here), line.output_length))
    return asked


class _Lru:
    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, names: Sequence[int]) -> int:
        """How many of these, from the first on, are here. Then all are, the first used last."""
        blocks = self._blocks
        found = next((number for number, name in enumerate(names) if name not in blocks), len(names))
        for name in reversed(names):
            blocks[name] = None
            blocks.move_to_end(name)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)
        return found
