"""The prefill loop: take a request, read its prompt into a KV cache, and hand it over where room has been promised.

    deliveries ─► slots ─► one `PrefillJob` each:
        claim it at its receiver │ render and tokenise, once │ ask decode for blocks │ prefill, max_tokens = 1
        all four true ─► handoff.<decode> ─► accepted: the message is decode's

What to do when is `pipeline.protocol.request`; which pulls to offer is `pipeline.protocol.slots`.
"""

import contextlib
from collections.abc import Callable
from typing import Final

import anyio
from anyio.abc import TaskGroup

from pipeline import outside
from pipeline.bus import acks
from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError
from pipeline.bus.puller import BATCH_EXPIRES_S, LATE_S, Delivery, Puller
from pipeline.bus.recorder import Recorder
from pipeline.config import Config
from pipeline.errors import EngineDead
from pipeline.limits import ACCUSE_SILENT_S, LEASE_SILENT_MAX_S, PRESENCE_PERIOD_S, SURPLUS_HOLD_S
from pipeline.protocol import placement, subjects
from pipeline.protocol.intake import Rules
from pipeline.protocol.messages import Presence, verdict_decoder
from pipeline.protocol.presence import Presences
from pipeline.protocol.promptness import Promptness
from pipeline.protocol.request import Event
from pipeline.protocol.served import ShardsServed
from pipeline.protocol.slots import Offer, Slots
from pipeline.protocol.stages import AT_WORKERS
from pipeline.protocol.subjects import CLASSES, Shard
from pipeline.telemetry import metrics
from pipeline.telemetry.spans import spans_of
from workers.conversations import Conversations
from workers.engines.port import Engine
from workers.identity import Identity
from workers.leases import LeaseKeeper, Leases
from workers.personas import Personas, PersonaWarmer
from workers.pool import Pool
from workers.prefill_desk import Desk
from workers.prefill_job import PrefillJob
from workers.reading import Reading
from workers.referred import Shelf
from workers.served import Served
from workers.starts import Starts
from workers.visits import Visits
from workers.warm_up import WarmUps
from workers.warmth import Warmth

QUEUED_TOKENS_MAX: Final = 65_536
"""Prompt tokens in progress at which a worker is fully loaded: what queues behind them would be too late for interactive use."""


