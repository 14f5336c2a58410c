"""What an HTTP request asks for: headers and a body in, an `Order` out. Pure; raises `RequestError`.

Nothing of a client reaches a subject unencoded, and what is ours (ids, reply subjects, cache salts) cannot be set from outside.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from pipeline.errors import BodyEncoded, BodyTooLarge, InvalidField
from pipeline.limits import COMPLETION_BYTES_MAX, REQUEST_ID_BYTES_MAX
from pipeline.protocol import by_reference, resume, subjects, tracing
from pipeline.protocol.by_reference import Reference
from pipeline.protocol.chat import RESERVED, Chat, to_map, to_part
from pipeline.protocol.completions import MAX_TOKENS, CompletionRequest, Request, check_no_reference
from pipeline.protocol.keys import Key
from pipeline.protocol.messages import encode, encoding_of

Headers = Mapping[bytes, bytes]
"""ASGI's headers: names in lower case."""

_DIGITS_MAX: Final = 9
"""Milliseconds of eleven days."""

_PRINTABLE: Final = frozenset(range(0x20, 0x7F))

OPEN: Final = Key(name="-", sha256="0" * 64, tenant="*")
"""Everybody's, where no key is needed: it may do anything."""


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply must say beside one text: several `choices` to each prompt, `logprobs`, the `ids` of its tokens, usage in each
    chunk. What it must not say, where it has some: the reasoning.

    `role` is who speaks: where no new turn was to begin, who spoke last.
    """

    choices: int = 1
    logprobs: bool = False
    ids: bool = False
    continuous_usage: bool = False
    hides_reasoning: bool = False
    role: str = "assistant"

    @property
    def plain(self) -> bool:
        """Nothing."""
        return self == Detail()


def detail_of(asked: Request) -> Detail:
    """What of it a client asks for."""
    options = asked.stream_options
    detail = Detail(
        choices=asked.n or 1,
        logprobs=asked.logprobs is not None and asked.logprobs is not False,
        ids=bool(asked.return_token_ids),
        continuous_usage=options is not None and options.include_usage and options.continuous_usage_stats,
    )
    if isinstance(asked, CompletionRequest):
        return detail
    return msgspec.structs.replace(
        detail,
        hides_reasoning=asked.include_reasoning is False,
        role=asked.messages[-1].role if asked.add_generation_prompt is False else "assistant",
    )


class Part(msgspec.Struct):
    """One request of the pipeline. `payload` is the envelope as it will lie in REQUESTS."""

    id: str
    payload: bytes


class Order(msgspec.Struct, kw_only=True):
    """One HTTP request, checked. `creator` is its subject token. `parts`: one for each prompt, mostly one.

    `conversation` keeps its turns together where a creator's are spread. `model` is what the client asked for, then what it gets.
    `referred`: it names its persona and history instead of carrying them. `trace` are headers for the stored message.
    `continues`: should its worker die, another goes on with the reply where it was.
    """

    id: str
    klass: str
    creator: str
    conversation: str
    parts: list[Part]
    model: str
    stream: bool
    include_usage: bool
    detail: "Detail"
    timeout_s: float
    trace: dict[str, str]
    referred: bool = False
    continues: bool = True


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What this gateway adds to every request. `timeout_s` is of a request that sets none; the longest is by class."""

    reply_to: str
    claim_at: str
    receiver: str
    default_creator: str
    timeout_s: float
    timeout_max_s: Mapping[str, float]
    default_max_tokens: int | None = None


def declared_too_large(headers: Headers, bytes_max: int) -> bool:
    """Whether the client itself says that its body passes the limit."""
    declared = headers.get(b"content-length", b"0")
    return declared.isdigit() and int(declared) > bytes_max


def too_large(bytes_max: int) -> BodyTooLarge:
    """The refusal of such a body."""
    return BodyTooLarge(f"The body is larger than {bytes_max} bytes.")


def check_encoding(headers: Headers) -> None:
    """Raise `BodyEncoded` for a body that would have to be unpacked: a small one could become any size."""
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        name = encoding.decode("latin-1")
        raise BodyEncoded(f"The body is encoded as {name!r}: send it as it is.", param="content-encoding")


def request_id_of(headers: Headers) -> str | None:
    """The client's own name for its request, `x-request-id`, where it is fit to print."""
    theirs = headers.get(b"x-request-id", b"")
    fit = 0 < len(theirs) <= REQUEST_ID_BYTES_MAX and _PRINTABLE.issuperset(theirs)
    return theirs.decode("ascii") if fit else None


def trace_of(headers: Headers) -> dict[str, str]:
    """The client's trace context, as headers for the stored message."""
    if b"traceparent" not in headers:
        return {}
    names = (tracing.PARENT, tracing.STATE)
    return tracing.context_of({name: headers.get(name.encode(), b"").decode("latin-1") for name in names})


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
    return text_of(raw) or user or default


