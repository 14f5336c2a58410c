"""Running one request's machine: events in, effects out, and every task of it owned by one group.

A job takes one event at a time, steps its machine and carries out the effects in order. Effects that take time run beside it and
report back by further events; STOP cancels those that work, at once.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Final, Literal

from pipeline import outside
from pipeline.bus.errors import BusError
from pipeline.errors import DeadlineExceeded, EngineDead, FirstTokenLate, ReplyError, RequestError, ServiceError
from pipeline.protocol import outcomes
from pipeline.protocol.records import Facts, Record
from pipeline.protocol.request import Effect, Event, Stage
from pipeline.protocol.stages import Decoding, Prefilling
from pipeline.telemetry import logs
from pipeline.telemetry.spans import Span
from workers.bell import Bell
from workers.holding import Holding

log: Final = logs.get("job")

TELLING_GRACE_S: Final = 5.0
"""After its deadline a request's end is told for this long; then its receiver is taken for gone."""

TOO_LATE: Final = "The request's time ran out before its reply was whole; give it a longer timeout_ms, or try again."


TOO_LATE_TO_BEGIN: Final = (
    "The reply could not begin in time, for too much is asked at the moment: try again later, or let the operator raise "
    "requests.first_token_s, or add workers."
)


class Job(ABC):
    """One request at one worker. `deadline_s` and `first_by_s`, when its reply must have begun, are on the clock of `clock`."""

    holding: Holding
    span: Span
    times: Prefilling | Decoding

    def __init__(self, deadline_s: float, clock: Callable[[], float]) -> None:
        self.deadline_s = deadline_s
        self.first_by_s = math.inf
        self.error: ReplyError = ServiceError("The request failed.")
        self.told: ReplyError | None = None
        """What its receiver is told instead of a reply."""
        self.ended_by: Event | None = None
        self.began_s = clock()
        self._clock = clock
        self._events: list[Event] = []
        self._bell = Bell()
        self._beside: set[asyncio.Task[None]] = set()
        self._working: list[asyncio.Task[None]] = []
        self._tasks: asyncio.TaskGroup

    @property
    @abstractmethod
    def stage(self) -> Stage:
        """Where the machine is."""

    @property
    @abstractmethod
    def record(self) -> Record:
        """What this worker knows of it now."""

    def recorded(
        self,
        role: Literal["prefill", "decode"],
        stages: dict[str, float],
        creator: str = "",
        facts: Facts | None = None,
        told: ReplyError | None = None,
    ) -> Record:
        """Its record, with what jobs have in common. `told`: what its receiver was told instead of a reply."""
        took_s = self._clock() - self.began_s
        return Record(
            process=self.holding.me.id,
            role=role,
            request=self.holding.request,
            outcome=outcomes.outcome(self.ended_by, told) if self.ended else "",
            began_unix_s=outside.unix_s() - took_s,
            took_s=took_s,
            stages=stages,
            request_id=self.holding.request_id,
            trace_id=self.span.trace_id,
            creator=creator,
            facts=facts or {},
        )

    @property
    def ended(self) -> bool:
        """Whether the machine has come to its end."""
        return self.stage is Stage.ENDED

    @abstractmethod
    def step(self, event: Event) -> tuple[Effect, ...]:
        """Step the machine."""

    @abstractmethod
    def beside(self) -> dict[Effect, Callable[[], Awaitable[None]]]:
        """Effects that take time, by what carries them out. STOP cancels them, but for claims and TELL."""

    @abstractmethod
    def at_once(self) -> dict[Effect, Callable[[], Awaitable[None]]]:
        """Effects that are carried out before the next event is looked at."""

    @abstractmethod
    def resend(self, index: int) -> None:
        """The receiver misses tokens from this index on."""

    def happen(self, event: Event, error: ReplyError | None = None) -> None:
        """Something has happened to this request. Callable from any callback."""
        if error is not None:
            self.error = self.told = error
        self.times.happened(event, self._clock())
        self._events.append(event)
        self._bell.ring()

    async def run(self) -> None:
        """Live until the machine has ended."""
        beside, at_once = self.beside(), self.at_once()
        async with asyncio.TaskGroup() as self._tasks:
            while not self.ended:
                self.ended_by = await self._next()
                for effect in self.step(self.ended_by):
                    if effect in at_once:
                        await self._carry_out(effect, at_once[effect])
                    else:
                        self._start(effect, beside[effect])
            for task in self._beside:
                task.cancel()

    async def stop_working(self) -> None:
        """Cancel what works for this request: rendering, asking, the engine. What was about to begin does not begin."""
        for task in self._working:
            task.cancel()
        self._working.clear()

    async def _next(self) -> Event:
        """The next event. Past the deadline that is DEADLINE, and UNHEARD once the end has been told for long enough."""
        while not self._events:
            await self._bell.heard(max(0.0, self._until_s() - self._clock()))
            if not self._events and self._clock() >= self._until_s():
                return self._too_late()
        return self._events.pop(0)

    def _until_s(self) -> float:
        """When the next event is overdue. Telling the end gets its time also where the deadline had passed before we began."""
        if self.stage is Stage.ENDING:
            return max(self.deadline_s, self.began_s) + TELLING_GRACE_S
        return min(self.deadline_s, self.first_by_s)

    def check_deadline(self) -> None:
        """Before work that would come too late. Raises `DeadlineExceeded` and `FirstTokenLate`."""
        if self._clock() >= min(self.deadline_s, self.first_by_s):
            raise self._lateness()

    def _lateness(self) -> ReplyError:
        if self._clock() >= self.deadline_s:
            return DeadlineExceeded(TOO_LATE)
        return FirstTokenLate(TOO_LATE_TO_BEGIN, retry_after_s=1.0)

    def _too_late(self) -> Event:
        if self.stage is Stage.ENDING:
            return Event.UNHEARD
        self.error = self.told = self._lateness()
        return Event.DEADLINE

    def _start(self, effect: Effect, carry_out: Callable[[], Awaitable[None]]) -> None:
        """Known to STOP from now on, and not from its first turn: the events that start and stop it may come together."""
        task = self._tasks.create_task(self._run_beside(effect, carry_out))
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        if effect not in (Effect.CLAIM, Effect.RECLAIM, Effect.TELL):
            self._working.append(task)

    async def _run_beside(self, effect: Effect, carry_out: Callable[[], Awaitable[None]]) -> None:
        # A claim beside the ack of what is dropped would be answered, and its receiver would count on it.
        if self.ended_by is not Event.GONE:
            await self._carry_out(effect, carry_out)

    async def _carry_out(self, effect: Effect, carry_out: Callable[[], Awaitable[None]]) -> None:
        """Failures become events: a job never takes its worker down."""
        try:
            await carry_out()
        except EngineDead as error:
            self.happen(Event.LEFT, error)
        except RequestError as error:
            self.happen(Event.INVALID, error)
        except ReplyError as error:
            # An end that could not be told is no end: its message is let go, and comes again.
            self.happen(Event.DOUBT if effect is Effect.TELL else Event.FAILED, error)
        except BusError as error:
            log.warning("broker out of reach", effect=effect.name, error=str(error))
            self.happen(Event.DOUBT)
        except Exception as error:
            log.exception("effect failed", effect=effect.name)
            self.happen(
                Event.FAILED, ServiceError(f"Internal error ({type(error).__name__}) while carrying out {effect.name}.")
            )
