"""Intake: where the answer goes is read even from what is malformed; everything else is checked."""

from typing import Any

import msgspec
import pytest

from pipeline.errors import InvalidField, RequestError
from pipeline.protocol import intake, subjects
from pipeline.protocol.intake import Address, Rules

ACK = subjects.parse_ack("$JS.ACK.REQUESTS_interactive.s1.1.17.17.1700000000000000000.0")
STORED = subjects.parse_stored("requests.shard.1.interactive.alice.alice")
RULES = Rules(reply_subjects=("_INBOX.>", "replies.>"), timeout_max_s={"interactive": 60.0})
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "reply_to": "_INBOX.x"}


def read(body: dict[str, Any], headers: dict[str, str] | None = None) -> intake.Intake:
    return intake.read(msgspec.json.encode(body), headers, STORED, ACK, RULES)


def test_a_request_says_who_when_and_where_to() -> None:
    request = read({**BODY, "id": "r-1", "timeout_ms": 1500, "claim_at": "_INBOX.c", "receiver": "g/1"})
    assert request.address == Address(
        request="r-1", reply_to="_INBOX.x", claim_at="_INBOX.c", receiver="g/1", encoding="json"
    )
    assert (request.creator, request.klass, request.reply_to) == ("alice", "interactive", "_INBOX.x")
    assert request.deadline_s == 1700000001.5


def test_a_request_without_an_id_is_named_by_its_place_in_the_stream() -> None:
    assert read(BODY).address.request == "REQUESTS_interactive-17"


def test_a_prompt_makes_it_a_completion_which_is_written_down_as_one() -> None:
    request = read({"prompt": "Once", "reply_to": "_INBOX.x", "tenant": "acme"})
    assert request.tree["type"] == "completion"
    assert (request.asked.reply_tokens_max, request.envelope.tenant, request.reference) == (16, "acme", None)
    for wrong in ({"prompt": ["a", "b"]}, {"prompt": "a", "metadata": {"persona": "ada"}}):
        with pytest.raises(InvalidField):
            read({"reply_to": "_INBOX.x"} | wrong)


def test_a_deadline_is_at_most_the_classes() -> None:
    assert read(BODY).deadline_s == read({**BODY, "timeout_ms": 10**9}).deadline_s == 1700000060.0


def test_subjects_may_stand_in_headers_but_the_body_wins() -> None:
    bare = {"messages": BODY["messages"]}
    assert read(bare, {"reply-to": "replies.a", "Claim-At": "replies.c"}).address.claim_at == "replies.c"
    assert read(BODY, {"Reply-To": "replies.a"}).reply_to == "_INBOX.x"


@pytest.mark.parametrize("field", ["reply_to", "claim_at"])
@pytest.mark.parametrize("subject", ["$JS.API.STREAM.PURGE.X", "requests.in.batch.a.a", "replies.*", "credit.d"])
def test_a_worker_is_not_told_to_publish_elsewhere(field: str, subject: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read({**BODY, field: subject})
    assert caught.value.param == field


def test_a_request_that_nobody_can_be_answered_about_is_malformed() -> None:
    with pytest.raises(InvalidField) as caught:
        read({"messages": BODY["messages"]})
    assert caught.value.param == "reply_to"


@pytest.mark.parametrize(
    ("payload", "headers", "expected"),
    [
        (
            b"garbage",
            None,
            Address(request="REQUESTS_interactive-17", reply_to=None, claim_at=None, receiver=None, encoding="json"),
        ),
        (
            b"garbage",
            {"Reply-To": "replies.a"},
            Address(
                request="REQUESTS_interactive-17", reply_to="replies.a", claim_at=None, receiver=None, encoding="json"
            ),
        ),
        (
            b'{"id":7,"reply_to":"$JS.API.x","claim_at":9}',
            None,
            Address(request="REQUESTS_interactive-17", reply_to=None, claim_at=None, receiver=None, encoding="json"),
        ),
        (
            b'{"id":"r","reply_to":"_INBOX.x"}',
            None,
            Address(request="r", reply_to="_INBOX.x", claim_at=None, receiver=None, encoding="json"),
        ),
        (
            msgspec.msgpack.encode({"id": "r", "reply_to": "_INBOX.x"}),
            {},
            Address(request="r", reply_to="_INBOX.x", claim_at=None, receiver=None, encoding="msgpack"),
        ),
    ],
)
def test_the_address_of_anything_can_be_read(payload: bytes, headers: dict[str, str] | None, expected: Address) -> None:
    assert intake.address(payload, headers, ACK, RULES) == expected
    if "garbage" in str(payload):
        with pytest.raises(RequestError):
            intake.read(payload, headers, STORED, ACK, RULES)
