"""The DLQ keeper: sees to it that every request ends with a word to its receiver, also where no worker can say it.

    advisories of the broker ──┐
    a scan for what aged out ──┴─► work items in ADVISORIES ─► claim │ copy │ tell │ delete ─► ack the item

Several keepers may run: the consumer gives an item to one at a time, and again when that one dies. What to do about a request is
decided in `pipeline.protocol.dead_letters`.
"""

import contextlib
import signal
from typing import Final

import anyio
import msgspec
from anyio.abc import TaskGroup

from pipeline import outside
from pipeline.bus import acks, reading
from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError, Duplicate
from pipeline.bus.presence import Watcher
from pipeline.bus.reading import Kept, State
from pipeline.bus.recorder import Recorder
from pipeline.config import Config, Telemetry
from pipeline.errors import CapacityError, DeadlineExceeded, ReplyError, ReplyLost
from pipeline.limits import (
    KEEPER_ANSWER_S,
    KEEPER_ITEM_S,
    KEEPER_ITEMS_MAX,
    KEEPER_RETRY_S,
    KEEPER_TRIES_MAX,
    RECEIVER_SILENT_MAX_S,
    SCAN_PERIOD_S,
    SCAN_READS_MAX,
)
from pipeline.protocol import dead_letters, intake, tracing
from pipeline.protocol.dead_letters import ADVISORIES, CONSUMER, Ages, Item, Judgement, Letter
from pipeline.protocol.intake import Rules
from pipeline.protocol.messages import Answer, Failed, Gone
from pipeline.protocol.presence import Presences, Receiver
from pipeline.protocol.records import Record
from pipeline.protocol.request import Event
from pipeline.protocol.subjects import CLASSES, AckSubject, Shard, parse_ack, parse_stored
from pipeline.telemetry import logs, metrics
from pipeline.telemetry.lag import measure_lag
from pipeline.telemetry.spans import Passed
from workers.backlog import measure_backlog
from workers.dead_letters import keep
from workers.holding import Holding
from workers.identity import Identity, new_claim, new_identity
from workers.jobs import TOO_LATE
from workers.runtime import check_ages, check_streams

PULL_S: Final = 2.0
"""How long a pull for items stands."""

UNSAID: Final = Telemetry()

BYTES_PER_TOKEN: Final = 4
"""Of a waiting request: English text has about so many, and what nobody has tokenised can only be estimated."""

_ACK_PREFIX: Final = "$JS.ACK."

log: Final = logs.get("keeper")


