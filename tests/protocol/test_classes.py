"""Classes: who is next while both wait, and what batch never holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocol.classes import BATCH, INTERACTIVE, Turns, Weights


def turns(weights: Weights, count: int) -> list[str]:
    """Who is served while both wait all the time."""
    made, served = Turns(weights), []
    for _ in range(count):
        served.append(made.order[0])
        made.served(served[-1])
    return served


def test_of_ten_turns_nine_are_interactive_and_the_last_is_batchs() -> None:
    assert turns(Weights(), 20) == ([INTERACTIVE] * 9 + [BATCH]) * 2


@pytest.mark.parametrize(
    ("interactive", "batch", "served"),
    [(1, 1, "ibib"), (1, 3, "ibbbibbb"), (3, 2, "iibibiibib"), (1000, 1, "i" * 12)],
)
def test_turns_are_shared_by_weight(interactive: int, batch: int, served: str) -> None:
    made = turns(Weights(interactive_weight=interactive, batch_weight=batch), len(served))
    assert "".join(klass[0] for klass in made) == served


def test_a_turn_that_batch_does_not_take_passes() -> None:
    made = Turns(Weights(interactive_weight=1, batch_weight=1))
    made.passed()
    orders = [made.order]
    made.served(INTERACTIVE)
    orders.append(made.order)
    made.passed()
    orders.append(made.order)
    assert [order[0] for order in orders] == [INTERACTIVE, BATCH, INTERACTIVE], "at first it was not batch's"


weights = st.builds(Weights, interactive_weight=st.integers(1, 50), batch_weight=st.integers(1, 50))


def after(weights: Weights, served: list[str]) -> Turns:
    made = Turns(weights)
    for klass in served:
        made.served(klass)
    return made


@given(weights, st.lists(st.sampled_from([INTERACTIVE, BATCH]), max_size=200))
def test_whatever_came_before_batch_waits_for_no_more_turns_than_its_weight_says(
    weights: Weights, before: list[str]
) -> None:
    made, waited = after(weights, before), 0
    while not made.batch:
        made.served(INTERACTIVE)
        waited += 1
    assert waited <= weights.starved_max


@given(weights, st.lists(st.sampled_from([INTERACTIVE, BATCH]), max_size=200))
def test_whatever_came_before_interactive_requests_wait_for_no_more_than_batchs_share(
    weights: Weights, before: list[str]
) -> None:
    made, waited = after(weights, before), 0
    while made.batch:
        made.served(BATCH)
        waited += 1
    assert waited <= -(-weights.batch_weight // weights.interactive_weight)


@pytest.mark.parametrize(
    ("places", "room", "most"),
    [(1, 0.25, 1), (2, 0.25, 1), (4, 0.25, 3), (16, 0.25, 12), (4, 0.0, 4), (4, 1.0, 1), (0, 0.25, 1)],
)
def test_batch_leaves_room_but_may_always_hold_one_place(places: int, room: float, most: int) -> None:
    assert Weights(decode_room=room).most(places) == most
    assert Weights(prefill_room=room).slots_most(places) == most
