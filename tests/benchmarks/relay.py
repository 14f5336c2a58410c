"""What a streamed request costs our gateway and a bare relay: `python -m tests.benchmarks.relay [--rates 100,250,400] [--json]`.

How much CPU that is depends first on the machine: on what a write to a socket costs here, and a wake-up. So our gateway is
measured beside the least that one in Python can do (`bare.py`). Each is one process on a core of its own, where there are
several; they are asked in turn, over the same broker, with the same worker behind them (`paced.py`): 20 ms, then 30 tokens 4 ms
apart, the tokens of all replies in one message a step. Bodies are of 2,210 words. Printed are medians over the rounds:

    CPU           of the relay's process, over the seconds of a rate, for each request
    first token   from when a request was due until its first text has come
    gap           99 % of a reply's gaps are shorter
"""

import asyncio
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import IO, Annotated, Final

import msgspec
import psutil
import typer
import uvloop

from pipeline.bench import session
from pipeline.bench.arrivals import poisson
from pipeline.bench.loops import Bounds
from pipeline.bench.orders import Load, plain
from pipeline.bench.session import Plan
from pipeline.bench.tally import Report as Served
from pipeline.cli.client import Gateway
from pipeline.cli.tables import table
from pipeline.errors import OperatorError
from tests.benchmarks.overhead import exact, unwatched
from tests.benchmarks.paced import REPLY_TOKENS
from tests.nats_server import NatsServer
from tests.ports import free_port

ROOT: Final = Path(__file__).parents[2]
CREATORS: Final = 400
"""The worker's queue holds four of one creator."""
PROMPT_WORDS: Final = 2210
READY_S: Final = 20.0
RELAYS: Final = ("bare", "headrace")

CONFIG: Final = """
[nats]
url = "{url}"
[gateway]
port = {port}
"""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One relay at one rate; medians over the rounds. `asked` and `served` over all of them."""

    relay: str
    rate: float
    asked: int
    served: int
    cpu_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p99_ms: float


class Relay(msgspec.Struct, frozen=True):
    """A relay that serves."""

    url: str
    process: psutil.Process


class Shot(msgspec.Struct, frozen=True):
    """One round of one relay at one rate."""

    served: Served
    cpu_ms: float


def run(rates: Sequence[float], rounds: int, seconds: float) -> list[Cell]:
    """All of it. Raises `OperatorError` where a process does not start. Nothing is left running."""
    shots: defaultdict[tuple[str, float], list[Shot]] = defaultdict(list)
    with standing() as relays:
        for relay in relays.values():
            _shoot(relay, min(rates), 1.0, "warm")
        for number, rate, (name, relay) in product(range(rounds), rates, relays.items()):
            shots[name, rate].append(_shoot(relay, rate, seconds, f"{rate:g}-{number}"))
            sys.stderr.write(f"{name}, {rate:g}/s: {shots[name, rate][-1].cpu_ms:.2f} ms\n")
    return [_cell(name, rate, shots[name, rate]) for rate in rates for name in RELAYS]


@contextmanager
def standing() -> Iterator[dict[str, Relay]]:
    """Both, on the last core; the broker, the worker and the load on the others."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-relay-")))
        cores = os.sched_getaffinity(0)
        stack.callback(os.sched_setaffinity, 0, cores)
        apart = {max(cores)}
        os.sched_setaffinity(0, cores - apart or cores)
        server = NatsServer(folder / "nats").start()
        stack.callback(server.stop)
        log = stack.enter_context((folder / "log").open("w+"))
        worker = _start(stack, log, "tests.benchmarks.paced", server.url)
        ports = {name: free_port() for name in RELAYS}
        config = folder / "headrace.toml"
        config.write_text(CONFIG.format(url=server.url, port=ports["headrace"]), "utf-8")
        _await(worker, log, lambda: "ready" in (folder / "log").read_text("utf-8"))
        os.sched_setaffinity(0, apart)
        processes = {
            "bare": _start(stack, log, "tests.benchmarks.bare", server.url, str(ports["bare"])),
            "headrace": _start(stack, log, "pipeline.cli", "gateway", "--config", str(config)),
        }
        os.sched_setaffinity(0, cores - apart or cores)
        for name, process in processes.items():
            _await(process, log, partial(_answers, ports[name]))
        yield {
            name: Relay(f"http://127.0.0.1:{ports[name]}", psutil.Process(process.pid))
            for name, process in processes.items()
        }


