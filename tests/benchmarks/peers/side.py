"""One side of the comparison: the processes that it is made of, started in stages, their CPU, and their end."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import anyio
import msgspec
import psutil

from pipeline.cli import http
from pipeline.errors import OperatorError
from workers.supervisor.folder import tail
from workers.supervisor.process import Process

START_S: Final = 240.0
"""For one stage: two engines start together on two cores."""

GRACE_S: Final = 25.0
"""For one process that is told to end: a fleet's drain takes 20 s at most."""

PROBE_S: Final = 0.1
TAIL_LINES: Final = 8

Part = Literal["front", "beside", "engine"]
"""The process that clients talk to; what else holds no engine; engines, with what shares a process with them."""


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One process, ready when a GET of `ready` is answered with 200, and with all of `says` in it.

    `members`: where it keeps others, the file in which it says who they are.
    """

    name: str
    command: tuple[str, ...]
    ready: str
    part: Part
    says: tuple[bytes, ...] = ()
    environment: Mapping[str, str] = {}
    members: Path | None = None


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared. The units of a stage start together, when those of the stage before are ready.

    `url` is where its clients ask; with `quick_ack` they acknowledge each packet at once. `leftovers` are removed at its end.
    """

    stages: tuple[tuple[Unit, ...], ...]
    url: str
    quick_ack: bool = False
    leftovers: tuple[Path, ...] = ()


class Member(msgspec.Struct, frozen=True):
    """A process that a supervisor keeps."""

    name: str
    pid: int
    log: str


class Members(msgspec.Struct, frozen=True):
    """As `headrace up` writes them."""

    processes: list[Member]


class Running:
    """A side that serves."""

    def __init__(self, side: Side, processes: Mapping[str, Process]) -> None:
        self.side = side
        self._processes = processes

    def cpu_s(self) -> dict[Part, float]:
        """Seconds of CPU that each part has had, with all that it has started."""
        spent: dict[Part, float] = {"front": 0.0, "beside": 0.0, "engine": 0.0}
        for part, pids in self._pids():
            spent[part] += sum(map(_spent_s, pids))
        return spent

    def gateway_log(self) -> Path | None:
        """Of Headrace; the others have none."""
        kept = [unit.members for stage in self.side.stages for unit in stage if unit.members is not None]
        return next((Path(member.log) for path in kept for member in members(path) if member.name == "gateway"), None)

    def _pids(self) -> Iterator[tuple[Part, list[int]]]:
        for unit in (unit for stage in self.side.stages for unit in stage):
            pid = self._processes[unit.name].pid
            if unit.members is None:
                yield unit.part, family(pid)
                continue
            yield unit.part, [pid]
            for member in members(unit.members):
                yield part_of(member.name), family(member.pid)


def members(path: Path) -> list[Member]:
    """Who is kept by the supervisor that has written this."""
    return msgspec.json.decode(path.read_bytes(), type=Members).processes


def part_of(member: str) -> Part:
    """Of a process of `headrace up`, by its name."""
    if member == "gateway":
        return "front"
    return "beside" if member in ("nats", "keeper") else "engine"


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _spent_s(pid: int) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


@asynccontextmanager
async def running(side: Side, logs: Path) -> AsyncIterator[Running]:
    """The side serves while the block runs, and nothing of it is left afterwards. Raises `OperatorError` where it does not start.

    Output of its processes goes to `logs`, which exists.
    """
    processes: dict[str, Process] = {}
    try:
        for stage in side.stages:
            for unit in stage:
                log = logs / f"{unit.name}.log"
                processes[unit.name] = Process.start(unit.name, unit.command, unit.environment, log)
            with anyio.move_on_after(START_S):
                for unit in stage:
                    await _until_ready(unit, processes[unit.name])
                continue
            raise OperatorError(f"{stage[0].name} or one beside it is not ready after {START_S:g} s.", f"See {logs}.")
        yield Running(side, processes)
    finally:
        with anyio.CancelScope(shield=True):
            for process in reversed(processes.values()):
                await process.end(GRACE_S, anyio.Event())
        for path in side.leftovers:
            path.unlink(missing_ok=True)


async def _until_ready(unit: Unit, process: Process) -> None:
    while not await _is_ready(unit):
        with anyio.move_on_after(PROBE_S):
            await process.wait()
            said = " ".join(tail(process.log, process.log_offset, TAIL_LINES))
            raise OperatorError(f"{unit.name} has ended: {said}", f"Its output is in {process.log}.")


async def _is_ready(unit: Unit) -> bool:
    try:
        status, body = await http.get(unit.ready, 2.0)
    except (OSError, TimeoutError):
        return False
    told = unit.members is None or unit.members.exists()  # written once the supervisor has seen all of them ready
    return told and status == 200 and all(said in body for said in unit.says)
