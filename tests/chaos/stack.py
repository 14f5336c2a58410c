"""A stack that can be hurt: nats-server, workers with the simulated engine and gateways, each a process of its own.

One task keeps each part: it starts its process, and starts it again `REVIVE_AFTER_S` after it has ended. An end that nobody has
asked for is remembered as `unasked`, because a part must not die of another's death.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import anyio
import anyio.abc
import msgspec

from pipeline import outside
from pipeline.bus import streams
from pipeline.bus.connection import Bus
from pipeline.bus.presence import Watcher
from pipeline.cli import OPERATOR_EXIT, http
from pipeline.paths import JETSTREAM, LOCAL_CONFIG, NATS_CONFIG
from pipeline.protocol.presence import Presences
from tests.nats_server import binary
from tests.ports import free_port
from workers.engines.simulated.engine import TIER_VARIABLE
from workers.supervisor.folder import tail
from workers.supervisor.process import Process

REVIVE_AFTER_S: Final = 0.3
"""A supervisor notices a death and starts the next life."""

START_S_MAX: Final = 60.0
"""Eight Python processes start at once, and the cores may be busy."""

GRACE_S: Final = 25.0
"""For a part that is told to end: a worker's drain takes at most 20 s."""

END_S: Final = 5.0
"""For all parts when the run is over: nothing is under way any more."""

PROBE_S: Final = 0.02

Role = Literal["prefill", "decode"]
ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet, its engines and their configuration. Where requests are killed at random, many starts are in order."""

    prefill: int = 3
    decode: int = 3
    both: int = 0
    begin_as: tuple[str, ...] = ()
    more: Mapping[str, object] = {}
    gateways: int = 2
    step_s: float = 0.005
    decode_slots: int = 64
    kv_blocks: int = 1024
    in_flight_max: int = 2048
    starts_max: int = 20
    config: Path = LOCAL_CONFIG
    otlp_endpoint: str = ""

    def environment(self) -> dict[str, str]:
        """As the configuration's variables."""
        places = {
            "ENGINE": "simulated",
            "SIMULATED__STEP_S": self.step_s,
            "SIMULATED__KV_BLOCKS": self.kv_blocks,
            "DECODE__SLOTS": self.decode_slots,
            "BOTH__SLOTS": self.decode_slots,
            "GATEWAY__IN_FLIGHT_MAX": self.in_flight_max,
            "REQUESTS__STARTS_MAX": self.starts_max,
            "TELEMETRY__OTLP_ENDPOINT": self.otlp_endpoint,
        }
        return {f"HEADRACE__{place}": str(value) for place, value in {**places, **self.more}.items()}


