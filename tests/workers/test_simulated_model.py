"""The simulated engine's steps, in virtual time."""

from array import array
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import Simulated
from pipeline.errors import EngineFailed
from workers.engines.port import Prefilled, Step
from workers.engines.simulated.model import EngineModel, Job, Output, Shape
from workers.engines.simulated.reply import Reply, sampling_of
from workers.engines.simulated.tier import LocalTier, Tier

TIMING = Simulated(
    prefill_tokens_per_s=10_000.0,
    prefill_overhead_s=0.01,
    step_s=0.004,
    step_per_sequence_s=0.001,
    kv_blocks=400,
    lmcache_blocks_per_s=1_000.0,
)
SHAPE = Shape(block_size=32, chunk_size=32, seats=16, tokens_per_step=512)


def engine(timing: Simulated = TIMING, shape: Shape = SHAPE, tier: Tier | None = None) -> EngineModel:
    return EngineModel(timing, shape, LocalTier(1000) if tier is None else tier)


def ids_of(tokens: int, variant: int = 0) -> "array[int]":
    return array("I", range(1000 + variant * 10_000, 1000 + variant * 10_000 + tokens))


def reply_of(job: Job, tokens: int) -> list[int]:
    """What the job should say, token by token."""
    reply = Reply(1, job.token_ids.tobytes(), (), sampling_of({"ignore_eos": True}), tokens)
    return [reply.next()[0] for _ in range(tokens)]


def prefill(key: str, tokens: int, variant: int = 0, fails_after: int | None = None) -> Job:
    return Job(key=key, token_ids=ids_of(tokens, variant), salt="aa", fails_after=fails_after)


def decode(key: str, tokens: int, max_tokens: int, variant: int = 0, fails_after: int | None = None) -> Job:
    ids = ids_of(tokens, variant)
    reply = Reply(1, ids.tobytes(), (), sampling_of({"ignore_eos": True}), max_tokens)
    return Job(key=key, token_ids=ids, salt="aa", reply=reply, tokens_max=max_tokens, fails_after=fails_after)


Timed = tuple[float, Output]


def run(model: EngineModel, until_s: float = 1e9) -> list[Timed]:
    """All that happens until then, each with its time."""
    happened: list[Timed] = []
    while (at_s := model.next_at()) is not None and at_s <= until_s:
        happened.extend((round(at_s, 6), output) for output in model.advance(at_s))
    return happened


