"""Exceptions to the hash: which affinities a creator's requests have, and when that should change.

As a rule a creator is its own affinity, and whoever owns that shard (`placement.py`) serves it. Two kinds of creators are worth
an exception, a `Route`, which all gateways share:

    hot     it brings more than a part of what one worker can do. It gets several affinities, `<creator>~<i>`, so chosen that
            each has another owner. A conversation stays with one of them. There are more of them before an owner is full, and
            fewer again when its share has stayed small for a while.
    moved   its owner has more than others, and this creator fits better elsewhere. It gets one affinity, of another owner.

The tail stays hashed. Demand is estimated, not asked for: of the heavy creators we know the rates, and the rest is spread over
the shards, so a worker's part of it is the part of the shards that it owns. What load the workers have themselves only says
whether it matters at all: an exception among idle workers would cost warmth and gain nothing.

    share of traffic ──► demand of each owner ──► grow, mend, shrink a hot creator ──► move one off the fullest owner, or back

Nothing is sticky for ever: an exception whose reason has been gone for `KEEP_S` is dropped. Equal inputs give equal changes, on
every gateway; what a `Balancer` remembers is only since when an exception has been idle.
"""

import hashlib
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal

import msgspec

from pipeline.limits import (
    RATES_MEMORY_S,
    RATES_TOP_MAX,
    RATES_TRACKED_MAX,
    ROUTE_CHANGES_MAX,
    ROUTE_VARIANTS_MAX,
)
from pipeline.protocol.placement import Owners
from pipeline.protocol.subjects import partition

HOT_PART: Final = 0.4
"""A variant brings at most this part of what one worker can do: below half, so that an owner still fills evenly with others."""

KEEP_PART: Final = 0.2
"""A creator keeps its variants while each brings so much: half of `HOT_PART`, so that a share that wavers changes nothing."""

KEEP_S: Final = 20.0
"""An exception outlives its reason for so long: one memory of the rates, which waver that slowly."""

MOVE_ABOVE: Final = 1.08
"""Demand of an owner, against its fair part, above which creators are moved off it."""

BACK_BELOW: Final = 1.03
"""A moved creator returns where its home would have no more than this with it: well under what it would be moved for."""

MOVE_HOLD_S: Final = 30.0
"""A creator that was moved stays for so long: what it changes shows in the rates after about that time."""

SEEN_MIN: Final = 16.0
"""Requests below which a creator is not judged: its share would be chance, to a quarter and more."""

PENDING_S: Final = 5.0
"""A change that is not published after so long has failed with a warm-up, and may be decided again."""

BUSY_LOAD: Final = 0.4
"""Load of an owner from which exceptions are made: it doubles within no step before it reaches the spill."""

IDLE_LOAD: Final = 0.15
"""Load of all workers below which exceptions are dropped: any owner alone could serve what they spread."""

LOAD_MEMORY_S: Final = 2.0
"""Loads are smoothed over this time: a worker's slots are full and empty within milliseconds, but who is full may not wait."""

NUMBERS_TRIED_PER_SHARD: Final = 8
"""Variant numbers tried, for each shard, to find one of a wanted owner: 1 of 3,000 owners of a single shard is missed."""


class Route(msgspec.Struct, frozen=True):
    """A creator's exception. Variant i of creator c is the affinity `c~i`. Never empty."""

    variants: tuple[int, ...]
    reason: Literal["hot", "moved"]


class Worker(msgspec.Struct, frozen=True):
    """A prefill worker, as its presence says: its capacity in slots, and its load (0…1)."""

    weight: float
    load: float


class Change(msgspec.Struct, frozen=True):
    """A creator's new route; None drops the exception.

    `warm` are the workers that come to own this creator by it: they are warmed up before the route is published.
    """

    creator: str
    route: Route | None
    warm: tuple[str, ...] = ()


