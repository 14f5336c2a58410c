"""Requests that will not be tried again: what is kept of them, how one is replayed all the same, and what the DLQ keeper decides.

A **dead letter** is a copy of the request under `dlq.<reason>.<class>`, its own headers with it. Ours beside them say what it
was and why it died:

    Headrace-Reason     malformed   the request cannot be served as it is
                        poison      workers have died with it
                        exhausted   delivered `max_deliver` times, and nobody has finished it
                        expired     its deadline passed before anybody had taken it
                        terminated  somebody sent +TERM, and the broker has dropped the message: nothing but its place is known
    Headrace-Why        for people, one line                    Headrace-Code, Headrace-Param   the error that its receiver gets
    Headrace-Subject    as stored: shard, class, affinity, creator
    Headrace-Stream, Headrace-Sequence, Headrace-Stored-At, Headrace-Deliveries
    Headrace-Body       whole, deflated (it and our headers would not have fitted), or missing

The **keeper** learns of a dead request in two ways: an advisory of the broker, or a scan for what nobody has taken in time. Each
becomes one work item in the stream ADVISORIES, which one keeper at a time has. It claims the request at its receiver like any
worker, and what it then does is a table (`JUDGEMENTS`). In this order nothing is lost when it dies between two steps:

    claim ─► copy, under the request's own message id ─► error frame ─► delete from REQUESTS ─► ack the item
"""

import heapq
import zlib
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any, Final, Literal

import msgspec

from pipeline.errors import InvalidField, ReplyError, RequestError
from pipeline.limits import AGES_MAX, EXPIRED_AFTER_S, MESSAGE_BYTES_MAX
from pipeline.protocol import intake
from pipeline.protocol.chat import to_map
from pipeline.protocol.intake import CLAIM_AT_HEADER, REPLY_TO_HEADER, Rules
from pipeline.protocol.messages import Answer, Fenced, Go, Gone, Whole, encode, encoding_of
from pipeline.protocol.subjects import AckSubject, Stored, parse_stored, request_in

STREAM: Final = "DLQ"
ADVISORIES: Final = "ADVISORIES"
CONSUMER: Final = "keeper"

REASONS: Final = ("malformed", "poison", "exhausted", "expired", "terminated")

Body = Literal["whole", "deflated", "missing"]

_OURS: Final = "headrace-"
_BROKERS: Final = "nats-"
_WHY_CHARACTERS_MAX: Final = 512

# --------------------------------------------------------------------------------------------------------------
# The letter


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """What the headers of a dead letter say. Times are Unix seconds on the broker's clock; what is not known is empty or 0."""

    reason: str
    subject: str = ""
    stream: str = ""
    sequence: int = 0
    stored_at_s: float = 0.0
    deliveries: int = 0
    code: str = ""
    param: str = ""
    why: str = ""
    body: Body = "whole"

    @property
    def msg_id(self) -> str:
        """The copy's message id: whoever makes it, and however often, the DLQ holds it once."""
        return f"{self.stream}-{self.sequence}-{round(self.stored_at_s * 1000)}"

    @property
    def request(self) -> Stored | None:
        """Shard, affinity and creator, where the request's subject is known."""
        try:
            return parse_stored(self.subject)
        except InvalidField:
            return None

    @property
    def klass(self) -> str:
        """The request's class. Streams are named after theirs."""
        return self.request.shard.klass if self.request else self.stream.removeprefix("REQUESTS_")

    def headers(self) -> dict[str, str]:
        """The letter as headers."""
        said = {
            "Headrace-Reason": self.reason,
            "Headrace-Subject": self.subject,
            "Headrace-Stream": self.stream,
            "Headrace-Sequence": str(self.sequence),
            "Headrace-Stored-At": f"{self.stored_at_s:.3f}",
            "Headrace-Deliveries": str(self.deliveries),
            "Headrace-Code": self.code,
            "Headrace-Param": self.param,
            "Headrace-Why": self.why,
            "Headrace-Body": self.body,
        }
        return {name: value for name, value in said.items() if value}


def write(reason: str, subject: str, ack: AckSubject, error: ReplyError) -> Letter:
    """The letter of a request that ends with `error`."""
    return Letter(
        reason=reason,
        subject=subject,
        stream=ack.stream,
        sequence=ack.sequence,
        stored_at_s=ack.stored_at_s,
        deliveries=ack.delivered,
        code=error.code,
        param=_line(error.param or ""),
        why=_line(error.message),
    )


