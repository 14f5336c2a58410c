"""Standing pulls: the slots that a worker offers at the broker, and exactly what has become of each.

A pull asks a shard's consumer for up to `batch` messages at a priority. Each of its slots ends once: as a delivery, or by
`on_ended`. It is not renewed here: whoever decides about slots decides about that, too.

The broker does not say which pull a delivery answers (it comes with the stream's subject, not with the pull's inbox), and serves
equal pulls in turn. So slots are counted by shard, and the broker's own words correct the count:

    a status (408 expired, …)  ends what the status says was left of that pull, or all of a pull that was never accepted
    silence                    a pull that waits is told its end when it expires. One past that is over: served, or lost with
                               its answer. Never more slots can wait than the pulls before that have; what we count above
                               that has ended
    a new connection           ends everything, under a new inbox: under the old one the broker would serve old pulls again

Pulls live for a moment only, and need no heartbeat for it. A worker that stands still (paused, swapping, its host frozen) gets
messages for as long as its pulls do, and each of them costs a lease: nobody has claimed it, so nobody can accuse. By the time
that the first of them comes back, none of its pulls is left to take it again. Batch has the time: its pulls are the longer ones.

Where the broker refuses (409, 503, …), the end is told 0.2 s later, so that offering again at once is not a storm.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from pipeline import outside
from pipeline.bus.background import Background, handler_failed
from pipeline.bus.connection import Bus, Message, Subscription
from pipeline.bus.errors import Disconnected
from pipeline.limits import PULL_RANK_MAX
from pipeline.protocol.classes import BATCH, INTERACTIVE
from pipeline.protocol.subjects import Shard, parse_stored
from pipeline.telemetry import logs
from pipeline.telemetry.metrics import PULLS_ABANDONED

GROUP: Final = "pool"
"""The priority group of every shard's consumer, as in `configs/jetstream`."""

EXPIRES_S: Final = 0.4
"""What stands still takes no interactive request for longer. A pull keeps the priority it was made with: after a change of ranks
the old ones are gone within this time. Idle, a worker makes 40 a second for 16 shards."""

BATCH_EXPIRES_S: Final = 0.8
"""Less than an `ACK_WAIT_S`, so that it is over before what it took can come back."""

_EXPIRES_S: Final = {INTERACTIVE: EXPIRES_S, BATCH: BATCH_EXPIRES_S}

LATE_S: Final = 0.25
"""What the broker's word that a pull has expired may take to come."""

REFUSED_PAUSE_S: Final = 0.2

_ACK_PREFIX: Final = "$JS.ACK."
_LEFT: Final = "Nats-Pending-Messages"
_OVER: Final = frozenset({"404", "408"})
"""Ends in the normal course: no message came."""
_NEVER_BEGAN: Final = frozenset({"400", "503"})

_log = logs.get("bus")


class Delivery(NamedTuple):
    """A message and its lease. `ack` is its `$JS.ACK…` subject."""

    shard: Shard
    subject: str
    ack: str
    data: bytes
    headers: Mapping[str, str] | None


class _Pull:
    """One pull that may still wait at the broker."""

    __slots__ = ("batch", "over_s", "shard")

    def __init__(self, shard: Shard, batch: int, over_s: float) -> None:
        """`over_s`: when the broker must have told its end."""
        self.shard = shard
        self.batch = batch
        self.over_s = over_s