def affinity(creator: str, conversation: str, route: Route | None) -> str:
    """The affinity of a request. `creator` is its subject token; a conversation keeps its variant as long as there is one."""
    if route is None:
        return creator
    variants = route.variants
    chosen = variants[0] if len(variants) == 1 else variants[_jump(conversation, len(variants))]
    return f"{creator}~{chosen}"


def _jump(key: str, buckets: int) -> int:
    """Jump consistent hash (Lamping and Veach): with one bucket more, only its own share of the keys moves."""
    state = int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    bucket, jump = 0, 0
    while jump < buckets:
        bucket = jump
        state = (state * 2862933555777941757 + 1) & 0xFFFFFFFFFFFFFFFF
        jump = int((bucket + 1) * (1 << 31) / ((state >> 33) + 1))
    return bucket


class Rates:
    """Requests per second by creator, of the last `RATES_MEMORY_S` or so: exact for few creators, bounded for any number.

    Space-saving (Metwally and others) over weights that grow with time instead of counts that decay: all that is forgotten
    fades alike, so nothing has to be walked through. A creator that pushes out the lightest one takes over its weight as an
    error, and is believed only what is above that.
    """

    def __init__(self, tracked_max: int = RATES_TRACKED_MAX, memory_s: float = RATES_MEMORY_S) -> None:
        self._tracked_max, self._memory_s = tracked_max, memory_s
        self._weights: dict[str, float] = {}
        self._errors: dict[str, float] = {}
        self._lightest: list[tuple[float, str]] = []
        """A heap of every tracked creator once, under a weight that it had or has: never more than the present one."""
        self._sum = 0.0
        self._base_s: float | None = None
        self._began_s = 0.0

    def __len__(self) -> int:
        return len(self._weights)

    def count(self, creator: str, now_s: float) -> None:
        """A request of this creator (its subject token)."""
        weight = self._weight(now_s)
        self._sum += weight
        known = self._weights.get(creator)
        if known is not None:
            self._weights[creator] = known + weight
        elif len(self._weights) < self._tracked_max:
            self._weights[creator], self._errors[creator] = weight, 0.0
            heapq.heappush(self._lightest, (weight, creator))
        else:
            self._replace(creator, weight)

    def top(self, now_s: float) -> dict[str, float]:
        """Requests per second of the heaviest creators, the heaviest first: what they surely have."""
        per_s = self._per_s(now_s)
        sure = ((weight - self._errors[creator], creator) for creator, weight in self._weights.items())
        heaviest = heapq.nsmallest(RATES_TOP_MAX, ((-weight, creator) for weight, creator in sure))
        return {creator: -weight * per_s for weight, creator in heaviest}

    def total(self, now_s: float) -> float:
        """Requests per second of all creators."""
        return self._sum * self._per_s(now_s)

    def _weight(self, now_s: float) -> float:
        """Of a request now. Weights of old ones shrink to nothing before this one becomes too large for a float."""
        if self._base_s is None:
            self._base_s = self._began_s = now_s
        age = (now_s - self._base_s) / self._memory_s
        if age > 64.0:
            self._rebase(math.exp(-age), now_s)
            return 1.0
        return math.exp(age)

    def _per_s(self, now_s: float) -> float:
        """What one unit of weight is now, in requests per second. A young count divides by its age, not by its memory."""
        if self._base_s is None:
            return 0.0
        seen = 1.0 - math.exp(-max(now_s - self._began_s, 1.0) / self._memory_s)
        return math.exp(-(now_s - self._base_s) / self._memory_s) / (self._memory_s * seen)

    def _rebase(self, factor: float, now_s: float) -> None:
        self._base_s = now_s
        self._sum *= factor
        self._weights = {creator: weight * factor for creator, weight in self._weights.items()}
        self._errors = {creator: weight * factor for creator, weight in self._errors.items()}
        self._lightest = [(weight * factor, creator) for weight, creator in self._lightest]

    def _replace(self, creator: str, weight: float) -> None:
        """The lightest creator gives way."""
        heap = self._lightest
        while (lightest := self._weights[heap[0][1]]) > heap[0][0]:
            heapq.heapreplace(heap, (lightest, heap[0][1]))
        _, gone = heap[0]
        del self._weights[gone], self._errors[gone]
        self._weights[creator], self._errors[creator] = lightest + weight, lightest
        heapq.heapreplace(heap, (lightest + weight, creator))


