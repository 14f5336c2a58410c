"""Prefills of one engine: batch prompts in pieces, interactive ones between those."""

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import pytest

from pipeline.config import Config, Engine, LMCache, Simulated
from pipeline.errors import DeadlineExceeded, EngineFailed
from pipeline.protocol.classes import BATCH, INTERACTIVE, WEIGHTS, Weights
from workers.engines.port import Prefilled
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.tier import ProcessTier
from workers.visits import Visits

pytestmark = pytest.mark.anyio

CONFIG = Config(
    engine="simulated",
    lmcache=LMCache(chunk_size=32, block_size=32),
    prefill=Engine(slots=8, max_num_batched_tokens=512),
    simulated=Simulated(prefill_tokens_per_s=20_000.0, prefill_overhead_s=0.0),
)


_numbers = itertools.count()


class Recorded(SimulatedEngine):
    """An engine that says which prompts it was asked for, by length, as they end."""

    def __init__(self) -> None:
        super().__init__(CONFIG, "prefill", ProcessTier(f"visits-{next(_numbers)}", 10_000))
        self.ended: list[int] = []

    async def prefill(self, key: str, token_ids: Any, *args: Any, **names: Any) -> Prefilled:
        done = await super().prefill(key, token_ids, *args, **names)
        self.ended.append(len(token_ids))
        return done


@pytest.fixture
async def engine() -> Any:
    made = Recorded()
    await made.start()
    yield made
    await made.close()


def ask(
    visits: Visits,
    key: str,
    klass: str,
    tokens: int,
    chat: Mapping[str, Any] | None = None,
    expected: int = 0,
    before_each: Callable[[], None] = lambda: None,
) -> Any:
    """A prompt that shares nothing with others."""
    ids = [hash(key) % 50_000 + 300] * tokens
    return visits.prefill(key, klass, ids, expected, "aa", chat or {"messages": []}, {}, before_each)


def visits_of(engine: SimulatedEngine) -> Visits:
    return Visits(engine, CONFIG.prefill.max_num_batched_tokens, WEIGHTS, time.monotonic)


async def test_a_batch_prompt_is_read_in_pieces_and_nothing_is_computed_twice(engine: Recorded) -> None:
    done = await ask(visits_of(engine), "b", BATCH, 2210)
    assert engine.ended == [512, 1024, 1536, 2048, 2210]
    assert (done.cached_tokens, done.generated_tokens) == (0, 5)


async def test_what_is_cached_is_counted_once_over_all_pieces(engine: Recorded) -> None:
    visits = visits_of(engine)
    await ask(visits, "b", INTERACTIVE, 1000)
    done = await ask(visits, "b", BATCH, 2210, expected=992)
    assert engine.ended == [1000, 1504, 2016, 2210]
    assert done.cached_tokens == 992


async def test_an_interactive_prompt_is_read_whole_and_goes_between_the_pieces(engine: Recorded) -> None:
    visits = visits_of(engine)
    async with anyio.create_task_group() as tasks:
        for key in "bcd":
            tasks.start_soon(ask, visits, key, BATCH, 2048)
        await anyio.sleep(0.01)
        tasks.start_soon(ask, visits, "i", INTERACTIVE, 1000)
    assert len(engine.ended) == 13
    assert engine.ended.index(1000) <= 2, engine.ended


async def test_logprobs_of_a_batch_prompt_are_told_of_one_that_is_read_whole(engine: Recorded) -> None:
    await ask(visits_of(engine), "b", BATCH, 2048, {"messages": [], "prompt_logprobs": 1})
    assert engine.ended == [2048]


async def test_a_batch_prompt_that_is_too_late_ends_between_pieces(engine: Recorded) -> None:
    visits, calls = visits_of(engine), 0

    def before_each() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise DeadlineExceeded("too late")

    with pytest.raises(DeadlineExceeded):
        await ask(visits, "b", BATCH, 2048, before_each=before_each)
    assert engine.ended == [512, 1024]


async def test_whatever_ends_a_prompt_leaves_nothing_behind(engine: Recorded) -> None:
    visits = visits_of(engine)
    visits.weigh(Weights(batch_weight=2))
    engine.fail_next("prefill")
    with pytest.raises(EngineFailed):
        await ask(visits, "a", BATCH, 2048)
    async with anyio.create_task_group() as tasks:
        for key in "bcd":
            tasks.start_soon(ask, visits, key, BATCH, 2048)
        await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    assert not visits._waiting
    assert not visits._yielding._visits
    await ask(visits, "e", BATCH, 100)
