"""The judge itself: what it must notice, and what it must not take for a fault."""

import msgspec
import pytest

from pipeline.limits import ACK_WAIT_S
from pipeline.protocol.messages import Account
from tests.chaos.load import REPLY_TOKENS, Ending, Outcome, orders
from tests.chaos.mischief import KINDS, drawn
from tests.chaos.rest import Rest, held
from tests.chaos.verdict import Report, judge, table, tokens_amiss, was_cut

ORDER, OTHER = orders(2, "judge")
TEXT = ORDER.expected
FIRST = TEXT[: TEXT.index(" ", 1)]


def outcome(text: str = TEXT, ending: Ending = "whole", code: str = "") -> Outcome:
    return Outcome(order=ORDER, began_s=10.0, ended_s=10.5, text=text, ending=ending, code=code)


def judged(*outcomes: Outcome, rest: Rest | None = None, unasked: tuple[str, ...] = ()) -> Report:
    deaths = [(10.1, 10.2)]
    return judge(
        outcomes, rest=rest or Rest(), kills=["gateway"], gateway_deaths=deaths, unasked=unasked, duration_s=1.0
    )


def test_a_request_and_its_reply_are_the_same_in_every_run_and_unlike_any_other() -> None:
    assert orders(2, "judge") == [ORDER, OTHER]
    assert orders(1, "judge")[0].expected == TEXT
    assert OTHER.expected != TEXT
    assert ORDER.body["max_tokens"] == REPLY_TOKENS


@pytest.mark.parametrize(
    ("text", "ending", "amiss"),
    [
        (TEXT, "whole", (0, 0)),
        (FIRST + TEXT, "whole", (1, 0)),
        (TEXT[len(FIRST) :], "whole", (0, 1)),
        ("", "whole", (0, 20)),
        (FIRST, "error", (0, 0)),
        ("", "broken", (0, 0)),
        (FIRST + FIRST, "error", (1, 0)),
    ],
)
def test_every_token_too_many_or_too_few_is_counted(text: str, ending: Ending, amiss: tuple[int, int]) -> None:
    assert tokens_amiss(outcome(text, ending)) == amiss


def test_a_reply_of_somebody_else_is_wrong_in_both_ways() -> None:
    extra, missing = tokens_amiss(outcome(OTHER.expected))
    assert extra > 0
    assert missing > 0


def test_only_who_broke_off_while_the_gateway_died_was_cut() -> None:
    broken = outcome("", "broken", "broken_off")
    assert was_cut(broken, [(10.4, 10.6)])
    assert was_cut(broken, [(9.9, 10.01)]), "a dying process still takes connections"
    assert not was_cut(broken, [(9.0, 9.5), (11.0, 11.1)])
    assert not was_cut(outcome("", "broken", "silence"), [(10.4, 10.6)]), "a client that was forgotten"
    assert not was_cut(outcome("", "error", "deadline"), [(10.4, 10.6)])


def test_ends_are_counted_apart() -> None:
    report = judged(
        outcome(), outcome("", "error", "deadline"), outcome("", "broken", "stopped"), outcome("", "broken", "silence")
    )
    assert (report.requests, report.completed, report.errors, report.cut, report.lost) == (4, 1, 1, 1, 1)
    assert report.error_codes == {"deadline": 1}
    assert report.failed
    assert "1 lost" in table(report)


@pytest.mark.parametrize(
    ("rest", "unasked"),
    [(Rest(blocks=1), ()), (Rest(slots=1), ()), (Rest(requests=1), ()), (Rest(), ("decode-1 (life 2, status 1)",))],
)
def test_whatever_is_left_behind_is_a_failure(rest: Rest, unasked: tuple[str, ...]) -> None:
    assert not judged(outcome()).failed
    assert judged(outcome(), rest=rest, unasked=unasked).failed


BOOKS = Account(
    decode="decode-1",
    epoch="1",
    blocks=100,
    free=100,
    reserve=10,
    waiting=0,
    granted_now=0,
    granted_blocks=0,
    consumed_now=0,
    consumed_blocks=0,
    granted=6,
    released=3,
    returned=2,
    expired=1,
    refused=4,
)


@pytest.mark.parametrize(
    ("change", "blocks"),
    [({}, 0), ({"free": 93}, 7), ({"engine_blocks": 5}, 5), ({"released": 2}, 100), ({"preemptions": 1}, 100)],
)
def test_books_that_do_not_add_up_hold_every_block(change: dict[str, int], blocks: int) -> None:
    assert held(msgspec.structs.replace(BOOKS, **change)) == blocks


def test_a_seed_draws_the_same_acts_every_kind_at_least_once_and_pauses_beyond_the_lease() -> None:
    acts = drawn(5, KINDS, 12)
    assert acts == drawn(5, KINDS, 12) != drawn(6, KINDS, 12)
    assert {act.kind for act in acts} == set(KINDS)
    assert len(acts) == 12
    assert [act.at for act in acts] == sorted(act.at for act in acts)
    assert all(act.pause_s > ACK_WAIT_S for act in acts)
    assert [act.kind for act in drawn(1, ("nats",), 2)] == ["nats", "nats"]
    assert drawn(1, (), 5) == []
