"""Numbered things come out once and in order, whatever has become of them on the way."""

import random

import pytest

from pipeline.limits import EARLY_MAX
from pipeline.protocol.in_order import InOrder


def test_what_is_expected_comes_out_at_once_and_what_was_there_does_not() -> None:
    order: InOrder[str] = InOrder()
    assert order.take(0, "a") == ["a"]
    assert order.take(0, "a") == []
    assert (order.next, order.repeated, order.gap) == (1, 1, False)


def test_what_comes_early_waits_for_what_is_missing() -> None:
    order: InOrder[str] = InOrder()
    assert order.take(2, "c") == order.take(1, "b") == order.take(2, "c") == []
    assert order.gap
    assert order.take(0, "a") == ["a", "b", "c"]
    assert not order.gap


def test_what_is_known_otherwise_is_skipped() -> None:
    order: InOrder[str] = InOrder(1)
    for number, thing in ((3, "c"), (5, "e"), (6, "f")):
        order.take(number, thing)
    assert order.skip_to(5) == ["e", "f"]
    assert (order.next, order.gap) == (7, False)


def test_what_comes_too_early_is_bounded_and_the_latest_go() -> None:
    order: InOrder[int] = InOrder()
    for number in range(2 * EARLY_MAX, 0, -1):
        order.take(number, number)
    assert order.take(0, 0) == list(range(EARLY_MAX + 1))


@pytest.mark.parametrize("seed", range(20))
def test_any_order_with_repeats_comes_out_in_order(seed: int) -> None:
    chance = random.Random(seed)
    numbers = [*range(200), *chance.choices(range(200), k=100)]
    chance.shuffle(numbers)
    order: InOrder[int] = InOrder()
    assert [ready for number in numbers for ready in order.take(number, number)] == list(range(200))
    assert order.repeated == 100
