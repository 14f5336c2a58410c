"""Frames on their way out: those of one engine step that go to one receiver travel as one message.

All requests of a step wake in the same turn of the event loop, so it is enough to send what has gathered in the next turn.
"""

from typing import Final

import anyio

from pipeline.bus.connection import Bus
from pipeline.errors import HeadraceError
from pipeline.limits import MESSAGE_BYTES_MAX
from pipeline.protocol.messages import AnyFrame, Encoding, encode, frame_for
from pipeline.telemetry import logs, metrics

log: Final = logs.get("frames")


class FrameSender:
    """Gathers tokens frames by subject and publishes them. What waits is bounded by one step of the engine."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._gathered: dict[str, list[AnyFrame]] = {}
        self._alone: list[tuple[str, bytes]] = []
        self._wake = anyio.Event()

    def send(self, subject: str, frame: AnyFrame, encoding: Encoding) -> None:
        """Send soon. A JSON receiver gets each frame as a message of its own."""
        metrics.FRAMES.inc()
        if encoding == "json":
            self._alone.append((subject, frame_for(frame, "json")))
        else:
            self._gathered.setdefault(subject, []).append(frame)
        self._wake.set()

    async def run(self) -> None:
        """Publish what gathers, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            await self.flush()

    async def flush(self) -> None:
        """Publish what has gathered so far."""
        gathered, self._gathered = self._gathered, {}
        alone, self._alone = self._alone, []
        for subject, payload in alone:
            await self._publish(subject, payload)
        for subject, frames in gathered.items():
            await self._publish_together(subject, frames)

    async def _publish_together(self, subject: str, frames: list[AnyFrame]) -> None:
        """As one message; in halves where that is too large, as a long reply may be that is sent again from its start."""
        payload = encode(frames)
        if len(payload) <= MESSAGE_BYTES_MAX or len(frames) < 2:
            await self._publish(subject, payload)
            return
        half = len(frames) // 2
        await self._publish_together(subject, frames[:half])
        await self._publish_together(subject, frames[half:])

    async def _publish(self, subject: str, payload: bytes) -> None:
        metrics.FRAME_MESSAGES.inc()
        try:
            await self._bus.publish(subject, payload)
        except HeadraceError as error:
            # A frame that is lost is repaired from the next one's index, or from `Done`.
            log.warning("frames not sent", subject=subject, error=str(error))
