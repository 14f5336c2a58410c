"""What travels. Structs are grouped by who receives them; every one is tagged and versioned.

Between our own processes everything is msgpack. A producer may write its request in JSON or msgpack and is answered in kind:
`encoding_of` tells the two apart by the first byte. Token ids travel as raw little-endian u32 (`pack_ids`), in JSON as a list.

Requests themselves, which come from outside, are in `chat.py`.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from pipeline.errors import ErrorBody, InvalidField
from pipeline.protocol.conversations import Talk
from pipeline.protocol.keys import KeyUse
from pipeline.protocol.pieces import Choice, Echo, Extra, choice_in_json, extra_in_json
from pipeline.protocol.stages import AtPrefill, Stages, named

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


def encoding_of(payload: bytes) -> Encoding:
    """How a map is written: msgpack's begins at 0x80 to 0x8f, 0xde or 0xdf; no JSON does, with a byte-order mark or without."""
    return "msgpack" if payload and (payload[0] & 0xF0 == 0x80 or payload[0] in (0xDE, 0xDF)) else "json"


# --------------------------------------------------------------------------------------------------------------
# To a receiver: frames and claims


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply took, in tokens. The split shows in it.

    `cached_tokens` of the prompt prefill did not compute: `hbm_tokens` of them it found in its engine's own cache, the others in
    LMCache. `decode_cached_tokens` of it decode did not compute, which is what the hand-off carried. `prefill_generated_tokens`
    is 1, with which a plain reply begins, and of a batch prompt one for each piece that it was read in; 0 says that the request
    went directly to decode, and then `cached_tokens` is what decode found.
    `reasoning_tokens` of the completion were reasoning, where a parser tells.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    decode_cached_tokens: int
    prefill_generated_tokens: int
    prefill: str
    decode: str
    hbm_tokens: int = 0
    reasoning_tokens: int | None = None


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="kind", tag="?"):
    """One message of a reply: `[kind, version, request, claim, index, …]`.

    `index` counts tokens from the start of the reply, over claims: a tokens frame starts at it, the others end at it.
    """

    v: Version
    request: str
    claim: str
    index: int


class Tokens(Frame, frozen=True, array_like=True, gc=False, tag_field="kind", tag="tokens"):
    """New tokens (packed ids) and the text that they add.

    Of a request for several replies, `index` counts the tokens of all of them in the order in which they are sent, so a gap is
    seen and mended as in one. `extra` comes last, and mostly not at all: a reader that does not know it reads the rest.
    """

    ids: bytes
    text: str
    extra: Extra | None = None


class Done(Frame, frozen=True, array_like=True, gc=False, tag_field="kind", tag="done"):
    """The whole reply once more; `index` is its length in tokens. Sent as a request: the ack follows `Whole`.

    `choices` are all replies, where there are several, or where there is more to say than ids, text and reason: these are the
    first one's. `prompt` has the prompt's ids (packed) and `prompt_logprobs` vLLM's (a JSON list), where they are asked for.
    `stages`: where the workers' time went.
    """

    ids: bytes
    text: str
    finish_reason: str
    usage: Usage
    choices: list[Choice] = []
    prompt: bytes = b""
    prompt_logprobs: str = ""
    stages: Stages | None = None

    @property
    def all_choices(self) -> list[Choice]:
        """The replies, mostly one."""
        return self.choices or [Choice(self.ids, self.text, self.finish_reason)]


class Failed(Frame, frozen=True, array_like=True, gc=False, tag_field="kind", tag="error"):
    """The reply ends here, incomplete, and why. Sent as a request, like `Done`."""

    error: ErrorBody


AnyFrame = Tokens | Done | Failed


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag="claim"):
    """A worker asks the receiver for the right to work on a request and to speak for it.

    `holder` is the worker's control subject, `ack` the message's ack subject. `follows` names the claim that is taken over;
    unset, the claim begins a delivery. `persona` is the version with which a request by reference is about to be rendered.
    """

    v: Version = 1
    request: str
    claim: str
    epoch: str
    holder: str
    ack: str
    follows: str | None = None
    persona: int = 0


