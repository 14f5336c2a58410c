"""Workloads in numbers and as traces, and what caches will have of them."""

import itertools
import math
from pathlib import Path

import msgspec
import pytest

from pipeline.errors import OperatorError
from pipeline.planning import hits, presets, source, traffic, workload
from pipeline.planning.caches import Cache
from pipeline.planning.question import Numbers, Trace
from pipeline.planning.rates import Memory
from pipeline.planning.workload import Workload

LOAD = Workload(requests_per_s=200, prefix_tokens=1800, history_tokens=400, creators=300, turn_gap_s=10.0)
SINGLE = Workload(requests_per_s=50, prefix_tokens=800, message_tokens=400, output_tokens=100, creators=40)


def test_the_seed_workload_has_the_shape_that_the_fleet_gives_it() -> None:
    assert presets.seed().load.shape == traffic.Shape()
    assert presets.seed().load.conversations == source.CONVERSATIONS


def test_hits_of_the_mean_prompt_are_counted_in_full_blocks() -> None:
    assert LOAD.block_hit_rate(16) == 135 / 137
    assert SINGLE.block_hit_rate(16) == (50 - 31) / 50
    assert Workload(requests_per_s=1, prefix_tokens=0).block_hit_rate(16) == 0.0


# ---- what caches have


def measured(load: Workload, capacity: int, seconds: float) -> float:
    """The share of prompt tokens that one LRU cache has of the fleet's own traffic, when it has filled."""
    cache, found, tokens = Cache(capacity), 0, 0
    trace = itertools.islice(traffic.requests(load.traffic(3)), int(seconds * load.requests_per_s))
    for number, request in enumerate(trace):
        if number > seconds * load.requests_per_s / 2:
            found += cache.match(request) * source.BLOCK_TOKENS
            tokens += request.tokens
        cache.put(request)
    return found / tokens


@pytest.mark.parametrize("capacity", [5_000, 20_000, 60_000, 10_000_000])
@pytest.mark.parametrize(
    "load", [LOAD, msgspec.structs.replace(LOAD, hot_share=0.5), SINGLE], ids=["chat", "hot", "single"]
)
def test_ches_approximation_says_what_an_lru_cache_will_have(load: Workload, capacity: int) -> None:
    expected = hits.expect(load, capacity)
    asked = list(itertools.islice(hits.draw(load, expected, expected, 1), 20_000))
    drawn = sum(one.hbm for one in asked) / sum(one.prompt for one in asked)
    assert drawn == pytest.approx(measured(load, capacity, 150), abs=0.03)


def test_what_a_small_cache_has_a_larger_one_has_too() -> None:
    small, large = hits.expect(LOAD, 20_000), hits.expect(LOAD, 60_000)
    asked = list(itertools.islice(hits.draw(LOAD, small, large, 1), 5000))
    assert all(one.lmcache >= 0 and one.hbm + one.lmcache < one.prompt for one in asked)
    assert sum(one.lmcache for one in asked) > 0
    assert not any(one.lmcache for one in itertools.islice(hits.draw(LOAD, small, small, 1), 5000))


def test_creators_in_groups_are_those_that_traffic_draws() -> None:
    groups = list(hits.zipf(40_000_000))
    assert sum(count for count, _ in groups) == 40_000_000
    assert sum(count * each for count, each in groups) == pytest.approx(1)
    assert groups[0][0] == 1
    assert groups[0][1] == pytest.approx(math.log(2) / math.log(40_000_001))
    assert len(groups) < 400


def test_drawn_requests_have_the_workloads_lengths_and_rate() -> None:
    asked = Numbers(LOAD).requests(200, Memory(prefill_tokens=1e9, decode_tokens=None, lmcache_tokens=1e9), 4)
    assert sum(one.prompt for one in asked) / len(asked) == pytest.approx(2210, rel=0.01)
    assert len(asked) / asked[-1].at_s == pytest.approx(200, rel=0.05)


# ---- traces


def lines(path: Path, *requests: dict[str, object]) -> Path:
    path.write_bytes(b"\n".join(map(msgspec.json.encode, requests)) + b"\n\n")
    return path


def one(at_ms: float, tokens: int, output: int, names: list[int]) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": names}


def test_a_trace_is_replayed_against_caches_of_a_size(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "trace.jsonl",
        one(0, 1024, 10, [1, 2]),
        one(1000, 1500, 20, [1, 2, 3]),
        one(2000, 1100, 30, [4, 5, 6]),
        one(3000, 1024, 40, [1, 2]),
    )
    trace = workload.read_trace(path)
    asked = workload.replay(trace, hbm_tokens=3 * 512, lmcache_tokens=1e9)
    assert [(each.hbm, each.lmcache) for each in asked] == [
        (0, 0),
        (1024, 0),
        (0, 0),
        (0, 1023),
    ]  # the last token is computed
    assert [each.at_s for each in asked] == [0, 1, 2, 3]


def test_a_trace_in_numbers_is_its_means(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "trace.jsonl", one(0, 1000, 10, [1]), one(500, 2000, 30, [1, 2, 3]), one(1000, 3000, 50, [9])
    )
    load = workload.mean_of(workload.read_trace(path))
    assert load.requests_per_s == 2.0
    assert (load.prompt_tokens, load.prefix_tokens, load.output_tokens) == (2000, 512 // 3, 30)


def test_a_trace_may_be_played_faster(tmp_path: Path) -> None:
    path = lines(tmp_path / "trace.jsonl", one(0, 1000, 10, [1]), one(1000, 1000, 10, [1]))
    asked = Trace(workload.read_trace(path)).requests(
        4, Memory(prefill_tokens=1e9, decode_tokens=None, lmcache_tokens=1e9), 1
    )
    assert [each.at_s for each in asked] == [0, 0.25]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"timestamp": 0}\n', "line 1: .*missing required field `input_length`"),
        (b"\n{}{}\n", "line 2"),
        (b'{"timestamp": 0, "input_length": 9, "output_length": 1}\n', "no two requests at different times"),
        (None, "Cannot read"),
    ],
)
def test_a_wrong_trace_is_refused_by_line(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OperatorError, match=sentence):
        workload.read_trace(path)