def read(subject: str, headers: Mapping[str, str]) -> Letter:
    """The letter in a DLQ message. Never fails: of what somebody else has put there, the subject says the reason."""
    said = {name.lower().removeprefix(_OURS): value for name, value in headers.items() if _is_ours(name)}
    body = said.get("body", "whole")
    return Letter(
        reason=said.get("reason") or subject.split(".")[1],
        subject=said.get("subject", ""),
        stream=said.get("stream", ""),
        sequence=int(_number(said.get("sequence"))),
        stored_at_s=_number(said.get("stored-at")),
        deliveries=int(_number(said.get("deliveries"))),
        code=said.get("code", ""),
        param=said.get("param", ""),
        why=said.get("why", ""),
        body="deflated" if body == "deflated" else "missing" if body == "missing" else "whole",
    )


class Copy(msgspec.Struct, frozen=True):
    """A dead request as it is stored."""

    letter: Letter
    headers: Mapping[str, str]
    data: bytes


def copies(letter: Letter, data: bytes, headers: Mapping[str, str] | None) -> Iterator[Copy]:
    """What to store, until one is small enough: the request as it was, deflated, or without its body. The last one always is."""
    own = own_headers(headers)
    if letter.body != "missing":
        yield _copy(letter, "whole", own, data)
        yield _copy(letter, "deflated", own, zlib.compress(data))
    yield _copy(letter, "missing", {}, b"")


def _copy(letter: Letter, body: Body, own: Mapping[str, str], data: bytes) -> Copy:
    made = msgspec.structs.replace(letter, body=body)
    return Copy(made, {**own, **made.headers()}, data)


def content(letter: Letter, data: bytes) -> bytes:
    """The request's own body. Raises `InvalidField` where the letter does not hold it."""
    if letter.body == "whole":
        return data
    if letter.body == "missing":
        raise InvalidField("Its body was not kept.")
    inflater = zlib.decompressobj()
    try:
        return inflater.decompress(data, MESSAGE_BYTES_MAX)
    except zlib.error as error:
        raise InvalidField(f"Its body is damaged: {error}.") from None


def own_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """The headers that are the request's own: neither ours, nor for the broker."""
    return {
        name: value
        for name, value in (headers or {}).items()
        if not _is_ours(name) and not name.lower().startswith(_BROKERS)
    }


def _is_ours(name: str) -> bool:
    return name.lower().startswith(_OURS)


def _line(text: str) -> str:
    """Header values are one line of ASCII."""
    return " ".join(text.encode("ascii", "backslashreplace").decode().split())[:_WHY_CHARACTERS_MAX]


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


# --------------------------------------------------------------------------------------------------------------
# Once more


class Replay(msgspec.Struct, frozen=True):
    """A dead request, to be published again."""

    subject: str
    data: bytes
    headers: Mapping[str, str]


def replay(letter: Letter, data: bytes, headers: Mapping[str, str], reply_to: str | None = None) -> Replay:
    """The request as it came, or with its reply sent elsewhere. Raises `InvalidField` where too little of it is left."""
    request = letter.request
    if request is None:
        raise InvalidField("It does not say whose request it was.")
    body, own = content(letter, data), own_headers(headers)
    if reply_to is not None:
        body, own = _readdressed(body, own, reply_to)
    return Replay(request_in(request.shard.klass, request.affinity, request.creator), body, own)


def replay_id(sequence: int, stored_at_s: float) -> str:
    """The message id of a replay: new to the request's stream, and the same when the replay of this dead letter is repeated."""
    return f"replay-{sequence}-{round(stored_at_s * 1000)}"


def _readdressed(body: bytes, headers: dict[str, str], reply_to: str) -> tuple[bytes, dict[str, str]]:
    """The old receiver is gone: it must neither be asked for claims, nor be watched for its death."""
    addresses = {REPLY_TO_HEADER.lower(), CLAIM_AT_HEADER.lower()}
    others = {name: value for name, value in headers.items() if name.lower() not in addresses}
    tree: dict[str, Any] = {name: value for name, value in to_map(body).items() if name not in ("claim_at", "receiver")}
    tree["reply_to"] = reply_to
    return encode(tree) if encoding_of(body) == "msgpack" else msgspec.json.encode(tree), others


# --------------------------------------------------------------------------------------------------------------
# What the keeper works on


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One request that may be dead. `deliveries` and `why` are the broker's words, where it has said any."""

    reason: str
    stream: str
    sequence: int
    deliveries: int = 0
    why: str = ""


class _Advisory(msgspec.Struct):
    stream: str
    stream_seq: int
    deliveries: int = 0
    reason: str = ""


