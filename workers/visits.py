"""Prefills of one engine: interactive prompts whole and at once, batch prompts in pieces between them.

Who goes when is `pipeline.protocol.yielding`.
"""

from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from msgspec.structs import replace

from pipeline.protocol.classes import BATCH, INTERACTIVE, Weights
from pipeline.protocol.completions import prompt_logprobs
from pipeline.protocol.occupancy import Occupancy
from pipeline.protocol.yielding import Yielding, pieces
from workers.engines.port import Engine, Prefilled


class Visits:
    """What goes into one engine to be prefilled. `step_tokens`: what it computes in a step."""

    def __init__(self, engine: Engine, step_tokens: int, weights: Weights, clock: Callable[[], float]) -> None:
        self._engine, self._clock = engine, clock
        self._yielding = Yielding(step_tokens, weights)
        self._waiting: dict[Hashable, anyio.Event] = {}
        self._occupancy = Occupancy(clock())

    def weigh(self, weights: Weights) -> None:
        """The classes share so, from the next prompt on."""
        self._yielding.weights = weights

    async def prefill(
        self,
        key: str,
        klass: str,
        token_ids: Sequence[int],
        expected: int,
        salt: str,
        chat: Mapping[str, Any],
        trace: Mapping[str, str],
        before_each: Callable[[], None],
        begins: int = 0,
    ) -> Prefilled:
        """As `Engine.prefill`, of a prompt of which `expected` tokens are taken to be in the engine's cache.

        What is told of a batch prompt is of all its pieces: a token that one of them has found, and that none before has
        computed, was cached. `before_each` may raise, and ends it.
        """
        ends: Sequence[int] = (len(token_ids),)
        if klass == BATCH and prompt_logprobs(chat) is None:  # those are told of a prompt that is computed in one
            step_tokens, unit = self._yielding.step_tokens, self._engine.info.chunk_size
            ends = pieces(len(token_ids), expected, step_tokens, unit)
        computed = generated = 0
        wait_s = store_s = 0.0
        done = expected
        for end in ends:
            asked_s = self._clock()
            async with self._visit(f"{key}/{end}", klass, end - done):
                before_each()
                wait_s += self._clock() - asked_s
                last = end == len(token_ids)
                one = await self._engine.prefill(
                    key if last else f"{key}.{end}",
                    token_ids[:end],
                    salt,
                    chat if last else None,
                    trace=trace,
                    begins=begins if last else 0,
                )
            done = end
            computed += end - one.cached_tokens
            generated += one.generated_tokens
            wait_s, store_s = wait_s + one.wait_s, store_s + one.store_s
        return replace(
            one,
            cached_tokens=max(0, len(token_ids) - computed),
            generated_tokens=generated,
            wait_s=wait_s,
            store_s=store_s,
        )

    @property
    def reads_ratio(self) -> float:
        """The share of the last seconds in which the engine had a prompt to read."""
        return self._occupancy.ratio(self._clock())

    def come(self, key: str, tokens: int) -> None:
        """An interactive prompt of which so many tokens have to be computed is read in the engine, by others than us."""
        self._enter(key, INTERACTIVE, tokens)

    def gone(self, key: str) -> None:
        """It has been read, or is not wanted any more."""
        self._leave(key)

    @asynccontextmanager
    async def _visit(self, key: str, klass: str, tokens: int) -> AsyncIterator[None]:
        came = self._enter(key, klass, tokens)
        try:
            if not came.is_set():  # a look at an event costs a turn of the loop
                await came.wait()
            yield
        finally:
            self._leave(key)

    def _enter(self, key: str, klass: str, tokens: int) -> anyio.Event:
        came = self._waiting[key] = anyio.Event()
        self._occupancy.use(True, self._clock())
        self._let_in(self._yielding.enter(key, klass, tokens))
        return came

    def _leave(self, key: str) -> None:
        del self._waiting[key]
        self._occupancy.use(bool(self._waiting), self._clock())
        self._let_in(self._yielding.leave(key))

    def _let_in(self, keys: list[Hashable]) -> None:
        for key in keys:
            self._waiting[key].set()
