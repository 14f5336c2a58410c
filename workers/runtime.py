"""One worker process: its connection, its engine, its loop, and how they start and end.

    connect ─► check the streams ─► start and warm up the engine ─► loop, leases and presence ─► SIGTERM ─► drain ─► close

It ends with an error when its engine dies: whoever supervises it starts a new one, in a new epoch.
"""

import signal
import time
from contextlib import AsyncExitStack
from typing import Final

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from pipeline import outside
from pipeline.bus import streams
from pipeline.bus.connection import Bus
from pipeline.bus.presence import Watcher
from pipeline.bus.settings import Settings
from pipeline.config import Config, Nats
from pipeline.errors import EngineDead, OperatorError
from pipeline.limits import DRAIN_S, TURNS_KEPT_MAX
from pipeline.paths import JETSTREAM
from pipeline.protocol.arrangement import Role
from pipeline.protocol.presence import Presences
from pipeline.protocol.subjects import CLASSES
from pipeline.protocol.turns import TURNS
from pipeline.telemetry import logs, spans
from pipeline.telemetry.lag import measure_lag
from workers.control import Control
from workers.engines import launch
from workers.engines.port import Engine
from workers.identity import new_identity
from workers.lease_thread import LeaseThread, lease_thread
from workers.loops import Loops
from workers.store_watch import watch_store

log: Final = logs.get("worker")

AGE_SPARE_S: Final = 30.0
"""From a class's longest deadline to the end of a message: time for a worker, or else the DLQ keeper, to tell how it ended."""

HEALTH_PERIOD_S: Final = 0.5


def make_engine(config: Config, role: Role, model_path: str | None) -> Engine:
    """The engine that the configuration names, built for `role`. vLLM is imported here and nowhere before."""
    if config.engine == "simulated":
        from workers.engines.simulated import SimulatedEngine  # noqa: PLC0415

        return SimulatedEngine(config, role)
    from workers.engines.vllm import VllmEngine  # noqa: PLC0415

    assert model_path is not None
    return VllmEngine(config, role, model_path)


async def run_worker(
    config: Config, built_for: Role, worker_id: str, model_path: str | None, role: Role | None = None
) -> None:
    """Run until SIGTERM or SIGINT. A worker whose engine is built for both may begin in another `role`.

    Raises `OperatorError` for a set-up that cannot work, `EngineDead` for a lost engine."""
    spans.check(config.telemetry)  # before seconds are spent on an engine
    engine = make_engine(config, built_for, model_path)
    process = _Process(config, built_for, role, worker_id, engine)
    async with AsyncExitStack() as cleanup:
        cleanup.push_async_callback(_shielded_close, engine)
        await process.run()


async def _shielded_close(engine: Engine) -> None:
    with anyio.CancelScope(shield=True):
        await engine.close()


