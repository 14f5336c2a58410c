"""Routes that change all the time: whatever they say, no request may suffer, and all gateways must come to agree."""

import random
from collections.abc import Mapping
from typing import Final

import msgspec

from pipeline.protocol.routes import Balancer, Change, Route, Worker
from tests.simulation.jetstream import JetStream
from tests.simulation.plan import CREATORS

STEPS: Final = 4
"""Seconds of it in a gateway's life, while most requests come. Then nothing is changed any more, and all must agree."""

VARIANTS: Final = 6


class Restless(Balancer):
    """Wants something else every second, for no reason."""

    def __init__(self, seed: int, process: str) -> None:
        super().__init__()
        self._chance = random.Random(f"{seed}/{process}/routes")
        self._steps = STEPS

    def step(
        self,
        now_s: float,
        rates: Mapping[str, float],
        total: float,
        routes: Mapping[str, Route],
        workers: Mapping[str, Worker],
        shards: int,
    ) -> list[Change]:
        if not self._steps:
            return []
        self._steps -= 1
        return [self._change(creator, sorted(workers)) for creator in CREATORS if self._chance.random() < 0.5]

    def _change(self, creator: str, workers: list[str]) -> Change:
        chance = self._chance
        if chance.random() < 0.3:
            return Change(creator, None)
        numbers = tuple(sorted(chance.sample(range(VARIANTS), k=chance.choice((1, 2, 3)))))
        route = Route(variants=numbers, reason="moved" if len(numbers) == 1 else "hot")
        return Change(creator, route, tuple(worker for worker in workers if chance.random() < 0.5))


def written(js: JetStream) -> dict[str, Route]:
    """What the bucket holds."""
    stream = js.streams["KV_routes"]
    return {
        stored.subject.removeprefix("$KV.routes."): msgspec.json.decode(stored.data, type=Route)
        for stored in stream.messages.values()
        if stored.data
    }
