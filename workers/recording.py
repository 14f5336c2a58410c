"""What a decode worker says of the replies that it has ended, to those who record traffic: nothing while nobody does."""

import contextlib
from collections.abc import Callable
from typing import Final

from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError
from pipeline.protocol import subjects
from pipeline.protocol.messages import Handoff, encode
from pipeline.protocol.traces import Recorders, Traced, block_hashes, wanted_decoder
from pipeline.telemetry import logs

log: Final = logs.get("recording")


class Recorded:
    """One worker's part in recordings."""

    def __init__(self, bus: Bus, clock: Callable[[], float]) -> None:
        self._bus, self._clock = bus, clock
        self._recorders = Recorders()

    async def listen(self) -> None:
        """Hear who records, from now on."""
        await self._bus.subscribe(subjects.trace_ask(), self._asked)

    def tell(self, handoff: Handoff, tokens: int) -> None:
        """A reply of so many tokens has ended. What cannot be sent now is missing from the trace."""
        for recorder, secret in self._recorders.live(self._clock()):
            said = Traced(
                stored_at_s=subjects.parse_ack(handoff.ack).stored_at_s,
                input_length=len(handoff.ids) // 4,
                output_length=tokens,
                blocks=block_hashes(secret, handoff.salt, handoff.ids),
            )
            with contextlib.suppress(BusError):
                self._bus.post(subjects.trace_record(recorder), encode(said))

    def _asked(self, message: Message) -> None:
        wanted = wanted_decoder.decode(message.data)
        if self._recorders.asked(wanted, self._clock()):
            log.info("recorded", by=wanted.recorder)
