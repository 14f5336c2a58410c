"""The gateway's watch over those who work for it, and over itself.

Several times a second it looks whether the holder of each open reply still lives, and gives a dead one's message back, so that
the next worker has it at once and not only after the lease. For one whose next word is due it asks the broker, which knows
whether anybody listens there. What such a worker took and had not claimed yet is looked for, too (`strays.py`). After it was
away itself, it trusts nothing that it has not heard since; and where it was away so long that workers may have dropped its
requests, it asks each holder to go on, and ends what nobody answers for.
"""

import asyncio
import contextlib
from typing import Final

from gateway.replies import Replies, Reply
from gateway.strays import Search
from pipeline import outside
from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError, Disconnected
from pipeline.errors import ReplyLost
from pipeline.limits import PRESENCE_PERIOD_S, RECEIVER_SILENT_MAX_S
from pipeline.protocol.accuser import Accuser
from pipeline.protocol.messages import Claim, Gone, Notice, encode
from pipeline.protocol.presence import Presences
from pipeline.telemetry import logs, metrics

PERIOD_S: Final = 0.05
HEARS_ITSELF_WITHIN_S: Final = 1.5 * PRESENCE_PERIOD_S
"""A connection on which our own presence does not come back brings nobody else's either."""

LOST: Final = ReplyLost("The gateway was away, and nobody works on this reply any more: send it again.").body()

ARE_YOU_THERE: Final = encode(Notice("", "", Gone()))
"""A notice about no claim: a worker that lives lets it pass, and for one that does not the broker answers."""

log = logs.get("gateway")


class Vigil:
    """One gateway's watch. `presences` are fed by the watcher, frames and claims by `replies`."""

    def __init__(self, bus: Bus, accuser: Accuser, presences: Presences, replies: Replies, process: str) -> None:
        self._process = process
        self._bus = bus
        self._presences = presences
        self._replies = replies
        self.accuser = accuser
        self._search = Search(bus, replies)
        self._inbox = bus.inbox()
        self._asked_s: dict[str, float] = {}
        self._silent_from_s: float | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
        self._bus.on_disconnect(self._disconnected)
        self._bus.on_reconnect(self._reconnected)
        await self._bus.subscribe(f"{self._inbox}.>", self.answered)
        await self._search.listen()
        while True:
            asked_s = outside.monotonic_s()
            await asyncio.sleep(PERIOD_S)
            now_s = outside.monotonic_s()
            late_s = now_s - asked_s - PERIOD_S
            self.accuser.woke(late_s, now_s)
            if late_s > RECEIVER_SILENT_MAX_S:
                await self._read_what_came()
                self.was_away(outside.monotonic_s())
            self.look(outside.monotonic_s())

    def look(self, now_s: float) -> None:
        """Accuse who is dead, and end what nobody has answered for."""
        if not self._hears_itself(now_s):
            self.accuser.distrust_myself(now_s)
        for worker, epoch, heard_s in self._presences.heard_of(("prefill", "decode")):
            self.accuser.heard(f"holder.{worker}", epoch, heard_s)
        connected, until_s = self._bus.connected, self._heard_until_s
        silent: set[str] = set()
        for reply in self._replies.all():
            if reply.answer_by_s is not None and now_s > reply.answer_by_s:
                reply.finish(LOST)
            claim = reply.receiver.arbiter.last
            if claim is None or not connected:
                continue
            self._judge(reply, claim, until_s)
            if self.accuser.wonders(claim, now_s):
                silent.add(claim.holder)
        self._ask_for(silent, now_s)
        self._search.look(now_s)

    @property
    def _heard_until_s(self) -> float:
        """Not until now: what was said since our own last word came back may still be on its way."""
        return self._presences.heard_s("gateway", self._process)

    def was_away(self, now_s: float) -> None:
        """Workers may have taken us for gone. Never publish again: two messages for one request would fence each other."""
        self._replies.ask_holders()
        self._replies.doubt_all(now_s)

    def _hears_itself(self, now_s: float) -> bool:
        """Our own presence comes back to us, if the connection carries anything."""
        heard = self._presences.heard_of(("gateway",))
        return any(who == self._process and now_s - at_s < HEARS_ITSELF_WITHIN_S for who, _, at_s in heard)

    async def _read_what_came(self) -> None:
        """What workers said while we were away is no answer: who said it may have given up since."""
        with contextlib.suppress(BusError):
            await self._bus.barrier()

    def _judge(self, reply: Reply, claim: Claim, until_s: float) -> None:
        if reply.last_frame_s is not None:
            self.accuser.heard(claim.holder, claim.epoch, reply.last_frame_s)
        if self.accuser.accuses(claim, until_s, loses=reply.lost_with_holder):
            log.warning("worker_silent", holder=claim.holder, request=reply.request)
            metrics.ACCUSATIONS.inc()
            self._post(claim.ack, b"-NAK")
            self._replies.given_back(reply)

    def _ask_for(self, silent: set[str], now_s: float) -> None:
        """Ask the broker, once a look, for each holder whose next word is due."""
        self._asked_s = dict.fromkeys(silent, now_s)
        for holder in silent:
            self._post(holder, ARE_YOU_THERE, f"{self._inbox}.{holder}")

    def answered(self, message: Message) -> None:
        """The broker says that nobody listens there. What the worker had said before it died has come before this."""
        holder = message.subject.removeprefix(f"{self._inbox}.")
        if message.nobody_listens and holder in self._asked_s:
            self.accuser.absent(holder, self._asked_s[holder])
            until_s = self._heard_until_s
            for reply in self._replies.all():
                claim = reply.receiver.arbiter.last
                if claim is not None and claim.holder == holder:
                    self._judge(reply, claim, until_s)

    def _post(self, subject: str, data: bytes, reply: str = "") -> None:
        try:
            self._bus.post(subject, data, reply)
        except Disconnected:
            log.warning("not_said", subject=subject)

    def _disconnected(self) -> None:
        self._silent_from_s = outside.monotonic_s()

    def _reconnected(self) -> None:
        now_s = outside.monotonic_s()
        self.accuser.distrust_myself(now_s)
        self._replies.strays.distrust(now_s)
        silent_from_s, self._silent_from_s = self._silent_from_s, None
        if silent_from_s is not None and now_s - silent_from_s > RECEIVER_SILENT_MAX_S:
            self.was_away(now_s)
