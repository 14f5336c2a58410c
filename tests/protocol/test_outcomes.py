"""The words for how a request ended at a worker."""

import pytest

from pipeline.errors import DeadlineExceeded, InvalidField, Poisoned, ReplyError, ServiceError
from pipeline.protocol.outcomes import ENDINGS, outcome
from pipeline.protocol.request import Event


@pytest.mark.parametrize("event", list(ENDINGS))
def test_without_an_error_the_last_event_says_it(event: Event) -> None:
    assert outcome(event, None) == ENDINGS[event]


@pytest.mark.parametrize("event", [None, Event.GENERATED])
def test_what_ended_in_no_known_way_has_failed(event: Event | None) -> None:
    assert outcome(event, None) == "failed"


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (DeadlineExceeded("Too late."), "expired"),
        (InvalidField("Wrong."), "malformed"),
        (ServiceError("Broken."), "failed"),
        (Poisoned("Deadly."), "failed"),
    ],
)
def test_an_error_that_was_told_is_no_whole_reply(error: ReplyError, word: str) -> None:
    assert outcome(Event.WHOLE, error) == outcome(Event.UNHEARD, error) == word


def test_who_left_or_lost_it_did_not_get_the_error() -> None:
    assert outcome(Event.CANCELLED, ServiceError("Broken.")) == "cancelled"
    assert outcome(Event.FENCED, DeadlineExceeded("Too late.")) == "fenced"
