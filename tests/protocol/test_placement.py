"""Placement: everybody computes the same order, shares follow capacity, and a change moves only its own share."""

import random

import pytest

from pipeline.limits import PULL_RANK_MAX, SPILL_BACK_LOAD, SPILL_LOAD
from pipeline.protocol import placement
from pipeline.protocol.subjects import Shard

SHARDS = [Shard("interactive", number) for number in range(2000)]


def owners(workers: dict[str, float]) -> dict[Shard, str]:
    return {shard: placement.order(shard, workers)[0] for shard in SHARDS}


def test_my_rank_is_my_place_in_the_order_that_everybody_computes() -> None:
    workers = {f"p{number}": 4.0 for number in range(5)}
    for me in workers:
        ranks = placement.ranks(me, SHARDS, workers)
        assert all(placement.order(shard, workers)[rank] == me for shard, rank in ranks.items())


def test_the_first_of_each_shard_are_those_of_its_order() -> None:
    workers = {f"p{number}": 1.0 + number for number in range(9)}
    first = placement.first_of(50, workers, 2)
    assert first == [placement.order(shard, workers)[:2] for shard in SHARDS[:50]]
    assert placement.first_of(1, {"alone": 4.0}, 2) == [["alone"]]
    assert placement.first_of(1, {}, 2) == [[]]


def test_a_worker_that_others_do_not_know_yet_ranks_itself_all_the_same() -> None:
    assert set(placement.ranks("new", SHARDS[:50], {"old": 1.0}).values()) == {0, 1}
    assert set(placement.ranks("alone", SHARDS[:5], {}).values()) == {0}


def test_ranks_beyond_what_nats_knows_share_the_last() -> None:
    workers = {f"p{number}": 1.0 for number in range(40)}
    assert max(placement.ranks("p0", SHARDS[:200], workers).values()) == PULL_RANK_MAX


def test_a_worker_owns_in_proportion_to_its_capacity() -> None:
    owned = list(owners({"small": 1.0, "big": 3.0}).values())
    assert 0.70 < owned.count("big") / len(owned) < 0.80


def test_a_worker_that_leaves_moves_only_its_own_shards() -> None:
    before = owners({"a": 1.0, "b": 1.0, "c": 1.0})
    after = owners({"a": 1.0, "b": 1.0})
    assert all(after[shard] == owner for shard, owner in before.items() if owner != "c")


def test_both_classes_of_a_shard_have_the_same_owner() -> None:
    workers = {"a": 1.0, "b": 1.0, "c": 1.0}
    for number in range(50):
        assert placement.order(Shard("interactive", number), workers) == placement.order(
            Shard("batch", number), workers
        )


@pytest.mark.parametrize(
    ("busy", "tokens", "kv", "expected"), [(1, 0, 0.0, 0.25), (1, 90, 0.0, 0.9), (1, 0, 0.8, 0.8), (4, 500, 1.0, 1.0)]
)
def test_load_is_the_scarcest_of_slots_tokens_and_blocks(busy: int, tokens: int, kv: float, expected: float) -> None:
    assert (
        placement.load(busy=busy, slots=4, queued_tokens=tokens, queued_tokens_max=100, kv_usage_ratio=kv) == expected
    )


@pytest.mark.parametrize("spilling", [False, True])
def test_a_worker_that_spills_goes_on_until_its_load_has_clearly_fallen(spilling: bool) -> None:
    assert placement.spills(SPILL_LOAD, spilling)
    assert not placement.spills(SPILL_BACK_LOAD, spilling)
    assert placement.spills(0.8, spilling) == spilling


def test_owners_are_kept_as_workers_come_go_and_change() -> None:
    chance, workers = random.Random(1), {"a": 4.0}
    owners = placement.Owners(64)
    assert (len(owners), owners[0]) == (64, "")
    for number in (*range(30), *range(30)):
        if chance.random() < 0.6 or not workers:
            workers[f"w{number}"] = float(chance.choice((2, 4)))
        else:
            workers.pop(chance.choice(list(workers)), None)
        owners.update(workers)
        best = [placement.order(Shard("batch", n), workers)[:1] for n in range(64)]
        assert [owners[n] for n in range(64)] == [first[0] if first else "" for first in best]


def test_of_equal_scores_the_smaller_id_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_scores", lambda worker, shards: [1.0] * shards)
    for workers in (["a", "b"], ["b", "a"]):
        owners = placement.Owners(4)
        owners.update(dict.fromkeys(workers, 1.0))
        assert owners[0] == "a"
