"""What travels. Structs are grouped by who receives them; every one is tagged and versioned.

Between our own processes everything is msgpack. A producer may write its request in JSON or msgpack and is answered in kind:
`encoding_of` tells the two apart by the first byte. Token ids travel as raw little-endian u32 (`pack_ids`), in JSON as a list.

A **request** is one flat map: OpenAI's chat fields, and beside them a few of ours (`id`, `reply_to`, `claim_at`,
`timeout_ms`). We type what we act on; every other field stays in the map and reaches the engine's own request class, which
knows what it means.
"""

import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from pipeline.errors import ErrorBody, InvalidField
from pipeline.limits import REQUEST_ID_BYTES_MAX

Version = Literal[1]
Encoding = Literal["json", "msgpack"]

# --------------------------------------------------------------------------------------------------------------
# Token ids


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as raw little-endian u32: 4 bytes each, and 70 µs less than a list for 4,096 of them."""
    packed = array("I", ids)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(raw: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    packed = array("I")
    packed.frombytes(raw)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tolist()


# --------------------------------------------------------------------------------------------------------------
# To a prefill worker: the request


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A piece of text in a message whose content is a list."""

    text: str


class Message(msgspec.Struct, frozen=True):
    """One turn of the chat. `content` may be missing only where tool calls stand for it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], msgspec.Meta(min_length=1)] | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """The part of OpenAI's chat completion request that we act on or check before any engine sees it.

    Unknown fields are accepted. Bounds are those of vLLM 0.32.
    """

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    logprobs: bool | None = None
    tools: list[Any] | None = None
    response_format: Mapping[str, Any] | None = None

    @property
    def reply_tokens_max(self) -> int | None:
        """The reply's length that the client set, by its new name or its old one."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class ChatRequest(Chat, frozen=True, kw_only=True, tag="chat"):
    """A request as it lies in REQUESTS.

    `reply_to`: subject for frames (or the header `Reply-To`). `claim_at`: subject that arbitrates claims (or `Claim-At`);
    a producer that is only a subscription has none. `timeout_ms` counts from when the stream stored the request. `id` is the
    publisher's own; without one the stream's sequence names the request. `receiver` is `<id>/<epoch>` of a gateway that says
    in its presence that it lives: once it does not, its requests are dropped.
    """

    v: Version = 1
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=REQUEST_ID_BYTES_MAX)] | None = None
    reply_to: str | None = None
    claim_at: str | None = None
    timeout_ms: Annotated[int, msgspec.Meta(ge=1)] | None = None
    receiver: str | None = None


ChatT = TypeVar("ChatT", bound=Chat)

RESERVED: Final = frozenset(
    {
        "type",
        "v",
        "id",
        "reply_to",
        "claim_at",
        "timeout_ms",
        "receiver",
        "kv_transfer_params",
        "ec_transfer_params",
        "cache_salt",
    }
)
"""Fields that an HTTP client may not set: ours, and those that would reach into the engine's transfers or caches."""

_UNSUPPORTED: Final[tuple[tuple[str, Any], ...]] = (
    ("logprobs", False),
    ("tools", []),
    ("response_format", {"type": "text"}),
    ("n", 1),
)


def check_chat(chat: Chat) -> None:
    """Raise `InvalidField` for features that are not served yet."""
    for name, harmless in _UNSUPPORTED:
        value = getattr(chat, name)
        if value is not None and value != harmless:
            raise InvalidField(f"{name} = {value!r} is not served yet; leave it out.", param=name)


def encoding_of(payload: bytes) -> Encoding:
    """How a request is written. A msgpack map starts at 0x80 or above, JSON never does."""
    return "msgpack" if payload and payload[0] >= 0x80 else "json"


def to_map(payload: bytes) -> dict[str, Any]:
    """The request as a plain map. Raises `InvalidField` where it is neither JSON nor msgpack, or no map."""
    encoding = encoding_of(payload)
    try:
        tree = msgspec.msgpack.decode(payload) if encoding == "msgpack" else msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidField(f"The body is not valid {encoding}: {error}.") from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise InvalidField("The body must be an object.")
    return tree


def to_chat(tree: Mapping[str, Any], as_type: type[ChatT]) -> ChatT:
    """`tree` as `Chat` or `ChatRequest`. Raises `InvalidField` whose `param` is the place in the body."""
    try:
        chat = msgspec.convert(tree, as_type)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        place = path.strip("`").lstrip(".")
        if "missing required field" in message:
            # msgspec puts a missing field's name into the message, not into the path.
            place = ".".join(filter(None, (place, message.split("`")[1])))
        raise InvalidField(f"{_why(message, place)}.", param=place or None) from None
    check_chat(chat)
    return chat