class Keeper:
    """One keeper's two loops. `presences` says which receivers are gone for good."""

    def __init__(
        self, bus: Bus, rules: Rules, me: Identity, presences: Presences, telemetry: Telemetry = UNSAID
    ) -> None:
        self.recorder = Recorder(bus, telemetry, lambda _: [])
        self.bus, self.rules, self.me, self.presences = bus, rules, me, presences
        self.ready = anyio.Event()
        self._ages = {klass: Ages() for klass in CLASSES}
        self._connected_s = outside.monotonic_s()
        self._busy = 0
        self._left = 0
        self._wake = anyio.Event()
        self._tasks: TaskGroup

    async def run(self) -> None:
        """Serve until cancelled."""
        self.bus.on_reconnect(self._reconnected)
        async with anyio.create_task_group() as self._tasks:
            inbox = self.bus.inbox()
            await self.bus.subscribe(inbox, self._came)
            await self.recorder.listen()
            await self.bus.barrier()
            self._tasks.start_soon(self._scan)
            self.ready.set()
            await self._pull(inbox)

    def _reconnected(self) -> None:
        self._connected_s = outside.monotonic_s()

    # ----------------------------------------------------------------------------------------------------------
    # The scan

    async def _scan(self) -> None:
        while True:
            for klass, ages in self._ages.items():
                try:
                    await self._scan_stream(klass, ages)
                except (BusError, CapacityError) as error:
                    log.warning("scan_broken_off", klass=klass, error=str(error))
            await anyio.sleep(SCAN_PERIOD_S)

    async def _scan_stream(self, klass: str, ages: Ages) -> None:
        """Read on from where the last scan was, up to what is too young; make items of what has expired."""
        stream = Shard(klass, 0).stream
        state = await reading.state(self.bus, stream)
        _measure(klass, state)
        ages.begin(state.first, state.last)
        for _ in range(SCAN_READS_MAX if state.messages else 0):
            kept = None if ages.full else await reading.next_from(self.bus, stream, ages.next_sequence)
            if kept is None or not dead_letters.may_expire(kept.stored_at_s, state.now_s):
                break
            ages.saw(kept.sequence, self._expires_at_s(stream, kept))
        while (sequence := ages.expired(state.now_s)) is not None:
            subject = dead_letters.expired_subject(stream, sequence)
            with contextlib.suppress(Duplicate):  # another keeper has seen it, too
                await self.bus.store(subject, b"", f"{subject}-{state.created}", KEEPER_ANSWER_S)
            ages.told()

    def _expires_at_s(self, stream: str, kept: Kept) -> float:
        return dead_letters.expired_at_s(
            kept.subject, kept.data, kept.headers, _as_delivered(stream, kept, 0), self.rules
        )

    # ----------------------------------------------------------------------------------------------------------
    # Items

    async def _pull(self, inbox: str) -> None:
        """One pull at a time, for as many items as may still be dealt with."""
        while True:
            self._wake = anyio.Event()
            if self._left <= 0 and self._busy < KEEPER_ITEMS_MAX:
                self._left = KEEPER_ITEMS_MAX - self._busy
                asked = msgspec.json.encode({"batch": self._left, "expires": int(PULL_S * 1e9)})
                with contextlib.suppress(BusError):
                    self.bus.post(f"$JS.API.CONSUMER.MSG.NEXT.{ADVISORIES}.{CONSUMER}", asked, inbox)
            with anyio.move_on_after(PULL_S + 1.0) as silence:
                await self._wake.wait()
            if silence.cancelled_caught:
                self._left = 0  # the broker does not know of this pull, or not any more

    def _came(self, message: Message) -> None:
        """An item, or the end of the pull."""
        if message.reply.startswith(_ACK_PREFIX):
            self._busy += 1
            self._left -= 1
            self._tasks.start_soon(self._work, message)
        else:
            self._left = 0
        self._wake.set()

    async def _work(self, message: Message) -> None:
        """One item, to its end or back to the queue. Nothing that goes wrong here takes the keeper down."""
        about, item = parse_ack(message.reply), dead_letters.item(message.subject, message.data)
        done = item is None
        try:
            if item is not None:
                with anyio.move_on_after(KEEPER_ITEM_S):
                    done = await self._deal(item, about)
            await self._settle(message.reply, about, done=done)
        except (BusError, CapacityError) as error:
            log.warning("item_broken_off", subject=message.subject, error=str(error))
        except Exception:
            log.exception("item_failed", subject=message.subject)
        finally:
            self._busy -= 1
            self._wake.set()

    async def _settle(self, ack: str, about: AckSubject, *, done: bool) -> None:
        if not done and about.delivered >= KEEPER_TRIES_MAX:
            log.error("item_given_up", sequence=about.sequence, tries=about.delivered)
            done = True
        await (acks.ack(self.bus, ack) if done else acks.nak(self.bus, ack, KEEPER_RETRY_S))

    # ----------------------------------------------------------------------------------------------------------
    # One dead request

    async def _deal(self, item: Item, about: AckSubject) -> bool:
        """Whether the item is done with. Each step may be the last one of this keeper, and another then repeats them all."""
        kept = await reading.get(self.bus, item.stream, item.sequence)
        if kept is None:
            await self._vanished(item, about)
            return True
        if kept.stored_at_s > about.stored_at_s:
            return True  # the stream was made anew and counts again: this is another request
        ack, error = _as_delivered(item.stream, kept, item.deliveries), _error(item)
        letter = dead_letters.write(item.reason, kept.subject, ack, error)
        holding = self._holding(kept, ack)
        judgement = dead_letters.judge(await self._claimed(holding), about.delivered)
        if judgement in (Judgement.LEAVE, Judgement.ASK_AGAIN):
            return False
        if judgement is not Judgement.REMOVE:
            await keep(self.bus, letter, kept.data, kept.headers)
        if judgement is Judgement.BURY and not await self._told(holding, error):
            return False
        await reading.delete(self.bus, item.stream, item.sequence)
        self._record(item, kept, holding, judgement)
        return True

    def _record(self, item: Item, kept: Kept, holding: Holding, judgement: Judgement) -> None:
        trace = tracing.context_of(kept.headers)
        record = Record(
            process=self.me.id,
            role="keeper",
            request=holding.request,
            outcome="expired" if item.reason == "expired" else "failed",
            began_unix_s=kept.stored_at_s,
            took_s=outside.unix_s() - kept.stored_at_s,
            stages={},
            request_id=holding.request_id,
            trace_id=tracing.trace_id(trace),
            facts={"reason": item.reason, "deliveries": item.deliveries, "how": judgement.name.lower()},
        )
        self.recorder.ended(record, Passed(trace), (), loud=True)

    async def _vanished(self, item: Item, about: AckSubject) -> None:
        """Acked meanwhile, or dealt with; but what was terminated is gone without a word, so that at least its place is kept."""
        if item.reason == "terminated":
            letter = Letter(
                reason=item.reason,
                stream=item.stream,
                sequence=item.sequence,
                stored_at_s=about.stored_at_s,
                deliveries=item.deliveries,
                why=_error(item).message,
                body="missing",
            )
            await keep(self.bus, letter, b"", None)

    def _holding(self, kept: Kept, ack: AckSubject) -> Holding:
        """As a worker would hold it. The ack subject is of no delivery: a NAK on it does nothing."""
        address = intake.address(kept.data, kept.headers, ack, self.rules)
        return Holding(
            bus=self.bus,
            me=self.me,
            request=address.request,
            claim=new_claim(self.me),
            ack_subject=_subject_of(ack),
            reply_to=address.reply_to,
            claim_at=address.claim_at,
            encoding=address.encoding,
            receiver=Receiver.parse(address.receiver),
            request_id=address.request_id,
        )

    async def _claimed(self, holding: Holding) -> Answer | None:
        if holding.receiver is not None:
            silence_s = self.presences.silence_s(holding.receiver, self._connected_s, outside.monotonic_s())
            if silence_s > RECEIVER_SILENT_MAX_S:
                return Gone()
        with anyio.move_on_after(KEEPER_ANSWER_S):
            return await holding.claim_it(follows=None)
        return None

    async def _told(self, holding: Holding, error: ReplyError) -> bool:
        """Whether the receiver has its end. A receiver that does not answer, or has another's claim, is asked again later."""
        frame = Failed(1, holding.request, holding.claim, 0, error.body())
        with anyio.move_on_after(KEEPER_ANSWER_S):
            return await holding.tell(frame, lambda _: None) in (Event.WHOLE, Event.GONE)
        return False