def times(happened: list[Timed]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for at_s, output in happened:
        found.setdefault(output.key, []).append(at_s)
    return found


def cached(happened: list[Timed], key: str) -> int:
    whats = [output.what for _, output in happened if output.key == key]
    assert isinstance(whats[0], Prefilled | Step)
    return whats[0].cached_tokens


def test_a_cold_prefill_takes_its_overhead_its_tokens_and_the_store() -> None:
    model = engine()
    model.submit(prefill("a", 1000), 5.0)
    ((at_s, output),) = run(model)
    assert isinstance(output.what, Prefilled)
    assert (output.what.cached_tokens, output.what.generated_tokens, output.what.wait_s) == (0, 1, 0.0)
    assert output.what.store_s == pytest.approx(31 / 1_000)
    assert at_s == pytest.approx(5.0 + 0.01 + 1000 / 10_000 + 31 / 1_000)


def test_a_warm_prefill_computes_only_what_is_not_in_hbm() -> None:
    model = engine()
    model.submit(prefill("a", 1000), 0.0)
    run(model)
    model.submit(prefill("b", 1000), 1.0)
    ((at_s, output),) = run(model)
    assert cached([(at_s, output)], "b") == 992
    assert at_s == pytest.approx(1.0 + 0.01 + 8 / 10_000)


def test_prefills_share_the_compute_in_order() -> None:
    model = engine()
    model.submit(prefill("a", 1000, 0), 0.0)
    model.submit(prefill("b", 1000, 1), 0.0)
    done = times(run(model))
    assert done["a"][0] < done["b"][0]
    assert done["b"][0] == pytest.approx(0.02 + 2000 / 10_000 + 31 / 1_000, abs=0.002)


def test_a_second_prompt_finds_what_the_first_one_ahead_of_it_has_computed() -> None:
    model = engine()
    model.submit(prefill("a", 2000), 0.0)
    model.submit(prefill("b", 2000), 0.0)
    happened = run(model)
    assert cached(happened, "a") == 0
    assert cached(happened, "b") == 1984


@pytest.mark.parametrize(("sequences", "step_s"), [(1, 0.005), (8, 0.012)])
def test_a_step_gives_every_sequence_a_token_and_grows_with_the_batch(sequences: int, step_s: float) -> None:
    model = engine()
    for number in range(sequences):
        model.submit(decode(f"d{number}", 33, 40), 0.0)
    at = times(run(model))
    assert all(len(steps) == 40 for steps in at.values())
    assert all(set(at["d0"][2:]) <= set(steps) for steps in at.values())
    assert at["d0"][10] - at["d0"][9] == pytest.approx(step_s)


def test_prefill_in_the_same_engine_slows_the_steps_down() -> None:
    model = engine()
    model.submit(decode("d", 33, 40), 0.0)
    model.submit(prefill("p", 2000, 1), 0.05)
    at = times(run(model))["d"]
    gaps = [later - sooner for sooner, later in pairwise(at)]
    assert min(gaps) == pytest.approx(0.005)
    assert max(gaps) == pytest.approx(0.005 + 511 / 10_000 + 0.01)


@pytest.mark.parametrize(("tokens", "loaded"), [(2210, 2208), (2208, 2207), (64, 63), (65, 64), (33, 32), (31, 0)])
def test_decode_loads_the_full_chunks_and_computes_the_tail(tokens: int, loaded: int) -> None:
    shared = LocalTier(1000)
    first, second = engine(tier=shared), engine(tier=shared)
    first.submit(prefill("a", tokens), 0.0)
    run(first)
    second.submit(decode("a", tokens, 2), 10.0)
    happened = run(second)
    assert cached(happened, "a") == loaded
    blocks = -(-loaded // 32)
    assert happened[0][0] == pytest.approx(10.0 + blocks / 1_000 + 0.005 + (tokens - loaded) / 10_000)


def test_only_full_chunks_travel() -> None:
    shared = LocalTier(1000)
    shape = Shape(block_size=32, chunk_size=128, seats=4, tokens_per_step=512)
    first, second = engine(shape=shape, tier=shared), engine(shape=shape, tier=shared)
    first.submit(prefill("a", 500), 0.0)
    run(first)
    assert len(shared) == 3
    second.submit(decode("a", 500, 2), 0.0)
    assert cached(run(second), "a") == 384


def test_decode_without_the_tier_computes_the_prompt_itself() -> None:
    model = engine()
    model.submit(decode("a", 1000, 1), 0.0)
    happened = run(model)
    assert cached(happened, "a") == 0
    assert happened[0][0] == pytest.approx(0.004 + 0.005 + 1000 / 10_000)  # two steps: 512 tokens and 488


def test_loads_share_the_link_and_run_beside_the_steps() -> None:
    shared = LocalTier(1000)
    first, second = engine(tier=shared), engine(tier=shared)
    for variant in (0, 1):
        first.submit(prefill(f"p{variant}", 641, variant), 0.0)
    run(first)
    second.submit(decode("busy", 33, 20, variant=2), 0.0)
    second.submit(decode("d0", 641, 1, 0), 0.0)
    second.submit(decode("d1", 641, 1, 1), 0.0)
    at = times(run(second))
    assert 0.02 < at["d0"][0] < 0.04 < at["d1"][0] < 0.06
    assert sum(at_s < 0.04 for at_s in at["busy"]) >= 5


def test_the_hbm_cache_evicts_the_prompt_used_longest_ago() -> None:
    model, found = engine(Simulated(kv_blocks=20), tier=LocalTier(1)), dict[str, int]()
    for key, variant in (("a", 0), ("b", 1), ("a again", 0), ("c", 2), ("a still", 0), ("b no more", 1)):
        model.submit(prefill(key, 8 * 32 + 1, variant), 0.0)
        found[key] = cached(run(model), key)
    assert found == {"a": 0, "b": 0, "a again": 256, "c": 0, "a still": 256, "b no more": 96}  # its end went first


def test_the_tier_evicts_the_prompt_used_longest_ago() -> None:
    shared = LocalTier(20)
    first = engine(tier=shared)
    for key, variant in (("a", 0), ("b", 1), ("a again", 0), ("c", 2)):
        first.submit(prefill(key, 8 * 32 + 1, variant), 0.0)
        run(first)
    for key, variant, loaded in (("a", 0, 256), ("b", 1, 0), ("c", 2, 256)):
        second = engine(tier=shared)
        second.submit(decode(key, 8 * 32 + 1, 1, variant), 0.0)
        assert cached(run(second), key) == loaded


def test_requests_wait_for_blocks_and_end_all_the_same() -> None:
    model = engine(Simulated(kv_blocks=12))
    for number in range(6):
        model.submit(decode(f"d{number}", 64, 32, number), 0.0)
    assert model.usage().waiting > 0
    happened = run(model)
    assert {key: len(found) for key, found in times(happened).items()} == {f"d{number}": 32 for number in range(6)}
    assert (model.usage().kv_usage_ratio, model.usage().running, model.usage().waiting) == (0.0, 0, 0)


def test_when_blocks_run_out_the_youngest_starts_over_and_says_nothing_twice() -> None:
    model = engine(Simulated(kv_blocks=12))
    jobs = [decode(f"d{number}", 65, 200, number) for number in range(3)]
    expected = {job.key: reply_of(job, 200) for job in jobs}
    for job in jobs:
        model.submit(job, 0.0)
    said: dict[str, list[int]] = {job.key: [] for job in jobs}
    for _, output in run(model):
        assert isinstance(output.what, Step)
        said[output.key].extend(output.what.token_ids)
    assert said == expected
    assert model.usage().preemptions > 0
    assert model.usage().kv_usage_ratio == 0.0


def test_with_a_block_for_every_token_to_come_nothing_is_preempted() -> None:
    need = -(-(65 + 200) // 32) + 1
    model = engine(Simulated(kv_blocks=3 * need))
    for number in range(3):
        model.submit(decode(f"d{number}", 65, 200, number), 0.0)
    run(model)
    assert model.usage().preemptions == 0


def test_what_can_never_fit_and_a_key_in_use_are_refused_at_once() -> None:
    model = engine(Simulated(kv_blocks=4))
    with pytest.raises(EngineFailed, match="5 KV blocks"):
        model.submit(decode("d", 100, 30), 0.0)
    model.submit(decode("d", 100, 28), 0.0)
    with pytest.raises(EngineFailed, match="in use"):
        model.submit(decode("d", 10, 2), 0.0)


def test_an_abort_frees_the_blocks_at_once_in_every_state() -> None:
    shared = LocalTier(1000)
    first = engine(tier=shared)
    first.submit(prefill("stored", 641), 0.0)
    run(first)
    model = engine(Simulated(kv_blocks=60), Shape(block_size=32, chunk_size=32, seats=2, tokens_per_step=64), shared)
    model.submit(decode("loading", 641, 5), 0.0)
    model.submit(decode("running", 300, 5, 1), 0.0)
    model.submit(prefill("waiting", 1000, 2), 0.0)
    assert (model.usage().running, model.usage().waiting) == (1, 2)
    for key in ("waiting", "loading", "running", "unknown"):
        model.abort(key, 0.0)
    assert (model.usage().running, model.usage().waiting, model.usage().kv_usage_ratio) == (0, 0, 0.0)
    assert run(model) == []


def test_an_abort_makes_room_for_who_waits() -> None:
    model = engine(Simulated(kv_blocks=10))
    model.submit(decode("d0", 200, 90), 0.0)
    model.submit(decode("d1", 200, 90, 1), 0.0)
    run(model, 0.02)
    model.abort("d0", 0.021)
    assert len(times(run(model))["d1"]) == 90


def test_a_job_told_to_fail_does_so_and_gives_its_blocks_back() -> None:
    model = engine()
    model.submit(prefill("p", 100, fails_after=0), 0.0)
    model.submit(decode("d", 100, 10, 1, fails_after=3), 0.0)
    happened = run(model)
    assert [isinstance(output.what, EngineFailed) for _, output in happened if output.key == "p"] == [True]
    assert [isinstance(output.what, EngineFailed) for _, output in happened if output.key == "d"] == [False] * 3 + [
        True
    ]
    assert model.usage().kv_usage_ratio == 0.0


def test_an_engine_that_stood_still_ends_all_the_later() -> None:
    model = engine()
    model.submit(prefill("p", 1000), 0.0)
    run(model, 0.02)
    model.postpone(7.0)
    ((at_s, _),) = run(model)
    assert at_s == pytest.approx(7.0 + 0.01 + 0.1 + 0.031)


def test_who_comes_while_the_loop_is_late_is_not_served_before_it_came() -> None:
    model = engine()
    model.submit(decode("early", 33, 2), 0.0)
    first_end_s = model.next_at()
    assert first_end_s is not None
    model.submit(decode("late", 33, 1, 1), first_end_s + 0.001)
    at = times(run(model))
    assert at["late"][0] > first_end_s + 0.001 + 0.005


jobs = st.lists(
    st.tuples(
        st.booleans(),  # a prefill?
        st.integers(1, 200),  # prompt tokens
        st.integers(0, 3),  # variant
        st.integers(1, 60),  # reply tokens
        st.floats(0, 0.2),  # time after the one before
        st.one_of(st.none(), st.floats(0, 0.2)),  # aborted so long after it came
    ),
    min_size=1,
    max_size=15,
)


@given(jobs, st.integers(9, 40), st.integers(1, 6), st.integers(16, 512))
@settings(max_examples=150, deadline=None)
def test_whatever_comes_every_request_ends_once_and_every_block_returns(
    asked: list[tuple[bool, int, int, int, float, float | None]], blocks: int, seats: int, budget: int
) -> None:
    timing = Simulated(kv_blocks=blocks, lmcache_blocks_per_s=2_000.0, prefill_tokens_per_s=20_000.0)
    model = engine(timing, Shape(block_size=32, chunk_size=32, seats=seats, tokens_per_step=budget), LocalTier(12))
    now_s, aborts, lasts = 0.0, dict[str, float](), dict[str, int]()
    for number, (is_prefill, tokens, variant, max_tokens, later_s, abort_s) in enumerate(asked):
        now_s += later_s
        for key in [key for key, at_s in aborts.items() if at_s <= now_s]:
            model.abort(key, aborts.pop(key))
        note(run(model, now_s), lasts)
        key = str(number)
        model.submit(prefill(key, tokens, variant) if is_prefill else decode(key, tokens, max_tokens, variant), now_s)
        if abort_s is not None:
            aborts[key] = now_s + abort_s
        assert 0.0 <= model.usage().kv_usage_ratio <= 1.0
    note(run(model), lasts)
    assert set(lasts.values()) <= {1}
    assert all(lasts.get(str(number)) == 1 for number, job in enumerate(asked) if job[5] is None)
    usage = model.usage()
    assert (usage.running, usage.waiting, usage.kv_usage_ratio) == (0, 0, 0.0)


def note(happened: list[Timed], lasts: dict[str, int]) -> None:
    """Count the last outputs of each key."""
    for _, output in happened:
        if not isinstance(output.what, Step) or output.what.finish_reason is not None:
            lasts[output.key] = lasts.get(output.key, 0) + 1


def test_a_prompt_is_read_in_small_steps_only_beside_a_reply() -> None:
    """A step of 512 tokens takes 51 ms, one of 32 beside a reply 3 ms and what the reply takes."""
    shape = Shape(block_size=32, chunk_size=32, seats=4, tokens_per_step=512, beside_replies=32)
    timing = msgspec.structs.replace(TIMING, prefill_overhead_s=0.0, step_per_sequence_s=0.0)

    def read_s(shape: Shape, *, beside_reply: bool = True) -> tuple[float, float]:
        """When a prompt of 512 tokens has been read, and the longest gap in the reply beside it."""
        model = engine(timing, shape)
        if beside_reply:
            model.submit(decode("r", 32, 60, variant=1), 0.0)
        happened = run(model, 0.02)
        model.submit(prefill("p", 512), 0.02)
        happened += run(model)
        steps_s = [at_s for at_s, output in happened if isinstance(output.what, Step)]
        read = next(at_s for at_s, output in happened if output.key == "p")
        return read - 0.02, max((after - before for before, after in pairwise(steps_s)), default=0.0)

    alone_s, _ = read_s(shape, beside_reply=False)
    long_s, long_gap_s = read_s(msgspec.structs.replace(shape, beside_replies=0))
    short_s, short_gap_s = read_s(shape)
    assert alone_s == pytest.approx(long_s, abs=0.03)
    assert long_gap_s > 0.05
    assert short_gap_s < 0.01
    assert short_s > 16 * 0.007
