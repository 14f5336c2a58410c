"""What processes remember of requests, and how they are asked for it.

A process keeps a `Record` of each request that it has worked on, the last so many in a `Ring`. Asked on `control.trace.<name>`,
it answers with those that have the name, where there are any, and with what it is working on under it now. The name is the
request's id, or the client's own (`x-request-id`), which several requests may have.
"""

import hashlib
import itertools
from collections import deque
from typing import Final, Literal

import msgspec

from pipeline.protocol.subjects import token

Facts = dict[str, str | int | float]
Naming = Literal["hashed", "plain", "none"]


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request at one process: `stages` in seconds, in order. `outcome` is empty while it is under way.

    `began_unix_s` is by that process's own clock. `facts` are counts and names: tokens, who served it.
    """

    process: str
    role: Literal["gateway", "prefill", "decode", "keeper"]
    request: str
    outcome: str
    began_unix_s: float
    took_s: float
    stages: dict[str, float]
    request_id: str = ""
    trace_id: str = ""
    creator: str = ""
    facts: Facts = {}


def is_called(name: str, request: str, request_id: str) -> bool:
    """Whether `name` means this request: its id, or its client's own for it, as it is or as a subject token."""
    if name in (request, request_id):
        return True
    # A token differs from its id only where it has an "=": so most are never encoded.
    return "=" in name and name in map(token, filter(None, (request, request_id)))


class Ring:
    """The last `kept_max` records."""

    def __init__(self, kept_max: int) -> None:
        self._records: deque[Record] = deque(maxlen=kept_max)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        """Remember it, and forget the oldest where there are too many."""
        self._records.append(record)

    def last(self, count: int) -> list[Record]:
        """The newest so many, in the order in which they were added."""
        return list(itertools.islice(reversed(self._records), count))[::-1]

    def find(self, name: str) -> list[Record]:
        """Those of that name, which is not empty, the oldest first, as many as an answer may hold: the newest ones."""
        return [one for one in self._records if is_called(name, one.request, one.request_id)][-ANSWERED_MAX:]


ANSWERED_MAX: Final = 256
"""Records of one answer, at 0.7 KB: a client may give all its requests one name, and a message holds 1 MiB."""

_HASH_DIGITS: Final = 12


def creator_as(naming: Naming, creator: str) -> str:
    """How a creator is named where people read."""
    if naming == "plain":
        return creator
    return hashlib.sha256(creator.encode()).hexdigest()[:_HASH_DIGITS] if naming == "hashed" and creator else ""


records_decoder: Final[msgspec.msgpack.Decoder[list[Record]]] = msgspec.msgpack.Decoder(list[Record])
