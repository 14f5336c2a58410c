"""Keeping a dead request's copy. What a copy says is `pipeline.protocol.dead_letters`."""

import contextlib
from collections.abc import Mapping

from pipeline.bus.connection import Bus
from pipeline.bus.errors import Duplicate
from pipeline.bus.puller import Delivery
from pipeline.errors import BodyTooLarge, CapacityError, Poisoned, ReplyError
from pipeline.limits import LETTER_TIMEOUT_S
from pipeline.protocol import dead_letters, subjects
from pipeline.protocol.dead_letters import Letter
from pipeline.protocol.subjects import AckSubject
from pipeline.telemetry import logs, metrics

_log = logs.get("dead_letters")


async def keep(bus: Bus, letter: Letter, data: bytes, headers: Mapping[str, str] | None) -> None:
    """Copy a request into the DLQ, once: what is there already is not copied again.

    Raises `CapacityError` where it could not be stored: then the request must not be acked.
    """
    subject = subjects.dead_letter(letter.reason, letter.klass)
    for copy in dead_letters.copies(letter, data, headers):
        with contextlib.suppress(BodyTooLarge):
            await _store(bus, subject, copy)
            return
    raise AssertionError("a copy without its body is small")  # pragma: no cover


async def keep_delivery(bus: Bus, delivery: Delivery, message: AckSubject, error: ReplyError) -> bool:
    """Keep a copy, with the reason, of what will not be tried again. False where that was not possible."""
    reason = "poison" if isinstance(error, Poisoned) else "malformed"
    letter = dead_letters.write(reason, delivery.subject, message, error)
    try:
        await keep(bus, letter, delivery.data, delivery.headers)
    except CapacityError:
        return False
    return True


async def _store(bus: Bus, subject: str, copy: dead_letters.Copy) -> None:
    try:
        await bus.store(subject, copy.data, copy.letter.msg_id, LETTER_TIMEOUT_S, copy.headers)
    except Duplicate:
        return
    metrics.DEAD_LETTERS.labels(reason=copy.letter.reason).inc()
    if copy.letter.body == "missing":
        _log.error(
            "dead_letter_without_body", subject=subject, stream=copy.letter.stream, sequence=copy.letter.sequence
        )
