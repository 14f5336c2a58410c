"""The grammar of our NATS subjects: lower-case, broad to narrow, and every foreign id is exactly one token.

A foreign id (a creator, a conversation, a request id) may be any Unicode string. `token()` maps it to one subject token
injectively: `[A-Za-z0-9_-]` stay, every other byte becomes `=XX`, and what would be too long becomes `=h` and a hash, so
that no id can widen a subject, hit another's, or name a wildcard.

    requests.in.<class>.<affinity>.<creator>          what producers and gateways publish
    requests.shard.<n>.<class>.<affinity>.<creator>   what the stream stores: n = partition(affinity)
    credit.<decode>   handoff.<decode>   holder.<worker>   presence.<role>.<id>   dlq.<reason>.<class>
    control.cancel.<request>   control.trace.<request>   control.worker.<worker>   control.recent
    trace.ask   trace.record.<recorder>
    turns.<creator>.<conversation>   chat.sent.<creator>.<conversation>
"""

import base64
import hashlib
from typing import Final

import msgspec

from pipeline.errors import InvalidField
from pipeline.limits import CREATOR_TOKEN_BYTES_MAX

CLASSES: Final = ("interactive", "batch")
"""Request classes, most urgent first. Each has a stream of its own."""

_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
_TOKEN: Final = _PLAIN | frozenset(b"=~")


def token(foreign: str) -> str:
    """`foreign` as one subject token. Raises `InvalidField` where it is empty."""
    raw = foreign.encode("utf-8", "surrogatepass")
    if not raw:
        raise InvalidField("An id in a subject must not be empty.")
    out = "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in raw)
    if len(out) <= CREATOR_TOKEN_BYTES_MAX:
        return out
    digest = base64.b32encode(hashlib.sha256(raw).digest()).decode().rstrip("=").lower()
    return f"=h{digest}"


def is_token(text: str) -> bool:
    """Whether `text` may stand as one token of a request's subject (`~` marks a spread affinity)."""
    return 0 < len(text) <= CREATOR_TOKEN_BYTES_MAX and all(byte in _TOKEN for byte in text.encode())


def partition(affinity: str, shards: int) -> int:
    """The shard of an affinity token: 32-bit FNV-1a mod `shards`, the same function as NATS's `partition()`."""
    value = 0x811C9DC5
    for byte in affinity.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value % shards


class Shard(msgspec.Struct, frozen=True, order=True):
    """One of the static queues: a class and a number. `stream` and `consumer` are its JetStream names."""

    klass: str
    number: int

    @property
    def stream(self) -> str:
        """The stream that holds this class's requests."""
        return f"REQUESTS_{self.klass}"

    @property
    def consumer(self) -> str:
        """The durable consumer of this shard."""
        return f"s{self.number}"

    @property
    def queue(self) -> str:
        """Stream and consumer, as JetStream's subjects name them."""
        return f"{self.stream}.{self.consumer}"


class Stored(msgspec.Struct, frozen=True):
    """What the subject of a stored request says."""

    shard: Shard
    affinity: str
    creator: str


def request_in(klass: str, affinity: str, creator: str) -> str:
    """Where a request of this class is published. `affinity` and `creator` are tokens already."""
    return f"requests.in.{klass}.{affinity}.{creator}"


def parse_stored(subject: str) -> Stored:
    """Read `requests.shard.<n>.<class>.<affinity>.<creator>`. Raises `InvalidField` for any other subject."""
    parts = subject.split(".")
    if len(parts) != 6 or parts[:2] != ["requests", "shard"] or not parts[2].isdigit() or parts[3] not in CLASSES:
        raise InvalidField(f"Subject {subject!r} is not requests.shard.<n>.<class>.<affinity>.<creator>.")
    return Stored(Shard(parts[3], int(parts[2])), parts[4], parts[5])


class AckSubject(msgspec.Struct, frozen=True):
    """What `$JS.ACK.…` of a delivery says.

    `stored_at_s` is the broker's clock (Unix seconds); `pending` is the shard's backlog behind this message.
    """

    stream: str
    consumer: str
    delivered: int
    sequence: int
    stored_at_s: float
    pending: int