class Part:
    """One part of the stack and its present process. `hit` is set once we have asked for its end."""

    def __init__(self, name: str, command: tuple[str, ...], role: Role | None = None, port: int = 0) -> None:
        """`role`: the loop that it is known by. `port`: where a gateway serves."""
        self.name = name
        self.url = f"http://127.0.0.1:{port}" if port else ""
        self.command = command
        self.role = role
        self.begins: str | None = role
        self.process: Process | None = None
        self.hit = False
        self.paused = False
        self.lives = 0
        self.deaths: list[tuple[float, float]] = []
        """From the signal until nothing of it was left: in between it may still take connections."""
        self.hit_s = 0.0
        self.former_epoch = ""

    def signal(self, number: int) -> None:
        """To the process that runs now; one that has just ended needs none."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


class Stack:
    """All parts of one run, and what we hear of them."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings
        self.nats_port = free_port()
        self.nats_url = f"nats://127.0.0.1:{self.nats_port}"
        self.unasked: list[str] = []
        self.bus: Bus
        self._presences = Presences()
        self._hurry = anyio.Event()
        self._tasks: anyio.abc.TaskGroup
        self.parts = {part.name: part for part in self._made()}

    # ------------------------------------------------------------------------------------------------------
    # What runs

    def ledgers(self) -> list[Part]:
        """The workers that keep books: a worker for both does so in every role."""
        return [part for part in self.workers() if part.role == "decode" or part.name.startswith("both")]

    def workers(self, role: Role | None = None) -> list[Part]:
        """Those of a role, or all of them."""
        return [part for part in self.parts.values() if part.role and role in (None, part.role)]

    def gateways(self) -> list[Part]:
        """All of them."""
        return [part for part in self.parts.values() if part.url]

    def gateways_up(self) -> list[Part]:
        """Those that run, and that nobody has hurt."""
        return [part for part in self.gateways() if part.process is not None and not part.hit and not part.paused]

    def up(self, role: Role) -> list[Part]:
        """The workers of a role that serve now."""
        return [part for part in self.workers(role) if self.serves(part)]

    def serves(self, worker: Part) -> bool:
        """Whether its present life says that it is ready."""
        assert worker.role is not None
        said = self._presences.get(worker.role, worker.name, outside.monotonic_s())
        if said is None or not said.ready or said.draining or said.epoch <= worker.former_epoch:
            return False
        return worker.process is not None and not worker.hit and not worker.paused

    def takes(self, role: Role, worker: str) -> bool:
        """Whether a worker says that it takes work of this role."""
        said = self._presences.get(role, worker, outside.monotonic_s())
        return said is not None and said.takes

    def slots_taken(self) -> int:
        """Slots of prefill workers that are not free, as they last said."""
        said = self._presences.live("prefill", outside.monotonic_s())
        return sum(peer.slots - peer.slots_free for peer in said)

    async def until_all_serve(self) -> None:
        """Return when every worker serves, and every gateway sees them."""
        await self.until(lambda: all(map(self.serves, self.workers())), "workers do not serve")
        with anyio.fail_after(START_S_MAX):
            for gateway in self.gateways():
                while not await self.sees(gateway, self._begin("prefill"), self._begin("decode")):
                    await anyio.sleep(5 * PROBE_S)

    def _begin(self, role: Role) -> int:
        """Workers that begin with this loop, alone or beside the other."""
        return sum(worker.begins in (role, "both") for worker in self.workers())

    async def sees(self, gateway: Part, prefill: int, decode: int) -> bool:
        """Whether a gateway is ready, and knows of so many workers."""
        try:
            status, body = await http.get(f"{gateway.url}/ready", 2.0)
        except OSError:
            return False
        seen = msgspec.json.decode(body)
        return status == 200 and (seen["prefill"], seen["decode"]) == (prefill, decode)

    async def until(self, true: Callable[[], bool], complaint: str, within_s: float = START_S_MAX) -> None:
        """Poll. Raises `TimeoutError`."""
        with anyio.move_on_after(within_s):
            while not true():
                await anyio.sleep(PROBE_S)
            return
        raise TimeoutError(f"{complaint}, after {within_s:g} s; see {self.folder}")

    # ------------------------------------------------------------------------------------------------------
    # What is done to it

    def kill(self, part: Part) -> None:
        """kill -9. It comes back by itself."""
        self._hit(part)
        part.signal(signal.SIGKILL)

    async def restart(self, worker: Part) -> int | None:
        """SIGTERM; returns its exit status once the next life serves."""
        assert worker.process is not None
        process = worker.process
        self._hit(worker)
        worker.signal(signal.SIGTERM)
        status = None
        with anyio.move_on_after(GRACE_S):
            status = await process.wait()
        if status is None:
            worker.signal(signal.SIGKILL)
        await self.until(lambda: self.serves(worker), f"{worker.name} does not serve again")
        return status

    async def pause(self, worker: Part, pause_s: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        worker.paused = True
        worker.signal(signal.SIGSTOP)
        try:
            await anyio.sleep(pause_s)
        finally:
            worker.signal(signal.SIGCONT)
            worker.paused = False

    def _hit(self, part: Part) -> None:
        part.hit, part.hit_s = True, time.monotonic()
        if part.role:
            said = self._presences.get(part.role, part.name, outside.monotonic_s())
            part.former_epoch = said.epoch if said else part.former_epoch

    # ------------------------------------------------------------------------------------------------------
    # Its life

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Stack"]:
        """The stack serves while the block runs, and nothing of it is left afterwards."""
        async with anyio.create_task_group() as self._tasks:
            try:
                self._keep_going("nats")
                with anyio.fail_after(START_S_MAX):
                    await self._until_nats_greets()
                async with await Bus.connect(self.nats_url, "chaos") as self.bus:
                    await streams.apply(self.bus, streams.declared(JETSTREAM))
                    watcher = Watcher(self.bus, self._presences, outside.monotonic_s)
                    await watcher.start()
                    for part in self.parts.values():
                        if part.name != "nats":
                            self._keep_going(part.name)
                    await self.until_all_serve()
                    yield self
            finally:
                self._tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await self._end_all()

    def _keep_going(self, name: str) -> None:
        self._tasks.start_soon(self._keep, self.parts[name])

    async def _keep(self, part: Part) -> None:
        while True:
            part.hit = False
            part.lives += 1
            part.process = process = Process.start(part.name, part.command, self._environment(), self._log(part.name))
            status = await process.wait()
            if not part.hit and not self._met_a_dying_broker(process, status):
                said = tail(process.log, process.log_offset, 1)
                self.unasked.append(f"{part.name} (life {part.lives}, status {status}): {' '.join(said)}")
            part.process = None
            await process.clear()
            part.deaths.append((part.hit_s, time.monotonic()))
            await anyio.sleep(REVIVE_AFTER_S)

    def _met_a_dying_broker(self, process: Process, status: int) -> bool:
        """A set-up that cannot work is said so and ends, also where the broker was lost in the middle of it."""
        return status == OPERATOR_EXIT and self.parts["nats"].hit_s > process.started_s

    async def _end_all(self) -> None:
        for part in self.parts.values():
            part.signal(signal.SIGCONT)
        others = [part for part in self.parts.values() if part.name != "nats"]
        for parts in (others, [self.parts["nats"]]):
            async with anyio.create_task_group() as ends:
                for part in parts:
                    if part.process is not None:
                        ends.start_soon(part.process.end, END_S, self._hurry)

    async def _until_nats_greets(self) -> None:
        while True:
            with contextlib.suppress(OSError, anyio.EndOfStream):
                async with await anyio.connect_tcp("127.0.0.1", self.nats_port) as stream:
                    if (await stream.receive(4)).startswith(b"INFO"):
                        return
            await anyio.sleep(PROBE_S)

    def _made(self) -> list[Part]:
        nats = (binary(), "-c", str(NATS_CONFIG), "-sd", str(self.folder / "nats"), "-p", str(self.nats_port))
        parts = [Part("nats", (*nats, "-m", str(free_port())))]
        for number in range(1, self.settings.gateways + 1):
            port = free_port()
            parts.append(Part(f"gateway-{number}", self._headrace("gateway", "--port", str(port)), port=port))
        for role, count in zip(ROLES, (self.settings.prefill, self.settings.decode), strict=True):
            for number in range(1, count + 1):
                name = f"{role}-{number}"
                parts.append(Part(name, self._headrace("worker", role, "--id", name, "--engine", "simulated"), role))
        parts += [self._both(number) for number in range(1, self.settings.both + 1)]
        return parts

    def _both(self, number: int) -> Part:
        name, begins = f"both-{number}", "both"
        if self.settings.begin_as:
            begins = self.settings.begin_as[number - 1]
        command = self._headrace("worker", "both", "--id", name, "--engine", "simulated", "--as", begins)
        part = Part(name, command, "prefill" if begins == "prefill" else "decode")
        part.begins = begins
        return part

    def _environment(self) -> Mapping[str, str]:
        return {
            **self.settings.environment(),
            "HEADRACE__NATS__URL": self.nats_url,
            TIER_VARIABLE: str(self.folder / "simulated-lmcache"),
        }

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _headrace(self, *arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-P", "-m", "pipeline.cli", *arguments, "--config", str(self.settings.config))
