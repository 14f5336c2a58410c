"""The life of a stack: start what can start, wait until it is ready, start again what dies, and end everything in order.

One task keeps each unit (`_keep`): it waits for what the unit needs, starts it, notices readiness and death, and asks
`restarts.verdict` what to do then. The first SIGINT or SIGTERM ends all these tasks and begins the drain; the second one ends
the drain's patience. Whatever happens, no process outlives `Stack.run`.
"""

import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from pipeline import tls
from pipeline.cli import http
from pipeline.config import Config
from pipeline.errors import OperatorError
from workers.engines import launch
from workers.supervisor import folder, plan, restarts, roster
from workers.supervisor.plan import Answers, Present, Unit
from workers.supervisor.process import Process
from workers.supervisor.screen import Screen

PROBE_PERIOD_S: Final = 0.1
"""Between two looks at a starting unit: a tenth of what a person notices."""

PROBE_TIMEOUT_S: Final = 2.0
"""A server that takes longer to say that it is well is not."""

FALL_GRACE_S: Final = 3.0
"""What a worker gets when LMCache has died under it: its calls there hang, and its requests are redelivered anyway."""

HURRY_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

QUOTED_LINES: Final = 15
"""Of the log of what failed."""

Live = Callable[[], Awaitable[None]]
"""What runs once the stack is ready."""


