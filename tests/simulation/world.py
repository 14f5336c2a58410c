"""One seed, from its first event to rest."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import msgspec
import structlog

from pipeline import outside
from pipeline.bus import streams
from pipeline.paths import JETSTREAM
from pipeline.protocol.personas import Persona, key_of, write
from tests.simulation import faults
from tests.simulation.broker import SimBroker
from tests.simulation.checks import Checks
from tests.simulation.clients import Client, HttpClient, persona
from tests.simulation.fleet import Fleet
from tests.simulation.loop import Stuck, VirtualLoop, VirtualSource, virtual_time
from tests.simulation.plan import CREATORS, LOAD_S, SHARDS, TIMEOUT_S, Order, Plan, draw
from tests.simulation.producers import PATIENCE_S, Arbiter, Keeping, Subscriber
from tests.simulation.story import Story

REST_WITHIN_S: Final = 30.0
"""After the last end: a lease, an ask, a pull's expiry, what a deadline leaves to be told, and what a keeper then buries."""

LOOK_PERIOD_S: Final = 0.25

STOP_AFTER_BROKEN: Final = 5


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a seed came to. `story` is there where it was asked for."""

    seed: int
    broken: list[str]
    requests: int
    whole: int
    errors: int
    left: int
    faults: dict[str, int]
    virtual_s: float
    story: list[str] = []


class World:
    """Everything of one seed."""

    def __init__(self, plan: Plan, loop: VirtualLoop, *, story: bool) -> None:
        self.plan, self.loop = plan, loop
        self.story = Story(loop, story)
        self.broker = SimBroker(loop, plan.seed)
        self.clients: dict[str, Client] = {}
        self.checks = self.broker.watch = Checks(plan, self.broker, self.story, self.clients)
        self.clients.update({order.id: self._client_of(order) for order in plan.orders})
        checks = self.checks
        self.fleet = checks.fleet = Fleet(
            loop, self.broker, plan.config, plan.seed, checks.begun, checks.crashed, checks.poisoned, plan.begins
        )
        self.struck: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []

    async def run(self) -> Outcome:
        """Live through it."""
        declare(self.broker)
        self._publish_personas()
        for of in self._fleet():
            self.fleet.start(of)
        await self._until_ready()
        begun_s = self.loop.now_s
        self.tasks = [
            *(self._do(faults.strike(self, fault, begun_s)) for fault in self.plan.faults),
            *(self._do(self._client(client, begun_s)) for client in self.clients.values()),
        ]
        await self._to_rest()
        await self.fleet.stop()
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        return self._outcome()

    def _publish_personas(self) -> None:
        bucket = self.broker.js.streams["KV_personas"]
        for creator in CREATORS:
            published = Persona(creator=creator, system=persona(creator))
            bucket.store(f"$KV.personas.{key_of(creator, '')}", write(published), None, self.broker.js.now_s)

    def _fleet(self) -> Iterator[tuple[str, int]]:
        for role, count in (
            ("decode", self.plan.decode),
            ("prefill", self.plan.prefill),
            ("both", self.plan.both),
            ("gateway", self.plan.gateways),
            ("keeper", self.plan.keepers),
            ("producer", 1),
            ("operator", int(self.plan.both > 0)),
        ):
            for number in range(count):
                yield role, number

    def _client_of(self, order: Order) -> Client:
        checks = self.checks
        match order.way:
            case "subscription":
                return Subscriber(order, checks.wrong, checks.listens)
            case "kept":
                return Keeping(order)
            case "arbiter":
                return Arbiter(order, checks.claimed, checks.grown)
            case None:
                return HttpClient(order)

    def _do(self, work: Any) -> "asyncio.Task[None]":
        return self.loop.create_task(work)

    async def _until_ready(self) -> None:
        """Everybody is there and known to the others."""
        await asyncio.sleep(0.5)

    async def _client(self, client: Client, begun_s: float) -> None:
        """One client: it finds a process that lives, a gateway or its own, asks, and may leave or be cut off."""
        order = client.order
        await asyncio.sleep(max(0.0, begun_s + order.at_s - self.loop.now_s))
        while (at := self.fleet.alive(order.through)) is None or not at.ready:
            await asyncio.sleep(0.05)
        self.story.tell("client", "▷", "asks", order.id, f"{order.max_tokens} tokens of {at}, {order.timeout_s:.2f} s")
        ask = client.ask(at, lambda verb, detail: self.story.tell("client", "■", verb, order.id, detail))
        client.task = self.loop.create_task(ask, context=at.process.context)
        if order.leaves_s is not None:
            self.broker.later(order.leaves_s, client.leave)
        await asyncio.wait({client.task})
        if client.task.cancelled():
            client.cut = True
        elif (error := client.task.exception()) is not None:
            self.checks.wrong(f"the relay of {order.id} failed: {error!r}")
        self.checks.ended(client)

    async def _to_rest(self) -> None:
        """Until all have ended and nothing is left, or too long."""
        ends_s = self.loop.now_s + LOAD_S + TIMEOUT_S + PATIENCE_S
        while not all(task.done() for task in self.tasks):
            await self._look()
            if self.loop.now_s > ends_s or len(self.checks.broken) >= STOP_AFTER_BROKEN:
                waiting = [client.order.id for client in self.clients.values() if not client.over]
                self.checks.wrong(f"after {self.loop.now_s:.1f} s still without an end: {waiting}")
                return
        quiet_s = self.loop.now_s
        while unrest := self.checks.unrest():
            await self._look()
            if self.loop.now_s - quiet_s > REST_WITHIN_S:
                for what in unrest:
                    self.checks.wrong(f"{REST_WITHIN_S:.0f} s after the last end, {what}")
                return
        self.checks.kept()

    async def _look(self) -> None:
        await asyncio.sleep(LOOK_PERIOD_S)
        self.checks.bounds()

    def _outcome(self) -> Outcome:
        ends = Counter(
            "left" if client.left or client.cut else type(client.end).__name__ for client in self.clients.values()
        )
        return Outcome(
            seed=self.plan.seed,
            broken=self.checks.broken,
            requests=len(self.clients),
            whole=ends["Done"],
            errors=ends["ErrorBody"],
            left=ends["left"],
            faults=dict(self.struck),
            virtual_s=self.loop.now_s,
            story=self.story.lines,
        )


def simulate(seed: int, *, story: bool = False) -> Outcome:
    """Run a seed. The same seed is the same run, to the last event."""
    return simulate_plan(draw(seed), story=story)


def simulate_plan(plan: Plan, *, story: bool = False) -> Outcome:
    """Run a plan."""
    collecting = gc.isenabled()
    gc.disable()  # what is collected when depends on more than the seed
    try:
        with virtual_time() as loop, _own_time(loop, plan.seed):
            world = World(plan, loop, story=story)
            with _errors_to(world.checks):
                try:
                    return loop.run_until_complete(world.run())
                except Stuck as error:
                    world.checks.wrong(f"the world is stuck: {error}")
                    return world._outcome()
    finally:
        if collecting:
            gc.enable()


def declare(broker: SimBroker) -> None:
    """The streams of `configs/jetstream`, with fewer shards."""
    for item in _declared():
        if item.kind == "stream":
            broker.js.declare(item.config)
        else:
            broker.js.consume(item.stream, item.config)


@cache
def _declared() -> tuple[streams.Item, ...]:
    items = (item for item in streams.declared(JETSTREAM).items if item.kind == "stream" or _is_wanted(item))
    return tuple(msgspec.structs.replace(item, config=_fewer_shards(item.config)) for item in items)


def _is_wanted(consumer: streams.Item) -> bool:
    """The keeper's, and the first shards of the requests."""
    return not consumer.stream.startswith("REQUESTS") or int(consumer.name.removeprefix("s")) < SHARDS


def _fewer_shards(config: Mapping[str, Any]) -> Mapping[str, Any]:
    transform = config.get("subject_transform")
    if transform is None:
        return config
    dest = transform["dest"].replace("partition(16,", f"partition({SHARDS},")
    return {**config, "subject_transform": {**transform, "dest": dest}}


@contextmanager
def _own_time(loop: VirtualLoop, seed: int) -> Iterator[None]:
    outside.use(VirtualSource(loop, seed))
    try:
        yield
    finally:
        outside.use(None)


@contextmanager
def _errors_to(checks: Checks) -> Iterator[None]:
    """Log lines go nowhere, but errors are found wrong."""

    def found(_: Any, __: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        checks.logged(event)
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[found], wrapper_class=structlog.make_filtering_bound_logger(40))
    try:
        yield
    finally:
        structlog.configure(**before)