def _measure(klass: str, state: State) -> None:
    metrics.QUEUE_REQUESTS.labels(klass=klass).set(state.messages)
    metrics.QUEUE_BYTES.labels(klass=klass).set(state.bytes)
    metrics.QUEUE_TOKENS.labels(klass=klass).set(state.bytes // BYTES_PER_TOKEN)
    metrics.QUEUE_OLDEST_SECONDS.labels(klass=klass).set(state.now_s - state.first_s if state.messages else 0.0)


def _as_delivered(stream: str, kept: Kept, deliveries: int) -> AckSubject:
    consumer = parse_stored(kept.subject).shard.consumer
    return AckSubject(stream, consumer, deliveries, kept.sequence, kept.stored_at_s, 0)


def _subject_of(ack: AckSubject) -> str:
    return f"{_ACK_PREFIX}{ack.stream}.{ack.consumer}.0.{ack.sequence}.0.{int(ack.stored_at_s * 1e9)}.0"


def _error(item: Item) -> ReplyError:
    if item.reason == "expired":
        return DeadlineExceeded(TOO_LATE)
    if item.reason == "terminated":
        return ReplyLost(f"The request was terminated: {item.why or 'no reason given'}.")
    return ReplyLost(f"The request was delivered {item.deliveries} times, and no worker has finished it.")


# --------------------------------------------------------------------------------------------------------------
# The process


async def run_keeper(config: Config, keeper_id: str, metrics_port: int) -> None:
    """Run until SIGTERM or SIGINT. Raises `OperatorError` for streams that are not as declared."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_live, config, keeper_id, metrics_port)
            async for _ in signals:
                tasks.cancel_scope.cancel()
                return


async def _live(config: Config, keeper_id: str, metrics_port: int) -> None:
    """It serves metrics once it works, so that who has started it sees that it does."""
    me, presences = new_identity(keeper_id), Presences()
    rules = Rules(reply_subjects=config.requests.reply_subjects, timeout_max_s=dict(config.requests.timeout_max_s))
    async with await Bus.connect(config.nats, keeper_id) as bus:
        check_ages(config, await check_streams(bus, config.nats))
        await Watcher(bus, presences, outside.monotonic_s).start()
        keeper = Keeper(bus, rules, me, presences, config.telemetry)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keeper.run)
            tasks.start_soon(measure_lag)
            tasks.start_soon(measure_backlog, bus)
            await keeper.ready.wait()
            metrics.SERVING.set(1)
            if metrics_port:
                metrics.serve(metrics_port, config.metrics.host)
            log.info("keeping", epoch=me.epoch)
