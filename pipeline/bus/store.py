"""Publish to a stream, and be sure of it.

A message is sent again, under the same `Nats-Msg-Id`, until the stream says that it has it: over lost connections, over a broker
that restarts, over answers that do not come. The stream's duplicate window makes the repetition harmless. So an id must be the
publisher's own and fresh: where the *first* attempt is called a duplicate, somebody else's message is meant.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from pipeline.bus.errors import Disconnected, Duplicate, NoResponders, Unanswered
from pipeline.errors import BodyTooLarge, BrokerUnavailable, CapacityError, CreatorBusy
from pipeline.telemetry.metrics import PUBLISH_SECONDS

if TYPE_CHECKING:
    from pipeline.bus.connection import Bus

MSG_ID: Final = "Nats-Msg-Id"

_ATTEMPT_S: Final = 1.0
"""An answer takes 0.2 ms; after this long it is not coming, and the message is sent again."""

_PAUSE_S: Final = 0.05
"""A restarted broker needs some 150 ms until its streams answer."""

_STORE_FAILED: Final = 10077
_TOO_LARGE: Final = 10054


class _Problem(msgspec.Struct):
    code: int
    err_code: int = 0
    description: str = ""


class _PubAck(msgspec.Struct):
    seq: int = 0
    duplicate: bool = False
    error: _Problem | None = None


_decode = msgspec.json.Decoder(_PubAck).decode


async def store(bus: "Bus", subject: str, data: bytes, headers: Mapping[str, str], timeout_s: float) -> int:
    """The sequence of the stored message. `headers` hold its `Nats-Msg-Id`.

    Raises `CreatorBusy` where the subject's own share of the stream is full, `CapacityError` where all of it is, `Duplicate` for
    an id that was not fresh, `BodyTooLarge`, and `BrokerUnavailable` where nothing was confirmed within `timeout_s`. After
    the last, the message may be stored all the same.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    deadline_s = began_s + timeout_s
    may_be_stored = False
    problem = "no answer"
    while (left_s := deadline_s - loop.time()) > 0:
        try:
            await bus.wait_connected(left_s)
            ack = _read(await bus.request(subject, data, min(left_s, _ATTEMPT_S), headers))
        except NoResponders as error:
            problem = f"{error} Is the stream declared?"
        except (Disconnected, Unanswered) as error:
            problem, may_be_stored = str(error), True
            continue
        else:
            if ack.error is None:
                PUBLISH_SECONDS.observe(loop.time() - began_s)
                return _sequence(ack, headers[MSG_ID], may_be_stored)
            problem = _refusal(ack.error, subject)
        await asyncio.sleep(min(_PAUSE_S, left_s))
    raise BrokerUnavailable(f"NATS did not confirm the message within {timeout_s:g} s: {problem}")


def _read(answer: bytes) -> _PubAck:
    try:
        return _decode(answer)
    except msgspec.MsgspecError:
        raise BrokerUnavailable("Something that is no stream answered the publish.") from None


def _sequence(ack: _PubAck, msg_id: str, may_be_stored: bool) -> int:
    if ack.duplicate and not may_be_stored:
        raise Duplicate(f"A message with the id {msg_id!r} is stored already (sequence {ack.seq}): take a fresh id.")
    return ack.seq


def _refusal(problem: _Problem, subject: str) -> str:
    """What to say if it stays so. Raises where sending again cannot help."""
    if problem.err_code == _TOO_LARGE:
        raise BodyTooLarge(f"The stream refused the message: {problem.description}.")
    if problem.err_code == _STORE_FAILED and "maximum" in problem.description:
        if "per subject" in problem.description:
            raise CreatorBusy(f"The queue of {subject} is full.")
        raise CapacityError(f"The queue is full: {problem.description}.")
    return f"{problem.description} (error {problem.err_code})."
