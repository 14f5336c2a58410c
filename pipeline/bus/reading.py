"""Reading what a stream holds without consuming it, and deleting single messages: an operator's hands, and the DLQ keeper's.

Through the JetStream API, which answers from the stream's leader: what was stored before the question is seen. All functions
raise `BusError` where the broker does not answer, and `ApiError` where it refuses.
"""

import base64
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from pipeline.bus.connection import Bus
from pipeline.bus.errors import ApiError

_TIMEOUT_S: Final = 2.0
"""An answer takes a millisecond; after a restart the stream needs some 150 more."""

_NO_MESSAGE: Final = 10037
_NO_SEQUENCE: Final = frozenset({10043, 10057})


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A message as its stream holds it. `stored_at_s` is the broker's clock (Unix seconds)."""

    subject: str
    sequence: int
    stored_at_s: float
    data: bytes
    headers: Mapping[str, str]


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A stream at one moment: its messages, their sequences from `first` (stored at `first_s`) to `last`, and the broker's clock.

    `created` tells a stream from one of the same name that was there before it, whose sequences begin at 1 as well.
    """

    messages: int
    bytes: int
    first: int
    first_s: float
    last: int
    now_s: float
    created: str


async def get(bus: Bus, stream: str, sequence: int) -> Kept | None:
    """The message of that sequence, while the stream holds it."""
    return await _get(bus, stream, {"seq": sequence})


async def last_of(bus: Bus, stream: str, subject: str) -> Kept | None:
    """The last message of a subject."""
    return await _get(bus, stream, {"last_by_subj": subject})


async def subjects_of(bus: Bus, stream: str, under: str) -> dict[str, int]:
    """The subjects that hold messages, with how many; as many as one answer carries, which is 100,000."""
    info = await _call(bus, f"STREAM.INFO.{stream}", {"subjects_filter": under})
    return info["state"].get("subjects") or {}


async def consumers(bus: Bus, stream: str) -> list[dict[str, Any]]:
    """What the broker says of each consumer of a stream."""
    found: list[dict[str, Any]] = []
    while True:
        said = await _call(bus, f"CONSUMER.LIST.{stream}", {"offset": len(found)})
        listed: list[dict[str, Any]] = said.get("consumers") or []
        found += listed
        if not listed or len(found) >= said["total"]:
            return found


async def purge(bus: Bus, stream: str, subject: str) -> None:
    """Delete all messages of a subject."""
    await _call(bus, f"STREAM.PURGE.{stream}", {"filter": subject})


async def next_from(bus: Bus, stream: str, sequence: int, under: str = ">") -> Kept | None:
    """The first message from that sequence on whose subject falls under a pattern."""
    return await _get(bus, stream, {"seq": sequence, "next_by_subj": under})


async def delete(bus: Bus, stream: str, sequence: int) -> bool:
    """Take a message out of the stream, whoever may hold it. False where it was not there."""
    try:
        await _call(bus, f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
    except ApiError as error:
        if error.err_code in _NO_SEQUENCE:
            return False
        raise
    return True


async def state(bus: Bus, stream: str) -> State:
    """How the stream stands."""
    info = await _call(bus, f"STREAM.INFO.{stream}", {})
    have = info["state"]
    return State(
        messages=have["messages"],
        bytes=have["bytes"],
        first=have["first_seq"],
        first_s=unix_s_of(have["first_ts"]),
        last=have["last_seq"],
        now_s=unix_s_of(info["ts"]),
        created=info["created"],
    )


def unix_s_of(text: str) -> float:
    """Unix seconds of the server's `2026-01-31T12:00:00.123456789Z`."""
    whole, _, rest = text.removesuffix("Z").partition(".")
    return datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp() + float(f"0.{rest or 0}")


async def _get(bus: Bus, stream: str, asked: dict[str, Any]) -> Kept | None:
    try:
        said = (await _call(bus, f"STREAM.MSG.GET.{stream}", asked))["message"]
    except ApiError as error:
        if error.err_code == _NO_MESSAGE:
            return None
        raise
    return Kept(
        subject=said["subject"],
        sequence=said["seq"],
        stored_at_s=unix_s_of(said["time"]),
        data=base64.b64decode(said.get("data", "")),
        headers=_headers(base64.b64decode(said.get("hdrs", ""))),
    )


def _headers(raw: bytes) -> dict[str, str]:
    """`NATS/1.0`, then a line each. Of a header that stands there twice, the first."""
    found: dict[str, str] = {}
    for line in raw.decode("utf-8", "replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name, value.strip())
    return found


async def _call(bus: Bus, subject: str, asked: dict[str, Any]) -> dict[str, Any]:
    answer = await bus.request(f"$JS.API.{subject}", msgspec.json.encode(asked) if asked else b"", _TIMEOUT_S)
    said = msgspec.json.decode(answer, type=dict[str, Any])
    if problem := said.get("error"):
        raise ApiError(
            problem.get("code", 0), problem.get("err_code", 0), problem.get("description", "no reason given")
        )
    return said
