"""Where a creator's requests go: by the hash, unless the bucket `routes` says otherwise.

Every gateway follows the bucket, counts who asks how much, and says so in its presence. One of them, the live gateway whose id
comes first, looks at it all once a second and writes the exceptions (`pipeline.protocol.routes` decides which). Should two think
that they are it, the bucket's compare-and-set keeps them from undoing each other's work. Producers may read the bucket, too; one
that does not still spills.

Before a route sends a creator to workers that do not know it, those load its persona (`prefill.<worker>`): an owner that has
served the creator says what its prompts share. Where nobody can, or a worker has no time, the route is published all the same.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

import anyio
import msgspec

from gateway.warm import Warm
from pipeline.bus.connection import Bus
from pipeline.bus.errors import ApiError, BusError
from pipeline.bus.kv import Bucket
from pipeline.limits import BALANCE_PERIOD_S, RATES_SAID_MAX, ROUTES_RELOAD_S, SPILL_LOAD, WARM_UP_TIMEOUT_S
from pipeline.protocol import placement, routes, subjects
from pipeline.protocol.messages import encode
from pipeline.protocol.presence import Presences
from pipeline.protocol.routes import Balancer, Change, Rates, Route, Worker
from pipeline.protocol.subjects import Shard
from pipeline.protocol.warm_messages import Prefix, WantPrefix, WarmUp, prefix_decoder, warmed_up_decoder
from pipeline.telemetry import logs, metrics

BUCKET: Final = "routes"

log = logs.get("routing")

_read = msgspec.json.Decoder(Route).decode


class Routing:
    """One gateway's view of the routes, and its part in making them."""

    def __init__(
        self, bus: Bus, presences: Presences, warm: Warm, process: str, shards: int, clock: Callable[[], float]
    ) -> None:
        self.warm = warm
        self.rates = Rates()
        self.balancer = Balancer()
        self.routes: dict[str, Route] = {}
        self.spill_load = SPILL_LOAD
        self._bus, self._presences, self._process = bus, presences, process
        self._shards = shards
        self._clock = clock
        self._bucket = Bucket(bus, BUCKET)
        self._revisions: dict[str, int] = {}
        self._version = -1
        self._changed: set[str] = set()
        self._were_warm: set[str] = set()
        """Moved creators whose new owner has had their prefix."""
        self._wake = asyncio.Event()
        self._reload_s = float("-inf")
        self._unread = ""
        """What was said last of a bucket that could not be read: once, and not every second."""

    def affinity(self, creator: str, conversation: str) -> str:
        """The affinity token of a request, which counts as one of its creator's (a subject token)."""
        self.rates.count(creator, self._clock())
        return routes.affinity(creator, conversation, self.routes.get(creator))

    def shard(self, klass: str, affinity: str) -> Shard:
        """The queue of requests of this affinity."""
        return Shard(klass, subjects.partition(affinity, self._shards))

    def heaviest(self) -> dict[str, float]:
        """Requests a second of the creators that ask most here: for our presence."""
        top = self.rates.top(self._clock())
        named = sorted(top, key=top.__getitem__, reverse=True)[:RATES_SAID_MAX]
        return {creator: round(top[creator], 2) for creator in named}

    def total(self) -> float:
        """Requests a second that have come here."""
        return round(self.rates.total(self._clock()), 2)

    async def start(self) -> None:
        """Follow the bucket, and read it. A broker without one leaves all to the hash, and is asked again."""
        await self._bucket.follow(self._heard)
        self._bus.on_reconnect(self._doubt)
        await self._refresh()

    async def run(self) -> None:
        """Keep up with the bucket, and write it when that is ours to do; until cancelled."""
        balance_s = self._clock() + BALANCE_PERIOD_S
        while True:
            with anyio.move_on_after(max(0.0, balance_s - self._clock())):
                await self._wake.wait()
            self._wake.clear()
            await self._refresh()
            if self._clock() >= balance_s:
                balance_s = self._clock() + BALANCE_PERIOD_S
                if self.leads():
                    await self._balance()

    # ---- following

    def _heard(self, creator: str) -> None:
        self._changed.add(creator)
        self._wake.set()

    def _doubt(self) -> None:
        self._version, self._reload_s = -1, float("-inf")
        self._wake.set()

    async def _refresh(self) -> None:
        """Read what has changed, and now and then whether anything has that we did not hear of."""
        try:
            while self._changed:
                creator = self._changed.pop()
                entry = await self._bucket.read(creator)
                self._take(creator, entry.value if entry else None, entry.revision if entry else 0)
            if self._clock() >= self._reload_s:
                await self._reload()
            self._unread = ""
        except BusError as error:
            if str(error) != self._unread:
                self._unread = str(error)
                log.warning("routes_unread", error=self._unread)
            self._version = -1
            self._reload_s = self._clock() + BALANCE_PERIOD_S

    async def _reload(self) -> None:
        self._reload_s = self._clock() + ROUTES_RELOAD_S
        version = await self._bucket.version()
        if version == self._version:
            return
        entries = await self._bucket.load()
        for creator in self.routes.keys() - entries.keys():
            self._take(creator, None, 0)
        for creator, entry in entries.items():
            self._take(creator, entry.value, entry.revision)
        self._version = version

    def _take(self, creator: str, value: bytes | None, revision: int) -> None:
        self.routes.pop(creator, None)
        self._revisions[creator] = revision
        if value is None:
            del self._revisions[creator]
        else:
            try:
                self.routes[creator] = _read(value)
            except msgspec.MsgspecError as error:  # another version's, or somebody's own: the hash serves as well
                log.warning("route_unreadable", creator=creator, error=str(error))
        reasons = Counter(route.reason for route in self.routes.values())
        for reason in ("hot", "moved"):
            metrics.ROUTES.labels(reason=reason).set(reasons[reason])

    # ---- writing

    def leads(self) -> bool:
        """Whether ours is the first id of the live gateways."""
        live = [peer.id for peer in self._presences.ready("gateway", self._clock())]
        return bool(live) and self._bus.connected and min(live) == self._process

    async def _balance(self) -> None:
        now_s = self._clock()
        rates, total = self._asked(now_s)
        workers = {
            peer.id: Worker(weight=float(peer.slots), load=peer.load)
            for peer in self._presences.ready("prefill", now_s)
        }
        changes = self.balancer.step(now_s, rates, total, self.routes, workers, self._shards)
        for change in [*self._evicted(), *changes]:
            try:
                await self._carry_out(change)
            except ApiError as error:
                log.warning("route_written_by_another", creator=change.creator, error=str(error))
                self._changed.add(change.creator)
            except BusError as error:
                log.warning("route_unwritten", creator=change.creator, error=str(error))

    def _evicted(self) -> list[Change]:
        """Moved creators that are not warm any more where they were moved to: that was the reason to stay."""
        moved = {creator for creator, route in self.routes.items() if route.reason == "moved"}
        warm = {
            creator for creator in moved if any(self.warm.is_warm(creator, owner) for owner in self.owners(creator))
        }
        lost = (self._were_warm & moved) - warm
        self._were_warm = (self._were_warm & moved - lost) | warm
        return [Change(creator, None) for creator in sorted(lost)]

    def _asked(self, now_s: float) -> tuple[dict[str, float], float]:
        """Requests a second by creator and in all, over all gateways."""
        rates, total = Counter(self.rates.top(now_s)), self.rates.total(now_s)
        for peer in self._presences.live("gateway", now_s):
            if peer.id != self._process:
                rates.update(peer.rates)
                total += peer.rate
        return dict(rates), total

    async def _carry_out(self, change: Change) -> None:
        revision = self._revisions.get(change.creator, 0)
        if change.route is None:
            if revision:
                await self._bucket.delete(change.creator, revision)
            self._take(change.creator, None, 0)
            metrics.ROUTE_CHANGES.labels(kind="dropped").inc()
            log.info("route_dropped", creator=change.creator)
            return
        if change.warm:
            await self._warm_up(change.creator, change.warm)
        value = msgspec.json.encode(change.route)
        revision = await self._bucket.write(change.creator, value, revision)
        self._take(change.creator, value, revision)
        metrics.ROUTE_CHANGES.labels(kind=change.route.reason).inc()
        log.info("route_written", creator=change.creator, reason=change.route.reason, variants=change.route.variants)

    # ---- prefixes ahead of demand

    async def _warm_up(self, creator: str, workers: tuple[str, ...]) -> None:
        """Have the new owners load the creator's persona. What fails costs a load at the first request, not a request."""
        prefix = await self._prefix_of(creator)
        if not prefix.ids:
            return
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(self._warm(worker, WarmUp(creator=creator, prefix=prefix)))

    async def _prefix_of(self, creator: str) -> Prefix:
        """From the first of its present owners that knows."""
        for worker in self.owners(creator):
            try:
                answer = await self._bus.request(
                    subjects.prefill(worker), encode(WantPrefix(creator)), WARM_UP_TIMEOUT_S / 4
                )
                prefix = prefix_decoder.decode(answer)
            except (BusError, msgspec.MsgspecError):  # the second: a worker of another version
                continue
            if prefix.ids:
                return prefix
        return Prefix()

    async def _warm(self, worker: str, warm_up: WarmUp) -> None:
        try:
            answer = await self._bus.request(subjects.prefill(worker), encode(warm_up), WARM_UP_TIMEOUT_S)
            done = warmed_up_decoder.decode(answer)
            log.info("warmed_up", creator=warm_up.creator, worker=worker, state=done.state, cached=done.cached_tokens)
        except (BusError, msgspec.MsgspecError) as error:
            log.warning("not_warmed_up", creator=warm_up.creator, worker=worker, error=str(error))

    # ---- who serves whom

    def owners(self, creator: str) -> list[str]:
        """The workers that a creator's requests are meant for now, each once."""
        return list(dict.fromkeys(order[0] for _, order in self.ways(creator) if order))

    def ways(self, creator: str) -> list[tuple[Shard, list[str]]]:
        """Of each of its affinities: the shard, and the live prefill workers in order of rank."""
        weights = {peer.id: float(peer.slots) for peer in self._presences.ready("prefill", self._clock())}
        shards = [Shard("interactive", subjects.partition(name, self._shards)) for name in self.affinities(creator)]
        return [(shard, placement.order(shard, weights)) for shard in shards]

    def affinities(self, creator: str) -> list[str]:
        """The affinity tokens that a creator's requests may carry now."""
        route = self.routes.get(creator)
        return [f"{creator}~{variant}" for variant in route.variants] if route else [creator]