def conversation_of(headers: Headers, cache_key: str | None, request: str) -> str:
    """Which requests share a history: those of the header's, else of OpenAI's `prompt_cache_key`, else this one alone."""
    return text_of(headers.get(b"x-conversation-id", b"")) or cache_key or request


def referred_creator(headers: Headers, reference: Reference, default: str) -> str:
    """Whose persona a request by reference names. Raises `InvalidField` where its header says that it is another's."""
    named = reference.creator or default
    said = text_of(headers.get(b"x-creator-id", b""))
    if said and said != named:
        raise InvalidField(
            f"{reference.names.persona} is {named!r}, but x-creator-id is {said!r}: name one creator, or leave the header out.",
            param=reference.names.persona,
        )
    return named


def take(
    request: str, headers: Headers, body: bytes, terms: Terms, key: Key = OPEN, kind: type[Request] = Chat
) -> Order:
    """Check everything that can be checked without a tokeniser and the fleet, and write the envelopes."""
    klass = class_of(headers)
    key.check_class(klass)
    timeout_s = timeout_of(headers, klass, terms)
    if encoding_of(body) != "json":
        raise InvalidField("The body must be JSON, in UTF-8.")
    try:
        tree = to_map(body)
        asked: Request = to_part(tree, kind)
        if asked.stream_options is not None and not asked.stream:
            raise InvalidField("stream_options can only be set where stream is true.", param="stream_options")
        theirs = {name: value for name, value in tree.items() if name not in RESERVED}
        creator = creator_of(headers, asked.user, terms.default_creator)
        reference = _reference(theirs, asked)
        if reference is not None:
            creator = referred_creator(headers, reference, creator)
        key.check_creator(creator)
        _bound_reply(theirs, asked, key, terms.default_max_tokens)
        if tenant := key.tenant_for(text_of(headers.get(b"x-tenant-id", b""))):
            theirs["tenant"] = tenant
        if request_id := request_id_of(headers):
            theirs["request_id"] = request_id
        parts = _parts(request, timeout_s, terms, theirs, asked)
    except RecursionError:
        raise InvalidField("The body is nested too deeply.") from None
    except OverflowError:
        raise InvalidField("The body has an integer of more than 64 bits.") from None
    return Order(
        id=request,
        klass=klass,
        creator=subjects.token(creator),
        conversation=(reference.conversation if reference is not None else None)
        or conversation_of(headers, asked.prompt_cache_key, request),
        parts=parts,
        model=asked.model or "",
        stream=bool(asked.stream),
        include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        detail=detail_of(asked),
        timeout_s=timeout_s,
        trace=trace_of(headers),
        referred=reference is not None,
        continues=resume.continues(theirs),
    )


def _reference(fields: Mapping[str, object], asked: Request) -> Reference | None:
    """What a chat refers to; a completion brings all of its prompt."""
    if isinstance(asked, CompletionRequest):
        check_no_reference(fields)
        return None
    return by_reference.read(fields)


def _bound_reply(fields: dict[str, object], asked: Request, key: Key, default: int | None) -> None:
    """Write down the reply's length where the client sets none and its key bounds it."""
    is_completion = isinstance(asked, CompletionRequest)
    said = asked.max_tokens if is_completion else asked.reply_tokens_max
    key.check_tokens(said)
    if key.reply_tokens_max is not None and said is None:
        unsaid = MAX_TOKENS if is_completion else default
        fields["max_tokens"] = min(unsaid or key.reply_tokens_max, key.reply_tokens_max)


def _parts(request: str, timeout_s: float, terms: Terms, fields: dict[str, object], asked: Request) -> list[Part]:
    """The first has the request's own id."""
    fields["type"] = "chat"
    if not isinstance(asked, CompletionRequest):
        return [Part(request, _envelope(request, timeout_s, terms, fields))]
    fields["type"] = "completion"
    prompts = asked.prompts
    if len(prompts) > 1:
        fields.setdefault("request_id", request)  # by which all are found
    parts: list[Part] = []
    size = 0
    for number, prompt in enumerate(prompts):
        name = f"{request}-{number}" if number else request
        parts.append(Part(name, _envelope(name, timeout_s, terms, fields | {"prompt": prompt})))
        size += len(parts[-1].payload)
        if number and size > COMPLETION_BYTES_MAX:
            raise BodyTooLarge(
                f"{len(prompts)} prompts, each with all else that the body says, are more than {COMPLETION_BYTES_MAX} bytes: "
                "send them in several requests."
            )
    return parts


def _envelope(request: str, timeout_s: float, terms: Terms, fields: dict[str, object]) -> bytes:
    fields["v"] = 1
    fields["id"] = request
    fields["reply_to"] = terms.reply_to
    fields["claim_at"] = terms.claim_at
    fields["receiver"] = terms.receiver
    fields["timeout_ms"] = max(1, round(timeout_s * 1000))
    return encode(fields)


def text_of(raw: bytes) -> str:
    """A header's value. Most clients send UTF-8; HTTP's own reading is Latin-1."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")
