"""Which pulls to offer now: a prefill worker's free slots, spread over the shards.

A standing pull is an open hand: the broker puts the next message of that shard into it. The rules:

* A pull is offered in the very moment that a delivery has used one up. A loop that refills later misroutes 13 % of messages.
* A shard without backlog gets open hands even when there are more such shards than free slots: nothing is waiting there. Should
  more arrive than there are slots, the surplus is held for `SURPLUS_HOLD_S`, in case a slot frees. Else it is given back, and
  its shard is one with backlog. (To leave it alone for a while bounced no fewer messages, and let them wait beside free slots.)
  What comes again is given back at once: it has waited, and the hands of a full worker are the first that it meets.
* Shards with backlog share exactly the free slots, mostly own ones first, in turn: backlog alone must cost no deliveries. What we
  know of a backlog is old, since others work on it too: where a pull is not served at once, nothing is waiting, and its slot is
  free for others.
* Shards that another worker owns get one hand each; urgent classes and own shards come first.
* Interactive requests go before batch ones, with the turns and the room of `classes.py`: batch has a bound of slots, and while an
  interactive request waits, it is asked for only when it is its turn. Then a slot is kept for it until it has come, or has not.
* A worker that spills (`placement.spills`) offers what it has left only at the last priorities, where nobody else has a slot.
  Slots that batch holds do not count for that: beside them there is room, and a creator's requests stay where its prefix is.

      0  own shards      1 … 7  others', by rank and load      8  own shards, spilling      9  others', spilling

Every delivery asks which pulls to add, over hundreds of shards. So a lane, which is what we know of one shard, lies where its
state puts it, and only lanes that lack a pull are ever looked at:

    idle[n], n good hands stand there ◄── ended, unserved ── backlog, in turn
    low, only hands at a last priority ──── delivered with backlog ──►
"""

import heapq
from collections.abc import Hashable, Mapping
from itertools import chain, islice
from math import ceil
from typing import Final

import msgspec

from pipeline.limits import BACKLOG_UNSERVED_S, PULL_RANK_MAX, SURPLUS_HOLD_S
from pipeline.protocol import placement
from pipeline.protocol.classes import BATCH, INTERACTIVE, WEIGHTS, Turns, Weights
from pipeline.protocol.subjects import CLASSES, Shard

SPILLING_OWN: Final = PULL_RANK_MAX - 1
"""Priority of own shards while spilling: behind all who are not."""

SPILLING_OTHERS: Final = PULL_RANK_MAX

RANK_MAX: Final = SPILLING_OWN - 1
"""Others' shards are never offered behind own ones of a worker that spills."""

RANKS_ALIKE: Final = 3
"""Next ranks that share a priority: they are served in turn, so that each gets a part of what the owner spills."""

OWN_TURNS: Final = 4
"""One of so many pulls on a backlog is for a shard of somebody else's first, or it would starve while we have one of our own."""

LOAD_STEPS: Final = 3
"""A worker steps back by one group of ranks for each third of its load: the least loaded of the next ranks comes first."""


class Offer(msgspec.Struct, frozen=True):
    """Pull `batch` messages of a shard at a priority."""

    shard: Shard
    batch: int
    priority: int


class _Lane:
    """What we know of one shard. `asked_s`: when a pull was last added here for a backlog, or served."""

    __slots__ = (
        "asked_s", "backlog", "home", "key", "low", "outstanding", "place", "rank", "shard", "watched",
    )  # fmt: skip

    def __init__(self, shard: Shard, rank: int, home: "_Lanes") -> None:
        self.shard = shard
        self.home = home
        self.rank = rank
        self.key = (CLASSES.index(shard.klass), rank, shard.number)
        self.outstanding = 0
        self.low = 0
        """Of those, how many stand at a last priority: as good as none once the worker spills no more."""
        self.backlog = 0
        self.asked_s = float("-inf")
        self.place: dict[Shard, _Lane] | None = None
        self.watched = False


