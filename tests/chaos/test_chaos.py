"""Real processes are killed, paused, restarted and overloaded while they serve; no reply may suffer and nothing may be left.

Times are not judged here: the cores may be busy. `headrace chaos` reports them.
"""

import pytest

from tests.chaos import overload, roles
from tests.chaos.overload import SLOW
from tests.chaos.run import DEFAULT_KINDS, Plan, run
from tests.chaos.stack import Settings
from tests.chaos.verdict import Report

pytestmark = pytest.mark.timeout(240)

FLEET = Settings(prefill=2, decode=2)


def sound(report: Report) -> bool:
    """Whether every client got what it asked for, and nothing is left behind."""
    return not report.failed and report.errors == 0 and report.completed + report.cut == report.requests


def test_no_reply_suffers_from_kills_of_anybody_and_pauses_of_workers() -> None:
    plan = Plan(requests=200, rate=20.0, kills=8, seed=7, kinds=DEFAULT_KINDS, settings=Settings())
    report = run(plan)
    assert sound(report), report
    assert report.kills >= len(DEFAULT_KINDS), "an act waits for a victim, and on busy cores some come too late"


def test_a_killed_gateway_cuts_its_clients_off_and_leaves_nothing_behind() -> None:
    report = run(Plan(requests=200, rate=40.0, kills=2, seed=3, kinds=("gateway",), settings=FLEET))
    assert sound(report), report
    assert report.kills_by_kind["gateway"] >= 1
    assert report.cut > 0


def test_a_gateway_and_a_broker_that_stand_still_lose_nothing() -> None:
    report = run(Plan(requests=150, rate=20.0, kills=3, seed=5, kinds=("stall",), settings=FLEET))
    assert not report.failed, report
    assert report.completed + report.errors == report.requests


def test_a_rolling_restart_of_every_worker_is_not_noticed() -> None:
    report = run(Plan(requests=160, rate=16.0, rolling=True, settings=FLEET))
    assert sound(report), report
    assert report.kills_by_kind == {"prefill": 2, "decode": 2}


def test_workers_that_change_their_roles_under_load_lose_nothing() -> None:
    changed = roles.run(roles.Plan(rate=20.0))
    assert sound(changed.report), changed.report
    assert len(changed.turns) == len(roles.TURNS)
    assert changed.during_s, "requests were under way while roles changed"


def test_workers_for_both_that_are_killed_lose_nothing() -> None:
    both = Settings(prefill=0, decode=0, both=3)
    report = run(Plan(requests=200, rate=20.0, kills=5, seed=4, kinds=("decode", "pause"), settings=both))
    assert sound(report), report
    assert report.kills >= 2


def test_ten_times_more_than_the_fleet_can_do_is_refused_and_not_lost() -> None:
    report = overload.run(overload.Plan(clients=(8,), rounds=3, offered_s=6.0, settings=SLOW))
    assert not report.failed, report
    assert report.refused
    assert all(refusal.startswith(("429 ", "503 ")) for refusal in report.refused)
    assert report.completed > 0
    ended = report.completed + sum(report.refused.values()) + sum(report.other_errors.values())
    assert ended == report.requests, "every request ends"
    assert set(report.other_errors) <= {"deadline"}
