"""The broker's shards: what waits, and standing pulls by priority, as measured on nats-server 2.15.

The lowest priority that has a waiting pull is served, equal ones in turn; what was given back goes first.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from pipeline.bus.puller import EXPIRES_S
from pipeline.limits import PULL_RANK_MAX
from pipeline.planning.events import Events
from pipeline.planning.source import HOP_S
from pipeline.planning.traffic import Request
from pipeline.protocol.slots import Offer
from pipeline.protocol.subjects import Shard


class Puller(Protocol):
    """A worker, as the broker knows it."""

    def delivered(self, shard: Shard, request: Request, backlog: int, again: bool) -> None:
        """A message has come, with `backlog` more behind it; `again`: it had been given back."""

    def ended(self, ended: list[tuple[Shard, int]]) -> None:
        """So many pulls of these shards have expired."""


class _Pull:
    __slots__ = ("expires_s", "left", "shard", "worker")

    def __init__(self, worker: Puller, shard: Shard, left: int, expires_s: float) -> None:
        self.worker, self.shard, self.left, self.expires_s = worker, shard, left, expires_s


class _Queue:
    __slots__ = ("pulls", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[Request, bool]] = deque()
        self.pulls: tuple[deque[_Pull], ...] = tuple(deque() for _ in range(PULL_RANK_MAX + 1))


class Broker:
    """All shards of one class. Each thing said to it, and each that it says, takes one hop."""

    def __init__(self, events: Events, shards: list[Shard]) -> None:
        self._events = events
        self._queues = {shard: _Queue() for shard in shards}
        self._standing: deque[_Pull] = deque()
        self.returned = 0
        """Messages that were given back."""

    def publish(self, shard: Shard, request: Request) -> None:
        """A request has arrived here."""
        queue = self._queues[shard]
        queue.waiting.append((request, False))
        self._serve(shard, queue)

    def give_back(self, shard: Shard, request: Request) -> None:
        """A NAK has arrived here."""
        self.returned += 1
        queue = self._queues[shard]
        queue.waiting.appendleft((request, True))
        self._serve(shard, queue)

    def pull(self, worker: Puller, offers: list[Offer]) -> None:
        """Pulls have arrived here, made one hop ago."""
        for offer in offers:
            pull = _Pull(worker, offer.shard, offer.batch, self._events.now_s + EXPIRES_S)
            if not self._standing:
                self._events.at(pull.expires_s, self._expire)
            self._standing.append(pull)
            queue = self._queues[offer.shard]
            alike = queue.pulls[offer.priority]
            while alike and not (alike[0].left and alike[0].expires_s > self._events.now_s):
                alike.popleft()
            alike.append(pull)
            if queue.waiting:
                self._serve(offer.shard, queue)

    def _serve(self, shard: Shard, queue: _Queue) -> None:
        while queue.waiting and (pull := self._next(queue)) is not None:
            request, again = queue.waiting.popleft()
            pull.left -= 1
            self._events.after(HOP_S, pull.worker.delivered, shard, request, len(queue.waiting), again)

    def _next(self, queue: _Queue) -> _Pull | None:
        """The pull that is served now; it goes to the end of its turn."""
        for pulls in queue.pulls:
            while pulls:
                pull = pulls.popleft()
                if pull.left and pull.expires_s > self._events.now_s:
                    pulls.append(pull)
                    return pull
        return None

    def _expire(self) -> None:
        """Tell each worker what has ended; all pulls live equally long, so the oldest are the first."""
        ended: dict[Callable[[list[tuple[Shard, int]]], None], list[tuple[Shard, int]]] = {}
        while self._standing and (oldest := self._standing[0]).expires_s <= self._events.now_s:
            self._standing.popleft()
            if oldest.left:
                ended.setdefault(oldest.worker.ended, []).append((oldest.shard, oldest.left))
        for tell, what in ended.items():
            self._events.after(HOP_S, tell, what)
        while self._standing and not self._standing[0].left:
            self._standing.popleft()
        if self._standing:
            self._events.at(self._standing[0].expires_s, self._expire)
