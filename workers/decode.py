"""The decode loop: promise blocks, take over requests whose KV is ready, generate, and ack what has been received whole.

    credit.<id>   ─► the ledger answers asks, now or when there is room
    handoff.<id>  ─► a live grant? ─► one `DecodeJob` each: take the claim over │ load the KV, generate, stream │ ack

What to promise is `pipeline.protocol.credits`; what to do when is `pipeline.protocol.request`.
"""

import contextlib
from collections.abc import Callable
from typing import Final

import anyio
from anyio.abc import TaskGroup

from pipeline import outside
from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError
from pipeline.bus.recorder import Recorder
from pipeline.config import Config
from pipeline.errors import EngineDead
from pipeline.limits import REPEAT_PERIOD_S
from pipeline.protocol import subjects
from pipeline.protocol.classes import BATCH
from pipeline.protocol.credits import ENDED_REMEMBERED, Consumption, GrantState, Ledger, Verdicts
from pipeline.protocol.messages import (
    Ask,
    Handoff,
    HandoffAnswer,
    Presence,
    Return,
    credit_decoder,
    encode,
    handoff_decoder,
)
from pipeline.protocol.occupancy import FULL_MEMORY_S, Occupancy, promised_ratio
from pipeline.protocol.presence import Presences
from pipeline.protocol.request import Event
from pipeline.protocol.stages import AT_WORKERS
from pipeline.telemetry import logs, metrics
from pipeline.telemetry.spans import spans_of
from workers.conversations import Conversations
from workers.decode_job import DecodeJob, Desk
from workers.engines.port import Engine
from workers.frames import FrameSender
from workers.identity import Identity
from workers.leases import LeaseKeeper, Leases
from workers.pool import Pool
from workers.recording import Recorded
from workers.starts import Starts
from workers.tombstones import Tombstones

log: Final = logs.get("decode")

_TRACED: Final = (Event.WHOLE, Event.GONE, Event.CANCELLED)
"""Ends after which no other worker goes on with the reply."""

_REFUSALS: Final[dict[Consumption, HandoffAnswer]] = {
    Consumption.NO_GRANT: HandoffAnswer(state="refused", reason="no_grant"),
    Consumption.OLD_EPOCH: HandoffAnswer(state="refused", reason="old_epoch"),
}


