"""`GET /v1/routes/{creator}`: where a request of that creator would go now, and why."""

from collections.abc import Callable

import msgspec

from gateway.routing import Routing
from pipeline.protocol import subjects
from pipeline.protocol.presence import Presences

RANKS_TOLD_MAX = 4
"""The owner and who would serve in its place. What comes after them is hardly ever reached."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill worker for a shard: rank 0 owns it. `load` is 0…1, its own word; `warm`: it holds the creator's prefix."""

    worker: str
    rank: int
    load: float
    slots_free: int
    warm: bool


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One affinity of the creator: its requests lie in `shard` of their class."""

    affinity: str
    shard: int
    workers: list[Candidate]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `rate` is the creator's, in requests a second at this gateway; `route` is the exception, where there is one."""

    creator: str
    token: str
    rate: float
    route: str
    why: str
    ways: list[Way]


def explain(creator: str, routing: Routing, presences: Presences, clock: Callable[[], float]) -> Explanation:
    """What would happen to a request of `creator`, as its client spells it."""
    token, now_s = subjects.token(creator), clock()
    peers = {peer.id: peer for peer in presences.ready("prefill", now_s)}
    ways = [
        Way(
            affinity=affinity,
            shard=shard.number,
            workers=[
                Candidate(
                    worker=worker,
                    rank=rank,
                    load=peers[worker].load,
                    slots_free=peers[worker].slots_free,
                    warm=routing.warm.is_warm(token, worker),
                )
                for rank, worker in enumerate(order[:RANKS_TOLD_MAX])
                if worker in peers
            ],
        )
        for affinity, (shard, order) in zip(routing.affinities(token), routing.ways(token), strict=True)
    ]
    route = routing.routes.get(token)
    return Explanation(
        creator=creator,
        token=token,
        rate=round(routing.rates.top(now_s).get(token, 0.0), 2),
        route=route.reason if route else "hash",
        why=" ".join(
            [_of_route(len(ways), route.reason if route else None), *(_of_way(way, routing.spill_load) for way in ways)]
        ),
        ways=ways,
    )


def _of_route(count: int, reason: str | None) -> str:
    if reason == "hot":
        return f"It asks for more than one worker should do, so its conversations are spread over {count} affinities."
    if reason == "moved":
        return "The worker that its hash names was overloaded, so it has been moved to another."
    return "It has no exception: its hash names the shard."


def _of_way(way: Way, spill_load: float) -> str:
    if not way.workers:
        return f"Shard {way.shard}: no prefill worker is ready, so requests wait."
    owner, others = way.workers[0], way.workers[1:]
    if owner.load < spill_load and owner.slots_free:
        found = "where its prefix is warm" if owner.warm else "whose engine does not hold its prefix yet"
        return f"Shard {way.shard}: {owner.worker} owns it, and takes them, {found}."
    spare = next((other for other in others if other.slots_free and other.load < spill_load), None)
    busy = f"Shard {way.shard}: its owner {owner.worker} is at {owner.load:.0%}"
    if spare is None:
        return f"{busy}, and so are the next: whoever has a slot first takes them."
    found = "where the prefix is warm, too" if spare.warm else "which loads the prefix from LMCache"
    return f"{busy}, so they spill to {spare.worker}, {found}."
