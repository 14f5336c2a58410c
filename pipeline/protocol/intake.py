"""From a stored message to a request that can be worked on, or to an error that loses nothing.

Reading happens in two steps, because a malformed request should be answered too: `address` takes from the message whatever
says where the answer goes, and never fails; `read` then checks everything.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from pipeline.errors import InvalidField, RequestError
from pipeline.limits import REQUEST_ID_BYTES_MAX
from pipeline.protocol import by_reference, completions
from pipeline.protocol.by_reference import Reference
from pipeline.protocol.chat import Chat, Envelope, to_map, to_part
from pipeline.protocol.completions import CompletionRequest
from pipeline.protocol.messages import Encoding, encoding_of
from pipeline.protocol.subjects import AckSubject, Stored, matches

REPLY_TO_HEADER = "Reply-To"
CLAIM_AT_HEADER = "Claim-At"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the answer to a request goes, as far as its message says. `reply_to` is None where nobody may be answered.

    `request_id` is the client's own name for it, for people.
    """

    request: str
    reply_to: str | None
    claim_at: str | None
    receiver: str | None
    encoding: Encoding
    request_id: str = ""


class Intake(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be worked on. `tree` is the body as sent, its `type` said; `deadline_s` is Unix time.

    With a `reference` the new message stands in `tree` for all of them, until persona and history are known.
    """

    address: Address
    reply_to: str
    klass: str
    creator: str
    deadline_s: float
    envelope: Envelope
    asked: completions.Request
    tree: Mapping[str, Any]
    reference: Reference | None = None


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's part: where replies may go, and how long a class of requests may take (seconds)."""

    reply_subjects: Sequence[str]
    timeout_max_s: Mapping[str, float]


def address(payload: bytes, headers: Mapping[str, str] | None, ack: AckSubject, rules: Rules) -> Address:
    """Whatever can be read of a message's address. What may not be published to counts as not there."""
    try:
        tree = to_map(payload)
    except RequestError:
        tree = {}
    request, receiver = tree.get("id"), tree.get("receiver")
    named = request if isinstance(request, str) and 0 < len(request) <= REQUEST_ID_BYTES_MAX else None
    theirs = tree.get("request_id")
    return Address(
        request=named or f"{ack.stream}-{ack.sequence}",
        reply_to=_allowed(_said(tree, "reply_to", headers, REPLY_TO_HEADER), rules),
        claim_at=_allowed(_said(tree, "claim_at", headers, CLAIM_AT_HEADER), rules),
        receiver=receiver if isinstance(receiver, str) else None,
        encoding=encoding_of(payload),
        request_id=theirs if isinstance(theirs, str) and len(theirs) <= REQUEST_ID_BYTES_MAX else "",
    )


def read(payload: bytes, headers: Mapping[str, str] | None, stored: Stored, ack: AckSubject, rules: Rules) -> Intake:
    """The request in a message. Raises `RequestError`, whose `param` names the field."""
    tree = to_map(payload)
    envelope = to_part(tree, Envelope)
    tree["type"] = completions.kind_of(tree)
    asked: completions.Request
    reference = None
    if tree["type"] == "completion":
        asked = to_part(tree, CompletionRequest)
        completions.check_single(asked)
        completions.check_no_reference(tree)
    else:
        if (reference := by_reference.read(tree)) is not None:
            by_reference.check_creator(reference, stored.creator)
            tree = by_reference.in_full(tree, reference)
        asked = to_part(tree, Chat)
    where = address(payload, headers, ack, rules)
    for field, header in (("reply_to", REPLY_TO_HEADER), ("claim_at", CLAIM_AT_HEADER)):
        _check_subject(field, _said(tree, field, headers, header), rules)
    if where.reply_to is None:
        raise InvalidField("reply_to is missing: name the subject that you listen on.", param="reply_to")
    longest_s = rules.timeout_max_s[stored.shard.klass]
    asked_s = envelope.timeout_ms / 1000 if envelope.timeout_ms is not None else longest_s
    return Intake(
        address=where,
        reply_to=where.reply_to,
        klass=stored.shard.klass,
        creator=stored.creator,
        deadline_s=ack.stored_at_s + min(asked_s, longest_s),
        envelope=envelope,
        asked=asked,
        tree=tree,
        reference=reference,
    )


def deadline_s(read_it: Callable[[], Intake], ack: AckSubject, longest_s: float) -> float:
    """A request's, in Unix time. What is malformed has its class's longest time to be answered in."""
    try:
        return read_it().deadline_s
    except RequestError:
        return ack.stored_at_s + longest_s


def _said(tree: Mapping[str, Any], field: str, headers: Mapping[str, str] | None, header: str) -> str | None:
    value = tree.get(field)
    if value is None and headers:
        value = next((text for name, text in headers.items() if name.lower() == header.lower()), None)
    return value if isinstance(value, str) and value else None


def _allowed(subject: str | None, rules: Rules) -> str | None:
    return subject if subject and any(matches(pattern, subject) for pattern in rules.reply_subjects) else None


def _check_subject(field: str, subject: str | None, rules: Rules) -> None:
    if subject is not None and _allowed(subject, rules) is None:
        allowed = ", ".join(rules.reply_subjects)
        raise InvalidField(
            f"{field} = {subject!r} may not be published to: use a subject under {allowed}.", param=field
        )
