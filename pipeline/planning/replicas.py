"""Aggregated engines, step by step: each does both, as vLLM with chunked prefill does.

A step gives one token to each sequence that decodes, and what is left of its budget to prompts, in order of arrival:

    step = computing the prompts' tokens, or reading the weights, whichever takes longer    (the sum, where they do not overlap)
         + KV of the sequences that decode + overhead of prompts that begin

Everyone who decodes waits for the whole of it. A request goes to its owner, drawn at random, unless prompts wait there and
nowhere else; there it has to load what its owner has.
"""

import random
from collections import deque
from collections.abc import Sequence

import msgspec

from pipeline.planning.events import Events
from pipeline.planning.queueing import WARM_UP, computed
from pipeline.planning.rates import Rates
from pipeline.planning.workload import Asked


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: what it does, tokens of a step, sequences that it has room for."""

    rates: Rates
    prefill_tokens_per_s: float
    chunk_tokens: int
    sequences_max: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """First-token times; each step with how many waited for it; the share of time with a prompt in the step; mean sequences."""

    ttfts_s: list[float]
    steps: list[tuple[float, int]]
    mixed: float
    batch: float


class _Served:
    """First tokens so far, of all engines."""

    def __init__(self) -> None:
        self.count = 0


class _Engine:
    def __init__(self, events: Events, of: Replica, warm_s: float, served: _Served) -> None:
        self._events, self._of, self._warm_s, self._served = events, of, warm_s, served
        self.waiting: deque[tuple[Asked, int]] = deque()
        self._decoding = 0
        self._ends: dict[int, int] = {}
        self._number = 0
        self._stepping = False
        self.outcome = Outcome(ttfts_s=[], steps=[], mixed=0.0, batch=0.0)
        self.mixed_s = 0.0

    def add(self, asked: Asked) -> None:
        """A prompt, what it loads being here."""
        self.waiting.append((asked, computed(asked)))
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        rates = self._of.rates
        self._decoding -= self._ends.pop(self._number, 0)
        self._number += 1
        tokens, begun, finished = self._prompts()
        self._stepping = bool(tokens or self._decoding)
        if not self._stepping:
            return
        compute_s = tokens / self._of.prefill_tokens_per_s + begun * rates.prefill_overhead_s
        read_s = rates.step_s if self._decoding or rates.overlaps else 0.0
        step_s = max(compute_s, read_s) if rates.overlaps else compute_s + read_s
        step_s += self._decoding * rates.step_per_sequence_s
        if self._events.now_s >= self._warm_s:
            if self._decoding:
                self.outcome.steps.append((step_s, self._decoding))
            self.mixed_s += step_s if tokens else 0.0
        self._events.after(step_s, self._end, finished)

    def _prompts(self) -> tuple[int, int, list[Asked]]:
        """Tokens of prompts in this step, how many of them begin, and those that it finishes."""
        budget, begun, finished = max(0, self._of.chunk_tokens - self._decoding), 0, list[Asked]()
        left_before = budget
        while self.waiting and budget and self._decoding + len(finished) < self._of.sequences_max:
            asked, left = self.waiting[0]
            begun += left == computed(asked)
            taken = min(left, budget)
            budget -= taken
            if taken < left:
                self.waiting[0] = (asked, left - taken)
            else:
                self.waiting.popleft()
                finished.append(asked)
        return left_before - budget, begun, finished

    def _end(self, finished: list[Asked]) -> None:
        for asked in finished:
            self._served.count += 1
            if asked.at_s >= self._warm_s:
                self.outcome.ttfts_s.append(self._events.now_s - asked.at_s)
            if asked.output > 1:
                self._decoding += 1
                last = self._number + asked.output - 1
                self._ends[last] = self._ends.get(last, 0) + 1
        self._step()


def serve(requests: Sequence[Asked], of: Replica, count: int, seed: int = 1) -> Outcome:
    """Put `requests` through `count` engines."""
    events, chance = Events(), random.Random(seed)
    warm_s = requests[int(len(requests) * WARM_UP)].at_s
    served = _Served()
    engines = [_Engine(events, of, warm_s, served) for _ in range(count)]
    pending = iter(requests)

    def arrive(asked: Asked) -> None:
        if (following := next(pending, None)) is not None:
            events.at(following.at_s, arrive, following)
        owner = engines[int(chance.random() * count)]
        engine = min(engines, key=lambda one: len(one.waiting)) if owner.waiting else owner
        loaded = asked.lmcache + (max(0, asked.hbm - asked.everywhere) if engine is not owner else 0)
        events.after(loaded / of.rates.load_tokens_per_s, engine.add, asked)

    first = next(pending)
    events.at(first.at_s, arrive, first)
    events.run(lambda: served.count < len(requests))
    steps = [step for engine in engines for step in engine.outcome.steps]
    lasted_s = max(1e-9, events.now_s - warm_s) * count
    return Outcome(
        ttfts_s=[ttft_s for engine in engines for ttft_s in engine.outcome.ttfts_s],
        steps=steps,
        mixed=sum(engine.mixed_s for engine in engines) / lasted_s,
        batch=sum(step_s * decoding for step_s, decoding in steps) / lasted_s,
    )
