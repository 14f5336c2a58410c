"""The first token of a reply, which prefill has made while it read the prompt, on its way to the receiver before decode has any.

Decode asks the receiver what it has before it begins, so what is lost here it makes itself: nothing waits for this frame, and
nobody repeats it unasked. It needs a receiver that answers that: without one decode would begin again at the same index.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pipeline.bus.errors import BusError
from pipeline.protocol.chat import wants_prompt, wants_prompt_ids
from pipeline.protocol.messages import Tokens, frame_for, pack_ids
from pipeline.protocol.reply import Outbox
from pipeline.protocol.resume import begins_at_prefill
from pipeline.telemetry import metrics
from workers.engines.port import Prefilled
from workers.holding import Holding


class Beginning:
    """That of one request, as its prefill worker holds it."""

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._frame: Tokens | None = None

    def may(self, chat: Mapping[str, Any], delivered: Sequence[int]) -> bool:
        """Whether it may come from here: its receiver then says to decode what it has."""
        heard = self._holding.arbitrated and self._holding.reply_to is not None and not self._holding.kept
        return heard and begins_at_prefill(chat, delivered)

    def send(self, chat: Mapping[str, Any], prompt: Sequence[int], prefilled: Prefilled) -> bool:
        """Send it, where there is one. What is published next on this connection comes after it. Once: offers may fail."""
        if self._frame is not None or prefilled.first_id is None:
            return False
        outbox = Outbox(self._holding.request, self._holding.claim)
        if wants_prompt(chat):
            outbox.prompt_tokens = len(prompt)
            outbox.prompt = pack_ids(prompt) if wants_prompt_ids(chat) else b""
        self._frame = outbox.add([prefilled.first_id], prefilled.first_text)
        metrics.PREFILL_BEGUN.inc()
        self.resend(0)
        return True

    def resend(self, index: int) -> None:
        """Send it again, where tokens are missing from this index on."""
        if self._frame is None or index > 0 or self._holding.reply_to is None:
            return
        metrics.FRAMES.inc()
        metrics.FRAME_MESSAGES.inc()
        frame = msgspec.structs.replace(self._frame, claim=self._holding.claim)  # a reclaim has changed it, maybe
        with contextlib.suppress(BusError):
            self._holding.bus.post(self._holding.reply_to, frame_for(frame, self._holding.encoding))