class _Process:
    """The life of the process. `loop` is set once it serves: before that a signal ends it at once."""

    def __init__(self, config: Config, built_for: Role, role: Role | None, worker_id: str, engine: Engine) -> None:
        self.config, self.built_for, self.role, self.worker_id, self.engine = config, built_for, role, worker_id, engine
        self.loop: Loops | None = None
        self._draining = False
        self._leases: LeaseThread
        self._tasks: TaskGroup

    async def run(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._obey_signals)
            async with await Bus.connect(self.config.nats, self.worker_id) as bus:
                declared = await check_streams(bus, self.config.nats)
                check_shards(self.config, declared)
                check_ages(self.config, declared)
                check_turns(self.config, declared)
                began_s = time.monotonic()
                await self.engine.start()
                await self.engine.warm_up()
                log.info("engine ready", seconds=round(time.monotonic() - began_s, 1), **_said(self.engine))
                async with lease_thread(self.config.nats, self.worker_id) as self._leases:
                    await self._serve(bus)

    async def _serve(self, bus: Bus) -> None:
        me, presences, settings = new_identity(self.worker_id), Presences(), Settings(bus, self.config)
        await settings.start()
        self.loop = loop = Loops(bus, self.engine, settings.now, me, presences, self.built_for, self._leases, self.role)
        loop.settings_version = lambda: settings.version
        settings.apply_to(loop.apply)
        self._tasks.start_soon(settings.run)
        self._tasks.start_soon(self._watch_engine)
        self._tasks.start_soon(Control(bus, self.worker_id, loop, lambda: self._draining, self._begin_drain).run)
        self._tasks.start_soon(measure_lag)
        if self.config.engine == "vllm":
            self._tasks.start_soon(watch_store, f"{launch.lmcache_url(self.config)}/healthcheck")
        watcher = Watcher(bus, presences, outside.monotonic_s)
        await watcher.start()
        try:
            log.info("serving", epoch=me.epoch)
            await loop.run()
        finally:
            with anyio.CancelScope(shield=True):
                await watcher.stop()
                await anyio.to_thread.run_sync(loop.close_spans)

    async def _obey_signals(self) -> None:
        """The first signal drains, a second one ends at once."""
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                if self.loop is None or self._draining:
                    self._tasks.cancel_scope.cancel()
                    return
                self._begin_drain()

    def _begin_drain(self) -> None:
        """By a signal, or by an operator's order."""
        assert self.loop is not None
        self._draining = True
        self._tasks.start_soon(self._drain, self.loop)

    async def _drain(self, loop: Loops) -> None:
        log.info("draining")
        with anyio.move_on_after(DRAIN_S) as bound:
            await loop.drain()
        if bound.cancelled_caught:
            log.warning("drain took too long: giving requests back", bound_s=DRAIN_S)
            loop.let_go()
            with anyio.move_on_after(1.0):
                await loop.drain()
        self._tasks.cancel_scope.cancel()

    async def _watch_engine(self) -> None:
        """`check` raises `EngineDead`, which ends the process; its leases do not wait for that."""
        while True:
            await anyio.sleep(HEALTH_PERIOD_S)
            try:
                await self.engine.check()
            except EngineDead:
                self._leases.engine_failed()
                raise


async def check_streams(bus: Bus, nats: Nats) -> streams.Declared:
    """On streams that are not as declared requests would be lost or misplaced. Raises `OperatorError`."""
    declared = streams.declared(JETSTREAM, nats.replicas)
    differences = await streams.diff(bus, declared)
    if differences:
        raise OperatorError(
            f"The streams on {nats.url} are not as declared: {'; '.join(map(str, differences[:3]))}.",
            "Run `headrace streams apply`.",
        )
    return declared


def check_shards(config: Config, declared: streams.Declared) -> None:
    """Shards that nobody pulls would starve. Raises `OperatorError`."""
    for klass in CLASSES:
        if (there := streams.shards_of(declared, klass)) != config.requests.shards:
            raise OperatorError(
                f"requests.shards is {config.requests.shards}, but the stream of class {klass} has {there} partitions.",
                "Make the two equal: in the configuration, or in configs/jetstream.",
            )


def check_ages(config: Config, declared: streams.Declared) -> None:
    """A request that is worked on when it passes `max_age` vanishes without a word. Raises `OperatorError`."""
    for klass in CLASSES:
        longest_s, age_s = config.requests.timeout_max_s[klass], streams.max_age_s(declared, klass)
        if longest_s + AGE_SPARE_S > age_s:
            raise OperatorError(
                f"requests.timeout_max_s of class {klass} is {longest_s:g} s, but its stream keeps a request for {age_s:g} s.",
                f"Set it to {age_s - AGE_SPARE_S:g} s at most, or raise max_age in configs/jetstream.",
            )


def check_turns(config: Config, declared: streams.Declared) -> None:
    """A window that is larger than what is kept would move with every turn. Raises `OperatorError`."""
    kept = min(TURNS_KEPT_MAX, declared.stream(TURNS)["max_msgs_per_subject"])
    wanted = config.conversations.window_turns + config.conversations.step_turns
    if wanted > kept:
        raise OperatorError(
            f"conversations.window_turns and step_turns are {wanted} together, but of a conversation {kept} turns are kept.",
            f"Lower them, or raise max_msgs_per_subject of the stream {TURNS}, to {TURNS_KEPT_MAX} at most.",
        )


def _said(engine: Engine) -> dict[str, object]:
    info = engine.info
    return {"model": info.model, "kv_blocks": info.kv_blocks, "block_size": info.block_size}