class _Lanes:
    """The lanes of own shards, or of others', by what they may need. `pulls` stand on those with backlog."""

    def __init__(self, hands_max: int) -> None:
        self.idle: list[dict[Shard, _Lane]] = [{} for _ in range(hands_max)]
        self.low: dict[Shard, _Lane] = {}
        self.backlog: dict[Shard, _Lane] = {}
        self.pulls = 0
        self.lacks = 0
        """How many lie in `idle` or `low`: most often none."""

    def lay(self, lane: _Lane) -> None:
        """Put a lane where it belongs: nowhere, where it has all the hands that it may ever have."""
        good = lane.outstanding - lane.low
        if lane.backlog:
            self.pulls += lane.outstanding
            place = self.backlog
        elif good == 0 and lane.low:
            place = self.low
            self.lacks += 1
        elif good < len(self.idle):
            place = self.idle[good]
            self.lacks += 1
        else:
            return
        place[lane.shard] = lane
        lane.place = place

    def lift(self, lane: _Lane) -> None:
        """Take a lane from where it lies."""
        if lane.place is not None:
            del lane.place[lane.shard]
            if lane.place is self.backlog:
                self.pulls -= lane.outstanding
            else:
                self.lacks -= 1
            lane.place = None

    def lacking(self, want: int, spilling: bool) -> list[_Lane]:
        """Idle lanes with fewer than `want` hands. While spilling, a hand at a last priority is one, too."""
        lanes = self.idle[:want] if spilling else [*self.idle[:want], self.low]
        return [lane for some in lanes for lane in some.values()]


class _Class:
    """What one class has of a worker: slots, and lanes, those of own shards and those of others'."""

    def __init__(self, capacity: int) -> None:
        self.busy = 0
        self.own = _Lanes(max(1, ceil(capacity / 2)))
        self.others = _Lanes(1)
        self._shared = 1

    @property
    def waits(self) -> bool:
        """Whether there is a backlog that we know of."""
        return bool(self.own.backlog or self.others.backlog)

    @property
    def pulls(self) -> int:
        """Pulls that stand on those."""
        return self.own.pulls + self.others.pulls

    def turn(self, pulls: int) -> list[_Lane]:
        """The next lanes with backlog, at most so many, mostly own ones first."""
        mine_first = self._shared % OWN_TURNS > 0
        first, then = (self.own, self.others) if mine_first else (self.others, self.own)
        lanes = list(islice(chain(first.backlog.values(), then.backlog.values()), max(0, pulls)))
        self._shared += len(lanes)
        return lanes