class Puller:
    """The pulls of one worker. Both callbacks are called at once, between two reads, and may call `offer`."""

    def __init__(
        self,
        bus: Bus,
        on_delivery: Callable[[Delivery], None],
        on_ended: Callable[[Shard, int], None],
        expires_s: float | None = None,
    ) -> None:
        """`expires_s`: of all pulls; by default of each as its class wants it."""
        self._bus = bus
        self._on_delivery = on_delivery
        self._on_ended = on_ended
        self._expires_s = {klass: expires_s or default for klass, default in _EXPIRES_S.items()}
        self._pulls: dict[str, _Pull] = {}
        self._left: Counter[Shard] = Counter()
        self._refused: Counter[Shard] = Counter()
        self._timers: set[asyncio.TimerHandle] = set()
        self._complained: set[tuple[Shard, str]] = set()
        self._count = 0
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._stale = asyncio.Event()
        self._tasks: list[Background] = []
        self._undo: Callable[[], None] | None = None
        self._stopped = False
        self.surplus = 0
        """Deliveries that no slot was counted for: of a pull that had been given up."""

    async def start(self) -> None:
        """Listen for what pulls bring. Before any `pull`, and again after a `stop`; nothing where it listens."""
        self._stopped = False
        if self._tasks:
            return
        await self._new_inbox()
        self._undo = self._bus.on_reconnect(self._reconnected)
        self._tasks = [Background(self._watch(), "puller watch"), Background(self._renew(), "puller renewal")]

    async def stop(self) -> None:
        """No more pulls. What the server has sent already still reaches `on_delivery`, and the slots left end.

        A message that the broker takes off its queue in this very instant can miss both; it comes back after `ack_wait`.
        """
        self._stopped = True
        if self._undo is not None:
            self._undo()
            self._undo = None
        for task in self._tasks:
            await task.stop()
        self._tasks = []
        # Whoever stops may be out of patience, and stops again: what was begun to be drained is not drained twice.
        subscription, self._subscription = self._subscription, None
        try:
            if subscription is not None:
                await subscription.drain()
        finally:
            self._end_all()

    async def pull(self, shard: Shard, batch: int, priority: int) -> None:
        """As `offer`, for a caller that can wait."""
        self.offer(shard, batch, priority)

    def offer(self, shard: Shard, batch: int, priority: int) -> None:
        """Offer `batch` slots to a shard at a priority (0 is served first; above 9 counts as 9). Nothing, once stopped.

        Without a connection they are counted all the same, and end when there is one.
        """
        if self._stopped or batch < 1:
            return
        self._left[shard] += batch
        if not self._inbox:
            return  # a new connection, whose inbox is not there yet: `_renew` ends it with the others
        self._count += 1
        reply = f"{self._inbox}.{self._count:x}"
        expires_s = self._expires_s[shard.klass]
        self._pulls[reply] = _Pull(shard, batch, outside.monotonic_s() + expires_s + LATE_S)
        rank, expires_ns = min(priority, PULL_RANK_MAX), int(expires_s * 1e9)
        body = f'{{"batch":{batch},"priority":{rank},"expires":{expires_ns},"group":"{GROUP}"}}'
        with contextlib.suppress(Disconnected):  # ends with the others by the new connection, or by silence
            self._bus.post(f"$JS.API.CONSUMER.MSG.NEXT.{shard.stream}.{shard.consumer}", body.encode(), reply)

    def outstanding(self, shard: Shard) -> int:
        """Slots of this shard that have been offered and have not ended."""
        return self._left[shard] + self._refused[shard]

    @property
    def outstanding_total(self) -> int:
        """Slots of all shards that have been offered and have not ended."""
        return self._left.total() + self._refused.total()

    # ---- what comes back

    def _came(self, message: Message) -> None:
        if message.reply.startswith(_ACK_PREFIX):
            self._delivered(message)
        elif (pull := self._pulls.get(message.subject)) is not None and message.headers:
            self._told(pull, message.subject, message.headers)

    def _delivered(self, message: Message) -> None:
        shard = parse_stored(message.subject).shard
        if self._left[shard] > 0:
            self._left[shard] -= 1
        else:
            self.surplus += 1
        self._on_delivery(Delivery(shard, message.subject, message.reply, message.data, message.headers))

    def _told(self, pull: _Pull, reply: str, headers: Mapping[str, str]) -> None:
        status = headers.get("Status", "")
        del self._pulls[reply]
        if status not in _OVER and (pull.shard, status) not in self._complained:
            self._complained.add((pull.shard, status))  # once, because a missing consumer refuses five times a second
            why = headers.get("Description", "").strip()
            _log.warning("pull_refused", klass=pull.shard.klass, shard=pull.shard.number, status=status, why=why)
        self._end(pull.shard, self._remainder(pull, status, headers), pause=status not in _OVER)

    def _remainder(self, pull: _Pull, status: str, headers: Mapping[str, str]) -> int:
        """Slots that this pull, which is over, still had."""
        if (left := headers.get(_LEFT)) is not None:
            return int(left)
        if status in _NEVER_BEGAN:
            return pull.batch
        return self._left[pull.shard] - self._waiting()[pull.shard]

    # ---- how slots end

    def _end(self, shard: Shard, count: int, *, pause: bool = False) -> None:
        count = min(count, self._left[shard])
        if count < 1:
            return
        self._left[shard] -= count
        if not pause:
            self._tell(shard, count)
            return
        self._refused[shard] += count
        self._timers.add(asyncio.get_running_loop().call_later(REFUSED_PAUSE_S, self._end_refused, shard, count))

    def _end_refused(self, shard: Shard, count: int) -> None:
        now_s = asyncio.get_running_loop().time()
        self._timers = {timer for timer in self._timers if timer.when() > now_s}
        self._refused[shard] -= count
        self._tell(shard, count)

    def _end_all(self) -> None:
        for timer in self._timers:
            timer.cancel()
        ended = self._left + self._refused
        self._timers.clear()
        self._pulls.clear()
        self._left.clear()
        self._refused.clear()
        for shard, count in ended.items():
            self._tell(shard, count)

    def _tell(self, shard: Shard, count: int) -> None:
        try:
            self._on_ended(shard, count)
        except Exception as error:  # it would end the task that watches the others
            handler_failed("the end of a pull", error)

    # ---- silence, and new connections

    def _waiting(self) -> Counter[Shard]:
        """The most slots that can still wait at the broker."""
        waiting: Counter[Shard] = Counter()
        for pull in self._pulls.values():
            waiting[pull.shard] += pull.batch
        return waiting

    async def _watch(self) -> None:
        while True:
            woken_s = outside.monotonic_s() + LATE_S
            await asyncio.sleep(LATE_S)
            late_s = outside.monotonic_s() - woken_s
            if self._inbox and self._bus.connected and late_s < LATE_S:  # else the broker's words lie unread
                self._forget_silent(outside.monotonic_s())

    def _forget_silent(self, now_s: float) -> None:
        self._pulls = {reply: pull for reply, pull in self._pulls.items() if pull.over_s >= now_s}
        waiting = self._waiting()
        for shard, left in list(self._left.items()):
            if (silent := left - waiting[shard]) > 0:
                PULLS_ABANDONED.inc(silent)
                self._end(shard, silent)

    def _reconnected(self) -> None:
        self._inbox = ""
        self._stale.set()

    async def _renew(self) -> None:
        """After a reconnect: a new inbox, and the end of all that was under the old one."""
        while True:
            await self._stale.wait()
            self._stale.clear()
            if self._subscription is not None:
                await self._subscription.drain()
            await self._new_inbox()
            if not self._stale.is_set():
                self._end_all()

    async def _new_inbox(self) -> None:
        inbox = self._bus.inbox()
        self._subscription = await self._bus.subscribe(f"{inbox}.*", self._came)
        self._inbox = inbox
        self._complained.clear()