class PrefillWorker:
    """One engine's prefill loop: offers slots, and runs a job for each request that takes one.

    `decodes`: of a worker for both, what its decode loop would say of itself now.
    """

    _tasks: TaskGroup

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
        self.bus, self.engine, self.config, self.me, self.presences = bus, engine, config, me, presences
        self.clock: Callable[[], float] = outside.monotonic_s
        self.slots = Slots(config.prefill.slots, config.classes.weights)
        self.slots.thresholds = _thresholds(config)
        self.queued_tokens = 0
        self.ready = self.paused = False
        self.personas, self.served = Personas(bus), Served()
        self.warmth = Warmth(bus, engine, me, self.clock)
        self.warm_ups = WarmUps(bus, engine, me.id, self.warmth.prefixes, self._has_time, self._account)
        self.persona_warmer = PersonaWarmer(
            bus, engine, self.personas, config.requests.salt_scope, self.owns, self.warm_ups.warm
        )
        self.spans = spans_of(config.telemetry, me.id, "prefill")
        self.desk = Desk(
            bus=bus,
            engine=engine,
            config=config,
            me=me,
            rules=_rules(config),
            leases=leases or LeaseKeeper(bus, self.clock),
            verdicts_at=bus.inbox(),
            starts=starts,
            decoders=self.decoders,
            living=lambda: presences.epochs(self.clock()),
            silence_s=lambda decode: self.clock() - presences.heard_s("decode", decode),
            leaves=self._leaves,
            weigh=self.weigh,
            rendered=self.warm_ups.prefixes.seen,
            suspects=anyio.Semaphore(1),
            shelf=Shelf(self.personas, Conversations(bus), config.conversations),
            expects=self.warmth.expects,
            visits=Visits(engine, config.prefill.max_num_batched_tokens, config.classes.weights, self.clock),
            spans=self.spans,
            clock=self.clock,
            promptness=Promptness(config.prefill.max_num_batched_tokens),
        )
        self._ranks: dict[Shard, int] = {}
        self._shards = [Shard(klass, n) for klass in CLASSES for n in range(config.requests.shards)]
        self._puller = Puller(bus, self._delivered, self._pull_ended)
        self._jobs: Pool[PrefillJob] = Pool(bus, presences, ("prefill", me.id), self._ended)
        self.recorder = Recorder(bus, config.telemetry, self._jobs.records)
        self.reading = Reading(self.desk.visits, self.weigh, self._served)
        self._held: dict[str, Delivery] = {}
        self._stale_until_s = float("-inf")
        self._heard_s = self._looked_s = self.clock()
        self.decodes: Callable[[], Presence] | None = None

    async def run(self) -> None:
        """Serve until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self.desk.leases.run)
            await self.bus.subscribe(self.desk.verdicts_at, self._verdict)
            await self.bus.subscribe(f"{self.desk.verdicts_at}.>", self._unheard)
            await self._jobs.listen()
            await self.recorder.listen()
            await self.warm_ups.listen()
            self._tasks.start_soon(self.warm_ups.run)
            await self.personas.listen()
            self._tasks.start_soon(self.personas.run)
            self._tasks.start_soon(self.persona_warmer.run)
            await self.warmth.listen()
            self._tasks.start_soon(self.warmth.run)
            self._tasks.start_soon(self._jobs.watch_receivers)
            await self._puller.start()
            await self.bus.barrier()
            self.ready = True
            self._tasks.start_soon(self._give_back_surplus)
            await self._keep_ranks()

    async def pause(self) -> None:
        """Take nothing new, and give back what only waits."""
        self.paused = True
        await self._close()

    async def resume(self) -> None:
        """Take requests again."""
        self.paused = False
        # Closed it may not have said that it lives, so that nothing came back: no standstill, and no old message can come now.
        self._heard_s, self._stale_until_s = self.clock(), float("-inf")
        self.slots.reopen()
        await self._puller.start()
        self._offer()

    async def drain(self) -> None:
        """Take nothing new, give back what only waits, and let what runs finish. The caller sets the bound."""
        await self.close()
        await self._jobs.drained()

    async def close(self) -> None:
        """Take nothing new, and give back what only waits, for good or until `resume`."""
        self.paused = False
        await self._close()

    async def _close(self) -> None:
        """A pull that is taken back may have a message under way, which would be lost for a lease: so they end by themselves."""
        self.slots.close(lingers=True)
        with anyio.move_on_after(BATCH_EXPIRES_S + LATE_S):
            while self._puller.outstanding_total and self.slots.lingers:
                await anyio.sleep(SURPLUS_HOLD_S / 2)
        if not self.slots.open:
            self.slots.close()
        await self._puller.stop()
        await self._return_surplus()

    def _leaves(self) -> bool:
        return not (self.slots.open or self.paused)

    @property
    def under_way(self) -> int:
        """Requests that it works on."""
        return len(self._jobs)

    def let_go(self) -> None:
        """The bound of the drain has passed: give every request back, alive."""
        self._jobs.let_go()

    def apply(self, config: Config) -> None:
        """The configuration has changed, in what may change while we run."""
        self.config = self.desk.config = config
        self.slots.thresholds = _thresholds(config)
        self.slots.weigh(config.classes.weights)
        self.desk.visits.weigh(config.classes.weights)
        self.slots.resize(config.prefill.slots)
        self._weigh()
        self._offer()

    def presence(self) -> Presence:
        """What others may know of this worker."""
        info = self.engine.info
        return Presence(
            role="prefill",
            id=self.me.id,
            epoch=self.me.epoch,
            ready=self.ready,
            draining=self._leaves(),
            paused=self.paused,
            load=self.slots.load,
            slots=self.slots.capacity,
            slots_free=self.slots.free,
            batch_slots_free=self.slots.free_for_batch,
            reads_ratio=round(self.desk.visits.reads_ratio, 3),
            model=info.model,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            fingerprint=info.fingerprint,
            warm=len(self.warmth.teller),
            warm_number=self.warmth.teller.number,
            warm_digest=self.warmth.teller.digest,
        )

    def _has_time(self) -> bool:
        """While it is closed, its engine's blocks may all be promised to replies."""
        return self.slots.open and self.slots.load < self.config.placement.spill_load

    def _account(self) -> ShardsServed:
        return ShardsServed(worker=self.me.id, warm_creators=len(self.warmth.teller), shards=self.served.rows())

    def owns(self, affinity: str) -> bool:
        """Whether requests of this affinity come here first."""
        number = subjects.partition(affinity, self.config.requests.shards)
        return self.slots.open and self._ranks.get(Shard(CLASSES[0], number)) == 0

    def decoders(self) -> list[Presence]:
        """Decode workers whose engine can load what ours computes; who has missed two presences only where nobody has not."""
        mine = self.engine.info.fingerprint
        live = [self._fresh(peer) for peer in self.presences.live("decode", self.clock()) if peer.fingerprint == mine]
        return [peer for peer in live if self.desk.silence_s(peer.id) <= ACCUSE_SILENT_S] or live

    def _fresh(self, peer: Presence) -> Presence:
        """What it said last; of our own worker, which may just have ended a request, what it would say now."""
        return self.decodes() if self.decodes is not None and peer.id == self.me.id else peer

    # Deliveries and slots

    def _delivered(self, delivery: Delivery) -> None:
        """A message has come. Its pull is replaced before anything else is done with it."""
        message = subjects.parse_ack(delivery.ack)
        key, again = (
            outside.token(8),
            message.delivered > 1,
        )  # a restarted broker delivers again under the same ack subject
        has_slot = self.slots.delivered(key, delivery.shard, message.pending, self.clock(), again=again)
        self._offer()
        if has_slot:
            self._start(delivery)
            return
        metrics.DELIVERIES.labels(kind="surplus").inc()
        self._held[key] = delivery
        if again:
            self._tasks.start_soon(self._return_surplus)

    def _pull_ended(self, shard: Shard, count: int) -> None:
        self.slots.ended(shard, count)
        self._offer()

    def _offer(self) -> None:
        self._pull(self.slots.offers(self.clock()))

    def _pull(self, offers: list[Offer]) -> None:
        for offer in offers:
            self._puller.offer(offer.shard, offer.batch, offer.priority)

    def _start(self, delivery: Delivery) -> None:
        job = PrefillJob(self.desk, delivery)
        metrics.DELIVERIES.labels(kind="again" if job.again else "first").inc()
        self._jobs.start(job.holding.claim, job, self._tasks)

    def _ended(self, job: PrefillJob) -> None:
        """A slot is free: it goes to a held message first, then back to the shards."""
        record = job.record
        self.recorder.ended(record, job.span, AT_WORKERS, loud=job.ended_by is not Event.ACCEPTED)
        metrics.PREFILLS.labels(outcome=record.outcome).inc()
        if isinstance(job.error, EngineDead):
            self.slots.close()  # until the health check ends this process: what came here would only come back
        if job.ended_by is not Event.ACCEPTED or job.prefilled is None:
            self._free(job)
        elif job.reading is None:
            self._served(job)
        else:
            self.reading.hold(job.reading, job)

    def has_read(self, ask: str, cached_tokens: int | None) -> None:
        """The decode loop beside us has read the prompt of this grant, or will not. It may say so before it is done with here."""
        job = self._jobs.get(ask.rpartition(".")[0])
        if job is not None and job.reading == ask:
            job.has_read(cached_tokens)
        else:
            self.reading.end(ask, cached_tokens)

    def _served(self, job: PrefillJob) -> None:
        assert job.prefilled is not None
        shard = job.stored.shard
        self.served.count(shard, job.prefilled, job.prompt_tokens, owned=self._ranks.get(shard) == 0)
        self._free(job)

    def _free(self, job: PrefillJob) -> None:
        self._weigh()
        key = self.slots.finished(job.stored.shard.klass)
        if key is not None:
            self._start(self._held.pop(str(key)))
        self._offer()

    async def _give_back_surplus(self) -> None:
        self._heard_s = self.clock()
        while True:
            self._looked_s = self.clock()
            await anyio.sleep(SURPLUS_HOLD_S / 2)
            await self._return_surplus()
            self._offer()

    def _notice_standstill(self, since_s: float) -> None:
        """This process has, since then, or its connection: one that carries anything brings our own presence back."""
        now_s, before_s = self.clock(), self._heard_s
        self._heard_s = max(before_s, self.presences.heard_s("prefill", self.me.id))
        if max(now_s - since_s, self._heard_s - before_s, now_s - self._heard_s) > LEASE_SILENT_MAX_S:
            self._stale_until_s = now_s + 2 * SURPLUS_HOLD_S

    async def _return_surplus(self) -> None:
        """Without a connection the broker has taken them back already, or will after `ack_wait`.

        After this process or its connection stood still, what it reads may be another's, and a NAK would take it from there. What
        lay in the socket is read before our own timer runs: so it is looked for here.
        """
        self._notice_standstill(self._looked_s)
        for key in self.slots.surplus(self.clock()):
            ack = self._held.pop(str(key)).ack
            if self.clock() >= self._stale_until_s:
                with contextlib.suppress(BusError):
                    await acks.nak(self.bus, ack)

    async def _keep_ranks(self) -> None:
        """Ranks follow who lives; a pull that stands keeps its old rank until it ends."""
        ranked: dict[str, float] = {}
        while True:
            self._weigh()
            live = {peer.id: float(peer.slots) for peer in self.presences.ready("prefill", self.clock())}
            live[self.me.id] = float(self.slots.capacity)
            if live != ranked:  # for 256 workers and 512 shards it takes 45 ms, in which the loop stands still
                ranked = live
                self._ranks = placement.ranks(self.me.id, self._shards, live)
                self._pull(self.slots.rank(self._ranks, self.clock()))
            await anyio.sleep(PRESENCE_PERIOD_S)

    def weigh(self, tokens: int) -> None:
        """So many prompt tokens more (or fewer) are in progress here."""
        self.queued_tokens += tokens
        self._weigh()

    def _weigh(self) -> None:
        usage = self.engine.usage()
        self.slots.load = placement.load(
            busy=self.slots.busy,
            slots=self.slots.capacity,
            queued_tokens=self.queued_tokens,
            queued_tokens_max=QUEUED_TOKENS_MAX,
            kv_usage_ratio=usage.kv_usage_ratio,
        )
        metrics.ENGINE_KV_USAGE_RATIO.set(usage.kv_usage_ratio)
        metrics.ENGINE_PREEMPTIONS.set(usage.preemptions)
        metrics.SLOTS.labels(state="busy").set(self.slots.busy)
        metrics.SLOTS.labels(state="free").set(self.slots.free)
        metrics.PREFILL_QUEUED_TOKENS.set(self.queued_tokens)
        metrics.PULLS_OUTSTANDING.set(self.slots.outstanding)

    def _unheard(self, message: Message) -> None:
        """The broker has no responder for an ask, whose id is in the reply subject."""
        ask = message.subject.removeprefix(f"{self.desk.verdicts_at}.")
        job = self._jobs.get(ask.rpartition(".")[0])
        if job is not None and job.asking is not None:
            job.unheard(ask)

    def _verdict(self, message: Message) -> None:
        """Verdicts name the ask, whose id begins with the first claim of its job."""
        verdict = verdict_decoder.decode(message.data)
        job = self._jobs.get(verdict.ask.rpartition(".")[0])
        if job is not None and job.asking is not None:
            job.send(job.verdict(verdict))


def _rules(config: Config) -> Rules:
    requests = config.requests
    return Rules(reply_subjects=requests.reply_subjects, timeout_max_s=dict(requests.timeout_max_s))


def _thresholds(config: Config) -> placement.Thresholds:
    return placement.Thresholds(config.placement.spill_load, config.placement.spill_back_load)