class Slots:
    """The slots of one worker. Keys name deliveries. All times are seconds, monotonic."""

    def __init__(self, capacity: int, weights: Weights = WEIGHTS) -> None:
        self.capacity = capacity
        self.thresholds = placement.THRESHOLDS
        self.busy = 0
        self.open = True
        self.lingers = False
        """Closed, but what its last pulls bring is taken, where there is a slot."""
        self.spilling = False
        self.outstanding = 0
        """Pulls that stand at the broker."""
        self._scarcer = 0.0
        self._turns = Turns(weights)
        self._batch_max = weights.slots_most(capacity)
        self._classes = {klass: _Class(capacity) for klass in CLASSES}
        self._urgent, self._batch = self._classes[INTERACTIVE], self._classes[BATCH]
        self._lanes: dict[Shard, _Lane] = {}
        self._held: dict[Hashable, tuple[Shard, float]] = {}
        self._watched: list[tuple[float, tuple[int, int, int], Shard]] = []
        """A heap of when to look at a lane again, each lane at most once."""

    @property
    def free(self) -> int:
        """Slots that no request holds. None while there are more requests than slots: some were taken away."""
        return max(0, self.capacity - self.busy)

    @property
    def free_for_batch(self) -> int:
        """Of those, how many batch may take now."""
        return max(0, min(self.capacity - self.busy, self._batch_max - self._batch.busy))

    def busy_of(self, klass: str) -> int:
        """Slots that requests of this class hold."""
        return self._classes[klass].busy

    @property
    def load(self) -> float:
        """0…1: what the worker said last, but for its slots, of which we always know."""
        return min(1.0, max(self._scarcer, self.busy / self.capacity))

    @load.setter
    def load(self, said: float) -> None:
        self._scarcer = said if said > self.busy / self.capacity else 0.0

    @property
    def urgent_load(self) -> float:
        """The same, without the slots that batch holds."""
        return min(1.0, max(self._scarcer, self._urgent.busy / self.capacity))

    def resize(self, capacity: int) -> None:
        """There are so many slots now. Where more are busy, nothing new is taken until they are fewer."""
        if capacity == self.capacity:
            return
        self.capacity = capacity
        self._batch_max = self.weights.slots_most(capacity)
        own = [lane for lane in self._lanes.values() if lane.rank == 0]
        for lane in own:
            self._lift(lane)
        for one in self._classes.values():
            one.own = _Lanes(max(1, ceil(capacity / 2)))
        for lane in own:
            lane.home = self._home(lane.shard, 0)
            self._lay(lane)

    @property
    def weights(self) -> Weights:
        """How the classes share."""
        return self._turns.weights

    def weigh(self, weights: Weights) -> None:
        """The classes share so, from the next turn on."""
        if weights != self.weights:
            self._turns = Turns(weights)
            self._batch_max = weights.slots_most(self.capacity)

    def rank(self, ranks: Mapping[Shard, int], now_s: float) -> list[Offer]:
        """The ranks have changed. Pulls that stand keep their old priority until they end."""
        for shard, rank in ranks.items():
            lane = self._lanes.get(shard)
            if lane is None:
                lane = self._lanes[shard] = _Lane(shard, rank, self._home(shard, rank))
            elif lane.rank == rank:
                continue
            self._lift(lane)
            lane.rank, lane.key = rank, (lane.key[0], rank, shard.number)
            lane.home = self._home(shard, rank)
            self._lay(lane)
        return self.offers(now_s)

    def delivered(self, key: Hashable, shard: Shard, backlog: int, now_s: float, *, again: bool = False) -> bool:
        """A message has come, with `backlog` more behind it. True: it has a slot. False: it is surplus.

        `again`: it was delivered before, and here or elsewhere found no slot.
        """
        lane = self._lanes[shard]
        self._lift(lane)
        if lane.outstanding:
            lane.outstanding -= 1
            self.outstanding -= 1
            lane.low = min(lane.low, lane.outstanding)  # the broker serves better priorities first
        lane.backlog = backlog
        lane.asked_s = now_s
        has_slot = self._has_slot(shard.klass)
        if has_slot:
            self._take(shard.klass)
        else:
            self._held[key] = (shard, now_s if again else now_s + SURPLUS_HOLD_S)
        self._lay(lane)
        return has_slot

    def ended(self, shard: Shard, count: int) -> None:
        """So many pulls of a shard have ended without a message: nothing was waiting there."""
        lane = self._lanes[shard]
        self._lift(lane)
        count = min(count, lane.outstanding)
        lane.outstanding -= count
        self.outstanding -= count
        lane.low = max(0, lane.low - count)
        lane.backlog = 0
        self._lay(lane)

    def finished(self, klass: str) -> Hashable | None:
        """A request of this class has left its slot. Returns the key of the surplus delivery that takes it, if any is held.

        It is the oldest of the class whose turn it is, else of the other.
        """
        self.busy -= 1
        self._classes[klass].busy -= 1
        assert self._classes[klass].busy >= 0
        if not self._held:
            return None
        for one in self._turns.order:
            key = next((key for key, (shard, _) in self._held.items() if shard.klass == one), None)
            if key is not None and self._has_slot(one):
                del self._held[key]
                self._take(one)
                return key
        return None

    def surplus(self, now_s: float) -> list[Hashable]:
        """Held deliveries whose time is up: to be given back."""
        late = [key for key, (_, until_s) in self._held.items() if now_s >= until_s or not (self.open or self.lingers)]
        for key in late:
            shard, _ = self._held.pop(key)
            lane = self._lanes[shard]
            self._lift(lane)
            lane.backlog += 1
            self._lay(lane)
        return late

    def close(self, *, lingers: bool = False) -> None:
        """Offer nothing any more. `lingers`: pulls stand at the broker still, and what they bring is not sent back."""
        self.open, self.lingers = False, lingers

    def reopen(self) -> None:
        """Offer again."""
        self.open, self.lingers = True, False

    def offers(self, now_s: float) -> list[Offer]:
        """The pulls to add now; remembers them as standing."""
        self.spilling = placement.spills(self.urgent_load, self.spilling, self.thresholds)
        if not self.open or self.busy >= self.capacity:
            return []
        self._wake(now_s)
        return self._top_up() + self._share(now_s)

    def _has_slot(self, klass: str) -> bool:
        """Whether a request of this class may take one now."""
        if not (self.open or self.lingers):
            return False
        if klass == BATCH:
            return self.free_for_batch > 0
        # One is kept while it is batch's turn and batch waits.
        kept = self._turns.batch and self._batch.waits and self.free_for_batch > 0
        return self.capacity - self.busy > kept

    def _take(self, klass: str) -> None:
        self.busy += 1
        self._classes[klass].busy += 1
        self._turns.served(klass)

    @property
    def _contended(self) -> bool:
        """Whether interactive requests wait, as far as we know."""
        return self._urgent.waits or any(shard.klass == INTERACTIVE for shard, _ in self._held.values())

    def _top_up(self) -> list[Offer]:
        """Own shards hold half the free slots open, so that a burst does not run past a single hand to the next worker."""
        urgent, batch = self._urgent, self._batch
        offers = self._hands(urgent, self.free) if urgent.own.lacks or urgent.others.lacks else []
        if (batch.own.lacks or batch.others.lacks) and (self._turns.batch or not self._contended):
            offers += self._hands(batch, self.free_for_batch)
        return offers

    def _hands(self, one: _Class, free: int) -> list[Offer]:
        if not free:
            return []
        hands = 1 if self.spilling else max(1, ceil(free / 2))
        lacking = one.own.lacking(hands, self.spilling) + one.others.lacking(1, self.spilling)
        if len(lacking) > 1:
            lacking.sort(key=lambda lane: lane.key)
        return [self._pull(lane, hands if lane.rank == 0 else 1) for lane in lacking]

    def _share(self, now_s: float) -> list[Offer]:
        """One pull each in turn, until every free slot has one: batch's turn, then interactive requests, then what is left."""
        urgent, batch = self._urgent, self._batch
        if not (urgent.own.backlog or urgent.others.backlog or batch.own.backlog or batch.others.backlog):
            return []
        offers: list[Offer] = []
        if batch.waits and self._turns.batch and not self._batch.pulls and self.free_for_batch:
            offers += self._give(self._batch, 1, now_s)
        offers += self._give(self._urgent, self._unpulled, now_s)
        if batch.waits:
            left = min(self._unpulled, self.free_for_batch - self._batch.pulls)
            offers += self._give(self._batch, left, now_s)
        return offers

    @property
    def _unpulled(self) -> int:
        """Free slots for which no pull stands on a backlog."""
        return self.free - self._urgent.pulls - self._batch.pulls

    def _give(self, to: _Class, pulls: int, now_s: float) -> list[Offer]:
        offers = []
        for lane in to.turn(pulls):
            lane.asked_s = now_s
            offers.append(self._pull(lane, lane.outstanding - lane.low + 1))
        return offers

    def _pull(self, lane: _Lane, hands: int) -> Offer:
        """Bring the good hands of a lane up to `hands`. Laid down again, it is the last in its turn."""
        batch = hands - lane.outstanding + lane.low
        self._lift(lane)
        lane.outstanding += batch
        self.outstanding += batch
        priority = self._priority(lane.rank)
        if self.spilling:
            lane.low += batch
        self._lay(lane)
        return Offer(lane.shard, batch, priority)

    def _priority(self, rank: int) -> int:
        """What a request of somebody else's shard finds first: a near rank, and of near ones a worker with little to do.

        Ranks of a group are equal, or all that a hot shard spills would go to one and the same worker.
        """
        if self.spilling:
            return SPILLING_OTHERS if rank else SPILLING_OWN
        if rank == 0:
            return 0
        return min(ceil(rank / RANKS_ALIKE) + int(LOAD_STEPS * self.load), RANK_MAX)

    # ---- where lanes lie

    def _lift(self, lane: _Lane) -> None:
        lane.home.lift(lane)

    def _lay(self, lane: _Lane) -> None:
        lane.home.lay(lane)
        if lane.backlog and lane.outstanding:
            self._watch(lane, lane.asked_s + BACKLOG_UNSERVED_S)

    def _home(self, shard: Shard, rank: int) -> _Lanes:
        of_class = self._classes[shard.klass]
        return of_class.others if rank else of_class.own

    def _watch(self, lane: _Lane, at_s: float) -> None:
        if not lane.watched:
            lane.watched = True
            heapq.heappush(self._watched, (at_s, lane.key, lane.shard))

    def _wake(self, now_s: float) -> None:
        """A pull on a backlog that nobody has served shows that the backlog is gone."""
        while self._watched and self._watched[0][0] <= now_s:
            lane = self._lanes[heapq.heappop(self._watched)[2]]
            lane.watched = False
            self._lift(lane)
            if lane.outstanding and lane.asked_s + BACKLOG_UNSERVED_S <= now_s:
                lane.backlog = 0
                if lane.shard.klass == BATCH:
                    self._turns.passed()
            self._lay(lane)
