"""Requests by reference: two forms that say the same, and errors in the words of the form that was used."""

from typing import Any

import pytest

from pipeline.errors import BodyTooLarge, InvalidField, RequestError
from pipeline.limits import REFERENCE_CHARS_MAX, REFERENCE_MESSAGE_BYTES_MAX
from pipeline.protocol import by_reference, intake, subjects
from pipeline.protocol.by_reference import EVENT, HTTP, Reference
from pipeline.protocol.intake import Rules
from pipeline.protocol.messages import encode

HI = {"role": "user", "content": "hi"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
LONG = "x" * (REFERENCE_CHARS_MAX + 1)
ACK = subjects.parse_ack("$JS.ACK.REQUESTS_interactive.s1.1.17.17.1700000000000000000.0")
STORED = subjects.parse_stored("requests.shard.1.interactive.ada.ada")
RULES = Rules(reply_subjects=("_INBOX.>",), timeout_max_s={"interactive": 60.0})


@pytest.mark.parametrize(
    "tree",
    [
        {"messages": [HI]},
        {"messages": [HI, HI], "metadata": {"conversation": "c", "team": "crm"}},
        {"messages": [HI], "metadata": None},
        {"messages": [HI], "metadata": "persona"},
        {"messages": [HI], "creator": "ada"},
        {},
    ],
)
def test_what_sends_everything_refers_to_nothing(tree: dict[str, Any]) -> None:
    assert by_reference.read(tree) is None


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"message": "hi"}, Reference(creator=None, conversation=None, message=HI, names=EVENT)),
        (
            {"message": "hi", "creator": "ada", "conversation": "c", "messages": None},
            Reference(creator="ada", conversation="c", message=HI, names=EVENT),
        ),
        ({"message": PARTS}, Reference(creator=None, conversation=None, message=PARTS, names=EVENT)),
        (
            {"messages": [HI], "metadata": {"persona": "ada", "conversation": "c", "team": "crm"}},
            Reference(creator="ada", conversation="c", message=HI, names=HTTP),
        ),
        (
            {"messages": [HI], "metadata": {"persona": "ada"}},
            Reference(creator="ada", conversation=None, message=HI, names=HTTP),
        ),
    ],
)
def test_both_forms_are_read(tree: dict[str, Any], expected: Reference) -> None:
    assert by_reference.read(tree) == expected


@pytest.mark.parametrize(
    ("tree", "param"),
    [
        ({"message": ""}, "message"),
        ({"message": 7}, "message"),
        ({"message": {"content": "hi"}}, "message"),
        ({"message": {"role": "system", "content": "hi"}}, "message.role"),
        ({"message": {"role": "user", "content": []}}, "message"),
        ({"message": {"role": "user", "content": [{"type": "image_url"}]}}, "message.content[0].type"),
        ({"message": "hi", "messages": [HI]}, "message"),
        ({"message": "hi", "conversation": ""}, "conversation"),
        ({"message": "hi", "conversation": LONG}, "conversation"),
        ({"message": "hi", "creator": 7}, "creator"),
        ({"messages": [HI], "conversation": "c"}, "conversation"),
        ({"messages": [HI, HI], "metadata": {"persona": "ada"}}, "messages"),
        ({"metadata": {"persona": "ada"}}, "messages"),
        ({"messages": [{"role": "assistant", "content": "hi"}], "metadata": {"persona": "ada"}}, "messages[0].role"),
        ({"messages": [HI], "metadata": {"persona": ""}}, "metadata.persona"),
        ({"messages": [HI], "metadata": {"persona": "ada", "conversation": 7}}, "metadata.conversation"),
    ],
)
def test_a_bad_reference_names_the_field_as_its_sender_calls_it(tree: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        by_reference.read(tree)
    assert caught.value.param == param
    assert param.partition("[")[0].partition(".")[0] in caught.value.message


def test_a_message_that_could_not_be_kept_is_too_large() -> None:
    with pytest.raises(BodyTooLarge, match="Send all in messages") as caught:
        by_reference.read({"message": "x" * REFERENCE_MESSAGE_BYTES_MAX})
    assert caught.value.param == "message"


def test_the_creator_is_that_of_the_subject() -> None:
    said = by_reference.read({"message": "hi", "creator": "ada lovelace"})
    assert said is not None
    by_reference.check_creator(said, "ada=20lovelace")
    with pytest.raises(InvalidField, match="name the same creator") as caught:
        by_reference.check_creator(said, "ada")
    assert caught.value.param == "creator"


def test_intake_reads_the_reference_and_checks_all_other_fields_as_ever() -> None:
    body = {"message": "hi", "conversation": "c", "reply_to": "_INBOX.x", "temperature": 0.5}
    read = intake.read(encode(body), None, STORED, ACK, RULES)
    assert read.reference == by_reference.read(body)
    assert read.tree == {"type": "chat", "messages": [HI], "reply_to": "_INBOX.x", "temperature": 0.5}
    for field in ({"temperature": 9}, {"creator": "eve"}, {"reply_to": "$JS.API.x"}):
        with pytest.raises(RequestError) as caught:
            intake.read(encode({**body, **field}), None, STORED, ACK, RULES)
        assert caught.value.param == next(iter(field))