def parse_ack(subject: str) -> AckSubject:
    """Read a version 1 ack subject, `$JS.ACK.<stream>.<consumer>.<delivered>.<sseq>.<cseq>.<ns>.<pending>`.

    Raises `InvalidField` for any other form: the server's `js_ack_fc_v2` must stay off.
    """
    parts = subject.split(".")
    if len(parts) != 9 or parts[:2] != ["$JS", "ACK"] or not all(part.isdigit() for part in parts[4:]):
        raise InvalidField(f"Ack subject {subject!r} is not version 1: set js_ack_fc_v2 to false on the server.")
    return AckSubject(parts[2], parts[3], int(parts[4]), int(parts[5]), int(parts[7]) / 1e9, int(parts[8]))


def ack_of(consumer: str, sequence: int, delivery: int) -> str:
    """An ack subject of a message that somebody else has: of its delivery we know no more than its `sequence` in the stream.

    `consumer` is `<stream>.<consumer>`. `delivery` is the consumer's newest: the server wants one of those that are not acked,
    whichever, and finds the message by its sequence.
    """
    return f"$JS.ACK.{consumer}.1.{sequence}.{delivery}.0.0"


def matches(pattern: str, subject: str) -> bool:
    """Whether `subject` falls under `pattern` (`*` one token, a last `>` one or more). No wildcard may stand in `subject`."""
    want, have = pattern.split("."), subject.split(".")
    if not all(have) or any(part in ("*", ">") for part in have):
        return False
    for at, part in enumerate(want):
        if part == ">":
            return len(have) > at
        if at >= len(have) or part not in ("*", have[at]):
            return False
    return len(want) == len(have)


def is_kept(reply_to: str) -> bool:
    """Whether replies to this subject are kept in the REPLIES stream, whole, for a producer that will ask later."""
    return reply_to.startswith("replies.")


def credit(decode: str) -> str:
    """Where a decode worker takes asks and returns."""
    return f"credit.{decode}"


def prefill(worker: str) -> str:
    """Where a prefill worker hears of prefixes to warm up, and of who wants to see what it has served."""
    return f"prefill.{worker}"


def cache_evicted(worker: str) -> str:
    """Where a prefill worker says which creators' prefixes it has lost."""
    return f"cache.evicted.{worker}"


def cache_warm(worker: str) -> str:
    """Where it says which it has gained, and now and then all that it has."""
    return f"cache.warm.{worker}"


def cache_ask(worker: str) -> str:
    """Where it is asked for all that it has."""
    return f"cache.ask.{worker}"


def handoff(decode: str) -> str:
    """Where a decode worker takes completion events."""
    return f"handoff.{decode}"


def holder(worker: str) -> str:
    """Where receivers talk to the holder of a claim."""
    return f"holder.{worker}"


def cancel(request: str) -> str:
    """Where a request is cancelled, wherever it is."""
    return f"control.cancel.{token(request)}"


def cancel_any() -> str:
    """What hears of every cancelled request."""
    return "control.cancel.*"


def trace(request: str) -> str:
    """Where every process is asked what it knows of a request, by its id or by the client's own name for it."""
    return f"control.trace.{token(request)}"


def trace_any() -> str:
    """What hears of every such question."""
    return "control.trace.*"


def control(worker: str) -> str:
    """Where a worker takes an operator's orders."""
    return f"control.worker.{worker}"


def recent() -> str:
    """Where every gateway is asked how requests have fared of late."""
    return "control.recent"


def presence(role: str, process: str) -> str:
    """Where a process says that it lives."""
    return f"presence.{role}.{process}"


def trace_ask() -> str:
    """Where decode workers hear who records traffic."""
    return "trace.ask"


def trace_record(recorder: str) -> str:
    """Where they tell a recorder of each reply."""
    return f"trace.record.{recorder}"


def turns(conversation: str) -> str:
    """Where the exchanges of a conversation are kept. `conversation` is `<creator>.<conversation>`, tokens both."""
    return f"turns.{conversation}"


def chat_sent(conversation: str) -> str:
    """Where an editor says which reply was really sent."""
    return f"chat.sent.{conversation}"


def dead_letter(reason: str, klass: str) -> str:
    """Where a request that will not be tried again is kept."""
    return f"dlq.{reason}.{klass}"
