"""One message in a worker's hands: claiming it at its receiver, telling the receiver how it ended, and ack or NAK.

Without a claim subject there is no arbiter: claiming is `go` at once, and the end is published and confirmed by the broker alone.
"""

import contextlib
from collections.abc import Callable
from typing import Final

import anyio
import msgspec

from pipeline import outside
from pipeline.bus import acks
from pipeline.bus.connection import Bus
from pipeline.bus.errors import BusError, Duplicate
from pipeline.errors import InvalidField
from pipeline.limits import REPEAT_PERIOD_S
from pipeline.protocol import subjects
from pipeline.protocol.messages import (
    Answer,
    Claim,
    Done,
    Encoding,
    Failed,
    Fenced,
    From,
    Go,
    Gone,
    Whole,
    claim_for,
    frame_for,
    read_answer,
)
from pipeline.protocol.presence import Receiver
from pipeline.protocol.request import Event
from pipeline.protocol.subjects import parse_ack
from workers.identity import Identity

KEEP_TIMEOUT_S: Final = 2.0
"""To store a whole reply. Beyond it the message is let go, and the reply is made again."""

EVENT_OF: Final[dict[type[Answer], Event]] = {Go: Event.GO, Whole: Event.WHOLE, Gone: Event.GONE, Fenced: Event.FENCED}


class Holding(msgspec.Struct):
    """A request's message: who may be answered where, under which claim, and its ack subject."""

    bus: Bus
    me: Identity
    request: str
    claim: str
    ack_subject: str
    reply_to: str | None
    claim_at: str | None
    encoding: Encoding
    receiver: Receiver | None = None
    request_id: str = ""
    answered_s: float = float("-inf")
    """When the receiver last answered, monotonic: a sign of life."""
    asked_s: float = float("-inf")
    """When it was last asked: what is repeated is answered once."""
    claim_asked_s: float | None = None
    """When it was asked for the claim, the time that it answered; and when that answer came."""
    claim_answered_s: float | None = None

    @property
    def arbitrated(self) -> bool:
        """Whether a receiver answers claims."""
        return self.claim_at is not None

    @property
    def kept(self) -> bool:
        """Whether the reply is stored whole, and its tokens are not sent."""
        return self.reply_to is not None and subjects.is_kept(self.reply_to)

    async def claim_it(self, follows: str | None, persona: int = 0) -> Answer:
        """Ask the receiver until it answers. A missing responder is not gone: its connection may be coming back.

        `persona` is the version that a request by reference is about to be rendered with.
        """
        if self.claim_at is None:
            return Go()
        claim = Claim(
            request=self.request,
            claim=self.claim,
            epoch=self.me.epoch,
            holder=subjects.holder(self.me.id),
            ack=self.ack_subject,
            follows=follows,
            persona=persona,
        )
        self.asked_s = outside.monotonic_s()
        answer = await self._asked(self.claim_at, claim_for(claim, self.encoding))
        self.claim_asked_s, self.claim_answered_s = self.asked_s, outside.monotonic_s()
        return answer

    async def tell(self, frame: Done | Failed, resend: Callable[[int], None]) -> Event:
        """Tell the receiver how the reply ended, until it has the whole of it, is gone, or belongs to another claim."""
        if self.reply_to is None:
            return Event.WHOLE
        payload = frame_for(frame, self.encoding)
        if self.kept:
            return await self._keep(self.reply_to, payload)
        if not self.arbitrated:
            await self.bus.publish(self.reply_to, payload)
            await self.bus.barrier()
            return Event.WHOLE
        while True:
            answer = await self._asked(self.reply_to, payload)
            if not isinstance(answer, From):
                return EVENT_OF[type(answer)]
            resend(answer.index)

    async def _keep(self, subject: str, payload: bytes) -> Event:
        """Store the whole reply: the stream's word stands for the receiver's. One message id, so that it is there once."""
        message = parse_ack(self.ack_subject)
        with contextlib.suppress(Duplicate):
            # With its time: a stream that was declared anew counts from 1 again, and its replies are no repetitions.
            kept = f"{message.stream}-{message.sequence}-{message.stored_at_s:.3f}"
            await self.bus.store(subject, payload, kept, KEEP_TIMEOUT_S)
        return Event.WHOLE

    async def ack(self) -> None:
        """The message is done with. Confirmed by the broker, or left to be delivered again and found whole."""
        await acks.ack(self.bus, self.ack_subject)

    async def nak(self, delay_s: float | None = None) -> None:
        """Let go of the message, alive: another worker may have it at once."""
        await acks.nak(self.bus, self.ack_subject, delay_s)

    async def _asked(self, subject: str, payload: bytes) -> Answer:
        while True:
            self.asked_s = outside.monotonic_s()
            try:
                answer = read_answer(await self.bus.request(subject, payload, REPEAT_PERIOD_S))
                self.answered_s = outside.monotonic_s()
                return answer
            except (BusError, InvalidField):
                # Unanswered has waited the period already; a refusal at once has not, and a short pause cannot hurt either.
                await anyio.sleep(REPEAT_PERIOD_S / 4)
