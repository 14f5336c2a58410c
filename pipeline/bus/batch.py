"""Reading all messages of one subject at once: a question, and as many answers as there are messages.

By direct get, which a replica of the stream may answer: who must see the newest message says which one that is, and asks again
where it has not come yet.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from pipeline.bus.client import Message
from pipeline.bus.connection import Bus
from pipeline.bus.errors import ApiError, NoResponders, Unanswered

_TIMEOUT_S: Final = 2.0
_END: Final = "204"
_NONE: Final = "404"
_NO_RESPONDERS: Final = "503"


class Item(msgspec.Struct, frozen=True):
    """A message: its sequence in the stream, and what it carries."""

    sequence: int
    data: bytes


async def messages_of(bus: Bus, stream: str, subject: str, most: int) -> list[Item]:
    """The messages of a subject, in order; the first `most` of them. Raises `BusError`."""
    found: list[Item] = []
    pending = 1
    while pending and len(found) < most:
        start = found[-1].sequence + 1 if found else 1
        more, pending = await _batch(bus, stream, {"seq": start, "next_by_subj": subject, "batch": most - len(found)})
        found += more
        pending = pending if more else 0
    return found


async def _batch(bus: Bus, stream: str, asked: dict[str, object]) -> tuple[list[Item], int]:
    """As many as the broker sends at once, and how many more there are."""
    found: list[Item] = []
    ended: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()

    def heard(message: Message) -> None:
        headers = message.headers or {}
        if "Status" not in headers:
            found.append(Item(int(headers["Nats-Sequence"]), message.data))
        elif not ended.done():
            ended.set_result(headers)

    inbox = bus.inbox()
    listening = await bus.subscribe(inbox, heard)
    try:
        await bus.publish(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(asked), inbox)
        end = await asyncio.wait_for(ended, _TIMEOUT_S)
    except TimeoutError:
        raise Unanswered(f"{stream} did not answer within {_TIMEOUT_S:g} s.") from None
    finally:
        await listening.unsubscribe()
    status = end["Status"]
    if status == _NO_RESPONDERS:
        raise NoResponders(f"Nobody answers for {stream}.")
    if status not in (_END, _NONE):
        raise ApiError(int(status), 0, f"{stream} refuses to be read: {end.get('Description', '')}")
    return found, int(end.get("Nats-Num-Pending", 0))
