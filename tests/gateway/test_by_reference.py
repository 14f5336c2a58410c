"""Over HTTP a request by reference is one message and `metadata`; everything else of `metadata` is the client's own."""

from typing import Any

import msgspec
import pytest

from gateway.intake import OPEN, Order, Terms, take
from pipeline.errors import InvalidField, NotAllowed
from pipeline.protocol.chat import to_map
from pipeline.protocol.keys import Key

HI = {"role": "user", "content": "hi"}
TERMS = Terms(
    reply_to="_INBOX.r",
    claim_at="_INBOX.c",
    receiver="g/1",
    default_creator="default",
    timeout_s=60.0,
    timeout_max_s={"interactive": 60.0},
)


def taken(body: dict[str, Any], headers: dict[bytes, bytes] | None = None, key: Key = OPEN) -> Order:
    return take("r1", headers or {}, msgspec.json.encode(body), TERMS, key)


def referring(**metadata: str) -> dict[str, Any]:
    return {"messages": [HI], "metadata": metadata, "user": "somebody"}


def test_the_persona_is_the_creator_and_the_conversation_keeps_its_affinity() -> None:
    order = taken(referring(persona="ada", conversation="c-17", team="crm"))
    assert (order.creator, order.conversation) == ("ada", "c-17")
    assert to_map(order.parts[0].payload)["metadata"] == {"persona": "ada", "conversation": "c-17", "team": "crm"}
    assert taken(referring(persona="ada")).conversation == "r1", "alone"


def test_without_a_persona_metadata_is_the_clients_own() -> None:
    order = taken({**referring(conversation="c-17"), "messages": [HI, HI]})
    assert (order.creator, order.conversation) == ("somebody", "r1")


def test_a_header_may_say_the_same_but_nothing_else() -> None:
    assert taken(referring(persona="ada"), {b"x-creator-id": b"ada"}).creator == "ada"
    with pytest.raises(InvalidField) as caught:
        taken(referring(persona="ada"), {b"x-creator-id": b"eve"})
    assert caught.value.param == "metadata.persona"


def test_a_history_that_the_client_sends_as_well_is_refused_at_once() -> None:
    with pytest.raises(InvalidField) as caught:
        taken({**referring(persona="ada"), "messages": [HI, HI]})
    assert caught.value.param == "messages"


def test_a_key_that_may_not_speak_for_the_persona_is_refused() -> None:
    bound = Key(name="bound", sha256="0" * 64, creators=("bob",))
    with pytest.raises(NotAllowed):
        taken(referring(persona="ada"), key=bound)


def test_the_fields_of_a_chat_event_mean_nothing_over_http() -> None:
    order = taken({"messages": [HI], "message": "hi", "conversation": "c", "creator": "ada"})
    assert not {"message", "conversation", "creator"} & to_map(order.parts[0].payload).keys()
    assert order.creator == "default"
