"""A fleet over the cluster, as `configs/production.toml` has it but for its engine: real processes, each with its role's NKey."""

import contextlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio

from pipeline.bus.connection import Bus
from pipeline.bus.errors import BusError
from tests.deployment.cluster import PRODUCTION, Cluster, Node
from tests.ports import free_port
from workers.engines.simulated.engine import TIER_VARIABLE
from workers.supervisor.process import Process

READY_S: Final = 60.0
END_S: Final = 30.0
POLL_S: Final = 0.05

ENGINE: Final = {
    "HEADRACE__ENGINE": "simulated",
    "HEADRACE__SIMULATED__STEP_S": "0.005",
    "HEADRACE__GATEWAY__HOST": "127.0.0.1",
    "HEADRACE__METRICS__HOST": "127.0.0.1",
    "HEADRACE__REQUESTS__STARTS_MAX": "20",
}


class Fleet:
    """Its processes. `ready` and `url` say where each answers."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.gateways: list[str] = []
        self.ports: dict[str, int] = {}
        self.processes: dict[str, Process] = {}

    async def start(self, prefill: int, decode: int, both: int, gateways: int) -> None:
        """Declare the streams, start everything, and return when all of it says that it is ready."""
        assert await self.command("operator", "streams", "apply") == 0, self.log("command")
        self._member("keeper", "keeper", "keeper", "--id", "keeper")
        for role, count in (("prefill", prefill), ("decode", decode), ("both", both)):
            for number in range(1, count + 1):
                name = f"{role}-{number}"
                self._member(name, role, "worker", role, "--id", name)
        for number in range(1, gateways + 1):
            self.ports[f"gateway-{number}"] = port = free_port()
            self.gateways.append(f"http://127.0.0.1:{port}")
            self._start(f"gateway-{number}", "gateway", "gateway", "--port", str(port))
        with anyio.fail_after(READY_S):
            for name in self.ports:
                while self.ready(name) != 200:
                    assert name in self.processes, self.log(name)
                    await anyio.sleep(POLL_S)

    def ready(self, name: str) -> int:
        """The status with which a member answers `/ready`; 0 where it does not."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[name]}/ready", timeout=2) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def log(self, name: str) -> str:
        """What a member has said."""
        return (self.folder / f"{name}.log").read_text("utf-8")

    async def stop(self, name: str) -> int:
        """SIGTERM; its exit status once it has drained."""
        return await self.processes.pop(name).end(END_S, anyio.Event())

    async def stop_all(self) -> dict[str, int]:
        """Everything, gateways first."""
        return {name: await self.stop(name) for name in sorted(self.processes, key=lambda name: name[0] != "g")}

    async def command(self, role: str, *arguments: str) -> int:
        """The exit status of a command that ends by itself; what it said is the log of `command`."""
        self._start("command", role, *arguments)
        return await self.processes.pop("command").wait()

    def _member(self, name: str, role: str, *arguments: str) -> None:
        self.ports[name] = port = free_port()
        self._start(name, role, *arguments, "--metrics-port", str(port))

    def _start(self, name: str, role: str, *arguments: str) -> Process:
        command = (sys.executable, "-P", "-m", "pipeline.cli", *arguments, "--config", str(PRODUCTION))
        tier = {TIER_VARIABLE: str(self.folder / "simulated-lmcache")}
        environment = self.cluster.environment(role) | ENGINE | tier
        self.processes[name] = Process.start(name, command, environment, self.folder / f"{name}.log")
        return self.processes[name]


@asynccontextmanager
async def fleet(
    cluster: Cluster, folder: Path, *, gateways: int, prefill: int = 0, decode: int = 0, both: int = 0
) -> AsyncIterator[Fleet]:
    """A fleet that serves. At its end none of it is left."""
    members = Fleet(cluster, folder)
    try:
        await members.start(prefill, decode, both, gateways)
        yield members
    finally:
        with anyio.CancelScope(shield=True):
            for process in members.processes.values():
                await process.end(0.0, anyio.Event())


async def asked(bus: Bus, subject: str) -> dict[str, Any]:
    """An operator's question to JetStream."""
    answer: dict[str, Any] = json.loads(await bus.request(f"$JS.API.{subject}", b"", 5.0))
    assert "error" not in answer, answer
    return answer


async def leader(bus: Bus, stream: str, nodes: Sequence[Node]) -> Node:
    """The node that leads a stream, of those that run. Waits for one to be elected."""
    running = {node.name: node for node in nodes if node.process is not None}
    with anyio.fail_after(READY_S):
        while True:
            with contextlib.suppress(BusError):  # our own server may have been the one that died
                if found := running.get((await asked(bus, f"STREAM.INFO.{stream}"))["cluster"].get("leader")):
                    return found
            await anyio.sleep(POLL_S)