class _Picture:
    """Who has how much to do, as parts of all traffic: `demand` by estimate and `fair` by capacity, of every owner."""

    def __init__(
        self,
        share: Mapping[str, float],
        routes: Mapping[str, Route],
        workers: Mapping[str, Worker],
        owners: Owners,
    ) -> None:
        self.share, self.owners = share, owners
        self.routes = dict(routes)
        owned: dict[str, int] = {}
        for number in range(len(owners)):
            owned[owners[number]] = owned.get(owners[number], 0) + 1
        capacity = sum(workers[worker].weight for worker in owned)
        self.fair = {worker: workers[worker].weight / capacity for worker in sorted(owned)}
        self.part = sum(worker.weight for worker in workers.values()) / len(workers)
        self.part /= sum(worker.weight for worker in workers.values())
        tail = max(0.0, 1.0 - sum(share.values()))
        self.demand = {worker: tail * owned[worker] / len(owners) for worker in self.fair}
        for creator in share:
            self.bear(creator, 1)

    def home(self, creator: str) -> str:
        """The owner of a creator without an exception."""
        return self.owners[partition(creator, len(self.owners))]

    def owner(self, creator: str, variant: int) -> str:
        """The owner of a variant."""
        return self.owners[partition(f"{creator}~{variant}", len(self.owners))]

    def serving(self, creator: str) -> list[str]:
        """The owner of each of its affinities, as things stand."""
        route = self.routes.get(creator)
        return [self.owner(creator, variant) for variant in route.variants] if route else [self.home(creator)]

    def bear(self, creator: str, sign: int) -> None:
        """Add (1) or take away (-1) a creator's demand."""
        serving = self.serving(creator)
        each = sign * self.share.get(creator, 0.0) / len(serving)
        for worker in serving:
            self.demand[worker] += each

    def filled(self, worker: str, more: float = 0.0) -> float:
        """Demand of a worker against its fair part: 1.0 is even."""
        return (self.demand[worker] + more) / self.fair[worker]

    def change(self, creator: str, route: Route | None) -> Change:
        """Take a new route into the picture."""
        before = set(self.serving(creator))
        self.bear(creator, -1)
        if route is None:
            self.routes.pop(creator, None)
        else:
            self.routes[creator] = route
        self.bear(creator, 1)
        after = dict.fromkeys(self.serving(creator))
        return Change(creator, route, tuple(worker for worker in after if worker not in before))

    def variants(self, creator: str, wanted: Iterable[str], without: Iterable[int]) -> dict[str, int]:
        """The first variant number of each wanted owner, where there is one, that is not in use."""
        missing, found, used = set(wanted), dict[str, int](), set(without)
        for number in range(NUMBERS_TRIED_PER_SHARD * len(self.owners)):
            if not missing:
                break
            if number not in used and (owner := self.owner(creator, number)) in missing:
                found[owner] = number
                missing.discard(owner)
        return found


def _parts(share: float, part: float) -> int:
    """How many parts a share makes. A last bit more is not another part."""
    return math.ceil(share / part - 1e-9)


