"""What must be true, at every step, at each end and at rest: not what the product believes, but what is.

every step   a ledger's blocks are conserved, no grant is spent twice
             a claim that begins a delivery is never fenced; only the one that was last told `go` adds tokens to a reply
             a message is acked only when its receiver has its end, or is gone
             a NAK takes nothing away from a worker that lives and works on it
             nothing fails inside a process: no handler, no background task, no effect
each end     a whole reply is the undisturbed one, token for token; what an error or a leaving cut off is a part of it
             an error has a cause that was drawn
at rest      no message, slot, pull, block, lease, job, engine sequence or open reply is left
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from gateway.app import Gateway
from pipeline.bus.client import Message
from pipeline.errors import ErrorBody
from pipeline.limits import ACCUSE_SILENT_S, PRESENCE_PERIOD_S, TOMBSTONES_MAX
from pipeline.protocol.credits import Consumption, Ledger
from pipeline.protocol.messages import Answer, Claim, Done, Fenced, Go, answer_decoder, claim_decoder, frames_decoder
from pipeline.protocol.subjects import parse_ack
from tests.simulation.broker import SimBroker, Watch
from tests.simulation.clients import Client, undisturbed
from tests.simulation.fleet import Fleet, Running
from tests.simulation.jetstream import ACK
from tests.simulation.loop import PROCESS, Process
from tests.simulation.plan import TIMEOUT_S, Plan
from tests.simulation.story import Story
from tests.simulation.wire import Link, Publish
from workers.leases import LeaseKeeper, Leases

REFUSALS: Final = {"model": "model_not_found", "max_tokens": "context_length_exceeded", "temperature": "invalid_value"}
"""What a malformed field is answered with."""


DELIVERIES_MAX: Final = 30
"""Of one message. Backlog costs no deliveries, and neither does a worker that can do nothing with them."""

HEARD_WITHIN_S: Final = 2 * PRESENCE_PERIOD_S + ACCUSE_SILENT_S
"""After an illness, everybody has heard of a process again, and has no reason to accuse it."""


class Checks(Watch):
    """Looks on, and keeps what it finds wrong."""

    def __init__(self, plan: Plan, broker: SimBroker, story: Story, clients: Mapping[str, Client]) -> None:
        self.broken: list[str] = []
        self.caused: Counter[str] = Counter()
        self.away: set[Running] = set()
        """Gateways that were silent for so long that workers may take them for gone."""
        self.fleet: Fleet
        self._plan, self._broker, self._story, self._clients = plan, broker, story, clients
        self._spent: set[tuple[str, str]] = set()
        self._claims: dict[str, Claim] = {}
        self._current: dict[str, Claim] = {}
        self._seen: set[str] = set()
        self._newest: dict[tuple[str, int], tuple[str, Process]] = {}
        self._deliveries: Counter[tuple[str, int]] = Counter()
        self._failed = 0
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
            self._look_into(running.decode.ledger)
        if running.gateway is not None:
            self._look_at(running.gateway)

    def crashed(self, running: Running, error: BaseException) -> None:
        """A process has ended by itself."""
        self.wrong(f"{running} ended by itself: {error!r}")

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
            self.wrong(f"{claim.claim} begins a delivery of {claim.request}, and was fenced")

    def missed(self, how: str, message: Message) -> None:
        """The weather has got at a message."""
        self._story.missed(how, message)

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
        client = self._clients.get(str(msgspec.msgpack.decode(stored.data).get("id")))
        if client is not None and not client.over and client.gateway not in self.away:
            self.wrong(f"{link.process.name} acked {client.order.id}, whose client still waits")

    def _naked(self, process: Process, ack: str) -> None:
        """Whoever holds the last claim loses it by this, where it is another's."""
        read = parse_ack(ack)
        stored = self._broker.js.streams[read.stream].messages.get(read.sequence)
        current = self._current.get(_id_of(stored.data)) if stored is not None else None
        newest, taker = self._newest[read.stream, read.sequence]
        if current is None or current.ack != newest or taker is process:
            return
        holder = self.fleet.named(current.holder.partition(".")[2])
        if holder is None or holder.process is process or holder.begun_epoch != current.epoch:
            return
        if self._is_well(holder.process):
            delivery = "the present" if current.ack == ack else "an old"
            self.wrong(f"{process.name} NAKed {delivery} delivery of {current.request}, which {holder} works on")

    def _is_well(self, process: Process) -> bool:
        """It runs and has been heard by all."""
        ill_until_s = max(self._ill_until_s.get(process, 0.0), self._ill_until_s.get(None, 0.0))
        return process.frozen is None and self._broker.loop.now_s - ill_until_s > HEARD_WITHIN_S

    def _look_into(self, ledger: Ledger) -> None:
        consume = ledger.consume

        def checked_consume(ask_id: str, epoch: str) -> Consumption:
            found = consume(ask_id, epoch)
            if found is Consumption.FRESH:
                if (ledger.epoch, ask_id) in self._spent:
                    self.wrong(f"grant {ask_id} was spent twice at {ledger.decode}")
                self._spent.add((ledger.epoch, ask_id))
            self._balance(ledger)
            return found

        ledger.consume = checked_consume  # type: ignore[method-assign]
        for name in ("ask", "give_back", "release", "tick"):
            setattr(ledger, name, self._checked(ledger, getattr(ledger, name)))

    def _checked(self, ledger: Ledger, method: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            result = method(*args)
            self._balance(ledger)
            return result

        return checked

    def _balance(self, ledger: Ledger) -> None:
        try:
            ledger.check()
        except AssertionError as error:
            self.wrong(f"the ledger of {ledger.decode} does not balance: {error}")

    def _look_at(self, gateway: Gateway) -> None:
        replies, opened = gateway.replies, self._clients
        on_frames, on_claim = replies.on_frames, replies.on_claim

        def framed(message: Message) -> None:
            frames = frames_decoder.decode(message.data)
            relays = {frame.request: opened[frame.request].relay for frame in frames}
            before = {request: len(relay.receiver.ids) for request, relay in relays.items() if relay is not None}
            on_frames(message)
            for request, length in before.items():
                relay = relays[request]
                if relay is not None and len(relay.receiver.ids) > length:
                    self._grown(request, {frame.claim for frame in frames if frame.request == request})

        def claimed(message: Message) -> None:
            self._claims[message.reply] = claim_decoder.decode(message.data)
            on_claim(message)
            self._claims.pop(message.reply, None)

        replies.on_frames, replies.on_claim = framed, claimed  # type: ignore[method-assign]

    def _grown(self, request: str, by: set[str]) -> None:
        current = self._current.get(request)
        if current is None or current.claim not in by:
            has = current.claim if current else "nobody"
            self.wrong(f"{request} took tokens of {', '.join(sorted(by))} while {has} had the go")

    # ---- each end

    def ended(self, client: Client) -> None:
        """A client's request is over: is what it got right?"""
        order, ids = client.order, client.relay.receiver.ids if client.relay else []
        if order.bad:
            if isinstance(client.end, Done):
                self.wrong(f"{order.id} has a bad {order.bad}, and got a reply")
        else:
            self._same(client, *undisturbed(order, self._plan.config.simulated.seed))
        if isinstance(client.end, ErrorBody) and (why := self._unjust(client, client.end)):
            self.wrong(
                f"{order.id} ended with {client.end.code} after {len(ids)} tokens, and {why}: {client.end.message}"
            )

    def _same(self, client: Client, want_ids: list[int], want_text: str) -> None:
        assert client.relay is not None
        order, ids = client.order, client.relay.receiver.ids
        whole = isinstance(client.end, Done)
        if ids != want_ids[: len(ids)] or not want_text.startswith(client.text):
            self.wrong(f"{order.id} got other tokens than the undisturbed reply: {ids} for {want_ids}")
        elif whole and (len(ids) != len(want_ids) or client.text != want_text):
            self.wrong(
                f"{order.id} is called whole, with {client.text!r} of {want_text!r}, {len(ids)} of {len(want_ids)} tokens"
            )

    def _unjust(self, client: Client, error: ErrorBody) -> str:
        """Why this error has no cause that was drawn; empty where it has one."""
        order = client.order
        match error.code:
            case "deadline":
                return "" if order.timeout_s < TIMEOUT_S else "it had time enough"
            case "broker_unavailable":
                return "" if order.timeout_s < 2.0 else "the broker was never away so long"
            case "engine_failed":
                self._failed += 1
                return "" if self._failed <= self.caused["engine_fails"] else "no engine was told to fail"
            case "reply_lost":
                return "" if client.gateway in self.away else "its gateway was not away"
            case _:
                return "" if error.code == REFUSALS.get(order.bad or "") else "nothing was drawn that leads to it"

    # ---- bounds, now and then

    def bounds(self) -> None:
        """What may grow has not grown too far."""
        for consumer in self._broker.js.each_consumer():
            if len(consumer.pulls) > int(consumer.config["max_waiting"]):
                self.wrong(f"{len(consumer.pulls)} pulls wait at {consumer.name}")
        for running in self.fleet.running.values():
            if (worker := running.prefill) is not None:
                self._bound(running, "busy slots", worker.slots.busy, worker.slots.capacity)
                self._bound(running, "pulls", worker.slots.outstanding, 8 * worker.slots.capacity)
                self._bound(running, "jobs", len(worker._jobs._jobs), worker.slots.capacity)
                self._bound(running, "tombstones", len(worker._jobs._cancelled._ids), TOMBSTONES_MAX)

    def _bound(self, running: Running, what: str, have: int, most: int) -> None:
        if have > most:
            self.wrong(f"{running} has {have} {what}; {most} is the most")

    # ---- at rest

    def unrest(self) -> list[str]:
        """What is still there that should not be, once nobody waits for anything."""
        found = []
        for name, stream in self._broker.js.streams.items():
            if name.startswith("REQUESTS") and stream.messages:
                found.append(f"{name} holds {[_id_of(stored.data) for stored in stream.messages.values()]}")
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
                "pulls that do not stand": self._pulls_astray(running),
            }
        if (decoder := running.decode) is not None:
            left |= {
                "blocks granted": decoder.ledger.blocks - decoder.ledger.free,
                "asks": len(decoder.ledger._entries),
                "jobs": len(decoder._jobs._jobs),
                "leases": _leases(decoder.desk.leases),
            }
        if running.gateway is not None:
            left["open replies"] = len(running.gateway.replies)
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


def _leases(keeper: Leases) -> int:
    assert isinstance(keeper, LeaseKeeper), "leases are kept on the loop here"
    return len(keeper._held)


def _id_of(data: bytes) -> str:
    return str(msgspec.msgpack.decode(data).get("id"))
