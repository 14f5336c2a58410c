"""Who gets what is stored: one durable pull consumer with the `prioritized` policy, as measured on nats-server 2.15.

* The lowest priority that has a waiting pull is served; equal ones in turn. What waits to be delivered again goes first.
* A pull ends with its batch, at its expiry (408, with what is left of it), or with the interest in its inbox.
* The lease: a message not acked within `ack_wait` of its delivery or of the last `+WPI` is delivered again. Whoever says ack, NAK
  or `+WPI` is heard, the holder of an older delivery too.
"""

import random
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pipeline.bus.client import Message
from tests.simulation.streams import Stored, Stream

if TYPE_CHECKING:
    from tests.simulation.broker import SimBroker
    from tests.simulation.wire import Link


class _Ask(msgspec.Struct):
    """The body of a pull request."""

    batch: int = 1
    expires: int = 0
    group: str = ""
    priority: int = 0


class _Delay(msgspec.Struct):
    delay: int = 0


class Pull:
    """One waiting pull request."""

    __slots__ = ("left", "link", "over", "priority", "reply")

    def __init__(self, link: "Link", reply: str, ask: _Ask) -> None:
        self.link = link
        self.reply = reply
        self.left = ask.batch
        self.priority = ask.priority
        self.over = False


class Pending:
    """A delivered message that is not acked: how often it was delivered, and until when its lease runs."""

    __slots__ = ("delivered", "due_s", "queued")

    def __init__(self) -> None:
        self.delivered = 0
        self.due_s = 0.0
        self.queued = False


_read_ask: Final = msgspec.json.Decoder(_Ask).decode
_read_delay: Final = msgspec.json.Decoder(_Delay).decode


