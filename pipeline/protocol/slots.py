"""Which pulls to offer now: a prefill worker's free slots, spread over the shards.

A standing pull is an open hand: the broker puts the next message of that shard into it. The rules:

* A pull is offered in the very moment that a delivery has used one up. A loop that refills later misroutes 13 % of messages.
* A shard without backlog gets open hands even when there are more such shards than free slots: nothing is waiting there. Should
  more arrive than there are slots, the surplus is held for `SURPLUS_HOLD_S`, in case a slot frees, and then given back; that
  shard is left alone for `SURPLUS_PAUSE_S`.
* Shards with backlog share exactly the free slots, in turn: backlog alone must cost no deliveries. What we know of a backlog
  is old, since others work on it too: where a pull is not served at once, nothing is waiting, and its slot is free for others.
* Shards that another worker owns get one hand each, and only below `SPILL_LOAD`; urgent classes and own shards come first.
"""

from collections.abc import Hashable, Iterable, Mapping
from math import ceil

import msgspec

from pipeline.limits import BACKLOG_UNSERVED_S, SURPLUS_HOLD_S, SURPLUS_PAUSE_S
from pipeline.protocol.placement import takes_foreign
from pipeline.protocol.subjects import CLASSES, Shard


class Offer(msgspec.Struct, frozen=True):
    """Pull `batch` messages of a shard at a priority."""

    shard: Shard
    batch: int
    priority: int


class _Lane(msgspec.Struct):
    rank: int
    outstanding: int = 0
    backlog: int = 0
    paused_until_s: float = float("-inf")
    asked_s: float = float("-inf")
    """When a pull was last added here, or served."""


class Slots:
    """The slots of one worker. Keys name deliveries. All times are seconds, monotonic."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.busy = 0
        self.load = 0.0
        self.open = True
        self._lanes: dict[Shard, _Lane] = {}
        self._turn: list[Shard] = []
        self._held: dict[Hashable, tuple[Shard, float]] = {}

    @property
    def free(self) -> int:
        """Slots that no request holds."""
        return self.capacity - self.busy

    @property
    def outstanding(self) -> int:
        """Pulls that stand at the broker."""
        return sum(lane.outstanding for lane in self._lanes.values())

    def rank(self, ranks: Mapping[Shard, int], now_s: float) -> list[Offer]:
        """The ranks have changed. Pulls that stand keep their old priority until they end."""
        for shard, rank in ranks.items():
            lane = self._lanes.setdefault(shard, _Lane(rank))
            lane.rank = rank
        self._turn = sorted(self._lanes, key=lambda shard: (CLASSES.index(shard.klass), self._lanes[shard].rank, shard))
        return self.offers(now_s)

    def delivered(self, key: Hashable, shard: Shard, backlog: int, now_s: float) -> bool:
        """A message has come, with `backlog` more behind it. True: it has a slot. False: it is held as surplus."""
        lane = self._lanes[shard]
        lane.outstanding = max(0, lane.outstanding - 1)
        lane.backlog = backlog
        lane.asked_s = now_s
        if self.open and self.busy < self.capacity:
            self.busy += 1
            return True
        self._held[key] = (shard, now_s + SURPLUS_HOLD_S)
        lane.paused_until_s = now_s + SURPLUS_PAUSE_S
        return False

    def ended(self, shard: Shard, count: int) -> None:
        """So many pulls of a shard have ended without a message: nothing was waiting there."""
        lane = self._lanes[shard]
        lane.outstanding = max(0, lane.outstanding - count)
        lane.backlog = 0

    def finished(self) -> Hashable | None:
        """A request has left its slot. Returns the key of the surplus delivery that takes it, the oldest, if any is held."""
        self.busy -= 1
        assert self.busy >= 0
        if not self._held or not self.open:
            return None
        key = next(iter(self._held))
        del self._held[key]
        self.busy += 1
        return key

    def surplus(self, now_s: float) -> list[Hashable]:
        """Held deliveries whose time is up: to be given back."""
        late = [key for key, (_, until_s) in self._held.items() if now_s >= until_s or not self.open]
        for key in late:
            shard, _ = self._held.pop(key)
            self._lanes[shard].backlog += 1
        return late

    def close(self) -> None:
        """Offer nothing any more."""
        self.open = False

    def offers(self, now_s: float) -> list[Offer]:
        """The pulls to add now; remembers them as standing."""
        if not self.open or self.busy >= self.capacity:
            return []
        lanes = [(shard, self._lanes[shard]) for shard in self._turn if now_s >= self._lanes[shard].paused_until_s]
        lanes = [(shard, lane) for shard, lane in lanes if lane.rank == 0 or takes_foreign(self.load)]
        for _, lane in lanes:
            if lane.outstanding and now_s - lane.asked_s > BACKLOG_UNSERVED_S:
                lane.backlog = 0
        idle = [offer for shard, lane in lanes if lane.backlog == 0 and (offer := self._top_up(shard, lane))]
        return idle + self._share(((shard, lane) for shard, lane in lanes if lane.backlog > 0), now_s)

    def _top_up(self, shard: Shard, lane: _Lane) -> Offer | None:
        """Own shards hold half the free slots open, so that a burst does not run past a single hand to the next worker."""
        want = max(1, ceil(self.free / 2)) if lane.rank == 0 else 1
        batch = want - lane.outstanding
        if batch <= 0:
            return None
        lane.outstanding += batch
        return Offer(shard, batch, lane.rank)

    def _share(self, lanes: Iterable[tuple[Shard, _Lane]], now_s: float) -> list[Offer]:
        """One pull each in turn, until every free slot has one."""
        backlogged = list(lanes)
        left = self.free - sum(lane.outstanding for _, lane in backlogged)
        offers = []
        for shard, lane in backlogged[: max(0, left)]:
            lane.outstanding += 1
            lane.asked_s = now_s
            offers.append(Offer(shard, 1, lane.rank))
            self._turn.remove(shard)
            self._turn.append(shard)
        return offers
