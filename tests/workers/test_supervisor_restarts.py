"""When what has died is started again."""

import pytest

from workers.supervisor.restarts import (
    DEATHS_KEPT,
    DELAY_S_MAX,
    UNREADY_DEATHS_MAX,
    Again,
    Death,
    GiveUp,
    StayAway,
    describe,
    verdict,
)

KILLED = Death(lived_s=100.0, was_ready=True, status=-9)
QUICK = Death(lived_s=1.0, was_ready=True, status=-9)
UNREADY = Death(lived_s=1.0, was_ready=False, status=1)
MISCONFIGURED = Death(lived_s=1.0, was_ready=False, status=2)


@pytest.mark.parametrize(
    ("deaths", "expected"),
    [
        ([KILLED], Again(0.0)),
        ([QUICK], Again(0.25)),
        ([QUICK, QUICK], Again(0.5)),
        ([QUICK, QUICK, KILLED], Again(0.0)),
        ([KILLED, QUICK], Again(0.25)),
        ([UNREADY], Again(0.25)),
        ([UNREADY] * 4, Again(2.0)),
    ],
)
def test_a_unit_is_started_again_later_and_later_after_short_lives(deaths: list[Death], expected: Again) -> None:
    assert verdict(deaths) == expected


def test_what_has_been_ready_is_started_again_for_ever() -> None:
    assert verdict([QUICK] * DEATHS_KEPT) == Again(DELAY_S_MAX)


def test_what_was_never_ready_is_given_up_after_a_few_tries() -> None:
    decision = verdict([UNREADY] * UNREADY_DEATHS_MAX)
    assert isinstance(decision, GiveUp)
    assert "5 times before it was ready; the last time it ended with exit status 1" in decision.reason


def test_a_ready_life_in_between_begins_the_count_anew() -> None:
    assert isinstance(verdict([UNREADY] * 4 + [QUICK] + [UNREADY] * 4), Again)


def test_a_worker_that_ends_well_was_told_to_and_stays_away() -> None:
    left = Death(lived_s=1.0, was_ready=True, status=0)
    assert verdict([left], may_leave=True) == StayAway()
    assert verdict([left]) == Again(0.25), "what nobody tells to end but us has no reason to"
    assert isinstance(verdict([Death(lived_s=1.0, was_ready=False, status=0)], may_leave=True), Again)


def test_a_set_up_that_cannot_work_is_given_up_at_once() -> None:
    assert isinstance(verdict([MISCONFIGURED]), GiveUp)


def test_an_exit_status_reads_as_words() -> None:
    assert describe(-9) == "was ended by signal 9"
    assert describe(3) == "ended with exit status 3"
