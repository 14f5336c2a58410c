"""What an HTTP request asks for: headers and a body in, an `Order` out. Pure; raises `RequestError`.

Nothing of a client reaches a subject unencoded, and what is ours (ids, reply subjects, cache salts) cannot be set from outside.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from pipeline.errors import BodyTooLarge, InvalidField
from pipeline.limits import REQUEST_ID_BYTES_MAX
from pipeline.protocol import subjects
from pipeline.protocol.chat import RESERVED, Chat, to_chat, to_map
from pipeline.protocol.messages import encode, encoding_of

Headers = Mapping[bytes, bytes]
"""ASGI's headers: names in lower case."""

_DIGITS_MAX: Final = 9
"""Milliseconds of eleven days."""

_PRINTABLE: Final = frozenset(range(0x20, 0x7F))


class Order(msgspec.Struct, kw_only=True):
    """One request, checked. `payload` is the envelope as it will lie in REQUESTS. `creator` is its subject token.

    `conversation` keeps its turns together where a creator's are spread. `model` is what the client asked for, then what it gets.
    """

    id: str
    klass: str
    creator: str
    conversation: str
    payload: bytes
    model: str
    stream: bool
    include_usage: bool
    timeout_s: float


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What this gateway adds to every request. `timeout_s` is of a request that sets none; the longest is by class."""

    reply_to: str
    claim_at: str
    receiver: str
    default_creator: str
    timeout_s: float
    timeout_max_s: Mapping[str, float]


def declared_too_large(headers: Headers, bytes_max: int) -> bool:
    """Whether the client itself says that its body passes the limit."""
    declared = headers.get(b"content-length", b"0")
    return declared.isdigit() and int(declared) > bytes_max


def too_large(bytes_max: int) -> BodyTooLarge:
    """The refusal of such a body."""
    return BodyTooLarge(f"The body is larger than {bytes_max} bytes.")


def echoed_id(headers: Headers, ours: str) -> bytes:
    """The `x-request-id` of the response: the client's own where it is fit to print, else ours."""
    theirs = headers.get(b"x-request-id", b"")
    fit = 0 < len(theirs) <= REQUEST_ID_BYTES_MAX and _PRINTABLE.issuperset(theirs)
    return theirs if fit else ours.encode()


def class_of(headers: Headers) -> str:
    """The request's class, from `x-request-class`."""
    klass = headers.get(b"x-request-class", b"interactive").decode("latin-1")
    if klass not in subjects.CLASSES:
        known = " or ".join(subjects.CLASSES)
        raise InvalidField(f"x-request-class must be {known}, got {klass!r}.", param="x-request-class")
    return klass


def timeout_of(headers: Headers, klass: str, terms: Terms) -> float:
    """How long the reply may take, in seconds: `x-request-timeout-ms` or the default, within the bound of its class."""
    asked = headers.get(b"x-request-timeout-ms")
    if asked is None:
        return min(terms.timeout_s, terms.timeout_max_s[klass])
    if not asked.isdigit() or not 0 < len(asked) <= _DIGITS_MAX or not int(asked):
        text = asked.decode("latin-1")
        raise InvalidField(
            f"x-request-timeout-ms must be a number of milliseconds, got {text!r}.", param="x-request-timeout-ms"
        )
    return min(int(asked) / 1000, terms.timeout_max_s[klass])


def creator_of(headers: Headers, user: str | None, default: str) -> str:
    """Whose persona the prompt carries: the header, else the body's `user`, else the default. Empty counts as absent."""
    raw = headers.get(b"x-creator-id", b"")
    return _text(raw) or user or default


def conversation_of(headers: Headers, cache_key: str | None, request: str) -> str:
    """Which requests share a history: those of the header's, else of OpenAI's `prompt_cache_key`, else this one alone."""
    return _text(headers.get(b"x-conversation-id", b"")) or cache_key or request


def take(request: str, headers: Headers, body: bytes, terms: Terms) -> Order:
    """Check everything that can be checked without a tokeniser, and write the envelope."""
    klass = class_of(headers)
    timeout_s = timeout_of(headers, klass, terms)
    if encoding_of(body) != "json":
        raise InvalidField("The body must be JSON, in UTF-8.")
    try:
        tree = to_map(body)
        chat = to_chat(tree, Chat)
        theirs = {name: value for name, value in tree.items() if name not in RESERVED}
        if tenant := _text(headers.get(b"x-tenant-id", b"")):
            theirs["tenant"] = tenant
        payload = _envelope(request, timeout_s, terms, theirs)
    except RecursionError:
        raise InvalidField("The body is nested too deeply.") from None
    except OverflowError:
        raise InvalidField("The body has an integer of more than 64 bits.") from None
    return Order(
        id=request,
        klass=klass,
        creator=subjects.token(creator_of(headers, chat.user, terms.default_creator)),
        conversation=conversation_of(headers, chat.prompt_cache_key, request),
        payload=payload,
        model=chat.model or "",
        stream=bool(chat.stream),
        include_usage=_wants_usage(chat),
        timeout_s=timeout_s,
    )


def _wants_usage(chat: Chat) -> bool:
    return chat.stream_options is not None and chat.stream_options.include_usage


def _envelope(request: str, timeout_s: float, terms: Terms, fields: dict[str, object]) -> bytes:
    fields["type"] = "chat"
    fields["v"] = 1
    fields["id"] = request
    fields["reply_to"] = terms.reply_to
    fields["claim_at"] = terms.claim_at
    fields["receiver"] = terms.receiver
    fields["timeout_ms"] = max(1, round(timeout_s * 1000))
    return encode(fields)


def _text(raw: bytes) -> str:
    """A header's value. Most clients send UTF-8; HTTP's own reading is Latin-1."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")