class DecodeWorker:
    """One engine's decode loop."""

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        config: Config,
        me: Identity,
        presences: Presences,
        starts: Starts,
        leases: Leases | None = None,
    ) -> None:
        """`starts`: of this process, whichever loops it has. `leases`: kept elsewhere than on this event loop."""
        self.bus, self.engine, self.config, self.me = bus, engine, config, me
        self.clock: Callable[[], float] = outside.monotonic_s
        self.ready = False
        self.spans = spans_of(config.telemetry, me.id, "decode")
        self.paused = False
        self.beside: Callable[[], int] = lambda: 0
        """Blocks that others than replies may hold in this engine."""
        self.read: Callable[[str, int | None], None] = lambda _ask, _cached: None
        """See `Desk`."""
        self.ledger = Ledger(
            me.id,
            me.epoch,
            engine.info.kv_blocks,
            config.credits.reserve_ratio,
            config.decode.slots,
            config.classes.weights,
        )
        self.desk = Desk(
            bus=bus,
            engine=engine,
            me=me,
            ledger=self.ledger,
            leases=leases or LeaseKeeper(bus, self.clock),
            frames=FrameSender(bus),
            starts=starts,
            conversations=Conversations(bus),
            publish=self._publish,
            read=self._read,
            spans=self.spans,
            clock=self.clock,
        )
        self._occupancy = Occupancy(self.clock(), FULL_MEMORY_S)
        self._jobs: Pool[DecodeJob] = Pool(bus, presences, ("decode", me.id), self._ended)
        self._refused = Tombstones(ENDED_REMEMBERED)
        self._recorded = Recorded(bus, self.clock)
        self.recorder = Recorder(bus, config.telemetry, self._jobs.records)
        self._counted: dict[str, int] = {}
        self._tasks: TaskGroup

    async def run(self) -> None:
        """Serve until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self.desk.leases.run)
            self._tasks.start_soon(self.desk.frames.run)
            await self._jobs.listen()
            await self.recorder.listen()
            self._tasks.start_soon(self._jobs.watch_receivers)
            await self._recorded.listen()
            await self.bus.subscribe(subjects.credit(self.me.id), self._credit)
            await self.bus.subscribe(subjects.handoff(self.me.id), self._handoff)
            await self.bus.barrier()
            self.ready = True
            while True:
                await anyio.sleep(REPEAT_PERIOD_S / 2)
                self._publish(self.ledger.tick(self.clock()))
                self._measure()

    async def pause(self) -> None:
        """Promise nothing new. What has been promised is served."""
        self.paused = True
        self._publish(self.ledger.close())

    async def resume(self) -> None:
        """Promise again."""
        self.paused = False
        self.ledger.reopen()

    async def close(self) -> None:
        """Promise nothing new, for good or until `resume`."""
        self.paused = False
        self._publish(self.ledger.close())

    async def drain(self) -> None:
        """Promise nothing new, and let what was promised and what runs finish. The caller sets the bound."""
        await self.close()
        while not self.ledger.idle:  # a grant ends by its handoff, or by the asker's silence
            await anyio.sleep(REPEAT_PERIOD_S / 4)
        await self._jobs.drained()

    @property
    def under_way(self) -> int:
        """Requests that it works on, or has promised to."""
        return self.ledger.count(GrantState.GRANTED) + len(self._jobs)

    def let_go(self) -> None:
        """The bound of the drain has passed: give every request back, alive."""
        self._jobs.let_go()

    def apply(self, config: Config) -> None:
        """The configuration has changed, in what may change while we run."""
        self.config = config
        self.ledger.resize(config.credits.reserve_ratio, config.decode.slots)
        self.ledger.weigh(config.classes.weights)

    def presence(self) -> Presence:
        """What others may know of this worker."""
        info = self.engine.info
        return Presence(
            role="decode",
            id=self.me.id,
            epoch=self.me.epoch,
            ready=self.ready,
            draining=not (self.ledger.open or self.paused),
            paused=self.paused,
            load=1.0 - self.ledger.free / max(1, self.ledger.blocks),
            blocks=self.ledger.blocks,
            blocks_free=max(0, self.ledger.free - self.ledger.reserve),
            asks_waiting=self.ledger.waiting(),
            batch_asks_waiting=self.ledger.waiting(BATCH),
            full_ratio=round(self._occupancy.ratio(self.clock()), 3),
            unread=sum(job.unread for job in self._jobs.all()),
            model=info.model,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            fingerprint=info.fingerprint,
        )

    def _credit(self, message: Message) -> None:
        """An ask, a return, or somebody who wants to see the books."""
        said = credit_decoder.decode(message.data)
        if isinstance(said, Ask):
            self._publish(self.ledger.ask(said, self.clock(), said.deadline_s - outside.unix_s()))
        elif isinstance(said, Return):
            self._publish(self.ledger.give_back(said.ask, self.clock()))
        else:
            self._post(
                message.reply, encode(self.ledger.account(self._engine_blocks(), self.engine.usage().preemptions))
            )

    def _engine_blocks(self) -> int:
        return round(self.engine.usage().kv_usage_ratio * self.engine.info.kv_blocks)

    def _handoff(self, message: Message) -> None:
        """A completion event. It is repeated until answered, so each must be answered, and only the first may have an effect."""
        handoff = handoff_decoder.decode(message.data)
        consumption = self.ledger.consume(handoff.ask, handoff.epoch, self.clock())
        if consumption in _REFUSALS:
            self._post(message.reply, encode(_REFUSALS[consumption]))
        elif consumption is Consumption.AGAIN:
            self._repeated(handoff, message.reply)
        else:
            self._start(handoff, message.reply)

    def _repeated(self, handoff: Handoff, answer_at: str) -> None:
        job = self._jobs.get(handoff.ask)
        if job is not None and not job.accepted:
            job.answer_at = answer_at
        elif handoff.ask in self._refused:  # its answer was lost, or came between two repetitions
            self._post(answer_at, encode(_REFUSALS[Consumption.NO_GRANT]))
        else:
            self._post(answer_at, encode(HandoffAnswer(state="accepted")))

    def _start(self, handoff: Handoff, answer_at: str) -> None:
        self._jobs.start(handoff.ask, DecodeJob(self.desk, handoff, answer_at), self._tasks)

    def _read(self, ask: str, cached_tokens: int | None) -> None:
        self.read(ask, cached_tokens)

    def _ended(self, job: DecodeJob) -> None:
        self.read(job.handoff.ask, None)
        record = job.record
        if not job.accepted:
            self._refused.add(job.handoff.ask)
        # A gateway writes the line of its own requests; those of producers have no other.
        loud = record.outcome != "whole" or job.holding.receiver is None
        self.recorder.ended(record, job.span, AT_WORKERS, loud=loud)
        metrics.DECODES.labels(outcome=record.outcome).inc()
        if job.ended_by in _TRACED and job.outbox.length:
            self._recorded.tell(job.handoff, job.outbox.length)
        if isinstance(job.error, EngineDead):
            self._publish(
                self.ledger.close()
            )  # until the health check ends this process: what came here would only come back

    def _publish(self, verdicts: Verdicts) -> None:
        for subject, verdict in verdicts:
            self._post(subject, encode(verdict))

    def _post(self, subject: str, payload: bytes) -> None:
        """Answer from within a handler. What cannot be sent now will be asked for again."""
        with contextlib.suppress(BusError):
            self.bus.post(subject, payload)

    def _measure(self) -> None:
        ledger, usage = self.ledger, self.engine.usage()
        promised = (ledger.blocks, max(0, ledger.free - ledger.reserve), ledger.seats, ledger.seats_max)
        self._occupancy.use(promised_ratio(*promised, ledger.waiting()), self.clock())
        if not ledger.reconcile(self._engine_blocks(), self.beside()):
            metrics.LEDGER_DISAGREEMENTS.inc()
        for state, blocks in {
            "total": ledger.blocks,
            "free": ledger.free,
            "reserve": ledger.reserve,
            "granted": ledger.blocks_in(GrantState.GRANTED),
            "consumed": ledger.blocks_in(GrantState.CONSUMED),
        }.items():
            metrics.BLOCKS.labels(state=state).set(blocks)
        for state in ("granted", "released", "returned", "expired", "refused"):
            total: int = getattr(ledger.totals, state)
            metrics.GRANTS.labels(state=state).inc(total - self._counted.get(state, 0))
            self._counted[state] = total
        for live in (GrantState.GRANTED, GrantState.CONSUMED):
            metrics.GRANTS_OUTSTANDING.labels(state=live.name.lower()).set(ledger.count(live))
        metrics.ASKS_WAITING.set(ledger.count(GrantState.WAITING))
        metrics.ENGINE_PREEMPTIONS.set(usage.preemptions)
        metrics.ENGINE_KV_USAGE_RATIO.set(usage.kv_usage_ratio)
