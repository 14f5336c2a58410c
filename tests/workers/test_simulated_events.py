"""The simulated engine's cache events say what its cache holds, on a way as unreliable as a test wants it."""

import random

import anyio
import pytest

from pipeline.config import Config, Engine, Simulated
from pipeline.limits import CACHE_BATCHES_KEPT, CACHE_BATCHES_UNREAD
from pipeline.protocol.warmth import Index, Removed
from workers.engines.simulated import SimulatedEngine
from workers.engines.simulated.cache_log import CacheFaults, CacheLog

pytestmark = pytest.mark.anyio

CONFIG = Config(
    engine="simulated",
    prefill=Engine(slots=3, max_num_batched_tokens=96),
    simulated=Simulated(prefill_tokens_per_s=1e6, prefill_overhead_s=0.0, kv_blocks=40, step_s=0.001),
)


def events(*blocks: int) -> list[Removed]:
    return [Removed([block]) for block in blocks]


async def test_batches_are_numbered_and_read_in_order_and_can_be_repeated() -> None:
    log = CacheLog(CacheFaults(), 1)
    log.write([])
    for block in range(3):
        log.write([*events(block)])
    assert [(await log.read()).number for _ in range(3)] == [0, 1, 2]
    assert [batch.number for batch in await log.replay(1)] == [1, 2]
    async with anyio.create_task_group() as tasks:
        with anyio.move_on_after(0.01):
            await log.read()
        tasks.start_soon(_later, log)
        assert (await log.read()).number == 3


async def _later(log: CacheLog) -> None:
    await anyio.sleep(0.01)
    log.write([*events(3)])


async def test_what_nobody_reads_is_bounded() -> None:
    log = CacheLog(CacheFaults(), 1)
    for block in range(CACHE_BATCHES_KEPT + 10):
        log.write([*events(block)])
    assert (await log.read()).number == CACHE_BATCHES_KEPT + 10 - CACHE_BATCHES_UNREAD
    assert len(await log.replay(0)) == CACHE_BATCHES_KEPT


@pytest.mark.parametrize(
    ("faults", "numbers"),
    [
        (CacheFaults(lost=1.0), []),
        (CacheFaults(twice=1.0), [0, 0, 1, 1, 2, 2, 3, 3]),
        (CacheFaults(overtaken=1.0), [1, 0, 3, 2]),
    ],
)
async def test_batches_are_lost_repeated_and_overtaken_as_told(faults: CacheFaults, numbers: list[int]) -> None:
    log = CacheLog(faults, 1)
    for block in range(4):
        log.write([*events(block)])
    assert [(await log.read()).number for _ in numbers] == numbers
    with anyio.move_on_after(0.01) as nothing_more:
        await log.read()
    assert nothing_more.cancelled_caught
    assert len(await log.replay(0)) == 4


@pytest.mark.parametrize("seed", range(5))
async def test_an_index_of_the_events_is_the_cache(seed: int) -> None:
    """Prompts that overlap in time, share prefixes, are given up, and do not fit all at once."""
    chance, engine = random.Random(seed), SimulatedEngine(CONFIG, "prefill")
    await engine.start()
    personas = [[100 * (1 + number)] * 256 for number in range(5)]
    prompts = [[*personas[n % 5], *chance.choices(range(9), k=chance.randint(1, 200))] for n in range(40)]

    async def one(number: int) -> None:
        with anyio.move_on_after(chance.choice((0.001, 1.0))):
            await engine.prefill(f"{number}", prompts[number], "aa")

    for first in range(0, 40, 4):
        async with anyio.create_task_group() as tasks:
            for number in range(first, first + 4):
                tasks.start_soon(one, number)
    log, index = engine.cache_events(), Index(32, CONFIG.simulated.kv_blocks)
    assert log is not None
    index.replayed(await log.replay(0), 0.0)
    assert index.whole
    assert len(index) > 0
    for prompt in prompts:
        assert index.cached_tokens("aa", prompt) == engine.truly_cached_tokens("aa", prompt)
    await engine.close()
    assert engine.truly_cached_tokens("aa", prompts[0]) == 0


async def test_a_decode_engine_tells_nothing() -> None:
    assert SimulatedEngine(CONFIG, "decode").cache_events() is None
