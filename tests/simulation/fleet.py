"""The processes: how they start, and the ways in which they stop.

A killed process stops with no effect beyond itself: its connection is gone and nothing that its clean-up says leaves it. It comes
back later, in a new life. A drained one goes as SIGTERM makes it go.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import anyio

from gateway.app import Gateway
from pipeline import outside
from pipeline.bus.connection import Bus
from pipeline.bus.errors import BusError
from pipeline.bus.presence import Announcer, Watcher
from pipeline.config import Config
from pipeline.limits import ACCUSER_PERIOD_S, DRAIN_S
from pipeline.protocol.arrangement import Role
from pipeline.protocol.intake import Rules
from pipeline.protocol.presence import Presences
from tests.simulation.broker import SimBroker
from tests.simulation.engine import Choices, SimEngine
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.restless import Restless
from tests.simulation.wire import BROKER, SimBus
from workers.control import Control
from workers.decode import DecodeWorker
from workers.engines.simulated.tier import LocalTier
from workers.identity import new_identity
from workers.keeper import Keeper
from workers.loops import Loops
from workers.prefill import PrefillWorker

RESTART_S: Final = 0.3

ENGINES: Final[Mapping[str, Role]] = {"prefill": "prefill", "decode": "decode", "both": "both"}
"""What the engine of a worker is built for."""

SKEW_S: Final = 0.2
"""Clocks are this wrong at most."""


class Running:
    """One life of one process, and what it consists of."""

    def __init__(self, process: Process, role: str) -> None:
        self.process = process
        self.role = role
        self.task: asyncio.Task[None]
        self.scope = anyio.CancelScope()
        self.bus: Bus | None = None
        self.engine: SimEngine | None = None
        self.loops: Loops | None = None
        self.gateway: Gateway | None = None
        self.keeper: Keeper | None = None
        self.ready = False
        self.draining = False

    @property
    def prefill(self) -> PrefillWorker | None:
        """Its prefill loop, open or closed, where its engine can."""
        return self.loops.prefill if self.loops is not None else None

    @property
    def decode(self) -> DecodeWorker | None:
        """Its decode loop."""
        return self.loops.decode if self.loops is not None else None

    @property
    def begun_epoch(self) -> str:
        """The worker's epoch, once it has one."""
        worker = self.prefill or self.decode
        return worker.me.epoch if worker is not None else ""

    @property
    def serves(self) -> bool:
        """Whether it has come through its start."""
        both = [loop.ready for loop in (self.prefill, self.decode) if loop is not None]
        return all(both) if both else self.ready

    def __str__(self) -> str:
        return self.process.name


