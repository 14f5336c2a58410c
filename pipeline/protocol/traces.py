"""Traces of real traffic, in the format of Mooncake's: who came when, how long, and what was shared, but nothing that was said.

A line is `{"timestamp", "input_length", "output_length", "hash_ids"}`: milliseconds from the beginning, tokens, and an id for
each block of 512 prompt tokens, the last one as far as it goes. An id names all that stands from the prompt's beginning up to the
block's end, and whose cache it may lie in: equal ids at the head of two lines are a prefix that one could take from the other.

Decode workers know all of it when a reply ends. They say so only while somebody asks:

    trace.ask                  a recorder, every second: its name, and a secret that it has drawn
    trace.record.<recorder>    a worker, after each reply: `Traced`, the blocks as hashes under that secret

The hashes are keyed, so nobody can try texts against them without the secret, which is told on the broker and never written; and
what is written instead of them are small numbers in the order of their appearance, which say nothing by themselves.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Literal

import msgspec

from pipeline.limits import (
    RECORDER_SILENT_MAX_S,
    RECORDERS_MAX,
    TRACE_BLOCKS_KNOWN_MAX,
    TRACE_LINES_HELD_MAX,
    TRACE_REORDER_S,
)
from pipeline.protocol.subjects import is_token

BLOCK_TOKENS: Final = 512
"""Of a block of a trace, as Mooncake's traces have it: larger than an engine's, so that a trace stays small."""

SECRET_BYTES: Final = 16
_HASH_BYTES: Final = 8
_BLOCK_BYTES: Final = 4 * BLOCK_TOKENS


class Line(msgspec.Struct, frozen=True):
    """One request of a trace. `timestamp` in milliseconds; some writers give fractions."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class TraceWanted(msgspec.Struct, frozen=True, kw_only=True, tag="trace-wanted"):
    """Say what you serve on `trace.record.<recorder>`, with blocks hashed under this secret. Good for three seconds."""

    v: Literal[1] = 1
    recorder: str
    secret: bytes


class Traced(msgspec.Struct, frozen=True, kw_only=True, tag="traced"):
    """A reply has ended. `stored_at_s` (Unix) is when the broker took its request; `blocks` are hashes of 8 bytes."""

    v: Literal[1] = 1
    stored_at_s: float
    input_length: int
    output_length: int
    blocks: bytes


wanted_decoder: Final = msgspec.msgpack.Decoder(TraceWanted)
traced_decoder: Final = msgspec.msgpack.Decoder(Traced)


def block_hashes(secret: bytes, salt: str, ids: bytes) -> bytes:
    """A hash for each block of a prompt (packed token ids), chained from the salt under which it is cached.

    20 µs for 2,250 tokens. `secret` is at most 64 bytes.
    """
    last = blake2b(salt.encode(), key=secret, digest_size=_HASH_BYTES).digest()
    hashes = []
    for begin in range(0, len(ids), _BLOCK_BYTES):
        last = blake2b(last + ids[begin : begin + _BLOCK_BYTES], key=secret, digest_size=_HASH_BYTES).digest()
        hashes.append(last)
    return b"".join(hashes)


class Recorders:
    """Who has asked a worker for its trace, and with which secret. `now_s` is monotonic."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, float]] = {}

    def asked(self, wanted: TraceWanted, now_s: float) -> bool:
        """Whether this one is new. More than `RECORDERS_MAX` are not heard, nor a name that is no token."""
        self.live(now_s)
        new = wanted.recorder not in self._known
        if new and (len(self._known) >= RECORDERS_MAX or not is_token(wanted.recorder)):
            return False
        self._known[wanted.recorder] = (wanted.secret[:SECRET_BYTES], now_s)
        return new

    def live(self, now_s: float) -> list[tuple[str, bytes]]:
        """Name and secret of those that are still there."""
        if self._known:
            gone = [name for name, (_, at_s) in self._known.items() if now_s - at_s > RECORDER_SILENT_MAX_S]
            for name in gone:
                del self._known[name]
        return [(name, secret) for name, (secret, _) in self._known.items()]


class Recording:
    """A trace in the making: hashes become numbers, and lines come out in the order in which their requests came in.

    Replies end in another order than requests begin, so a line is held until no earlier one is to be expected. Later ones still
    come out, only not in order: a reader sorts.
    """

    def __init__(self) -> None:
        self.lines = 0
        self._begin_s: float | None = None
        self._newest_s = 0.0
        self._held: list[tuple[float, int, Traced]] = []
        self._count = 0
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = 0

    def add(self, traced: Traced) -> list[Line]:
        """A worker has said this. Returns the lines that can be written now."""
        self._newest_s = max(self._newest_s, traced.stored_at_s)
        self._count += 1
        heapq.heappush(self._held, (traced.stored_at_s, self._count, traced))
        ripe = []
        while self._held[0][0] < self._newest_s - TRACE_REORDER_S or len(self._held) > TRACE_LINES_HELD_MAX:
            ripe.append(self._line(heapq.heappop(self._held)[2]))
        return ripe

    def rest(self) -> list[Line]:
        """All that was held."""
        rest = [self._line(traced) for _, _, traced in sorted(self._held)]
        self._held.clear()
        return rest

    def _line(self, traced: Traced) -> Line:
        self._begin_s = traced.stored_at_s if self._begin_s is None else self._begin_s
        self.lines += 1
        return Line(
            timestamp=max(0, round((traced.stored_at_s - self._begin_s) * 1000)),
            input_length=traced.input_length,
            output_length=traced.output_length,
            hash_ids=[self._number(block) for block in _cut(traced.blocks)],
        )

    def _number(self, block: bytes) -> int:
        """Its own, and a new one where it was forgotten: then a prefix is shared that the trace does not show."""
        number = self._numbers.get(block)
        if number is None:
            number = self._numbers[block] = self._next
            self._next += 1
            if len(self._numbers) > TRACE_BLOCKS_KNOWN_MAX:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(block)
        return number


def _cut(blocks: bytes) -> Sequence[bytes]:
    return [blocks[at : at + _HASH_BYTES] for at in range(0, len(blocks), _HASH_BYTES)]