class Slot:
    """One unit and its present process. `ready` is replaced when the unit dies: who waits, waits for the next life."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.process: Process | None = None
        self.ready = anyio.Event()
        self.falls = False
        self.deaths: list[restarts.Death] = []

    def died(self, status: int) -> None:
        """Its process has ended; remember how."""
        assert self.process is not None
        if not self.falls:
            lived_s = time.monotonic() - self.process.started_s
            death = restarts.Death(lived_s=lived_s, was_ready=self.ready.is_set(), status=status)
            self.deaths = [*self.deaths, death][-restarts.DEATHS_KEPT :]
        if self.ready.is_set():
            self.ready = anyio.Event()


class Stack:
    """All units of one plan, in one run folder."""

    def __init__(
        self, config: Config, units: Sequence[Unit], run_folder: Path, screen: Screen, gate: Answers | None = None
    ) -> None:
        """`gate` must answer, after all units are ready, before the stack is."""
        self._config = config
        self._gate = gate
        self._units = units
        self._folder = run_folder
        self._screen = screen
        self._slots = {unit.name: Slot(unit) for unit in units}
        self._life = anyio.CancelScope()
        self._keepers: TaskGroup
        self._hurry = anyio.Event()
        self._roster = roster.Roster()
        self._is_ready = False

    async def run(self, live: Live) -> None:
        """Start everything, run `live` when it is ready, and stay until a signal. Raises `OperatorError` where it cannot."""
        self._screen.expect(unit.name for unit in self._units)
        with anyio.open_signal_receiver(*HURRY_SIGNALS) as signals:
            async with anyio.create_task_group() as group:
                group.start_soon(self._obey, signals)
                try:
                    with self._life:
                        await self._live(live)
                finally:
                    with anyio.CancelScope(shield=True):
                        await self._drain()
                group.cancel_scope.cancel()

    async def _obey(self, signals: AsyncIterator[signal.Signals]) -> None:
        async for _ in signals:
            if self._life.cancel_called:
                self._hurry.set()
            self._life.cancel()

    async def _live(self, live: Live) -> None:
        async with anyio.create_task_group() as self._keepers:
            for slot in self._slots.values():
                self._keepers.start_soon(self._keep, slot)
            if any(isinstance(unit.ready, Present) for unit in self._units):
                self._keepers.start_soon(self._listen)
            await self._until_ready()
            await live()
            await anyio.sleep_forever()

    # ----------------------------------------------------------------------------------------------------------
    # Start

    async def _until_ready(self) -> None:
        limit_s = self._config.up.start_timeout_s
        try:
            with anyio.fail_after(limit_s):
                async with anyio.create_task_group() as group:
                    group.start_soon(self._draw)
                    await self._poll(self._complete)
                    group.cancel_scope.cancel()
        except TimeoutError:
            waited = [name for name, slot in self._slots.items() if not slot.ready.is_set()]
            waited += [] if waited or self._gate is None else [self._gate.url]
            raise OperatorError(
                f"Not ready after {limit_s:g} s: still waiting for {', '.join(waited)}.",
                f"See the logs in {self._folder / 'logs'}, or raise up.start_timeout_s.",
            ) from None
        finally:
            self._screen.settle()
        self._is_ready = True
        self._write_endpoints()

    async def _complete(self) -> bool:
        if not all(slot.ready.is_set() for slot in self._slots.values()):
            return False
        return self._gate is None or await _answers(self._gate)

    async def _draw(self) -> None:
        while True:
            for slot in self._slots.values():
                if slot.process and not slot.ready.is_set():
                    lines = folder.tail(slot.process.log, slot.process.log_offset, 1)
                    self._screen.remark(slot.unit.name, folder.note(lines))
            self._screen.tick()
            await anyio.sleep(PROBE_PERIOD_S)

    async def _listen(self) -> None:
        await self._slots["nats"].ready.wait()
        nats = self._config.nats
        async with roster.listening(nats.url, nats.connect_timeout_s) as heard:
            self._roster = heard
            await anyio.sleep_forever()

    # ----------------------------------------------------------------------------------------------------------
    # One unit

    async def _keep(self, slot: Slot) -> None:
        while True:
            for needed in slot.unit.after:
                await self._slots[needed].ready.wait()
            status = await self._one_life(slot)
            if slot.unit.is_step and status == 0:
                slot.ready.set()
                self._screen.show(slot.unit.name, "ready")
                return
            if not await self._after_death(slot, status):
                return

    async def _one_life(self, slot: Slot) -> int:
        process = self._start(slot)
        async with anyio.create_task_group() as group:
            group.start_soon(self._announce, slot)
            await process.wait()
            group.cancel_scope.cancel()
        return await process.clear()

    def _start(self, slot: Slot) -> Process:
        unit = slot.unit
        remove(unit.leftovers)
        slot.falls = False
        try:
            slot.process = Process.start(unit.name, unit.command, unit.environment, self._log(unit.name), unit.cores)
        except OSError as error:
            raise OperatorError(f"Cannot start {unit.name}: {error}.", f"Its command is {unit.command[0]}.") from None
        self._screen.show(unit.name, "starting")
        return slot.process

    async def _announce(self, slot: Slot) -> None:
        ready, process = slot.unit.ready, slot.process
        if isinstance(ready, Answers):
            await self._poll(lambda: _answers(ready))
        elif isinstance(ready, Present):
            former = self._roster.epoch(ready.role, ready.id)
            await self._poll(lambda: _now(self._roster.ready(ready.role, ready.id, former)))
        else:
            return
        assert slot.process is process
        slot.ready.set()
        if self._is_ready:
            self._write_endpoints()
        self._screen.show(slot.unit.name, "ready", "again" if self._is_ready else "")

    async def _after_death(self, slot: Slot, status: int) -> bool:
        """Returns whether to start it again."""
        name, falls = slot.unit.name, slot.falls
        slot.died(status)
        for other in plan.falling_with(self._units, name):
            self._keepers.start_soon(self._let_fall, self._slots[other], name)
        if falls:
            return True
        may_leave = isinstance(slot.unit.ready, Present)
        decision = (
            restarts.GiveUp(f"it {restarts.describe(status)}")
            if slot.unit.is_step
            else restarts.verdict(slot.deaths, may_leave=may_leave)
        )
        if isinstance(decision, restarts.GiveUp):
            raise self._given_up(slot, decision.reason)
        if isinstance(decision, restarts.StayAway):
            self._screen.show(name, "ended", "has drained and left")
            return False
        self._screen.show(name, "failed", f"{restarts.describe(status)}; starting it again")
        await anyio.sleep(decision.after_s)
        return True

    async def _let_fall(self, slot: Slot, under: str) -> None:
        if slot.process and not slot.falls:
            slot.falls = True
            self._screen.show(slot.unit.name, "stopping", f"falls with {under}")
            await slot.process.end(FALL_GRACE_S, self._hurry)

    def _given_up(self, slot: Slot, reason: str) -> OperatorError:
        self._screen.settle()
        log = self._log(slot.unit.name)
        self._screen.quote(folder.tail(log, slot.process.log_offset if slot.process else 0, QUOTED_LINES))
        return OperatorError(f"{slot.unit.name} cannot be kept running: {reason}.", f"Its log is {log}.")

    async def _poll(self, probe: Callable[[], Awaitable[bool]]) -> None:
        while not await probe():
            await anyio.sleep(PROBE_PERIOD_S)

    # ----------------------------------------------------------------------------------------------------------
    # End

    async def _drain(self) -> None:
        self._screen.settle()
        running = [slot for slot in self._slots.values() if slot.process]
        if self._is_ready:
            self._screen.tell("Stopping: running requests may end. Ctrl-C again to stop at once.")
        started_s = time.monotonic()
        for names, until_s in plan.drain_order(self._units, self._config.up.drain_s):
            grace_s = max(0.0, started_s + until_s - time.monotonic()) if self._is_ready else FALL_GRACE_S
            async with anyio.create_task_group() as group:
                for slot in running:
                    if slot.unit.name in names:
                        group.start_soon(self._end, slot, grace_s)
        self._screen.tell(f"Ended after {time.monotonic() - started_s:.1f} s.")

    async def _end(self, slot: Slot, grace_s: float) -> None:
        assert slot.process is not None
        await slot.process.end(grace_s, self._hurry)
        remove(slot.unit.leftovers)

    # ----------------------------------------------------------------------------------------------------------
    # Files

    def _log(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"

    def _write_endpoints(self) -> None:
        folder.write_endpoints(self._folder, endpoints(self._config, self._folder, self._slots.values()))


def endpoints(config: Config, run_folder: Path, slots: Iterable[Slot]) -> dict[str, Any]:
    """What `endpoints.json` says."""
    return {
        "pid": os.getpid(),
        "gateway": plan.gateway_url(config),
        "certificate": str(Path(config.gateway.tls_cert).expanduser().absolute()) if config.gateway.tls_cert else "",
        "nats": config.nats.url,
        "nats_monitor": f"http://127.0.0.1:{config.nats.monitor_port}",
        "lmcache": launch.lmcache_url(config) if config.engine == "vllm" else None,
        "engine": config.engine,
        "folder": str(run_folder),
        "processes": [
            {
                "name": slot.unit.name,
                "pid": slot.process.pid if slot.process else None,
                "log": str(run_folder / "logs" / f"{slot.unit.name}.log"),
                "metrics": slot.unit.metrics,
            }
            for slot in slots
            if not slot.unit.is_step
        ],
    }


def remove(leftovers: Sequence[Path]) -> None:
    """Files that a killed process leaves behind."""
    for path in leftovers:
        path.unlink(missing_ok=True)


async def _answers(at: Answers) -> bool:
    trust = tls.trusting_ours(at.certificate) if at.certificate else None
    try:
        status, _ = await http.get(at.url, PROBE_TIMEOUT_S, trust)
    except OSError:
        return False
    return status == 200


async def _now(value: bool) -> bool:
    return value