def _why(message: str, place: str) -> str:
    if place.endswith(".type") and "content" in place:
        return f"{place}: only text parts are served; {message}"
    return f"{place}: {message}" if place else message


# --------------------------------------------------------------------------------------------------------------
# To a receiver: frames and claims


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply took, in tokens. The split shows in it.

    `cached_tokens` of the prompt prefill did not compute (HBM or LMCache); `decode_cached_tokens` of it decode did not compute,
    which is what the hand-off carried; `prefill_generated_tokens` is always 1, thrown away.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    decode_cached_tokens: int
    prefill_generated_tokens: int
    prefill: str
    decode: str


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="kind", tag="?"):
    """One message of a reply: `[kind, version, request, claim, index, …]`.

    `index` counts tokens from the start of the reply, over claims: a tokens frame starts at it, the others end at it.
    """

    v: Version
    request: str
    claim: str
    index: int


class Tokens(Frame, frozen=True, array_like=True, gc=False, tag_field="kind", tag="tokens"):
    """New tokens (packed ids) and the text that they add."""

    ids: bytes
    text: str


class Done(Frame, frozen=True, array_like=True, gc=False, tag_field="kind", tag="done"):
    """The whole reply once more; `index` is its length in tokens. Sent as a request: the ack follows `Whole`."""

    ids: bytes
    text: str
    finish_reason: str
    usage: Usage


class Failed(Frame, frozen=True, array_like=True, gc=False, tag_field="kind", tag="error"):
    """The reply ends here, incomplete, and why. Sent as a request, like `Done`."""

    error: ErrorBody


AnyFrame = Tokens | Done | Failed


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag="claim"):
    """A worker asks the receiver for the right to work on a request and to speak for it.

    `holder` is the worker's control subject, `ack` the message's ack subject. `follows` names the claim that is taken over;
    unset, the claim begins a delivery.
    """

    v: Version = 1
    request: str
    claim: str
    epoch: str
    holder: str
    ack: str
    follows: str | None = None


class Go(msgspec.Struct, frozen=True, tag="go"):
    """Yours. `ids` (packed) the receiver has already: continue after them."""

    ids: bytes = b""


class Whole(msgspec.Struct, frozen=True, tag="whole"):
    """The receiver has the whole reply: ack."""


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Nobody wants the reply: stop, and ack."""


class Fenced(msgspec.Struct, frozen=True, tag="fenced"):
    """A later claim exists: stop, and neither ack nor NAK."""


class From(msgspec.Struct, frozen=True, tag="from"):
    """The answer to a `Done` whose reply has a gap, or a receiver's own wish: send tokens from this index again."""

    index: int


Answer = Go | Whole | Gone | Fenced | From


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """From a receiver to the holder of a claim, unasked: `fenced`, `gone`, or `from`."""

    request: str
    claim: str
    answer: Gone | Fenced | From


# --------------------------------------------------------------------------------------------------------------
# To a decode worker: credits and the completion event


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """May `blocks` KV blocks be kept for this request? Repeated with the same `ask` id while it is wanted: an ask is a lease.

    `answer_to` is where verdicts go, now and later. `deadline_s` is Unix time.
    """

    v: Version = 1
    ask: str
    request: str
    claim: str
    blocks: int
    deadline_s: float
    answer_to: str


class Audit(msgspec.Struct, frozen=True, tag="audit"):
    """How does the ledger stand? Answered with an `Account`."""


class Account(msgspec.Struct, frozen=True, kw_only=True, tag="account"):
    """One ledger: blocks and asks as they stand, and what has become of grants since it began."""

    decode: str
    epoch: str
    blocks: int
    free: int
    reserve: int
    waiting: int
    granted_now: int
    granted_blocks: int
    consumed_now: int
    consumed_blocks: int
    granted: int
    released: int
    returned: int
    expired: int
    refused: int
    engine_blocks: int = 0
    preemptions: int = 0
    disagreements: int = 0


class Return(msgspec.Struct, frozen=True, kw_only=True, tag="return"):
    """The ask or its grant is not wanted any more."""

    v: Version = 1
    ask: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True, tag="verdict"):
    """The present state of an ask, to the asker. `epoch` is the decode worker's: a restarted one owes nothing."""

    v: Version = 1
    ask: str
    request: str
    state: Literal["waiting", "granted", "refused"]
    decode: str
    epoch: str
    reason: str = ""
    never: bool = False
    """Set with `refused`: no decode worker of this size can ever grant it."""


