"""Yielding: who is in a prefill engine, told as short stories, and as a machine that starves nobody."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pipeline.protocol.classes import BATCH, INTERACTIVE, WEIGHTS, Weights
from pipeline.protocol.yielding import AHEAD_STEPS_MAX, OWED_STEPS_MAX, VISIT_COST_RATIO, Yielding, pieces

STEP = 512


def engine(weights: Weights = WEIGHTS) -> Yielding:
    return Yielding(STEP, weights)


def test_interactive_prompts_go_at_once_and_batch_between_them() -> None:
    made = engine()
    assert made.enter("a", INTERACTIVE, 100) == ["a"]
    assert made.enter("b", BATCH, 100) == []
    assert made.enter("c", INTERACTIVE, 100) == ["c"]
    assert made.leave("a") == []
    assert made.leave("c") == ["b"]


def test_no_more_of_batch_is_inside_than_one_step_takes() -> None:
    made = engine()
    assert [made.enter(key, BATCH, 200) for key in "abc"] == [["a"], ["b"], []]
    assert made.enter("d", BATCH, 70) == [], "a small one may not overtake for ever"
    assert made.enter("e", INTERACTIVE, 900) == ["e"], "and an interactive prompt need not wait for them"
    assert made.leave("e") == []
    assert made.leave("a") == ["c", "d"]


def test_what_is_longer_than_a_step_goes_alone() -> None:
    made = engine()
    assert made.enter("whole", BATCH, 5000) == ["whole"]
    assert made.enter("b", BATCH, 70) == []
    assert made.leave("whole") == ["b"]


def test_batch_that_is_never_alone_gets_its_weight_in_tokens() -> None:
    made, batch, interactive = engine(Weights(interactive_weight=4, batch_weight=1)), 0, 0
    made.enter(0, INTERACTIVE, 1000)
    made.enter("b0", BATCH, STEP)
    for number in range(1, 200):
        interactive += 1000
        for key in [*made.enter(number, INTERACTIVE, 1000), *made.leave(number - 1)]:
            if key == f"b{batch}":
                batch += 1
                made.leave(key)
                made.enter(f"b{batch}", BATCH, STEP)
    assert batch * STEP == pytest.approx(interactive / 4, rel=0.05)


def test_what_batch_gets_between_interactive_prompts_it_is_not_owed() -> None:
    made = engine(Weights(interactive_weight=1, batch_weight=1))
    made.enter("a", INTERACTIVE, STEP)
    made.leave("a")
    assert made.enter("b", BATCH, STEP) == ["b"]
    assert made.enter("c", INTERACTIVE, 100) == ["c"]
    assert made.leave("b") == []
    assert made.enter("d", BATCH, STEP) == []


def test_batch_that_was_served_before_lets_a_burst_pass_and_is_not_held_to_it_for_ever() -> None:
    made = engine(Weights(interactive_weight=1, batch_weight=1))
    for number in range(100):
        made.enter(number, BATCH, STEP)
        made.leave(number)
    made.enter("a", INTERACTIVE, AHEAD_STEPS_MAX * STEP)
    assert made.enter("b", BATCH, STEP) == []
    assert made.enter("c", INTERACTIVE, STEP) == ["c", "b"]


def test_what_batch_did_not_want_is_owed_for_one_prompt_only() -> None:
    made = engine(Weights(interactive_weight=1, batch_weight=1))
    made.enter("a", INTERACTIVE, 100 * STEP)
    went = [made.enter(number, BATCH, STEP) for number in range(OWED_STEPS_MAX + 1)]
    assert went == [[0], [1], [2], [3], []], "several at a time, for each is computed after those before it"
    assert made.leave(0) == [], "only its turn lets the last one in"


def test_a_prompt_that_is_cached_costs_something_all_the_same() -> None:
    made = engine(Weights(interactive_weight=1, batch_weight=1))
    made.enter("a", INTERACTIVE, 0)
    assert made.enter("b", BATCH, 0) == ["b"]
    assert made.batch_tokens_inside == math.ceil(STEP * VISIT_COST_RATIO)


def test_who_gives_up_waiting_lets_others_in() -> None:
    made = engine()
    made.enter("a", BATCH, 400)
    made.enter("b", BATCH, 400)
    made.enter("c", BATCH, 100)
    assert made.leave("b") == ["c"]


@pytest.mark.parametrize(
    ("tokens", "cached", "step_tokens", "unit", "ends"),
    [
        (2210, 0, 512, 32, [512, 1024, 1536, 2048, 2210]),
        (2210, 1810, 512, 32, [2210]),
        (1024, 0, 512, 32, [512, 1024]),
        (1000, 100, 300, 256, [256, 512, 768, 1000]),
        (100, 0, 16, 64, [64, 100]),
        (1, 0, 512, 32, [1]),
    ],
)
def test_a_prompt_is_read_in_pieces_of_a_step(
    tokens: int, cached: int, step_tokens: int, unit: int, ends: list[int]
) -> None:
    assert pieces(tokens, cached, step_tokens, unit) == ends


@given(
    st.integers(1, 5000), st.floats(0.0, 1.0), st.integers(1, 1000), st.sampled_from([1, 16, 32, 256])
)  # fmt: skip
def test_pieces_end_with_units_and_take_a_step_each(tokens: int, cached: float, step_tokens: int, unit: int) -> None:
    held = int(tokens * cached)
    ends = pieces(tokens, held, step_tokens, unit)
    assert ends[-1] == tokens
    assert all(end % unit == 0 for end in ends[:-1])
    begins = [held, *ends[:-1]]
    assert all(0 <= end - begin <= max(unit, step_tokens) for begin, end in zip(begins, ends, strict=True))


class YieldingMachine(RuleBasedStateMachine):
    """Any order of prompts: interactive ones are inside from the first moment on, batch within a step, and in its turn."""

    @initialize(interactive=st.integers(1, 9), batch=st.integers(1, 3), step=st.integers(8, 600))
    def begin(self, interactive: int, batch: int, step: int) -> None:
        self.weights = Weights(interactive_weight=interactive, batch_weight=batch)
        self.made = Yielding(step, self.weights)
        self.inside: list[int] = []
        self.outside: list[int] = []
        self.batch: set[int] = set()
        self.count = self.overtaken = 0

    def go(self, keys: list[object]) -> None:
        for key in keys:
            assert isinstance(key, int)
            assert key == self.outside.pop(0), "in order"
            self.inside.append(key)
            self.overtaken = 0

    @rule(tokens=st.integers(0, 3000))
    def interactive(self, tokens: int) -> None:
        self.count += 1
        first, *then = self.made.enter(self.count, INTERACTIVE, tokens)
        assert first == self.count
        self.inside.append(self.count)
        self.overtaken += 1
        self.go(then)

    @rule(tokens=st.integers(0, 3000))
    def asks(self, tokens: int) -> None:
        self.count += 1
        self.batch.add(self.count)
        self.outside.append(self.count)
        if len(self.outside) == 1:
            self.overtaken = 0
        self.go(self.made.enter(self.count, BATCH, tokens))

    @rule(pick=st.integers(0, 9))
    def ends(self, pick: int) -> None:
        if self.inside:
            self.go(self.made.leave(self.inside.pop(pick % len(self.inside))))

    @rule(pick=st.integers(0, 9))
    def gives_up(self, pick: int) -> None:
        if self.outside:
            self.overtaken = 0
            self.go(self.made.leave(self.outside.pop(pick % len(self.outside))))

    @invariant()
    def no_more_of_batch_is_inside_than_a_step_and_what_it_is_owed(self) -> None:
        assert self.made.batch_tokens_inside <= self.made.step_tokens * (1 + OWED_STEPS_MAX)
        assert self.made.interactive_inside == len([key for key in self.inside if key not in self.batch])

    @invariant()
    def an_idle_engine_is_given_what_waits(self) -> None:
        assert self.inside or not self.outside

    @invariant()
    def batch_is_not_starved(self) -> None:
        """By as many interactive prompts as owe it a step it is let in."""
        if self.outside and self.made.batch_tokens_inside <= self.made.step_tokens * OWED_STEPS_MAX:
            least = (
                self.made.step_tokens * VISIT_COST_RATIO * self.weights.batch_weight / self.weights.interactive_weight
            )
            assert self.overtaken <= math.ceil(self.made.step_tokens * (1 + AHEAD_STEPS_MAX) / least)


TestYielding = YieldingMachine.TestCase
TestYielding.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
