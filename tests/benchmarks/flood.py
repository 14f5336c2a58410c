"""What a flood of one key or creator costs the others: `python -m tests.benchmarks.flood [--rounds 3] [--seconds 4] [--json]`.

A gateway as a process of its own, a real nats-server, and workers that answer after 20 ms without computing anything. Many
creators ask at a steady rate, open loop: each request is timed from when it was due. In turn nobody else asks (calm), one key
floods that may ask 20 times a second, and one creator floods that may have four requests in flight; last, all places of the
gateway are taken, and everybody is refused (full). It prints

    p50, p99    of the others, from when each request was due until its whole reply
    refused     how many of the flood were refused, and the p50 and p99 of that, from connecting until all of the answer is read

The load and the workers share the machine with the gateway, so on few cores part of what a flood costs is its own making.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from pipeline.bus.connection import Bus
from pipeline.cli import http
from pipeline.cli.tables import table
from pipeline.protocol.keys import hash_of
from tests.gateway.worker_double import Job, WorkerDouble
from tests.nats_server import NatsServer
from tests.percentiles import percentile_ms
from tests.ports import free_port

BODY: Final = msgspec.json.encode(
    {"messages": [{"role": "system", "content": "x" * 8000}, {"role": "user", "content": "?"}]}
)
"""A persona of some 1,800 tokens, and a short message."""

SERVICE_S: Final = 0.02
PLACES: Final = 200
CREATORS: Final = 50
KINDS: Final = ("calm", "key", "creator", "full")

CONFIG: Final = f"""
[nats]
url = "URL"
[gateway]
port = PORT
in_flight_max = {PLACES}
creator_in_flight_max = 4
[[gateway.keys]]
name = "others"
sha256 = "{hash_of("others")}"
[[gateway.keys]]
name = "flood"
sha256 = "{hash_of("flood")}"
requests_per_s = 20.0
"""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of rounds. Times are in milliseconds, of those that there were."""

    kind: str
    others: int
    others_refused: int
    p50_ms: float | None
    p99_ms: float | None
    refused: int
    refused_p50_ms: float | None
    refused_p99_ms: float | None


class Seen(msgspec.Struct):
    """What one kind of rounds has brought, in seconds."""

    served_s: list[float] = []
    lost: int = 0
    refused_s: list[float] = []


async def ask(url: str, key: str, creator: str) -> int:
    """The status of one request, read to its end."""
    headers = {"authorization": f"Bearer {key}", "x-creator-id": creator, "content-type": "application/json"}
    async with http.requested("POST", f"{url}/v1/chat/completions", body=BODY, headers=headers) as response:
        await response.body()
        return response.status


class Load:
    """Requests at a steady rate, whatever becomes of those before."""

    def __init__(self, url: str, rate: float, seconds: float) -> None:
        self._url, self._rate, self._seconds = url, rate, seconds

    async def others(self, seen: Seen) -> None:
        """What should not suffer."""
        async for number, due_s, tasks in self._paced():
            tasks.create_task(self._other(f"other-{number % CREATORS}", due_s, seen))

    async def flood(self, key: str, creator: str, seen: Seen) -> None:
        """What it should not suffer from. `creator` may have a place for a number."""
        async for number, _, tasks in self._paced():
            tasks.create_task(self._one_of_many(key, creator.format(number % 1000), seen))

    async def _paced(self) -> AsyncIterator[tuple[int, float, asyncio.TaskGroup]]:
        clock = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as tasks:
            began_s = clock()
            for number in range(round(self._rate * self._seconds)):
                due_s = began_s + number / self._rate
                await asyncio.sleep(max(0.0, due_s - clock()))
                yield number, due_s, tasks

    async def _other(self, creator: str, due_s: float, seen: Seen) -> None:
        status = await ask(self._url, "others", creator)
        if status == 200:
            seen.served_s.append(asyncio.get_running_loop().time() - due_s)
        else:
            seen.lost += 1

    async def _one_of_many(self, key: str, creator: str, seen: Seen) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        if await ask(self._url, key, creator) != 200:
            seen.refused_s.append(clock() - began_s)


async def answer(job: Job) -> None:
    """What the workers do: nothing for requests that are to take a place, and little for all others."""
    if ".hold-" in job.subject:
        return
    await job.claim()
    await asyncio.sleep(SERVICE_S)
    await job.say("yes")
    await job.done()


