"""The gateway's search for strays: its requests that the broker has delivered and that nobody claims.

What to ask and what to give back is `pipeline.protocol.strays`. The questions go to JetStream's `CONSUMER.INFO`, and the answers
come on this gateway's own connection, behind every claim that was made before them.
"""

from typing import Final

import msgspec

from gateway.replies import Replies
from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import Disconnected
from pipeline.protocol import subjects
from pipeline.protocol.strays import Ask
from pipeline.telemetry import logs, metrics

log = logs.get("gateway")


class _Delivered(msgspec.Struct):
    consumer_seq: int
    stream_seq: int


class _Info(msgspec.Struct):
    delivered: _Delivered | None = None
    """None where the API answers with an error: while its leader is chosen, or the consumer made anew."""


_decode: Final = msgspec.json.Decoder(_Info).decode


class Search:
    """One gateway's search. `replies` say what waits."""

    def __init__(self, bus: Bus, replies: Replies) -> None:
        self._bus = bus
        self._replies = replies
        self._inbox = bus.inbox()

    async def listen(self) -> None:
        """Hear the answers."""
        await self._bus.subscribe(f"{self._inbox}.>", self.answered)

    def look(self, now_s: float) -> None:
        """Ask where something is overdue."""
        if not self._bus.connected:
            return
        for ask in self._replies.strays.asks(now_s):
            self._post(f"$JS.API.CONSUMER.INFO.{ask.consumer}", b"", f"{self._inbox}.{ask.consumer}.{ask.number}")

    def answered(self, message: Message) -> None:
        """A consumer says how far it has delivered."""
        consumer, _, number = message.subject.removeprefix(f"{self._inbox}.").rpartition(".")
        try:
            delivered = _decode(message.data).delivered
        except msgspec.DecodeError:
            return  # nobody answers for it: the broker has just started
        if delivered is None:
            return
        self._replies.leave_to_the_living()
        for queued in self._replies.strays.told(Ask(consumer, int(number)), delivered.stream_seq):
            log.info("stray_given_back", consumer=consumer, sequence=queued.sequence)
            metrics.STRAYS.inc()
            self._post(subjects.ack_of(consumer, queued.sequence, delivered.consumer_seq), b"-NAK")

    def _post(self, subject: str, data: bytes, reply: str = "") -> None:
        try:
            self._bus.post(subject, data, reply)
        except Disconnected:
            log.warning("not_said", subject=subject)
