"""The jobs of one loop: started, found again by what receivers and clients say, drained, and let go."""

from collections.abc import Callable
from typing import Final, Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from pipeline import outside
from pipeline.bus.connection import Bus, Message
from pipeline.limits import (
    PRESENCE_PERIOD_S,
    PRESENCE_SILENT_MAX_S,
    RECEIVER_SILENT_MAX_S,
    TOMBSTONES_MAX,
    TURNED_AWAY_MAX,
)
from pipeline.protocol import subjects
from pipeline.protocol.messages import From, notice_decoder
from pipeline.protocol.presence import Presences
from pipeline.protocol.records import Record, is_called
from pipeline.protocol.request import Event
from pipeline.telemetry import logs
from workers.holding import EVENT_OF
from workers.jobs import Job
from workers.tombstones import FirstSeen, Tombstones

J = TypeVar("J", bound=Job)

HEARD_BY_S: Final = 2 * PRESENCE_PERIOD_S
"""A receiver that has just sent a request says within this time that it lives."""


class Pool(Generic[J]):
    """Jobs by key. How many there can be is bounded by slots, or by blocks."""

    def __init__(self, bus: Bus, presences: Presences, me: tuple[str, str], ended: Callable[[J], None]) -> None:
        """`me`: role and id, under which our presence comes back to us. `ended` is told of each job's end."""
        self._bus = bus
        self._me = me
        self._presences = presences
        self._ended = ended
        self._listening_s = outside.monotonic_s()
        self._jobs: dict[str, J] = {}
        self._cancelled = Tombstones(TOMBSTONES_MAX)
        self._waiting = FirstSeen(TURNED_AWAY_MAX)
        self._idle = anyio.Event()

    async def listen(self) -> None:
        """Hear what receivers tell the holders of claims, and what clients do not want any more."""
        self._bus.on_reconnect(self._reconnected)
        await self._bus.subscribe(subjects.holder(self._me[1]), self._notice)
        await self._bus.subscribe(subjects.cancel_any(), self._cancel)

    async def watch_receivers(self) -> None:
        """Drop the requests of receivers that are gone for good, until cancelled."""
        while True:
            asked_s = outside.monotonic_s()
            await anyio.sleep(PRESENCE_PERIOD_S)
            now_s = outside.monotonic_s()
            if now_s - asked_s > 2 * PRESENCE_PERIOD_S:
                self._listening_s = now_s  # we stood still, and what came meanwhile may lie unread
            for job in self._jobs.values():
                self._watch(job, now_s)

    def _watch(self, job: J, now_s: float) -> None:
        if now_s - job.began_s > HEARD_BY_S and self._silence_s(job) > RECEIVER_SILENT_MAX_S:
            job.happen(Event.GONE)

    def _turned_away(self, job: J) -> Event | None:
        """What becomes at once of a request whose receiver would hardly answer now: it waits outside, until that one is gone.

        A receiver that was silent may be back with this request: then it is heard before the request has been seen for long.
        """
        silence_s, now_s = self._silence_s(job), outside.monotonic_s()
        if silence_s <= PRESENCE_SILENT_MAX_S:
            return None
        seen_s = now_s - self._waiting.since_s(job.holding.request, now_s)
        return Event.GONE if silence_s > RECEIVER_SILENT_MAX_S and seen_s > HEARD_BY_S else Event.UNANSWERED

    def _silence_s(self, job: J) -> float:
        """For how long its receiver has been silent, as far as our own words came back to us: until then we could hear."""
        if job.holding.receiver is None:
            return 0.0
        since_s = max(self._listening_s, job.holding.answered_s)
        return self._presences.silence_s(job.holding.receiver, since_s, self._presences.heard_s(*self._me))

    def _reconnected(self) -> None:
        self._listening_s = outside.monotonic_s()

    def start(self, key: str, job: J, tasks: TaskGroup) -> None:
        """Run a job until its machine has ended."""
        if subjects.token(job.holding.request) in self._cancelled:
            job.happen(Event.CANCELLED)
        elif (event := self._turned_away(job)) is not None:
            job.happen(event)
        self._jobs[key] = job
        tasks.start_soon(self._run, key, job)

    def get(self, key: str) -> J | None:
        """The job of that key, while it runs."""
        return self._jobs.get(key)

    def of_claim(self, claim: str) -> J | None:
        """The job that holds a claim."""
        return next((job for job in self._jobs.values() if job.holding.claim == claim), None)

    def all(self) -> list[J]:
        """Those that run."""
        return list(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)

    async def drained(self) -> None:
        """Returns when no job runs."""
        while self._jobs:
            self._idle = anyio.Event()
            await self._idle.wait()

    def let_go(self) -> None:
        """Give every request back, alive."""
        for job in self._jobs.values():
            job.happen(Event.LEFT)

    def records(self, name: str) -> list[Record]:
        """What is known of those that run under this name."""
        held = ((job, job.holding) for job in self._jobs.values())
        return [job.record for job, holding in held if is_called(name, holding.request, holding.request_id)]

    async def _run(self, key: str, job: J) -> None:
        names = {"request": job.holding.request, "request_id": job.holding.request_id, "trace_id": job.span.trace_id}
        # In this task and those that it starts: every line that is logged for the request says which it is.
        logs.bind(**{name: value for name, value in names.items() if value})
        try:
            await job.run()
        finally:
            del self._jobs[key]
            self._ended(job)
            if not self._jobs:
                self._idle.set()

    def _notice(self, message: Message) -> None:
        notice = notice_decoder.decode(message.data)
        job = self.of_claim(notice.claim)
        if job is None:
            return
        if isinstance(notice.answer, From):
            job.resend(notice.answer.index)
        else:
            job.happen(EVENT_OF[type(notice.answer)])

    def _cancel(self, message: Message) -> None:
        """`control.cancel.<request>`: the subject says it all."""
        request = message.subject.rpartition(".")[2]
        self._cancelled.add(request)
        for job in self._jobs.values():
            if subjects.token(job.holding.request) == request:
                job.happen(Event.CANCELLED)