class Fleet:
    """All processes, by role and number. `begun` and `crashed` are told of every life, `poisoned` of those that poison ends."""

    def __init__(
        self,
        loop: VirtualLoop,
        broker: SimBroker,
        config: Config,
        seed: int,
        begun: Callable[[Running], None],
        crashed: Callable[[Running, BaseException], None],
        poisoned: Callable[[Running], None],
        begins: Role,
    ) -> None:
        self._loop, self._broker, self._config, self._seed = loop, broker, config, seed
        self._begun, self._crashed, self._poisoned, self._begins = begun, crashed, poisoned, begins
        self._chance = random.Random(f"{seed}/fleet")
        self.tier = LocalTier(max(1, config.simulated.lmcache_blocks))
        self.samplings: dict[str, list[Choices]] = {}
        self.running: dict[tuple[str, int], Running] = {}
        self._processes: list[Process] = []
        self._ended = False
        self._lives = 0
        self._skews_s: dict[tuple[str, int], float] = {}

    def start(self, of: tuple[str, int]) -> Running:
        """A new life."""
        role, number = of
        self._lives += 1
        # A host's clock is wrong in the same way for all that run on it: epochs begin with the time, and must grow.
        skew_s = self._skews_s.setdefault(of, self._chance.uniform(-SKEW_S, SKEW_S))
        process = Process(f"{role}-{number + 1}", self._lives, self._seed, skew_s)
        process.context.run(BROKER.set, self._broker)
        self._processes.append(process)
        running = self.running[of] = Running(process, role)
        others = {"gateway": self._gateway, "keeper": self._keeper}
        work = self._worker if role in ENGINES else others.get(role, self._program)
        running.task = self._loop.create_task(self._live(of, running, work), context=process.context)
        return running

    def alive(self, of: tuple[str, int]) -> Running | None:
        """That process, where it runs."""
        return self.running.get(of)

    def named(self, name: str) -> Running | None:
        """The running process of that name."""
        return next((running for running in self.running.values() if running.process.name == name), None)

    def kill(self, of: tuple[str, int]) -> Running | None:
        """`kill -9`."""
        running = self.running.pop(of, None)
        if running is None:
            return None
        running.process.dead = True
        self._broker.died(running.process)
        self._loop.end(running.process)
        return running

    async def drain(self, of: tuple[str, int], running: Running) -> None:
        """SIGTERM, as `workers.runtime` obeys it."""
        loops = running.loops
        if loops is None or running.draining:
            return
        running.draining = True
        with anyio.move_on_after(DRAIN_S) as bound:
            await loops.drain()
        if bound.cancelled_caught:
            loops.let_go()
            with anyio.move_on_after(1.0):
                await loops.drain()
        running.scope.cancel()
        await asyncio.wait({running.task})
        if self.running.get(of) is running:
            del self.running[of]

    async def stop(self) -> None:
        """End everything, as the world ends."""
        self._ended = True
        for of in list(self.running):
            self.kill(of)
        for process in self._processes:
            process.dead = True
            while tasks := self._loop.end(process):
                await asyncio.wait(tasks)

    async def _live(
        self,
        of: tuple[str, int],
        running: Running,
        work: Callable[[tuple[str, int], Running], Coroutine[Any, Any, None]],
    ) -> None:
        """Where it loses the broker before it serves, its supervisor starts it anew. After that it may not end by itself."""
        try:
            await work(of, running)
        except Exception as error:
            if running.process.dead:
                return
            if running.serves or not _is_lost(error):
                self._crashed(running, error)
                return
            self.kill(of)
            self._broker.later(RESTART_S, self._again, of)

    def _again(self, of: tuple[str, int]) -> None:
        if of not in self.running and not self._ended:
            self.start(of)

    def _dies_of_poison(self, of: tuple[str, int], running: Running) -> None:
        if self.running.get(of) is running and not self._ended:
            self._poisoned(running)
            self.kill(of)
            self._broker.later(RESTART_S, self._again, of)

    async def _worker(self, of: tuple[str, int], running: Running) -> None:
        name, built_for = running.process.name, ENGINES[running.role]
        engine = SimEngine(
            self._config,
            built_for,
            self.tier,
            self.samplings,
            lambda: self._broker.later(0.0, self._dies_of_poison, of, running),
        )
        await engine.start()
        running.engine = engine
        try:
            async with await SimBus.connect("sim", name) as bus:
                running.bus = bus
                me, presences = new_identity(name), Presences()
                role = self._begins if built_for == "both" else built_for
                loops = running.loops = Loops(bus, engine, self._config, me, presences, built_for, role=role)
                self._begun(running)
                watcher = Watcher(bus, presences, outside.monotonic_s)
                await watcher.start()
                with running.scope:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._control(of, running, bus, loops).run)
                        await loops.run()
                await watcher.stop()
        finally:
            await engine.close()

    def _control(self, of: tuple[str, int], running: Running, bus: Bus, loops: Loops) -> Control:
        def leave() -> None:
            self._loop.create_task(self.drain(of, running), context=running.process.context)

        return Control(bus, running.process.name, loops, lambda: running.draining, leave)

    async def _gateway(self, _: tuple[str, int], running: Running) -> None:
        async with await SimBus.connect("sim", running.process.name) as bus:
            running.bus = bus
            gateway = running.gateway = Gateway(self._config, bus, self._gateway_id(running.process))
            gateway.routing.balancer = Restless(self._seed, running.process.name)
            self._begun(running)
            watcher = Watcher(bus, gateway.presences, outside.monotonic_s)
            announcer = Announcer(bus, gateway.presence, ACCUSER_PERIOD_S)
            await watcher.start()
            await gateway.listen()
            await announcer.start()
            await gateway.warm.start()
            await gateway.routing.start()
            async with anyio.create_task_group() as tasks:
                running.ready = True
                tasks.start_soon(gateway.vigil.run)
                tasks.start_soon(gateway.warm.run)
                tasks.start_soon(gateway.routing.run)
                await anyio.sleep_forever()

    async def _keeper(self, _: tuple[str, int], running: Running) -> None:
        requests, presences = self._config.requests, Presences()
        rules = Rules(reply_subjects=requests.reply_subjects, timeout_max_s=dict(requests.timeout_max_s))
        async with await SimBus.connect("sim", running.process.name) as bus:
            running.bus = bus
            await Watcher(bus, presences, outside.monotonic_s).start()
            running.keeper = Keeper(bus, rules, new_identity(running.process.name), presences)
            self._begun(running)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(running.keeper.run)
                await running.keeper.ready.wait()
                running.ready = True

    async def _program(self, _: tuple[str, int], running: Running) -> None:
        """A producer or an operator has nothing but a connection: what they do with it is in `producers.py` and `faults.py`."""
        async with await SimBus.connect("sim", running.process.name) as bus:
            running.bus = bus
            self._begun(running)
            running.ready = True
            await anyio.sleep_forever()

    def _gateway_id(self, process: Process) -> str:
        """In half of the worlds a gateway that is started anew keeps its name, as an operator may have it."""
        return process.name if self._seed % 2 else f"{process.name}-{outside.token(4)}"


def _is_lost(error: BaseException) -> bool:
    """Whether all that went wrong is the connection."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_lost(inner) for inner in error.exceptions)
    return isinstance(error, BusError)