class Balancer:
    """Decides on exceptions. One gateway at a time calls it, once a second; another may go on in its place at any time."""

    def __init__(self) -> None:
        self._owners: Owners | None = None
        self._loads: dict[str, float] = {}
        self._at_s: float | None = None
        self._began_s: float | None = None
        self._idle_since_s: dict[str, float] = {}
        self._moved_s: dict[str, float] = {}
        self._pending: dict[str, tuple[Route | None, float]] = {}
        """Changes that are not published yet: their new owners are being warmed up."""

    def step(
        self,
        now_s: float,
        rates: Mapping[str, float],
        total: float,
        routes: Mapping[str, Route],
        workers: Mapping[str, Worker],
        shards: int,
    ) -> list[Change]:
        """What to change now, at most `ROUTE_CHANGES_MAX` of it. `rates` and `total` are in requests/s, as `Rates` says them."""
        if not workers:
            return []
        # In one order, whatever order they came in: sums of floats depend on it, and gateways must agree to the last bit.
        workers = dict(sorted(workers.items()))
        rates = dict(sorted(rates.items()))
        self._feel(now_s, workers)
        self._idle_since_s = {creator: at_s for creator, at_s in self._idle_since_s.items() if creator in routes}
        self._moved_s = {creator: at_s for creator, at_s in self._moved_s.items() if now_s - at_s < MOVE_HOLD_S}
        if self._owners is None or len(self._owners) != shards:
            self._owners = Owners(shards)
        self._owners.update({worker: said.weight for worker, said in workers.items()})
        share = {creator: rate / total for creator, rate in rates.items() if rate * self._watched_s(now_s) >= SEEN_MIN}
        picture = _Picture(share, self._expected(routes, now_s), workers, self._owners)
        changes = self._spread(picture, now_s)
        changes += self._even_out(picture, now_s, ROUTE_CHANGES_MAX - len(changes))
        self._pending |= {change.creator: (change.route, now_s) for change in changes}
        return changes

    def _watched_s(self, now_s: float) -> float:
        """What a rate rests on: the memory of the rates, or less, where we have watched for less."""
        self._began_s = now_s if self._began_s is None else self._began_s
        return RATES_MEMORY_S * (1.0 - math.exp(-max(now_s - self._began_s, 1.0) / RATES_MEMORY_S))

    def _expected(self, routes: Mapping[str, Route], now_s: float) -> dict[str, Route]:
        """The routes as they will be once all is published that was decided. What is not, after a while, has failed."""
        self._pending = {
            creator: (route, at_s)
            for creator, (route, at_s) in self._pending.items()
            if routes.get(creator) != route and now_s - at_s < PENDING_S
        }
        soon = {creator: route for creator, route in routes.items() if creator not in self._pending}
        return soon | {creator: route for creator, (route, _) in self._pending.items() if route is not None}

    def _feel(self, now_s: float, workers: Mapping[str, Worker]) -> None:
        """Smooth the loads. A worker that is new is taken at its word."""
        passed_s = 0.0 if self._at_s is None else now_s - self._at_s
        keep = math.exp(-passed_s / LOAD_MEMORY_S)
        self._at_s = now_s
        self._loads = {
            worker: keep * self._loads.get(worker, said.load) + (1.0 - keep) * said.load
            for worker, said in workers.items()
        }

    def _idle(self, creator: str, idle: bool, now_s: float) -> bool:
        """Whether an exception has been idle for long enough to be cut back."""
        if not idle:
            self._idle_since_s.pop(creator, None)
            return False
        return now_s - self._idle_since_s.setdefault(creator, now_s) >= KEEP_S

    # ---- hot creators

    def _spread(self, picture: _Picture, now_s: float) -> list[Change]:
        """Grow, mend and shrink hot creators, the heaviest first."""
        changes: list[Change] = []
        calm = max(self._loads.values()) < IDLE_LOAD
        hot = {creator for creator, route in picture.routes.items() if route.reason == "hot"}
        for creator in sorted(hot | picture.share.keys(), key=lambda name: (-picture.share.get(name, 0.0), name)):
            if len(changes) == ROUTE_CHANGES_MAX:
                break
            if creator in self._pending:
                continue
            route, share = picture.routes.get(creator), picture.share.get(creator, 0.0)
            have = len(route.variants) if route else 1
            most = min(len(picture.fair), ROUTE_VARIANTS_MAX)
            want = min(most, _parts(share, HOT_PART * picture.part))
            keep = 1 if calm else min(most, _parts(share, KEEP_PART * picture.part))
            busy = max(self._loads[worker] for worker in picture.serving(creator)) >= BUSY_LOAD
            if want > have and busy and not calm:
                changes += self._grown(picture, creator, want)
            elif route is None or route.reason != "hot":
                continue
            elif self._idle(creator, keep < have, now_s):
                del self._idle_since_s[creator]
                shrunk = Route(route.variants[:keep], "hot") if keep > 1 else None
                changes.append(picture.change(creator, shrunk))
            elif len(set(picture.serving(creator))) < min(have, len(picture.fair)):
                changes += self._grown(picture, creator, have)
        return changes

    def _grown(self, picture: _Picture, creator: str, want: int) -> list[Change]:
        """`want` variants of distinct owners: those that there are stay, the others go to the least filled.

        Where two have come to share an owner (another has left), the later one is replaced in its place.
        """
        route = picture.routes.get(creator)
        kept: dict[str, int] = {}
        places: list[int | None] = []
        for variant in route.variants if route else ():
            fresh = kept.setdefault(picture.owner(creator, variant), variant) == variant
            places.append(variant if fresh else None)
        places += [None] * (want - len(places))
        found = self._free_variants(picture, creator, kept, places.count(None))
        variants = tuple(place if place is not None else next(found, None) for place in places)
        known = tuple(variant for variant in variants if variant is not None)
        if route is not None and known == route.variants:
            return []
        return [picture.change(creator, Route(known, "hot"))] if len(known) > 1 else []

    def _free_variants(self, picture: _Picture, creator: str, kept: Mapping[str, int], count: int) -> Iterator[int]:
        """`count` variant numbers whose owners are the least filled ones not in `kept`, by what others bring them."""
        picture.bear(creator, -1)
        least = sorted(picture.fair.keys() - kept.keys(), key=lambda worker: (picture.filled(worker), worker))
        picture.bear(creator, 1)
        numbers = picture.variants(creator, least, kept.values())
        reachable = [worker for worker in least if worker in numbers][:count]
        warm = set(picture.serving(creator))
        yield from (numbers[worker] for worker in sorted(reachable, key=lambda worker: worker not in warm))

    # ---- creators moved off a full owner

    def _even_out(self, picture: _Picture, now_s: float, most: int) -> list[Change]:
        """Take back moves that are not needed any more, then make those that are."""
        changes: list[Change] = []
        calm = max(self._loads.values()) < IDLE_LOAD
        moved = sorted(creator for creator, route in picture.routes.items() if route.reason == "moved")
        for creator in moved:
            share, home = picture.share.get(creator, 0.0), picture.home(creator)
            fits = picture.serving(creator) == [home] or picture.filled(home, share) <= BACK_BELOW
            if len(changes) < most and self._idle(creator, calm or fits, now_s) and creator not in self._pending:
                del self._idle_since_s[creator]
                changes.append(picture.change(creator, None))
        while len(changes) < most and (change := self._move(picture, now_s)):
            changes.append(change)
        return changes

    def _move(self, picture: _Picture, now_s: float) -> Change | None:
        """The heaviest creator of the fullest owner that the emptiest one can take: it stays clearly below what the other had,
        and below where its own would be moved off.
        """
        full = max(picture.fair, key=lambda worker: (picture.filled(worker), worker))
        empty = min(picture.fair, key=lambda worker: (picture.filled(worker), worker))
        if picture.filled(full) <= MOVE_ABOVE or self._loads[full] < BUSY_LOAD:
            return None
        most = min(MOVE_ABOVE, 0.75 * picture.filled(full) + 0.25 * picture.filled(empty))
        for creator in sorted(picture.share, key=lambda name: (-picture.share[name], name)):
            settled = creator not in self._moved_s and creator not in self._pending
            fits = picture.filled(empty, picture.share[creator]) <= most
            if not fits or not settled or picture.serving(creator) != [full]:
                continue
            number = picture.variants(creator, [empty], ()).get(empty)
            if number is None:
                continue
            self._moved_s[creator] = now_s
            home = picture.home(creator) == empty
            return picture.change(creator, None if home else Route((number,), "moved"))
        return None
