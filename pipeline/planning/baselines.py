"""What Headrace is compared with: routers that push each request to one worker's queue, in order of arrival.

They see more than real ones do: there is one router, so least-loaded knows of every request that a worker has, and hears of each
end as soon as a message can say it.
"""

import itertools
import random
from abc import abstractmethod
from collections import deque
from typing import Final

from pipeline.planning import source
from pipeline.planning.engine import Engine, Served
from pipeline.planning.fleet import Fleet
from pipeline.planning.traffic import Request
from pipeline.protocol.placement import order
from pipeline.protocol.subjects import Shard, partition

HASH_SHARDS: Final = 1 << 16
"""Pure hash places creators one by one: with so many shards hardly two of them share one."""


class Pushed(Fleet):
    """A router, and a queue at each worker."""

    def __init__(self, *, workers: int = source.PREFILL_WORKERS) -> None:
        super().__init__(workers=workers)
        self._queues: dict[str, deque[Request]] = {name: deque() for name in self.engines}
        self._sent = dict.fromkeys(self.engines, 0)
        """Requests on their way to a worker, in its queue, or in its slots."""

    def _arrive(self, request: Request) -> None:
        worker = self.choose(request)
        self._sent[worker] += 1
        self.events.after(source.ROUTER_S, self._queued, self.engines[worker], request)

    @abstractmethod
    def choose(self, request: Request) -> str:
        """The worker of a request."""

    def _queued(self, engine: Engine, request: Request) -> None:
        if engine.running < engine.slots:
            engine.begin(request)
        else:
            self._queues[engine.name].append(request)

    def _done(self, served: Served) -> None:
        super()._done(served)
        self.events.after(source.ROUTER_S, self._heard, served.worker)
        if queue := self._queues[served.worker]:
            self.engines[served.worker].begin(queue.popleft())

    def _heard(self, worker: str) -> None:
        """The router learns that a request has left a worker."""
        self._sent[worker] -= 1


class Random(Pushed):
    """Any worker."""

    def __init__(self, *, workers: int = source.PREFILL_WORKERS) -> None:
        super().__init__(workers=workers)
        self._chance = random.Random("random")

    def choose(self, request: Request) -> str:
        """Any worker."""
        return self._chance.choice(list(self.engines))


class RoundRobin(Pushed):
    """Each worker in turn."""

    def __init__(self, *, workers: int = source.PREFILL_WORKERS) -> None:
        super().__init__(workers=workers)
        self._turn = itertools.cycle(self.engines)

    def choose(self, request: Request) -> str:
        """The next worker."""
        return next(self._turn)


class PureHash(Pushed):
    """Each creator's own worker, by rendezvous hash, whatever its load."""

    def __init__(self, *, workers: int = source.PREFILL_WORKERS) -> None:
        super().__init__(workers=workers)
        self._owners: dict[str, str] = {}

    def choose(self, request: Request) -> str:
        """The creator's worker."""
        if request.creator not in self._owners:
            shard = Shard("interactive", partition(request.creator, HASH_SHARDS))
            self._owners[request.creator] = order(shard, dict.fromkeys(self.engines, 1.0))[0]
        return self._owners[request.creator]


class LeastLoaded(Pushed):
    """The worker with the fewest requests; of equal ones, each in turn."""

    def __init__(self, *, workers: int = source.PREFILL_WORKERS) -> None:
        super().__init__(workers=workers)
        self._turn = 0

    def choose(self, request: Request) -> str:
        """The worker with the fewest requests."""
        self._turn += 1
        names = list(self.engines)
        names = names[self._turn % len(names) :] + names[: self._turn % len(names)]
        return min(names, key=self._sent.__getitem__)
