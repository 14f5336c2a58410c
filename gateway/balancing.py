"""Moving workers between roles, where the operator wants it: `[balancer] enabled`.

One gateway decides, the one that writes the routes. What it decides is `pipeline.protocol.balancer`; the worker itself carries it
out, and may refuse.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.routing import Routing
from pipeline.bus.connection import Bus
from pipeline.bus.errors import BusError
from pipeline.limits import BALANCE_PERIOD_S
from pipeline.protocol import subjects
from pipeline.protocol.arrangement import Role
from pipeline.protocol.balancer import Balancer, Member, Rules, Turn
from pipeline.protocol.control import Order, standing_decoder
from pipeline.protocol.messages import Presence, encode
from pipeline.protocol.presence import Presences
from pipeline.telemetry import logs, metrics

ANSWER_S: Final = 5.0
"""A worker stops its pulls before it answers."""

ROLES: Final[dict[str, Role]] = {"prefill": "prefill", "decode": "decode", "both": "both"}

log = logs.get("balancing")


class Balancing:
    """One gateway's part in it."""

    def __init__(
        self, bus: Bus, presences: Presences, routing: Routing, rules: Rules, clock: Callable[[], float]
    ) -> None:
        self._bus, self._presences, self._routing, self._clock = bus, presences, routing, clock
        self._balancer = Balancer(rules)

    async def run(self) -> None:
        """Look once a second, until cancelled. Who has not decided before begins with a patience of its own."""
        while True:
            await asyncio.sleep(BALANCE_PERIOD_S)
            if self._routing.leads():
                await self._look()

    async def _look(self) -> None:
        now_s = self._clock()
        members = members_of(self._presences.ready("prefill", now_s), self._presences.ready("decode", now_s))
        turn = self._balancer.step(now_s, members)
        for part in ("prefill", "decode"):
            metrics.PRESSURE.labels(part=part).set(getattr(self._balancer.pressure, part))
        if turn is not None:
            await self._order(turn)

    async def _order(self, turn: Turn) -> None:
        try:
            asked = encode(Order("turn", turn.role))
            standing = standing_decoder.decode(await self._bus.request(subjects.control(turn.worker), asked, ANSWER_S))
        except (BusError, msgspec.MsgspecError) as error:  # the second: a worker of another version
            log.warning("turn_unanswered", worker=turn.worker, role=turn.role, error=str(error))
            return
        metrics.TURNS.labels(role=turn.role).inc()
        log.info(
            "turned", worker=turn.worker, role=turn.role, bottleneck=turn.bottleneck, refused=standing.refused or None
        )


def members_of(prefill: list[Presence], decode: list[Presence]) -> list[Member]:
    """The workers that take work, each once, from what their loops say."""
    there = {peer.id: peer for peer in decode}
    members = {peer.id: _member(peer, there.get(peer.id)) for peer in prefill}
    members |= {peer.id: _member(None, peer) for peer in decode if peer.id not in members}
    return list(members.values())


def _member(prefill: Presence | None, decode: Presence | None) -> Member:
    said = prefill or decode
    assert said is not None
    return Member(
        worker=said.id,
        role=ROLES.get(said.serves_as, ROLES[said.role]),
        built_for=ROLES.get(said.built_for, ROLES[said.role]),
        slots=prefill.slots if prefill else 0,
        slots_free=prefill.slots_free if prefill else 0,
        reads_ratio=prefill.reads_ratio if prefill else 0.0,
        blocks=decode.blocks if decode else 0,
        blocks_free=decode.blocks_free if decode else 0,
        full_ratio=decode.full_ratio if decode else 0.0,
    )
