"""What the load generator of `headrace bench` costs: `python -m tests.benchmarks.generator [--rates 100,500] [--json]`.

A server in a process of its own answers each request with 30 pieces, 4 ms apart, from a timer and without looking at it: all that
it could be slow at is sockets. At each rate the generator runs as `headrace bench --rate` does. It keeps up with a rate while it
sends in time: `lag` is how late it sent.
"""

import asyncio
import multiprocessing
import socket
import sys
from typing import Annotated, Final

import msgspec
import typer
import uvloop

from pipeline.bench import session
from pipeline.bench.arrivals import poisson
from pipeline.bench.loops import Bounds
from pipeline.bench.orders import Load, plain
from pipeline.bench.session import Plan
from pipeline.bench.tally import Report
from pipeline.cli.client import Gateway
from pipeline.cli.tables import table
from tests.bench.server import KEPT
from tests.cli.double import DONE, END, FINISH, USAGE, chunked, text

PIECES: Final = 30
GAP_S: Final = 0.004
RATES: Final = "100,250,500,750,1000"

LAST: Final = chunked(FINISH) + chunked(USAGE) + chunked(DONE) + END


class Answering(asyncio.Protocol):
    """Answers a request for each that comes; a request ends with the `}` of its body."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"}"):
            self._piece(0)

    def _piece(self, number: int) -> None:
        assert hasattr(self._transport, "write")
        if number == PIECES:
            self._transport.write(LAST)
            return
        self._transport.write((KEPT if number == 0 else b"") + chunked(text(" word")))
        self._loop.call_later(GAP_S, self._piece, number + 1)


class Met(msgspec.Struct, frozen=True, kw_only=True):
    """One rate."""

    per_s: float
    completed: int
    errors: int
    cpu_ms_per_request: float
    lag_p50_ms: float
    lag_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float


def _serve(listening: socket.socket) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Answering, sock=listening)
        await server.serve_forever()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def run(rates: list[float], duration_s: float) -> list[Met]:
    """Measure at each rate."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening:
        server = multiprocessing.get_context("fork").Process(target=_serve, args=(listening,), daemon=True)
        server.start()
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            return [_met(rate, url, duration_s) for rate in rates]
        finally:
            server.kill()
            server.join()


def _met(rate: float, url: str, duration_s: float) -> Met:
    plan = Plan(
        orders=plain(Load(creators=4, prompt_words=200, max_tokens=PIECES, run="generator")),
        times_s=poisson(rate, "generator"),
        bounds=Bounds(requests=None, duration_s=duration_s, warm_up_s=1.0, in_flight=session.in_flight_max()),
        loop="open",
        timeout_s=60.0,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report: Report = runner.run(
            session.run(Gateway(url), {"content-type": "application/json"}, plan, lambda _: None)
        )
    return Met(
        per_s=rate,
        completed=report.completed,
        errors=report.errors,
        cpu_ms_per_request=report.cpu_ms_per_request,
        lag_p50_ms=report.send_lag.p50_ms or 0.0,
        lag_p99_ms=report.send_lag.p99_ms or 0.0,
        ttft_p50_ms=report.ttft.p50_ms or 0.0,
        ttft_p99_ms=report.ttft.p99_ms or 0.0,
    )


def main(
    rates: Annotated[str, typer.Option(help="Requests a second, with commas between.")] = RATES,
    duration: Annotated[float, typer.Option(help="Seconds at each.", min=0.5)] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what the load generator costs, and up to which rate it keeps up."""
    met = run([float(rate) for rate in rates.split(",")], duration)
    head = ["per s", "whole", "failed", "CPU ms", "lag p50", "p99", "first token p50", "p99"]
    page = table(head, [msgspec.structs.astuple(one) for one in met])
    sys.stdout.write((msgspec.json.encode(met).decode() if as_json else page) + "\n")


if __name__ == "__main__":
    typer.run(main)
