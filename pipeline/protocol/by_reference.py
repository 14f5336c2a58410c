"""Requests that name their persona and their history instead of sending them.

Two forms say the same. A producer's chat event, on the creator's own subject:

    {"message": "hey, how was your day?", "conversation": "c-17", "creator": "ada"}

`message` is text, or a message of role `user`. `conversation` may be missing: then there is no history, and none is kept.
`creator` may be missing, too: it is that of the subject, and must not be another. And over HTTP, beside one user message:

    {"messages": [{"role": "user", "content": "hey, how was your day?"}], "metadata": {"persona": "ada", "conversation": "c-17"}}

OpenAI's `metadata` keeps its meaning: strings that a client attaches to a request, of at most 512 characters. Only where it names
a `persona` is a request by reference; `conversation` without `persona` is a string like any other. All other fields of a request
are those of one that sends everything.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from pipeline.errors import BodyTooLarge, InvalidField
from pipeline.limits import REFERENCE_CHARS_MAX, REFERENCE_MESSAGE_BYTES_MAX
from pipeline.protocol import subjects
from pipeline.protocol.chat import TextPart

FIELDS: Final = frozenset({"message", "conversation", "creator"})
"""Fields of a chat event. An HTTP client uses `metadata`."""


class Names(msgspec.Struct, frozen=True):
    """How the sender calls the parts of a reference: for errors."""

    persona: str
    conversation: str
    message: str


EVENT: Final = Names("creator", "conversation", "message")
HTTP: Final = Names("metadata.persona", "metadata.conversation", "messages")


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """What a request names. `creator` and `conversation` are foreign ids; `message` is the user's, as sent."""

    creator: str | None
    conversation: str | None
    message: Mapping[str, Any]
    names: Names


class _UserMessage(msgspec.Struct, frozen=True):
    role: Literal["user"]
    content: str | list[TextPart]


def read(tree: Mapping[str, Any]) -> Reference | None:
    """What a request's body refers to; None where it sends everything. Raises `RequestError`, whose `param` names the field."""
    if tree.get("message") is not None:
        return _event(tree)
    metadata = tree.get("metadata")
    if isinstance(metadata, Mapping) and metadata.get("persona") is not None:
        return _http(tree, metadata)
    if tree.get("conversation") is not None:
        raise InvalidField(
            "conversation goes with message, the one that is new; messages bring their own history.",
            param="conversation",
        )
    return None


def check_creator(reference: Reference, creator: str) -> None:
    """Raise `InvalidField` where a request names another creator than its subject does (a subject token)."""
    if reference.creator is not None and subjects.token(reference.creator) != creator:
        raise InvalidField(
            f"{reference.names.persona} is {reference.creator!r}, but the request is {creator}'s: name the same creator in both.",
            param=reference.names.persona,
        )


def in_full(tree: Mapping[str, Any], reference: Reference) -> dict[str, Any]:
    """The request as if the new message were all of it: what is checked before the rest is known."""
    return {**{name: value for name, value in tree.items() if name not in FIELDS}, "messages": [reference.message]}


def _event(tree: Mapping[str, Any]) -> Reference:
    if tree.get("messages") is not None:
        raise InvalidField("Either message, by reference, or messages, all of them: leave one out.", param="message")
    said = tree["message"]
    message = {"role": "user", "content": said} if isinstance(said, str) else said
    _check_message(message, "message", EVENT)
    return Reference(
        creator=_id(tree, "creator", EVENT.persona),
        conversation=_id(tree, "conversation", EVENT.conversation),
        message=message,
        names=EVENT,
    )


def _http(tree: Mapping[str, Any], metadata: Mapping[str, Any]) -> Reference:
    messages = tree.get("messages")
    if not isinstance(messages, list) or len(messages) != 1:
        raise InvalidField(
            "With metadata.persona, messages holds the new one alone: persona and history are kept here.",
            param="messages",
        )
    _check_message(messages[0], "messages[0]", HTTP)
    return Reference(
        creator=_id(metadata, "persona", HTTP.persona),
        conversation=_id(metadata, "conversation", HTTP.conversation),
        message=messages[0],
        names=HTTP,
    )


def _check_message(message: object, place: str, names: Names) -> None:
    try:
        read = msgspec.convert(message, _UserMessage)
    except msgspec.ValidationError as error:
        why, _, path = str(error).partition(" - at `$")
        where = place + path.strip("`")
        raise InvalidField(
            f"{where}: it must be a message of role user with text as its content; {why}.", param=where
        ) from None
    if not read.content:
        raise InvalidField(f"{place} must not be empty.", param=place)
    size = len(msgspec.json.encode(message))
    if size > REFERENCE_MESSAGE_BYTES_MAX:
        raise BodyTooLarge(
            f"{place} has {size} bytes; by reference {REFERENCE_MESSAGE_BYTES_MAX} are kept at most. Send all in messages.",
            param=names.message,
        )


def _id(fields: Mapping[str, Any], name: str, param: str) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= REFERENCE_CHARS_MAX:
        raise InvalidField(f"{param} must be a string of 1 to {REFERENCE_CHARS_MAX} characters.", param=param)
    return value
