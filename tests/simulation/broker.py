"""The simulated broker: subjects and who listens, the weather between processes, and the broker's own death and return.

Core messages are at most once: the weather may lose, repeat or overtake them. What a stream has confirmed survives a `kill -9`.
What does not: connections, pulls, what is in flight, and at times the newest acks and the counts of deliveries, which a consumer
writes down only now and then.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from pipeline.bus.client import Message
from pipeline.protocol.subjects import matches
from tests.simulation.consumers import Consumer
from tests.simulation.jetstream import ACK, API, JetStream, encode
from tests.simulation.loop import UNIX_S, Process, VirtualLoop
from tests.simulation.streams import Refused, Stored
from tests.simulation.wire import Link, Publish, SimClient, Subscribe, Up

LATENCY_S: Final = (0.0002, 0.0012)

READY_WITHIN_S: Final = 0.15
"""A restarted broker takes connections at once; its streams need this long."""

ACKS_FORGOTTEN_S: Final = 0.02
"""Acks of the last moment before a kill may not be on disk."""


class Interest:
    """Who listens where: subscriptions by subject."""

    def __init__(self) -> None:
        self._exact: dict[str, dict[tuple[Link, int], None]] = {}
        self._star: dict[str, dict[tuple[Link, int], None]] = {}
        self._rest: dict[str, dict[tuple[Link, int], None]] = {}

    def add(self, subject: str, link: Link, number: int) -> None:
        """One more."""
        table, key = self._place(subject)
        table.setdefault(key, {})[(link, number)] = None

    def remove(self, subject: str, link: Link, number: int) -> None:
        """One less."""
        table, key = self._place(subject)
        here = table.get(key, {})
        here.pop((link, number), None)
        if not here:
            table.pop(key, None)

    def of(self, subject: str) -> list[tuple[Link, int]]:
        """Who gets a message, in order."""
        found = [*self._exact.get(subject, ()), *self._star.get(subject.rpartition(".")[0], ())]
        for pattern, here in self._rest.items():
            if matches(pattern, subject):
                found += here
        return found

    def _place(self, subject: str) -> tuple[dict[str, dict[tuple[Link, int], None]], str]:
        if "*" not in subject and ">" not in subject:
            return self._exact, subject
        head, _, tail = subject.rpartition(".")
        if tail == "*" and "*" not in head:
            return self._star, head
        return self._rest, subject


class Weather:
    """What happens to core messages for a while: shares of them that are lost, repeated, overtaken."""

    def __init__(self, lost: float = 0.0, repeated: float = 0.0, late: float = 0.0) -> None:
        self.lost = lost
        self.repeated = repeated
        self.late = late


class Watch:
    """What is shown to whoever looks on. Nothing here changes anything."""

    def sent(self, process: Process, what: Publish) -> None:
        """A process has sent a message: it may never arrive."""

    def arrived(self, link: Link, what: Publish) -> None:
        """The broker has taken a message."""

    def delivered(self, link: Link, message: Message) -> None:
        """A stream's message, or the broker's own answer, is on its way to a process."""

    def missed(self, how: str, message: Message) -> None:
        """The weather has got at a message."""

    def leased(self, link: Link, stream: str, sequence: int, word: bytes) -> None:
        """Somebody says something about a delivered message; the consumer has not heard it yet."""

    def stored(self, stream: str, stored: Stored) -> None:
        """A stream has a new message."""

    def deleted(self, link: Link, stream: str, stored: Stored) -> None:
        """Somebody takes a message out of its stream; it is still there."""


CLEAR: Final = Weather()


class SimBroker:
    """One nats-server."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.chance = random.Random(f"{seed}/broker")
        self.interest = Interest()
        self.js = JetStream(self)
        self.watch = Watch()
        self.weather = CLEAR
        self.up = True
        self.ready = True
        self._links: dict[Link, None] = {}
        self._acked: deque[tuple[float, Consumer, Stored]] = deque(maxlen=64)

    def later(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Do something of the broker's own after a while."""
        self.loop.call_at(self.loop.now_s + delay_s, act, *args, context=self.loop.context)

    def latency_s(self) -> float:
        """Of the next bytes on a connection."""
        least_s, most_s = LATENCY_S
        return least_s + (most_s - least_s) * self.chance.random()

    # ---- connections

    def attach(self, client: SimClient) -> Link | None:
        """A new connection, if the broker is up."""
        if not self.up:
            return None
        link = Link(self, client)
        self._links[link] = None
        return link

    def left(self, link: Link) -> None:
        """A process has closed its connection: what it wrote before arrives."""
        link.break_off(keep_share=1.0)
        self._forget(link)

    def died(self, process: Process) -> None:
        """A process is dead. Its kernel still sends a part of what it had written."""
        for link in self.links_of(process):
            link.break_off(keep_share=self.chance.random())
            self._forget(link)

    def links_of(self, process: Process) -> list[Link]:
        """Its connections."""
        return [link for link in self._links if link.process is process]

    def cut(self, link: Link) -> None:
        """A connection breaks; its process learns of it a moment later."""
        link.break_off()
        self._forget(link)
        self.loop.call_at(self.loop.now_s + self.latency_s(), link.client.lost, link, context=link.process.context)

    def _forget(self, link: Link) -> None:
        self._links.pop(link, None)
        for number, subject in link.subjects.items():
            self.interest.remove(subject, link, number)
        link.subjects.clear()
        for consumer in self.js.each_consumer():
            consumer.forget(link)

    # ---- what comes up

    def take(self, link: Link, what: Up) -> None:
        """Something has arrived on a connection."""
        if isinstance(what, Publish):
            self.watch.arrived(link, what)
            self._published(link, what)
        elif isinstance(what, Subscribe):
            self._subscribed(link, what)
        else:
            link.deliver(what)

    def _subscribed(self, link: Link, what: Subscribe) -> None:
        if what.subject is None:
            subject = link.subjects.pop(what.number, None)
            if subject is not None:
                self.interest.remove(subject, link, what.number)
        else:
            link.subjects[what.number] = what.subject
            self.interest.add(what.subject, link, what.number)

    def _published(self, link: Link, what: Publish) -> None:
        subject = what.subject
        if subject.startswith("$JS."):
            self._to_jetstream(link, what)
        elif (stream := self.js.stream_of(subject)) is not None:
            # A stream is one more subscriber: others hear of a message too, also of one that the stream refuses.
            self._hear(what)
            if self.ready and not self._lost(what):
                self._store(stream.name, what)
            elif not self.ready:
                self.no_responders(what)
        elif not self._hear(what):
            self.no_responders(what)

    def _to_jetstream(self, link: Link, what: Publish) -> None:
        if not self.ready:
            self.no_responders(what)
        elif self._lost(what):
            return
        elif what.subject.startswith(API):
            self.js.call(link, what)
        elif what.subject.startswith(ACK):
            self._said(link, what)

    def _lost(self, what: Publish) -> bool:
        lost = self.weather is not CLEAR and self.chance.random() < self.weather.lost
        if lost:
            self.watch.missed("lost", Message(what.subject, what.reply, what.data, what.headers))
        return lost

    def _store(self, stream: str, what: Publish) -> None:
        kept = self.js.streams[stream]
        try:
            sequence, duplicate = kept.store(what.subject, what.data, what.headers, UNIX_S + self.loop.now_s)
        except Refused as refused:
            self.answer(what.reply, encode({"error": refused.body, "stream": stream, "seq": 0}))
            return
        self.answer(what.reply, encode({"stream": stream, "seq": sequence, "duplicate": duplicate}))
        if duplicate:
            return
        self.watch.stored(stream, kept.messages[sequence])
        self.js.age(kept)
        if lives := (what.headers or {}).get("Nats-TTL"):
            self.later(float(lives.removesuffix("s")), self.js.end, kept, sequence)
        if (consumer := self.js.consumer_of(kept.messages[sequence], kept)) is not None:
            consumer.stored(sequence)

    def _said(self, link: Link, what: Publish) -> None:
        _, _, stream, name, _, sequence, delivery, *_ = what.subject.split(".")
        consumer = self.js.consumers.get(stream, {}).get(name)
        if consumer is None:
            self.no_responders(what)
            return
        number = int(sequence)
        self.watch.leased(link, stream, number, what.data)
        before = consumer.stream.messages.get(number)
        consumer.said(number, int(delivery), what.data)
        if before is not None and number not in consumer.stream.messages:
            self._acked.append((self.loop.now_s, consumer, before))
        self.answer(what.reply, b"")

    # ---- what goes down

    def _hear(self, what: Publish) -> bool:
        """Whether anybody subscribes to it, who gets it now."""
        found = self.interest.of(what.subject)
        message = Message(what.subject, what.reply, what.data, what.headers)
        for link, number in found:
            self._core(link, number, message)
        return bool(found)

    def _core(self, link: Link, number: int, message: Message) -> None:
        """One core message to one subscriber, through the weather."""
        weather = self.weather
        if weather is CLEAR:
            link.deliver((number, message))
            return
        drawn = self.chance.random()
        if drawn < weather.lost:
            self.watch.missed("lost", message)
            return
        if drawn < weather.lost + weather.late:
            self.watch.missed("late", message)
            self.later(0.05 * self.chance.random(), link.deliver, (number, message))
            return
        link.deliver((number, message))
        if drawn > 1.0 - weather.repeated:
            self.watch.missed("repeated", message)
            self.later(0.05 * self.chance.random(), link.deliver, (number, message))

    def deliver(self, inbox: str, message: Message) -> None:
        """A stream's message to whoever listens on a pull's inbox. It may be lost, but comes once and in order."""
        for link, number in self.interest.of(inbox)[:1]:
            if self.weather is not CLEAR and self.chance.random() < self.weather.lost:
                self.watch.missed("lost", message)
            else:
                self.watch.delivered(link, message)
                link.deliver((number, message))

    def answer(self, reply: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """The broker's own answer to a request."""
        if reply:
            self.deliver(reply, Message(reply, "", data, headers))

    def answer_all(self, reply: str, answers: list[tuple[bytes, Mapping[str, str]]]) -> None:
        """An answer of several messages. A connection that carries one carries all: none is lost alone."""
        if self.weather is not CLEAR and self.chance.random() < self.weather.lost:
            self.watch.missed("lost", Message(reply, "", *answers[-1]))
            return
        for link, number in self.interest.of(reply)[:1]:
            for data, headers in answers:
                link.deliver((number, Message(reply, "", data, headers)))

    def status(self, reply: str, code: int, why: str, more: Mapping[str, str] | None = None) -> None:
        """A status line: no data, and headers."""
        self.answer(reply, b"", {"Status": str(code), "Description": why, **(more or {})})

    def no_responders(self, what: Publish) -> None:
        """Nobody listens: a request is told so."""
        if what.reply:
            self.status(what.reply, 503, "")

    # ---- its own death

    def kill(self) -> None:
        """`kill -9`: what was in flight is gone, what was stored is on disk."""
        self.up = self.ready = False
        for link in list(self._links):
            self.cut(link)
        self._forget_newest()

    def restart(self) -> None:
        """Back, with connections at once and streams a moment later."""
        self.up = True
        self.later(READY_WITHIN_S * self.chance.random(), self._ready)

    def _ready(self) -> None:
        if not self.up or self.ready:
            return
        self.ready = True
        for consumer in self.js.each_consumer():
            consumer.restarted()

    def _forget_newest(self) -> None:
        """What a consumer had not written down: at times acks of the last moment, and counts."""
        since_s = self.loop.now_s - ACKS_FORGOTTEN_S
        lost = [(of, stored) for at_s, of, stored in self._acked if at_s > since_s and self.chance.random() < 0.5]
        for consumer in self.js.each_consumer():
            consumer.forget_newest(self.chance, [stored for of, stored in lost if of is consumer])
        self._acked.clear()
