"""Batch prompts yield to interactive ones within a prefill engine, piece by piece.

An engine computes prompts in the order in which they came, a step at a time, and a prompt that runs is not put off for another.
So an interactive request that has a slot at once would still wait for all batch prompts before it. Therefore a batch prompt is
read in pieces, each as long as one step of the engine: every piece finds those before it in the prefix cache, so nothing is
computed twice. Between the pieces the engine is free, and this says who goes next:

* An interactive prompt goes at once, whole.
* A piece of batch goes while no interactive prompt is inside, and no more of them at a time than fill one step. That is what an
  interactive prompt may find before it: a step under way is what it would have to wait for in any case.
* Batch is owed, by weight, a part of the tokens of interactive prompts, less what it gets between them. What is left of that,
  which is seldom anything, it may have beside them, several pieces at a time, since each is computed after those before it: an
  engine that is never without interactive prompts starves nobody.

What holds a place here is a *visit*, and its key is the caller's.
"""

from collections.abc import Hashable, Sequence
from math import ceil
from typing import Final

import msgspec

from pipeline.protocol.classes import BATCH, Weights

VISIT_COST_RATIO: Final = 0.125
"""Of a step: what a prompt costs at least, though all of it were cached."""

OWED_STEPS_MAX: Final = 4
"""A prompt's worth of pieces. What batch did not want while it was owed is lost beyond that, or it would come all at once."""

AHEAD_STEPS_MAX: Final = 8
"""What batch had beyond its share is remembered so far: it is no reason to be let in beside a burst, and is forgotten after two
prompts' worth, or a night without interactive requests would be held against it for hours."""


class _Visit(msgspec.Struct):
    batch: bool
    tokens: int
    inside: bool = False


class Yielding:
    """Who is in one engine, of whose steps each takes `step_tokens`, and who waits outside."""

    def __init__(self, step_tokens: int, weights: Weights) -> None:
        self.step_tokens = step_tokens
        self.weights = weights
        self._visits: dict[Hashable, _Visit] = {}
        self._owed = 0.0

    def enter(self, key: Hashable, klass: str, tokens: int) -> list[Hashable]:
        """A visit of so many tokens that have to be computed. Returns who goes in now."""
        tokens = max(tokens, ceil(self.step_tokens * VISIT_COST_RATIO))
        visit = self._visits[key] = _Visit(klass == BATCH, min(tokens, self.step_tokens) if klass == BATCH else tokens)
        if visit.batch:
            return self._admitted()
        visit.inside = True
        owed = tokens * self.weights.batch_weight / self.weights.interactive_weight
        self._owed = min(float(self.step_tokens * OWED_STEPS_MAX), self._owed + owed)
        return [key, *self._admitted()]

    def leave(self, key: Hashable) -> list[Hashable]:
        """It is over, or given up. Returns who goes in now."""
        del self._visits[key]
        return self._admitted()

    @property
    def interactive_inside(self) -> int:
        """Interactive prompts that are computed now."""
        return sum(not visit.batch for visit in self._visits.values())

    @property
    def batch_tokens_inside(self) -> int:
        """Tokens of batch that are computed now."""
        return sum(visit.tokens for visit in self._visits.values() if visit.batch and visit.inside)

    def _admitted(self) -> list[Hashable]:
        """Batch that goes in now, the first that came first. One that may not yet holds up the rest."""
        admitted: list[Hashable] = []
        inside, beside = self.batch_tokens_inside, self.interactive_inside > 0
        for key, visit in self._visits.items():
            if not visit.batch or visit.inside:
                continue
            steps_max = 1 + OWED_STEPS_MAX if beside else 1
            if inside + visit.tokens > self.step_tokens * steps_max or (beside and self._owed < visit.tokens):
                break
            self._owed = max(-float(self.step_tokens * AHEAD_STEPS_MAX), self._owed - visit.tokens)
            visit.inside = True
            inside += visit.tokens
            admitted.append(key)
        return admitted


def pieces(tokens: int, cached: int, step_tokens: int, unit: int) -> Sequence[int]:
    """Where the pieces of a prompt of so many tokens end, of which the first `cached` need not be computed.

    A piece ends with a unit, the tokens that are cached and stored together, and takes no more than a step to compute, where
    a unit does not.
    """
    length = max(unit, step_tokens // unit * unit)
    first = cached // unit * unit + length
    return [*range(first, tokens, length), tokens]
