"""Prefixes ahead of demand, and what a prefill worker has served: what is asked on `prefill.<worker>`.

When a creator's requests are to be spread over more workers, the new ones load its persona from LMCache before they get any of
them: one worker that has served the creator says which tokens its prompts share, the others prefill those under the same salt.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from pipeline import outside
from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError
from pipeline.errors import ReplyError
from pipeline.limits import WARM_UPS_WAITING_MAX
from pipeline.protocol import subjects
from pipeline.protocol.messages import encode, unpack_ids
from pipeline.protocol.prefixes import Prefixes
from pipeline.protocol.served import ShardsServed
from pipeline.protocol.warm_messages import WantPrefix, WarmedUp, WarmUp, prefill_decoder
from pipeline.telemetry import logs, metrics
from workers.engines.port import Engine

log: Final = logs.get("warm_up")

_Asked = tuple[WarmUp, str]


class WarmUps:
    """One worker's answers. While it has no time, requests come first. `prefixes` is told of every prompt."""

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        worker: str,
        prefixes: Prefixes,
        has_time: Callable[[], bool],
        served: Callable[[], ShardsServed],
    ) -> None:
        self.prefixes = prefixes
        self._bus, self._engine, self._worker = bus, engine, worker
        self._has_time, self._served = has_time, served
        self._waiting: asyncio.Queue[_Asked] = asyncio.Queue(WARM_UPS_WAITING_MAX)

    async def listen(self) -> None:
        """Answer from now on."""
        await self._bus.subscribe(subjects.prefill(self._worker), self._asked)

    async def run(self) -> None:
        """Warm up what is asked for, one after the other, until cancelled."""
        while True:
            warm_up, answer_at = await self._waiting.get()
            self._answer(answer_at, await self.warm(warm_up))

    def _asked(self, message: Message) -> None:
        said = prefill_decoder.decode(message.data)
        if isinstance(said, WantPrefix):
            self._answer(message.reply, self.prefixes.of(said.creator))
        elif isinstance(said, WarmUp):
            self._queue(said, message.reply)
        else:
            self._answer(message.reply, self._served())

    def _queue(self, warm_up: WarmUp, answer_at: str) -> None:
        try:
            self._waiting.put_nowait((warm_up, answer_at))
        except asyncio.QueueFull:
            self._answer(answer_at, WarmedUp("busy"))

    async def warm(self, warm_up: WarmUp) -> WarmedUp:
        """Prefill a prefix, if there is time for it."""
        if not self._has_time():
            return WarmedUp("busy")
        prefix = warm_up.prefix
        try:
            done = await self._engine.prefill(f"warm-{outside.token(8)}", unpack_ids(prefix.ids), prefix.salt)
        except ReplyError:
            return WarmedUp("failed")
        except Exception:  # what somebody else takes for a prefix must not end the worker
            log.exception("prefix not warmed up", creator=warm_up.creator)
            return WarmedUp("failed")
        metrics.WARM_UPS.inc()
        self.prefixes.seen(warm_up.creator, prefix.salt, prefix.ids)
        return WarmedUp("warm", done.cached_tokens)

    def _answer(self, subject: str, answer: object) -> None:
        with contextlib.suppress(BusError):
            self._bus.post(subject, encode(answer))
