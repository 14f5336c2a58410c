"""The benchmark of the hand-over means what it says. Its figures are no test, and need the real stack."""

from tests.benchmarks.handover import WAYS, Times, median, text, times_of


def test_a_reply_has_a_first_token_a_first_gap_and_others() -> None:
    of = times_of([0.25, 0.375, 0.4375, 0.5, 0.625])
    assert of == Times(first_token_ms=250.0, first_gap_ms=125.0, gap_ms=62.5, whole_ms=625.0)


def test_medians_are_of_each_figure_and_the_split_is_compared_with_one_engine() -> None:
    one, two, three = (Times(first_token_ms=n, first_gap_ms=4 - n, gap_ms=n * n, whole_ms=9) for n in (1.0, 2.0, 3.0))
    assert median([three, one, two]) == Times(first_token_ms=2.0, first_gap_ms=2.0, gap_ms=4.0, whole_ms=9)
    said = text(dict.fromkeys(WAYS, one) | {"split": three})
    assert said.endswith("A first token of the split comes 2 ms behind a colocated one.")
