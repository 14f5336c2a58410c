"""The fleet as Headrace runs it: the gateway's real `affinity`, `Rates` and `Balancer`, real `Slots` in each worker, a broker.

There is one gateway, which counts all requests.
"""

from typing import Final

import msgspec

from pipeline.limits import PRESENCE_PERIOD_S, SURPLUS_HOLD_S
from pipeline.planning import source
from pipeline.planning.broker import Broker
from pipeline.planning.engine import SOURCE, Engine, Machine, Served
from pipeline.planning.events import Events
from pipeline.planning.fleet import Fleet, Outcome
from pipeline.planning.traffic import Request
from pipeline.protocol import placement, routes
from pipeline.protocol.classes import INTERACTIVE
from pipeline.protocol.routes import Balancer, Change, Rates, Route
from pipeline.protocol.slots import Offer, Slots
from pipeline.protocol.subjects import Shard, partition

SHARDS: Final = 256

QUEUED_TOKENS_MAX: Final = 65_536
"""As in `workers/prefill.py`."""


class _Worker:
    """The prefill loop: deliveries, slots, pulls, as `workers/prefill.py` has them."""

    def __init__(self, events: Events, broker: Broker, engine: Engine) -> None:
        self.engine = engine
        self.slots = Slots(engine.slots)
        self._events, self._broker = events, broker
        self._tokens = 0
        self._held: dict[int, tuple[Shard, Request]] = {}
        self._count = 0

    def start(self, shards: list[Shard], workers: dict[str, float]) -> None:
        """Offer the first pulls, and look after surplus from now on."""
        self._pull(self.slots.rank(placement.ranks(self.engine.name, shards, workers), self._events.now_s))
        self._events.after(SURPLUS_HOLD_S / 2, self._tick)

    def delivered(self, shard: Shard, request: Request, backlog: int, again: bool) -> None:
        """A message has come. Its pull is replaced before anything else."""
        self._count += 1
        has_slot = self.slots.delivered(self._count, shard, backlog, self._events.now_s, again=again)
        self._offer()
        if has_slot:
            self._begin(request)
        else:
            self._held[self._count] = (shard, request)

    def ended(self, ended: list[tuple[Shard, int]]) -> None:
        """Pulls have expired."""
        for shard, count in ended:
            self.slots.ended(shard, count)
        self._offer()

    def finished(self, request: Request) -> None:
        """A slot is free: for a held message first."""
        self._tokens -= request.tokens
        self._weigh()
        key = self.slots.finished(INTERACTIVE)
        if isinstance(key, int):
            self._begin(self._held.pop(key)[1])
        self._offer()

    def _begin(self, request: Request) -> None:
        self._tokens += request.tokens
        self._weigh()
        self.engine.begin(request)

    def _weigh(self) -> None:
        self.slots.load = placement.load(
            busy=self.slots.busy,
            slots=self.slots.capacity,
            queued_tokens=self._tokens,
            queued_tokens_max=QUEUED_TOKENS_MAX,
            kv_usage_ratio=0.0,
        )

    def _offer(self) -> None:
        self._pull(self.slots.offers(self._events.now_s))

    def _pull(self, offers: list[Offer]) -> None:
        if offers:
            self._events.after(source.HOP_S, self._broker.pull, self, offers)

    def _tick(self) -> None:
        for key in self.slots.surplus(self._events.now_s):
            assert isinstance(key, int)
            shard, request = self._held.pop(key)
            self._events.after(source.HOP_S, self._broker.give_back, shard, request)
        self._offer()
        self._events.after(SURPLUS_HOLD_S / 2, self._tick)


class Headrace(Fleet):
    """Pulls by rank, spill, and exceptions to the hash."""

    def __init__(
        self, *, workers: int = source.PREFILL_WORKERS, shards: int = SHARDS, machine: Machine = SOURCE
    ) -> None:
        super().__init__(workers=workers, machine=machine)
        self._shards = [Shard("interactive", number) for number in range(shards)]
        self._broker = Broker(self.events, self._shards)
        self._workers = {name: _Worker(self.events, self._broker, engine) for name, engine in self.engines.items()}
        self._rates, self._balancer = Rates(), Balancer()
        self.routes: dict[str, Route] = {}
        self._owners = placement.Owners(shards)
        weights = {name: float(engine.slots) for name, engine in self.engines.items()}
        self._owners.update(weights)
        self._presence: dict[str, routes.Worker] = {}
        self._placed: dict[int, str] = {}
        self.changes = 0
        for worker in self._workers.values():
            worker.start(self._shards, weights)
        self._say()
        self._balance()

    def foreign(self, served: Served) -> bool:
        """Whether another worker served it than the owner of its shard, as routes were when it came."""
        return self._placed[id(served.request)] != served.worker

    def _arrive(self, request: Request) -> None:
        self._rates.count(request.creator, self.events.now_s)
        affinity = routes.affinity(request.creator, request.conversation, self.routes.get(request.creator))
        number = partition(affinity, len(self._shards))
        self._placed[id(request)] = self._owners[number]
        self.events.after(source.HOP_S, self._broker.publish, self._shards[number], request)

    def _done(self, served: Served) -> None:
        super()._done(served)
        self._workers[served.worker].finished(served.request)

    def _say(self) -> None:
        """Presence: what the gateway knows of the workers' load."""
        self._presence = {
            name: routes.Worker(float(worker.slots.capacity), worker.slots.load)
            for name, worker in self._workers.items()
        }
        self.events.after(PRESENCE_PERIOD_S, self._say)

    def _balance(self) -> None:
        now_s = self.events.now_s
        rates, total = self._rates.top(now_s), self._rates.total(now_s)
        for change in self._balancer.step(now_s, rates, total, self.routes, self._presence, len(self._shards)):
            self.changes += 1
            self._warm(change)
        self.events.after(1.0, self._balance)

    def _warm(self, change: Change) -> None:
        """Warm the new owners up, then publish."""
        missing = len(change.warm)

        def publish() -> None:
            if change.route is None:
                self.routes.pop(change.creator, None)
            else:
                self.routes[change.creator] = change.route

        def warmed() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                self.events.after(source.HOP_S, publish)

        if not missing:
            self.events.after(source.HOP_S, publish)
        for worker in change.warm:
            self.events.after(source.HOP_S, self.engines[worker].warm, change.creator, warmed)

    def _outcome(self, expected: int) -> Outcome:
        outcome = super()._outcome(expected)
        return msgspec.structs.replace(outcome, returned=self._broker.returned, routes=len(self.routes))