class Consumer:
    """One durable consumer of a stream."""

    def __init__(self, broker: "SimBroker", stream: Stream, config: Mapping[str, Any]) -> None:
        self.config = config
        self.name: str = config["name"]
        self.stream = stream
        self.filter: str = config.get("filter_subject", ">")
        self.pending: dict[int, Pending] = {}
        self.todo: deque[int] = deque()
        self.again: deque[int] = deque()
        self.pulls: list[Pull] = []
        self._broker = broker
        self._grouped = "priority_groups" in config
        self._ack_wait_s = config["ack_wait"] / 1e9
        self._waiting_max: int = config["max_waiting"]
        self._pending_max: int = config["max_ack_pending"]
        self._prefix = f"$JS.ACK.{stream.name}.{self.name}"
        self._deliveries = 0
        self._newest = 0

    @property
    def delivered(self) -> dict[str, int]:
        """The newest delivery, and the newest message that was delivered."""
        return {"consumer_seq": self._deliveries, "stream_seq": self._newest}

    # ---- pulls

    def pull(self, link: "Link", reply: str, body: bytes) -> None:
        """A pull request."""
        ask = _read_ask(body)
        if self._grouped and not ask.group:
            self._broker.status(reply, 400, "Priority Group missing")
            return
        self.pulls = [pull for pull in self.pulls if not pull.over and self._wanted(pull)]
        if len(self.pulls) >= self._waiting_max:
            self._broker.status(reply, 409, "Exceeded MaxWaiting")
            return
        pull = Pull(link, reply, ask)
        self.pulls.append(pull)
        self.serve()
        if not pull.over:
            self._broker.later(ask.expires / 1e9, self._expire, pull)

    def forget(self, link: "Link") -> None:
        """A connection has gone, and its pulls with it."""
        for pull in self.pulls:
            pull.over |= pull.link is link
        self.pulls = [pull for pull in self.pulls if not pull.over]

    def serve(self) -> None:
        """Deliver what can be delivered."""
        while self._broker.ready and len(self.pending) < self._pending_max:
            sequence = self._first()
            if sequence is None or (pull := self._best()) is None:
                return
            if sequence in self.pending:
                self.again.popleft()
            else:
                self.todo.popleft()
            self._deliver(self.stream.messages[sequence], pull)

    def _first(self) -> int | None:
        """The message to deliver next: what is due again comes before what is new."""
        while self.again:
            known = self.pending.get(self.again[0])
            if known is not None and known.queued:
                return self.again[0]
            self.again.popleft()
        return self.todo[0] if self.todo else None

    def _best(self) -> Pull | None:
        """The pull to serve: it goes to the end of the line of its equals."""
        best: Pull | None = None
        for pull in list(self.pulls):
            if pull.over or not self._wanted(pull):
                pull.over = True
                self.pulls.remove(pull)
            elif best is None or pull.priority < best.priority:
                best = pull
        if best is not None:
            self.pulls.remove(best)
            best.left -= 1
            if best.left:
                self.pulls.append(best)
            else:
                best.over = True
        return best

    def _wanted(self, pull: Pull) -> bool:
        return pull.link.alive and bool(self._broker.interest.of(pull.reply))

    def _expire(self, pull: Pull) -> None:
        if pull.over or not self._wanted(pull):
            return
        pull.over = True
        self.pulls.remove(pull)
        left = {"Nats-Pending-Messages": str(pull.left), "Nats-Pending-Bytes": "0"}
        self._broker.status(pull.reply, 408, "Request Timeout", left)

    # ---- leases

    def _deliver(self, stored: Stored, pull: Pull) -> None:
        pending = self.pending.setdefault(stored.sequence, Pending())
        pending.queued = False
        pending.delivered += 1
        self._deliveries += 1
        self._newest = max(self._newest, stored.sequence)
        self._lease(stored.sequence, pending)
        at_ns = int(stored.at_s * 1e6) * 1000
        numbers = f"{pending.delivered}.{stored.sequence}.{self._deliveries}.{at_ns}.{len(self.todo)}"
        ack = f"{self._prefix}.{numbers}"
        self._broker.deliver(pull.reply, Message(stored.subject, ack, stored.data, stored.headers))

    def _lease(self, sequence: int, pending: Pending) -> None:
        pending.due_s = self._broker.loop.now_s + self._ack_wait_s
        self._broker.later(self._ack_wait_s, self._due, sequence, pending)

    def _due(self, sequence: int, pending: Pending) -> None:
        """The lease may have ended."""
        if self.pending.get(sequence) is not pending or pending.queued:
            return
        if not self._broker.ready or self._broker.loop.now_s < pending.due_s - 1e-9:
            return  # the later timer of a renewed lease, or of a broker that has come back, sees to it
        self._queue(sequence, pending)

    def _queue(self, sequence: int, pending: Pending) -> None:
        pending.queued = True
        self.again.append(sequence)
        self.serve()

    def said(self, sequence: int, delivery: int, word: bytes) -> None:
        """`+ACK`, `-NAK`, `+WPI` or `+TERM` of whoever says it. What names no delivery (0) hits none."""
        pending = self.pending.get(sequence)
        if pending is None or not delivery:
            return
        if word in (b"", b"+ACK") or word.startswith(b"+TERM"):
            self.done(sequence)
        elif word.startswith(b"+WPI"):
            self._lease(sequence, pending)
        elif word.startswith(b"-NAK"):
            delay_s = _read_delay(word[4:].strip() or b"{}").delay / 1e9
            if delay_s:
                pending.due_s = self._broker.loop.now_s + delay_s
                self._broker.later(delay_s, self._due, sequence, pending)
            elif not pending.queued:
                self._queue(sequence, pending)

    def done(self, sequence: int) -> None:
        """A work queue's message is over once it is acked."""
        del self.pending[sequence]
        self.stream.remove(sequence)
        self.serve()

    def stored(self, sequence: int) -> None:
        """A new message."""
        self.todo.append(sequence)
        self.serve()

    def dropped(self, sequence: int) -> None:
        """The message is gone from the stream: deleted, or too old."""
        self.pending.pop(sequence, None)
        if sequence in self.todo:
            self.todo.remove(sequence)

    def forget_newest(self, chance: random.Random, acked: list[Stored]) -> None:
        """The broker dies: what had not been written down. `acked` are messages whose removal is undone."""
        for stored in acked:
            self.stream.put_back(stored)
            self.pending[stored.sequence] = Pending()
        if chance.random() < 0.5:
            self._deliveries = chance.randrange(self._deliveries + 1)
        for pending in self.pending.values():
            if chance.random() < 0.5:
                pending.delivered = chance.randrange(pending.delivered + 1)

    def restarted(self) -> None:
        """The broker is back: the state is as it was on disk, and leases run anew."""
        for sequence, pending in self.pending.items():
            if not pending.queued:
                self._lease(sequence, pending)
        self.serve()
