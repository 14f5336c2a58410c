"""The simulated engine's two caches: blocks in HBM, and the LMCache tier that processes share."""

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import OperatorError
from workers.engines.simulated.blocks import BlockPool, names_of, root_of
from workers.engines.simulated.tier import LocalTier, ProcessTier, SharedTier, Tier

# --------------------------------------------------------------------------------------------------------------
# Blocks


def test_a_blocks_name_stands_for_all_before_it_and_for_the_salt() -> None:
    ids = array("I", range(96))
    names = names_of(ids.tobytes(), 32, root_of("aa"))
    assert len(names) == len(set(names)) == 3
    assert names_of(ids[:70].tobytes(), 32, root_of("aa")) == names[:2]
    assert names_of(ids[32:].tobytes(), 32, names[0]) == names[1:]
    assert not set(names) & set(names_of(ids.tobytes(), 32, root_of("ab")))


def test_blocks_that_nobody_uses_are_found_again_until_room_is_needed() -> None:
    pool = BlockPool(4)
    assert pool.take((), 3)
    for name in (1, 2, 3):
        pool.name(name)
    pool.release([1, 2, 3], 0)
    assert (pool.used, pool.idle, pool.match([1, 2, 3])) == (0, 3, 3)
    assert pool.take((), 2)
    assert pool.match([1, 2, 3]) == 2  # the prompt's end went first


def test_what_is_found_again_is_not_evicted_by_the_same_request() -> None:
    pool = BlockPool(4)
    assert pool.take((), 3)
    for name in (1, 2, 3):
        pool.name(name)
    pool.release([1, 2, 3], 0)
    assert not pool.take([1, 2, 3], 2)
    assert (pool.used, pool.match([1, 2, 3])) == (0, 3)
    assert pool.take([1, 2, 3], 1)
    assert (pool.used, pool.idle) == (4, 0)


Held = list[tuple[list[int], int]]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6), st.booleans()), max_size=60))
@settings(deadline=None)
def test_blocks_are_neither_lost_nor_made(moves: list[tuple[int, int, bool]]) -> None:
    pool, holders = BlockPool(16), Held()
    for chain, length, give_back in moves:
        if give_back and holders:
            pool.release(*holders.pop(0))
        else:
            names = [100 * chain + at for at in range(length)]
            here = pool.match(names)
            if pool.take(names[:here], length - here + 1):
                for name in names[here:]:
                    pool.name(name)
                holders.append((names, 1))
        distinct = {name for names, _ in holders for name in names}
        assert pool.used == len(distinct) + len(holders)
        assert pool.used + pool.idle <= 16
    for names, private in holders:
        pool.release(names, private)
    assert pool.used == 0


# --------------------------------------------------------------------------------------------------------------
# The tier


@pytest.fixture(params=["local", "process", "shared"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    opened: Tier
    match request.param:
        case "local":
            opened = LocalTier(8)
        case "process":
            opened = ProcessTier("a test's own", 8)
        case _:
            opened = SharedTier(str(tmp_path / "tier"), 8)
    yield opened
    opened.close()


def test_a_tier_forgets_what_was_used_longest_ago(tier: Tier) -> None:
    tier.put([1, 2, 3, 4])
    tier.put([5, 6, 7, 8])
    tier.put([1, 2])
    tier.put([9, 10])
    assert tier.match([1, 2]) == 2
    assert tier.match([3]) == tier.match([4]) == 0
    assert tier.match([5, 6, 7, 8, 9, 10, 11]) == 6


def test_a_tier_that_restarts_has_nothing(tier: Tier) -> None:
    tier.put([1, 2, 3])
    tier.clear()
    assert tier.match([1, 2, 3]) == 0
    tier.put([1])
    assert tier.match([1, 2]) == 1


def test_a_tier_of_a_process_lasts_until_its_last_user_closes_it() -> None:
    first, second = ProcessTier("lasting", 8), ProcessTier("lasting", 8)
    first.put([1, 2])
    first.close()
    third = ProcessTier("lasting", 8)
    assert second.match([1, 2]) == third.match([1, 2]) == 2
    second.close()
    third.close()
    fresh = ProcessTier("lasting", 8)
    assert fresh.match([1]) == 0
    fresh.close()


@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.lists(st.integers(1, 12), min_size=1, max_size=24)), max_size=12))
@settings(max_examples=50, deadline=None)
def test_processes_that_share_a_tier_agree_on_what_it_holds(
    tmp_path_factory: pytest.TempPathFactory, puts: list[tuple[int, list[int]]]
) -> None:
    path = str(tmp_path_factory.mktemp("tier") / "tier")
    users, truth = [SharedTier(path, 6), SharedTier(path, 6)], LocalTier(6)
    for user, names in puts:
        users[user].put(names)
        truth.put(names)
        for name in range(1, 13):
            assert users[0].match([name]) == users[1].match([name]) == truth.match([name])
    for shared in users:
        shared.close()


def test_who_joins_a_tier_late_knows_what_it_holds(tmp_path: Path) -> None:
    path = str(tmp_path / "tier")
    early = SharedTier(path, 100)
    for first in range(1, 1000, 10):
        early.put(range(first, first + 10))
    late = SharedTier(path, 100)
    assert late.match(range(901, 1001)) == 100
    assert late.match([900]) == 0
    early.clear()
    assert late.match([950]) == 0
    early.close()
    late.close()


def test_a_store_is_lost_while_another_process_holds_the_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "tier")
    one, stopped = SharedTier(path, 8), SharedTier(path, 8)
    assert stopped._locked()
    one.put([1])
    assert one.match([1]) == 0
    stopped.close()  # the kernel frees a dead process's lock
    one.put([1])
    assert one.match([1]) == 1
    one.close()


def test_a_tier_of_another_size_or_no_tier_at_all_is_refused(tmp_path: Path) -> None:
    SharedTier(str(tmp_path / "tier"), 8).close()
    (tmp_path / "text").write_text("something else")
    for path, capacity in ((tmp_path / "tier", 9), (tmp_path / "text", 8), (tmp_path / "no" / "folder", 8)):
        with pytest.raises(OperatorError):
            SharedTier(str(path), capacity)
