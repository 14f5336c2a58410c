"""How requests fare, from a gateway's records."""

import math
import random

import pytest

from pipeline.protocol import subjects
from pipeline.protocol.messages import encode
from pipeline.protocol.recent import (
    LOOKED_AT_MAX,
    NAMED_MAX,
    WantRecent,
    mean_s,
    quantile_s,
    recent,
    recent_decoder,
    together,
    want_recent_decoder,
)
from pipeline.protocol.records import Facts, Record, Ring

NOW_S = 1_000.0


def record(
    request: str, took_s: float, ago_s: float = 0.0, outcome: str = "whole", facts: Facts | None = None
) -> Record:
    """One that ended so long ago."""
    return Record(
        process="g",
        role="gateway",
        request=request,
        outcome=outcome,
        began_unix_s=NOW_S - ago_s - took_s,
        took_s=took_s,
        stages={"accept": took_s / 4, "lost": 0.0, "decode": took_s / 2},
        facts={"ttft_ms": 250 * took_s} if facts is None else facts,
    )


def test_what_ended_of_late_is_counted_by_outcome_and_what_was_whole_is_spread() -> None:
    ended = [
        record("old", 9.0, ago_s=61),
        record("a", 1.0, ago_s=30),
        record("b", 2.0, ago_s=1),
        record("c", 5.0, outcome="failed"),
        record("d", 0.5, facts={}),
    ]
    said = recent("g", WantRecent(since_s=60, named=2), ended, 3, [record("e", 4.0, outcome="")], NOW_S)
    assert recent_decoder.decode(encode(said)) == said
    assert (said.process, said.over_s, said.under_way) == ("g", 60, 3)
    assert said.outcomes == {"whole": 3, "failed": 1}
    assert [one.request for one in said.slowest] == ["c", "b"]
    assert [one.request for one in said.oldest] == ["e"]
    assert quantile_s(said.took, 0.5) == pytest.approx(1.0, rel=0.05)
    assert quantile_s(said.took, 1.0) == pytest.approx(2.0, rel=0.05)
    assert sum(said.ttft.values()) == 2, "one did not say when its first token came"
    assert quantile_s(said.ttft, 1.0) == pytest.approx(0.5, rel=0.05)
    assert said.stages.keys() == {"accept", "decode"}, "a stage that took no time is left out"


def test_where_more_ended_than_are_looked_at_the_answer_says_over_which_time() -> None:
    ended = [record(str(number), 0.1, ago_s=LOOKED_AT_MAX + 8 - number) for number in range(LOOKED_AT_MAX + 8)]
    said = recent("g", WantRecent(since_s=3600), ended, 0, [], NOW_S)
    assert said.outcomes == {"whole": LOOKED_AT_MAX}
    assert said.over_s == pytest.approx(LOOKED_AT_MAX)
    few = recent("g", WantRecent(since_s=3600), ended[-4:], 0, [], NOW_S, most=4)
    assert few.over_s == pytest.approx(4), "a gateway may remember fewer"


@pytest.mark.parametrize(("named", "expected"), [(-1, 0), (1, 1), (1 << 40, NAMED_MAX)])
def test_an_answer_names_no_more_than_it_may(named: int, expected: int) -> None:
    many = [record(str(number), 1.0) for number in range(NAMED_MAX + 1)]
    said = recent("g", WantRecent(named=named), many, len(many), many, NOW_S)
    assert (len(said.slowest), len(said.oldest)) == (expected, expected)


@pytest.mark.parametrize(("since_s", "over_s"), [(-1.0, 0.0), (1e9, 3600.0), (math.inf, 3600.0), (math.nan, 3600.0)])
def test_an_odd_time_is_bounded(since_s: float, over_s: float) -> None:
    assert recent("g", WantRecent(since_s=since_s), [], 0, [], NOW_S).over_s == over_s


def test_a_young_gateway_says_how_young_it_is() -> None:
    said = recent("g", WantRecent(since_s=60), [record("a", 1.0, ago_s=2)], 0, [], NOW_S, lived_s=7.5)
    assert (said.over_s, said.outcomes) == (7.5, {"whole": 1})


def test_a_question_may_say_nothing() -> None:
    assert want_recent_decoder.decode(encode(WantRecent())) == WantRecent()
    assert subjects.recent() == "control.recent"


def test_spreads_of_several_gateways_add_up_to_one_over_all() -> None:
    dice = random.Random(7)
    took = [dice.lognormvariate(-2, 1.5) for _ in range(200)]
    halves = [
        recent("g", WantRecent(), [record("r", t) for t in half], 0, [], NOW_S) for half in (took[:80], took[80:])
    ]
    counts = together(one.took for one in halves)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = sorted(took)[max(0, math.ceil(share * len(took)) - 1)]
        assert quantile_s(counts, share) == pytest.approx(exact, rel=0.05)
    assert mean_s(counts) == pytest.approx(sum(took) / len(took), rel=0.05)


def test_the_shortest_and_the_longest_have_a_bucket_and_nothing_has_no_quantile() -> None:
    said = recent("g", WantRecent(), [record("r", 0.0), record("s", 1e9)], 0, [], NOW_S)
    assert sorted(said.took) == [0, 160]
    assert quantile_s({}, 0.5) is None
    assert mean_s({}) is None


def test_a_ring_gives_its_newest_in_order() -> None:
    ring = Ring(4)
    for request in "abcde":
        ring.add(record(request, 1.0))
    assert [one.request for one in ring.last(2)] == ["d", "e"]
    assert [one.request for one in ring.last(9)] == ["b", "c", "d", "e"]