class Go(msgspec.Struct, frozen=True, tag="go"):
    """Yours. `ids` (packed) the receiver has already: continue after them. `persona` is the version that the first claim gave."""

    ids: bytes = b""
    persona: int = 0


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

    `klass` is the request's class, `seats` the sequences that it will be. `answer_to` is where verdicts go, now and later.
    `deadline_s` is Unix time.
    """

    v: Version = 1
    ask: str
    request: str
    claim: str
    klass: str = "interactive"
    blocks: int
    seats: int = 1
    deadline_s: float
    answer_to: str


class Audit(msgspec.Struct, frozen=True, tag="audit"):
    """How does the ledger stand? Answered with an `Account`."""


class Account(msgspec.Struct, frozen=True, kw_only=True, tag="account"):
    """One ledger: blocks, seats (None: no bound) and asks as they stand, and what has become of grants since it began."""

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
    seats: int = 0
    seats_max: int | None = None


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
    are the prompt's tokens, packed. `deadline_s` is Unix time. `chat` holds the client's fields but the prompt. `talk` is set
    where the exchange is to be written down. `echo` and `prompt_logprobs` (as in `Done`) are what only prefill knows.
    `stages` is where prefill's time went, `trace` the trace context's headers.
    `direct`: no prefill engine has seen this prompt. LMCache has of it what earlier ones have left; decode computes the rest.
    `first_by_s`: when the reply must have begun, Unix time too; 0: whenever it does.
    `reads`: nor is it a little that is missing. Decode is in the same engine, and reads it there as prefill would have.
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
    hbm_tokens: int = 0
    first_by_s: float = 0.0
    direct: bool = False
    reads: bool = False
    talk: Talk | None = None
    echo: Echo = Echo()
    prompt_logprobs: str = ""
    stages: AtPrefill | None = None
    trace: dict[str, str] = {}


class HandoffAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="handoff-answer"):
    """`accepted`: ack and lease are decode's now (also when repeated). `refused`: still prefill's, for the reason given."""

    state: Literal["accepted", "refused"]
    reason: Literal["", "fenced", "gone", "no_grant", "old_epoch"] = ""


# --------------------------------------------------------------------------------------------------------------
# To everybody


class Presence(msgspec.Struct, frozen=True, kw_only=True, tag="presence"):
    """A process lives. `load` is 0…1 of its own scarcest resource; blocks are a decode worker's, slots a prefill worker's.

    `paused`: it takes nothing new, by an operator's order, and lives on. `settings`: how far it has followed the bucket of
    live settings. A worker with both loops says it once for each: `serves_as` is what it is in all, or is becoming, and
    `built_for` what its engine can be.
    """

    v: Version = 1
    role: Literal["gateway", "prefill", "decode"]
    id: str
    epoch: str
    ready: bool
    draining: bool = False
    paused: bool = False
    settings: int = 0
    serves_as: str = ""
    built_for: str = ""
    load: float = 0.0
    slots: int = 0
    slots_free: int = 0
    batch_slots_free: int | None = None
    """Of those, the ones that batch may take. None: any."""
    reads_ratio: float = 0.0
    """A prefill worker's: the share of the last seconds in which its engine had a prompt to read."""
    blocks: int = 0
    blocks_free: int = 0
    asks_waiting: int = 0
    batch_asks_waiting: int = 0
    """Of a decode worker's waiting asks, those that let interactive ones go first."""
    full_ratio: float = 0.0
    """A decode worker's: how much of its blocks and seats was promised over the last half second, of what it may promise."""
    unread: int = 0
    """Prompts that a decode worker's engine reads itself, or has still to read."""
    model: str = ""
    max_model_len: int = 0
    block_size: int = 0
    fingerprint: str = ""
    rate: float = 0.0
    """A gateway's: requests a second that it has taken."""
    rates: dict[str, float] = {}
    """A gateway's: requests a second of the creators that ask most, by subject token."""
    keys: dict[str, KeyUse] = {}
    """A gateway's: what the busiest bearer keys use there, by name."""
    warm: int = 0
    """A prefill worker's: creators that are warm there."""
    warm_number: int = 0
    """Its last change of them, and below, all of their hashes, XORed: whose view differs asks for all."""
    warm_digest: int = 0
    unix_s: float = 0.0
    """When this was said, by the clock of who says it: a wrong one shows (`headrace doctor`)."""

    @property
    def takes(self) -> bool:
        """Whether it takes work now."""
        return self.ready and not self.draining and not self.paused


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
    return Go(pack_ids(answer.ids), answer.persona) if isinstance(answer, _JsonGo) else answer


class _JsonGo(msgspec.Struct, frozen=True, tag="go"):
    ids: list[int] = []
    persona: int = 0


def _spelled_out(frame: AnyFrame) -> dict[str, Any]:
    fields = {name: getattr(frame, name) for name in frame.__struct_fields__}
    if isinstance(frame, Tokens | Done):
        fields["ids"] = unpack_ids(frame.ids)
    if isinstance(frame, Tokens):
        fields["extra"] = frame.extra and extra_in_json(frame.extra, unpack_ids(frame.extra.prompt))
    if isinstance(frame, Done):
        fields["choices"] = [choice_in_json(choice, unpack_ids(choice.ids)) for choice in frame.choices]
        fields["prompt"] = unpack_ids(frame.prompt)
        fields["prompt_logprobs"] = msgspec.Raw(frame.prompt_logprobs.encode() or b"null")
        fields["stages"] = frame.stages and named(frame.stages)
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