@asynccontextmanager
async def stand(url: str, port: int) -> AsyncIterator[str]:
    """Workers, and a gateway that is ready."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(CONFIG.replace("URL", url).replace("PORT", str(port)))
        file.flush()
        command = [sys.executable, "-m", "pipeline.cli", "gateway", "--config", file.name]
        async with await Bus.connect(url, "flood") as bus:
            double = WorkerDouble(bus)
            double.script = answer
            await double.listen()
            work = asyncio.create_task(double.run())
            gateway = subprocess.Popen(command, env=os.environ | {"HEADRACE_LOG": "error"})  # noqa: ASYNC220
            try:
                await _ready(at := f"http://127.0.0.1:{port}")
                yield at
            finally:
                gateway.terminate()
                gateway.wait()
                work.cancel()


async def _ready(url: str) -> None:
    async with asyncio.timeout(20):
        while True:
            with suppress(OSError):
                if (await http.get(f"{url}/ready", 2.0))[0] == 200:
                    return
            await asyncio.sleep(0.05)


async def _full(url: str, rate: float, seconds: float, seen: Seen) -> None:
    """Take all places, and ask for more."""
    holders = [asyncio.create_task(ask(url, "others", f"hold-{number // 4}")) for number in range(PLACES)]
    await asyncio.sleep(2.0)
    await Load(url, rate, seconds).flood("others", "other-{}", seen)
    for holder in holders:
        holder.cancel()
    await asyncio.gather(*holders, return_exceptions=True)


async def _run(url: str, rounds: int, seconds: float, rate: float, flood: float) -> list[Figures]:
    seen = {kind: Seen() for kind in KINDS}
    async with stand(url, free_port()) as at:
        await Load(at, rate, 1.0).others(Seen())  # what is slow only once is not counted
        for number in range(rounds):
            for kind, key, creator in (("calm", "", ""), ("key", "flood", "many-{}"), ("creator", "others", "flood")):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(Load(at, rate, seconds).others(seen[kind]))
                    if key:
                        tasks.create_task(Load(at, flood, seconds).flood(key, creator, seen[kind]))
            sys.stderr.write(f"round {number + 1} of {rounds}\n")
        await _full(at, flood, seconds, seen["full"])
    return [_figures(kind, found) for kind, found in seen.items()]


def _figures(kind: str, seen: Seen) -> Figures:
    return Figures(
        kind=kind,
        others=len(seen.served_s),
        others_refused=seen.lost,
        p50_ms=percentile_ms(seen.served_s, 50),
        p99_ms=percentile_ms(seen.served_s, 99),
        refused=len(seen.refused_s),
        refused_p50_ms=percentile_ms(seen.refused_s, 50),
        refused_p99_ms=percentile_ms(seen.refused_s, 99),
    )


def text(report: Sequence[Figures]) -> str:
    """The report for people."""
    head = ["flood of", "others", "refused", "p50 ms", "p99 ms", "refused", "p50 ms", "p99 ms"]
    rows = [["–" if cell is None else cell for cell in msgspec.structs.astuple(figures)] for figures in report]
    return table(head, rows)


def run(rounds: int, seconds: float, rate: float = 50.0, flood: float = 300.0) -> list[Figures]:
    """Measure on a broker of our own, and leave nothing running."""
    with tempfile.TemporaryDirectory(prefix="headrace-flood-") as folder:
        broker = NatsServer(Path(folder)).start()
        try:
            return asyncio.run(_run(broker.url, rounds, seconds, rate, flood))
        finally:
            broker.kill9()


def main(
    rounds: Annotated[int, typer.Option(help="Each of a calm time and two floods.", min=1, max=100)] = 3,
    seconds: Annotated[float, typer.Option(help="Of each of them.", min=0.5, max=60)] = 4.0,
    rate: Annotated[float, typer.Option(help="Requests a second of the others.", min=1)] = 50.0,
    flood: Annotated[float, typer.Option(help="Requests a second of the flood.", min=1)] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Flood a gateway with one key and with one creator, and time everybody else and the refusals."""
    report = run(rounds, seconds, rate, flood)
    sys.stdout.write((msgspec.json.encode(report).decode() if as_json else text(report)) + "\n")


if __name__ == "__main__":
    typer.run(main)