_ADVISED: Final = {
    "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.": "exhausted",
    "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.": "terminated",
}
_EXPIRED: Final = "keeper.expired."


def expired_subject(stream: str, sequence: int) -> str:
    """Where a keeper says that a message has outlived its deadline. The subject is all there is to say."""
    return f"{_EXPIRED}{stream}.{sequence}"


def item(subject: str, data: bytes) -> Item | None:
    """The work item in a message of ADVISORIES, or None where it is not about a request."""
    if subject.startswith(_EXPIRED):
        stream, _, sequence = subject.removeprefix(_EXPIRED).rpartition(".")
        return Item(reason="expired", stream=stream, sequence=int(sequence)) if sequence.isdigit() else None
    reason = next((reason for prefix, reason in _ADVISED.items() if subject.startswith(prefix)), None)
    try:
        advisory = msgspec.json.decode(data, type=_Advisory)
    except msgspec.DecodeError:
        return None
    if reason is None or not advisory.stream.startswith("REQUESTS_"):
        return None
    return Item(
        reason=reason,
        stream=advisory.stream,
        sequence=advisory.stream_seq,
        deliveries=advisory.deliveries,
        why=advisory.reason,
    )


class Judgement(Enum):
    """What the keeper does about a request, by what its receiver has answered to the claim."""

    BURY = auto()
    """Copy, tell the receiver, delete."""
    BURY_UNHEARD = auto()
    """Copy and delete: nobody is there to be told."""
    REMOVE = auto()
    """Delete only: the receiver has its end, so nothing has died."""
    LEAVE = auto()
    """Somebody else claims it: it is alive."""
    ASK_AGAIN = auto()
    """No answer. It may come yet."""


JUDGEMENTS: Final[dict[type[Answer | None], Judgement]] = {
    Go: Judgement.BURY,
    Gone: Judgement.BURY_UNHEARD,
    Whole: Judgement.REMOVE,
    Fenced: Judgement.LEAVE,
}

UNANSWERED_TRIES: Final = 3
"""Claims without an answer, each longer than any pause of a broker's restart. Then the receiver is taken for gone."""


def judge(answer: Answer | None, tries: int) -> Judgement:
    """`tries` of this item there have been, this one with it. No answer is None, and nonsense is none."""
    unanswered = Judgement.ASK_AGAIN if tries < UNANSWERED_TRIES else Judgement.BURY_UNHEARD
    return JUDGEMENTS.get(type(answer), unanswered)


# --------------------------------------------------------------------------------------------------------------
# What has aged out


def may_expire(stored_at_s: float, now_s: float) -> bool:
    """Whether a message is old enough to be looked at: whatever deadline it sets, a younger one cannot have expired."""
    return stored_at_s + EXPIRED_AFTER_S <= now_s


def expired_at_s(subject: str, data: bytes, headers: Mapping[str, str], ack: AckSubject, rules: Rules) -> float:
    """When the keeper may take a stored request for dead (broker's clock): a while after its deadline.

    Workers answer for deadlines themselves, and keep no lease for so long. What is malformed has its class's maximum.
    """
    stored = parse_stored(subject)
    try:
        deadline_s = intake.read(data, headers, stored, ack, rules).deadline_s
    except RequestError:
        deadline_s = ack.stored_at_s + rules.timeout_max_s[stored.shard.klass]
    return deadline_s + EXPIRED_AFTER_S


class Ages:
    """The messages of one stream that a scan has read, by when they expire. Each is read once: the scan goes on where it was."""

    def __init__(self) -> None:
        self.next_sequence = 1
        self._expiring: list[tuple[float, int]] = []

    @property
    def full(self) -> bool:
        """Whether no more may be read before some have expired."""
        return len(self._expiring) >= AGES_MAX

    def begin(self, first: int, last: int) -> None:
        """A scan begins on a stream that holds these sequences. One made anew counts from 1 again."""
        if last + 1 < self.next_sequence:
            self.next_sequence, self._expiring = 1, []
        self.next_sequence = max(self.next_sequence, first)

    def saw(self, sequence: int, at_s: float) -> None:
        """This message expires then."""
        self.next_sequence = sequence + 1
        heapq.heappush(self._expiring, (at_s, sequence))

    def expired(self, now_s: float) -> int | None:
        """The sequence of the first message that has expired, until `told`."""
        return self._expiring[0][1] if self._expiring and self._expiring[0][0] <= now_s else None

    def told(self) -> None:
        """That message is somebody's work item now."""
        heapq.heappop(self._expiring)
