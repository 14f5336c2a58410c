"""What must be true, at every step, at each end and at rest: not what the product believes, but what is.

every step   a ledger's blocks are conserved, no grant is spent twice; what prefills beside them may need is not promised
             a claim that begins a delivery is fenced only once after an accusation; only the one that was last told `go` adds
             tokens to a reply
             a message is acked only when its receiver has its end, or is gone (or its end is sent, if it is only a subscription)
             a NAK takes nothing away from a worker that lives and works on it
             nothing fails inside a process: no handler, no background task, no effect
             a message is deleted only when its receiver has had its end, or is gone
now and then what may grow stays within its bounds, and batch leaves the room of interactive requests
each end     what `ends.py` says
at rest      no message, slot, pull, block, lease, job, engine sequence, open reply or keeper's item is left
             the dead letters and the kept replies are as `ends.py` says
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from gateway.app import Gateway
from pipeline.bus.client import Message
from pipeline.limits import ACCUSE_SILENT_S, PRESENCE_PERIOD_S, TOMBSTONES_MAX
from pipeline.protocol.classes import BATCH
from pipeline.protocol.credits import Consumption, GrantState, Ledger
from pipeline.protocol.messages import Answer, Claim, Fenced, Go, Tokens, answer_decoder, claim_decoder, frames_decoder
from pipeline.protocol.subjects import parse_ack
from tests.simulation.broker import SimBroker, Watch
from tests.simulation.clients import Client, HttpClient
from tests.simulation.ends import Ends
from tests.simulation.fleet import Fleet, Running
from tests.simulation.frames import frames_of, id_of
from tests.simulation.jetstream import ACK
from tests.simulation.loop import PROCESS, Process
from tests.simulation.plan import Plan
from tests.simulation.producers import Keeping, Subscriber
from tests.simulation.restless import written
from tests.simulation.story import Story
from tests.simulation.streams import Stored
from tests.simulation.wire import Link, Publish
from workers.leases import LeaseKeeper, Leases

DELIVERIES_MAX: Final = 30
"""Of one message. Backlog costs no deliveries, and neither does a worker that can do nothing with them."""

HEARD_WITHIN_S: Final = 2 * PRESENCE_PERIOD_S + ACCUSE_SILENT_S
"""After an illness, everybody has heard of a process again, and has no reason to accuse it."""


class Checks(Watch):
    """Looks on, and keeps what it finds wrong."""

    def __init__(self, plan: Plan, broker: SimBroker, story: Story, clients: Mapping[str, Client]) -> None:
        self.broken: list[str] = []
        self.away: set[Running] = set()
        """Gateways that were silent for so long that workers may take them for gone."""
        self.fleet: Fleet
        self.ends = Ends(plan, self.away, lambda request: self.fleet.samplings.get(request, []), lambda: broker.js)
        self._plan, self._broker, self._story, self._clients = plan, broker, story, clients
        self._inboxes: dict[str, Subscriber] = {}
        self._spent: set[tuple[str, str]] = set()
        self._claims: dict[str, Claim] = {}
        self._current: dict[str, Claim] = {}
        self._accused: dict[str, str] = {}
        self._seen: set[str] = set()
        self._newest: dict[tuple[str, int], tuple[str, Process]] = {}
        self._deliveries: Counter[tuple[str, int]] = Counter()
        self._ill_until_s: dict[Process | None, float] = {}

    def ill(self, process: Process | None, for_s: float = 0.0) -> None:
        """A process (or, as None, everybody) may be silent until then, without being dead."""
        self._ill_until_s[process] = max(self._ill_until_s.get(process, 0.0), self._broker.loop.now_s + for_s)

    def wrong(self, what: str) -> None:
        """Something is not as it must be."""
        self.broken.append(what)
        self._story.tell("check", "✗", what)

    # ---- every step

    def begun(self, running: Running) -> None:
        """A process has begun a life: look into it."""
        self.ill(running.process)
        if running.decode is not None:
            self._look_into(running, running.decode.ledger)
        if running.gateway is not None:
            self._look_at(running.gateway)

    def crashed(self, running: Running, error: BaseException) -> None:
        """A process has ended by itself."""
        self.wrong(f"{running} ended by itself: {error!r}")

    def poisoned(self, running: Running) -> None:
        """A process has died of what it read."""
        self._story.tell(str(running), "☠", "dies", "", "of poison")

    def logged(self, event: Mapping[str, Any]) -> None:
        """A process has logged an error."""
        process = PROCESS.get()
        if process is not None and not process.dead:
            said = {name: value for name, value in event.items() if name not in ("exc_info", "level")}
            self.wrong(f"{process.name} logged an error: {said} {event.get('exc_info')!r}")

    def sent(self, process: Process, what: Publish) -> None:
        """A process has sent a message."""
        claim = self._claims.pop(what.subject, None)
        if claim is not None:
            self._answered(claim, answer_decoder.decode(what.data))
        if what.data.startswith(b"-NAK"):
            self._naked(process, what.subject)
        self._story.sent(process.name, what)

    def _answered(self, claim: Claim, answer: Answer) -> None:
        new = claim.claim not in self._seen
        self._seen.add(claim.claim)
        if isinstance(answer, Go):
            self._current[claim.request] = claim
        elif isinstance(answer, Fenced) and new and claim.follows is None:
            current = self._current.get(claim.request)
            if current is None or self._accused.pop(claim.request, None) != current.claim:
                self.wrong(f"{claim.claim} begins a delivery of {claim.request}, and was fenced")

    def missed(self, how: str, message: Message) -> None:
        """The weather has got at a message."""
        self._story.missed(how, message)
        if (client := self._inboxes.get(message.subject)) is not None:
            client.shaken.add(how)

    def listens(self, inbox: str, client: Subscriber) -> None:
        """A producer waits there for its reply, and for nothing else."""
        self._inboxes[inbox] = client

    def arrived(self, link: Link, what: Publish) -> None:
        """The broker has taken a message."""
        client = self._inboxes.get(what.subject)
        if client is not None and not all(isinstance(frame, Tokens) for frame in frames_of(what.data)):
            client.said(self._broker.loop)

    def stored(self, stream: str, stored: Stored) -> None:
        """A stream has a new message."""
        self._story.stored(stream, stored)
        client = self._clients.get(stored.subject.rpartition(".")[2]) if stream == "REPLIES" else None
        if isinstance(client, Keeping):
            client.kept(stored.data)

    def deleted(self, link: Link, stream: str, stored: Stored) -> None:
        """Somebody takes a message out of its stream."""
        if stream.startswith("REQUESTS"):
            self._story.tell(link.process.name, "→", "delete", id_of(stored.data), f"#{stored.sequence} of {stream}")
            self._taken(link, stored, "deleted")

    def delivered(self, link: Link, message: Message) -> None:
        """A stream has handed out a message."""
        if message.reply.startswith(ACK):
            ack = parse_ack(message.reply)
            self._newest[ack.stream, ack.sequence] = (message.reply, link.process)
            self._deliveries[ack.stream, ack.sequence] += 1
            if self._deliveries[ack.stream, ack.sequence] == DELIVERIES_MAX + 1:
                self.wrong(f"#{ack.sequence} of {ack.stream} was delivered more than {DELIVERIES_MAX} times")
        self._story.delivered(link.process.name, message)

    def leased(self, link: Link, stream: str, sequence: int, word: bytes) -> None:
        """Somebody says something about a message, before the consumer hears it."""
        stored = self._broker.js.streams[stream].messages.get(sequence)
        if stored is None or word[:4] not in (b"+ACK", b"+TER"):
            return
        self._taken(link, stored, "acked")

    def _taken(self, link: Link, stored: Stored, how: str) -> None:
        client = self._clients.get(id_of(stored.data))
        if client is not None and not client.may_be_acked and client.at not in self.away:
            self.wrong(f"{link.process.name} {how} {client.order.id}, whose client still waits")

    def _naked(self, process: Process, ack: str) -> None:
        """Whoever holds the last claim loses it by this, where it is another's."""
        read = parse_ack(ack)
        stored = self._broker.js.streams[read.stream].messages.get(read.sequence)
        current = self._current.get(id_of(stored.data)) if stored is not None else None
        newest, taker = self._newest.get((read.stream, read.sequence), ("", process))
        if current is None or current.ack != newest or taker is process:
            return
        holder = self.fleet.named(current.holder.partition(".")[2])
        if holder is None or holder.process is process:
            return
        if current.ack == ack:
            self._accused[current.request] = current.claim
        if holder.begun_epoch != current.epoch:
            return
        if self._is_well(holder.process):
            delivery = "the present" if current.ack == ack else "an old"
            self.wrong(f"{process.name} NAKed {delivery} delivery of {current.request}, which {holder} works on")

    def _is_well(self, process: Process) -> bool:
        """It runs and has been heard by all."""
        ill_until_s = max(self._ill_until_s.get(process, 0.0), self._ill_until_s.get(None, 0.0))
        return process.frozen is None and self._broker.loop.now_s - ill_until_s > HEARD_WITHIN_S

    def _look_into(self, running: Running, ledger: Ledger) -> None:
        consume = ledger.consume

        def checked_consume(ask_id: str, epoch: str, now_s: float) -> Consumption:
            found = consume(ask_id, epoch, now_s)
            if found is Consumption.FRESH:
                if (ledger.epoch, ask_id) in self._spent:
                    self.wrong(f"grant {ask_id} was spent twice at {ledger.decode}")
                self._spent.add((ledger.epoch, ask_id))
            self._balance(running, ledger)
            return found

        ledger.consume = checked_consume  # type: ignore[method-assign]
        for name in ("ask", "give_back", "release", "tick", "withhold"):
            setattr(ledger, name, self._checked(running, ledger, getattr(ledger, name)))

    def _checked(self, running: Running, ledger: Ledger, method: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self._balance(running, ledger)
            return result

        return checked

    def _balance(self, running: Running, ledger: Ledger) -> None:
        try:
            ledger.check()
        except AssertionError as error:
            self.wrong(f"the ledger of {ledger.decode} does not balance: {error}")
        if running.prefill is not None and running.engine is not None:
            info, prefills = running.engine.info, running.prefill.slots.busy
            promised, largest = ledger.blocks - ledger.free, -(-info.max_model_len // info.block_size)
            if promised + prefills * largest > info.kv_blocks:
                self.wrong(f"{running} has promised {promised} blocks beside {prefills} prefills of up to {largest}")

    def _look_at(self, gateway: Gateway) -> None:
        replies, opened = gateway.replies, self._clients
        on_frames, on_claim = replies.on_frames, replies.on_claim

        def framed(message: Message) -> None:
            frames = frames_decoder.decode(message.data)
            clients = ((frame.request, opened[frame.request]) for frame in frames)
            relays = {request: client.relay for request, client in clients if isinstance(client, HttpClient)}
            before = {request: len(relay.receiver.ids) for request, relay in relays.items() if relay is not None}
            on_frames(message)
            for request, length in before.items():
                relay = relays[request]
                if relay is not None and len(relay.receiver.ids) > length:
                    self.grown(request, {frame.claim for frame in frames if frame.request == request})

        def claimed(message: Message) -> None:
            self.claimed(message.reply, claim_decoder.decode(message.data))
            on_claim(message)
            self._claims.pop(message.reply, None)

        replies.on_frames, replies.on_claim = framed, claimed  # type: ignore[method-assign]

    def claimed(self, answer_at: str, claim: Claim) -> None:
        """A receiver has got a claim, and will answer it there."""
        self._claims[answer_at] = claim

    def grown(self, request: str, by: set[str]) -> None:
        """A receiver has taken tokens that came under these claims."""
        current = self._current.get(request)
        if current is None or current.claim not in by:
            has = current.claim if current else "nobody"
            self.wrong(f"{request} took tokens of {', '.join(sorted(by))} while {has} had the go")

    # ---- each end

    def ended(self, client: Client) -> None:
        """A client's request is over: is what it got right?"""
        for what in self.ends.ended(client):
            self.wrong(what)

    # ---- bounds, now and then

    def bounds(self) -> None:
        """What may grow has not grown too far."""
        for consumer in self._broker.js.each_consumer():
            if len(consumer.pulls) > int(consumer.config["max_waiting"]):
                self.wrong(f"{len(consumer.pulls)} pulls wait at {consumer.name}")
        for running in self.fleet.running.values():
            if running.decode is not None:
                self._bound(running, "seats of batch", *_batch_seats(running.decode.ledger))
            if (worker := running.prefill) is not None:
                # One that turns ends what it began with more slots than it is to have.
                config = self._plan.config
                turns = max(config.prefill.slots, config.both.prefill_slots) if running.decode else 0
                slots = max(worker.slots.capacity, turns)
                self._bound(running, "busy slots", worker.slots.busy, slots)
                self._bound(running, "pulls", worker.slots.outstanding, 8 * slots)
                self._bound(running, "jobs", len(worker._jobs._jobs), slots)
                most = worker.slots.weights.slots_most(slots)
                self._bound(running, "slots of batch", worker.slots.busy_of(BATCH), most)
                self._bound(running, "tombstones", len(worker._jobs._cancelled._ids), TOMBSTONES_MAX)
            if running.decode is not None and running.engine is not None:
                self._bound(running, "preemptions", running.engine.usage().preemptions, 0)
                self._bound(running, "disagreements with its engine", running.decode.ledger.disagreements, 0)

    def _bound(self, running: Running, what: str, have: int, most: int) -> None:
        if have > most:
            self.wrong(f"{running} has {have} {what}; {most} is the most")

    # ---- at rest

    def kept(self) -> None:
        """Nothing happens any more: is what the streams keep right?"""
        for what in self.ends.kept(self._broker.js, self._clients.values()):
            self.wrong(what)

    def unrest(self) -> list[str]:
        """What is still there that should not be, once nobody waits for anything."""
        found = []
        for name, stream in self._broker.js.streams.items():
            if name.startswith("REQUESTS") and stream.messages:
                found.append(f"{name} holds {[id_of(stored.data) for stored in stream.messages.values()]}")
        if slots := [one for one in self._broker.js.streams["KV_conversations"].messages.values() if one.data]:
            found.append(f"{len(slots)} conversations are held")
        found += [
            f"{consumer.stream.name}/{consumer.name} has {len(consumer.pending)} unacked"
            for consumer in self._broker.js.each_consumer()
            if consumer.pending or consumer.todo
        ]
        for running in self.fleet.running.values():
            found += [f"{running} has {what}" for what in self._held(running)]
        return found

    def _held(self, running: Running) -> list[str]:
        left: dict[str, int] = {}
        if running.engine is not None:
            usage = running.engine.usage()
            left["engine sequences"] = usage.running + usage.waiting
        if (worker := running.prefill) is not None:
            left |= {
                "busy slots": worker.slots.busy,
                "held deliveries": len(worker._held) + len(worker.slots._held),
                "jobs": len(worker._jobs._jobs),
                "leases": _leases(worker.desk.leases),
                "queued tokens": worker.queued_tokens,
                "prompts before its engine": len(worker.desk.visits._waiting),
                "pulls that do not stand": self._pulls_astray(running),
            }
        if (decoder := running.decode) is not None:
            left |= {
                "blocks granted": decoder.ledger.blocks - decoder.ledger.free,
                "asks": len(decoder.ledger._entries),
                "jobs": len(decoder._jobs._jobs),
                "leases": _leases(decoder.desk.leases),
            }
        if running.loops is not None:
            left["turns that go on"] = int(running.loops.turning)
        if running.gateway is not None:
            left["open replies"] = len(running.gateway.replies)
            left["routes that are not the bucket's"] = len(
                running.gateway.routing.routes.items() ^ written(self._broker.js).items()
            )
        if running.keeper is not None:
            left["items in work"] = running.keeper._busy
        return [f"{count} {what}" for what, count in left.items() if count]

    def _pulls_astray(self, running: Running) -> int:
        """Pulls that the worker counts on and the broker does not have, which would starve it; and where its two counts differ.

        The other way round, more pulls than are counted, is left to the surplus rule: no delivery says which pull it answers.
        """
        assert running.prefill is not None
        standing = sum(
            pull.left
            for consumer in self._broker.js.each_consumer()
            for pull in consumer.pulls
            if pull.link.process is running.process and not pull.over
        )
        slots, puller = running.prefill.slots.outstanding, running.prefill._puller.outstanding_total
        return max(0, puller - standing) + abs(slots - puller)


def _batch_seats(ledger: Ledger) -> tuple[int, int]:
    """Seats that batch holds, and the most that it may: its bound, or those of one request alone."""
    granted = [one for one in ledger._entries.values() if one.klass == BATCH and one.state is not GrantState.WAITING]
    alone = max((one.seats for one in granted), default=0) if len(granted) == 1 else 0
    assert ledger._engine_seats is not None
    return sum(one.seats for one in granted), max(ledger.weights.most(ledger._engine_seats), alone)


def _leases(keeper: Leases) -> int:
    assert isinstance(keeper, LeaseKeeper), "leases are kept on the loop here"
    return len(keeper._held)