class Handoff(msgspec.Struct, frozen=True, kw_only=True, tag="handoff"):
    """The completion event: the KV of this request is in LMCache, under a live grant.

    `ask` is the grant's id, `epoch` the decode worker's that gave it. `claim` is prefill's, which decode takes over. `ids`
    are the prompt's tokens, packed. `deadline_s` is Unix time. `chat` holds the client's fields but the messages.
    """

    v: Version = 1
    request: str
    klass: str
    ask: str
    epoch: str
    claim: str
    ack: str
    reply_to: str
    claim_at: str | None
    receiver: str | None
    encoding: Encoding
    deadline_s: float
    ids: bytes
    salt: str
    max_tokens: int
    chat: dict[str, Any]
    cached_tokens: int
    prefill_generated_tokens: int
    prefill: str


class HandoffAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="handoff-answer"):
    """`accepted`: ack and lease are decode's now (also when repeated). `refused`: still prefill's, for the reason given."""

    state: Literal["accepted", "refused"]
    reason: Literal["", "fenced", "gone", "no_grant", "old_epoch", "draining"] = ""


# --------------------------------------------------------------------------------------------------------------
# To everybody


class Presence(msgspec.Struct, frozen=True, kw_only=True, tag="presence"):
    """A process lives. `load` is 0…1 of its own scarcest resource; blocks are a decode worker's, slots a prefill worker's."""

    v: Version = 1
    role: Literal["gateway", "prefill", "decode"]
    id: str
    epoch: str
    ready: bool
    draining: bool = False
    load: float = 0.0
    slots: int = 0
    slots_free: int = 0
    blocks: int = 0
    blocks_free: int = 0
    asks_waiting: int = 0
    model: str = ""
    max_model_len: int = 0
    block_size: int = 0
    fingerprint: str = ""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop the request wherever it is."""

    request: str


encode = msgspec.msgpack.Encoder().encode


def frame_for(frame: AnyFrame, encoding: Encoding) -> bytes:
    """One frame as its receiver reads it. In JSON it is an object with the fields' names."""
    return encode([frame]) if encoding == "msgpack" else msgspec.json.encode(_spelled_out(frame))


def claim_for(claim: Claim, encoding: Encoding) -> bytes:
    """A claim as the receiver of such a reply reads it."""
    return encode(claim) if encoding == "msgpack" else msgspec.json.encode(claim)


def read_answer(payload: bytes) -> Answer:
    """A receiver's answer, in whichever encoding it writes. Raises `InvalidField` where it is none."""
    try:
        if encoding_of(payload) == "msgpack":
            return answer_decoder.decode(payload)
        answer = _json_answer_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise InvalidField(f"Not an answer to a claim: {error}.") from None
    return Go(pack_ids(answer.ids)) if isinstance(answer, _JsonGo) else answer


class _JsonGo(msgspec.Struct, frozen=True, tag="go"):
    ids: list[int] = []


def _spelled_out(frame: AnyFrame) -> dict[str, Any]:
    fields = {name: getattr(frame, name) for name in frame.__struct_fields__}
    if isinstance(frame, Tokens | Done):
        fields["ids"] = unpack_ids(frame.ids)
    return {"kind": frame.__struct_config__.tag, **fields}


frames_decoder: Final[msgspec.msgpack.Decoder[list[AnyFrame]]] = msgspec.msgpack.Decoder(list[AnyFrame])
claim_decoder: Final = msgspec.msgpack.Decoder(Claim)
_json_answer_decoder: Final[msgspec.json.Decoder[_JsonGo | Whole | Gone | Fenced | From]] = msgspec.json.Decoder(
    _JsonGo | Whole | Gone | Fenced | From
)
answer_decoder: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)
notice_decoder: Final = msgspec.msgpack.Decoder(Notice)
credit_decoder: Final[msgspec.msgpack.Decoder[Ask | Return | Audit]] = msgspec.msgpack.Decoder(Ask | Return | Audit)
account_decoder: Final = msgspec.msgpack.Decoder(Account)
verdict_decoder: Final = msgspec.msgpack.Decoder(Verdict)
handoff_decoder: Final = msgspec.msgpack.Decoder(Handoff)
handoff_answer_decoder: Final = msgspec.msgpack.Decoder(HandoffAnswer)
presence_decoder: Final = msgspec.msgpack.Decoder(Presence)