def _start(stack: ExitStack, log: IO[str], module: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"HEADRACE_LOG": "error"}, stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def _await(process: subprocess.Popen[bytes], log: IO[str], holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + READY_S
    while not holds():
        if process.poll() is not None or time.monotonic() > until_s:
            log.seek(0)
            raise OperatorError(f"A process did not start: {log.read()[-2000:]}", "Read what it said.")
        time.sleep(0.05)


def _answers(port: int) -> bool:
    """Whether it serves: the bare one a reply to whatever it is asked, ours that it is ready."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
        return bool(answer.read())
    return False


def _shoot(relay: Relay, rate: float, seconds: float, run_name: str) -> Shot:
    """An open loop of so many requests a second."""
    load = Load(creators=CREATORS, prompt_words=PROMPT_WORDS, max_tokens=REPLY_TOKENS, run=run_name)
    plan = Plan(
        orders=exact(plain(load), {}),
        times_s=poisson(rate, run_name),
        bounds=Bounds(requests=None, duration_s=seconds, warm_up_s=0.0, in_flight=4096),
        loop=f"{rate:g}/s",
        timeout_s=30.0,
    )
    before_s = _spent_s(relay.process)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        served = runner.run(session.run(Gateway(relay.url), {"content-type": "application/json"}, plan, unwatched))
    return Shot(served, (_spent_s(relay.process) - before_s) * 1000 / max(1, served.requests))


def _spent_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _cell(name: str, rate: float, shots: Sequence[Shot]) -> Cell:
    def median(of: Callable[[Shot], float | None]) -> float:
        return round(statistics.median(of(shot) or math.inf for shot in shots), 2)

    return Cell(
        relay=name,
        rate=rate,
        asked=sum(shot.served.requests for shot in shots),
        served=sum(shot.served.completed for shot in shots),
        cpu_ms=median(lambda shot: shot.cpu_ms),
        ttft_p50_ms=median(lambda shot: shot.served.ttft_p50_ms),
        ttft_p99_ms=median(lambda shot: shot.served.ttft_p99_ms),
        itl_p99_ms=median(lambda shot: shot.served.itl.p99_ms),
    )


def text(cells: Sequence[Cell]) -> str:
    """The table for people, with what ours costs as a multiple of the bare one."""
    bare = {cell.rate: cell.cpu_ms for cell in cells if cell.relay == RELAYS[0]}
    rows = [
        (
            f"{cell.rate:g}/s", cell.relay, f"{cell.served} of {cell.asked}", f"{cell.cpu_ms:.2f}",
            f"× {cell.cpu_ms / bare[cell.rate]:.2f}" if bare[cell.rate] else "",
            f"{cell.ttft_p50_ms:.1f}", f"{cell.ttft_p99_ms:.1f}", f"{cell.itl_p99_ms:.1f}",
        )
        for cell in cells
    ]  # fmt: skip
    return table(("rate", "relay", "served", "CPU ms", "of bare", "TTFT p50 ms", "p99", "ITL p99 ms"), rows)


def main(
    rates: Annotated[str, typer.Option(help="Requests a second, one after the other.")] = "100,250,400",
    rounds: Annotated[int, typer.Option(help="Of each rate and relay, in turn.", min=1, max=50)] = 3,
    seconds: Annotated[float, typer.Option(help="Of each.", min=0.5, max=60.0)] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure our gateway beside the least that one in Python can do."""
    try:
        cells = run([float(rate) for rate in rates.split(",")], rounds, seconds)
    except OperatorError as error:
        raise SystemExit(str(error)) from None
    print(msgspec.json.encode(cells).decode() if as_json else text(cells))


if __name__ == "__main__":
    typer.run(main)
