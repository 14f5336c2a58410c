"""From how many tokens on prefill pays: `python -m tests.benchmarks.crossover [--rounds 5] [--lengths 32,64,…] [--json]`.

The real stack, as `headrace up` starts it, twice: once with every request through prefill, once with `requests.direct_tokens_max`
so large that those with a warm prefix go directly to decode. In both a creator's prefix is in the prefill engine's own cache and
in LMCache, and each request adds tokens that nobody has seen. They come one at a time:

    prefill   compute the new tokens in prefill, store them, and send its token
    direct    hand over, load the prefix in decode, compute the new tokens there, first step

What the direct way has more of before a first token is the load, and what it has less of the store. Who pays is everybody else:
what decode computes, its running replies wait for. Therefore one long reply runs beside all this, and the longest gap in it while
a request waits for its first token is measured as well. `direct_tokens_max` is then a choice: the largest gap that one will have.
"""

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Self

import httpx
import msgspec
import typer

from pipeline.cli.tables import table
from tests.e2e.prompts import WORDS
from tests.e2e.running import Running, await_ready

ROOT: Final = Path(__file__).parents[2]
PREFIX_TOKENS: Final = 1200
LENGTHS: Final = "32,64,128,256,512,1024"
ROUNDS_MAX: Final = 100
STOP_S: Final = 60.0

PORTS: Final = (
    "[nats]\nurl = 'nats://127.0.0.1:0'\nmonitor_port = 0\n[gateway]\nport = 0\n[lmcache]\nport = 0\nhttp_port = 0\n"
)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one number of uncached tokens, through prefill and directly: first-token times, their medians and the fastest; and the
    median of the longest gaps in the reply that runs beside."""

    uncached_tokens: int
    prefill_p50_ms: float
    direct_p50_ms: float
    prefill_min_ms: float
    direct_min_ms: float
    prefill_gap_ms: float
    direct_gap_ms: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. The first lengths from which, by medians, the first token came sooner through prefill, and the reply
    beside had shorter gaps; None: at none."""

    rounds: int
    prefix_tokens: int
    crossover_tokens: int | None
    gap_crossover_tokens: int | None
    lengths: list[Figures]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it began and its first text came, and its usage."""

    began_s: float
    first_s: float
    usage: dict[str, Any]


class Met(msgspec.Struct, frozen=True, kw_only=True):
    """What one request had to wait, and the reply beside it."""

    ttft_s: float
    gap_s: float


def run(rounds: int, lengths: list[int]) -> Report:
    """Measure on stacks of our own, and leave nothing running."""
    through = _measured(0, rounds, lengths)
    direct = _measured(PREFIX_TOKENS, rounds, lengths)
    figures = [
        Figures(
            uncached_tokens=length,
            prefill_p50_ms=statistics.median(met.ttft_s for met in through[length]) * 1e3,
            direct_p50_ms=statistics.median(met.ttft_s for met in direct[length]) * 1e3,
            prefill_min_ms=min(met.ttft_s for met in through[length]) * 1e3,
            direct_min_ms=min(met.ttft_s for met in direct[length]) * 1e3,
            prefill_gap_ms=statistics.median(met.gap_s for met in through[length]) * 1e3,
            direct_gap_ms=statistics.median(met.gap_s for met in direct[length]) * 1e3,
        )
        for length in lengths
    ]
    return Report(
        rounds=rounds,
        prefix_tokens=PREFIX_TOKENS,
        crossover_tokens=_from([(of.uncached_tokens, of.prefill_p50_ms < of.direct_p50_ms) for of in figures]),
        gap_crossover_tokens=_from([(of.uncached_tokens, of.prefill_gap_ms < of.direct_gap_ms) for of in figures]),
        lengths=figures,
    )


def _from(better: list[tuple[int, bool]]) -> int | None:
    """The first length from which it stays true. None: it is not true at the last."""
    last_not = max((length for length, is_better in better if not is_better), default=0)
    return min((length for length, _ in better if length > last_not), default=None)


class Beside:
    """A reply that never ends, and when each of its pieces came."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._came_s: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def longest_gap_s(self, began_s: float, ended_s: float) -> float:
        """Between two of its pieces, around that time."""
        came = [*self._came_s, time.perf_counter()]
        return max((b - a for a, b in pairwise(came) if b > began_s and a < ended_s), default=0.0)

    def _run(self) -> None:
        body = {
            "messages": [{"role": "user", "content": "Count."}],
            "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        with httpx.Client(base_url=self._gateway, timeout=120.0) as client:
            while not self._over.is_set():
                with client.stream("POST", "/v1/chat/completions", json=body, headers={"x-creator-id": "bob"}) as reply:
                    for line in reply.iter_lines():
                        if line.startswith("data: {"):
                            self._came_s.append(time.perf_counter())
                        if self._over.is_set():
                            return


def _measured(direct_tokens_max: int, rounds: int, lengths: list[int]) -> dict[int, list[Met]]:
    """What was met by each length."""
    times: dict[int, list[Met]] = {length: [] for length in lengths}
    chance = random.Random(direct_tokens_max)
    entries = f"default_max_tokens = 256\ndirect_tokens_max = {direct_tokens_max}\n"
    with stack(entries) as running, httpx.Client(base_url=running.gateway, timeout=120.0) as client:
        persona = " ".join(chance.choices(WORDS, k=PREFIX_TOKENS))
        for number in range(2):  # cold, and once as those that are measured
            _ask(client, persona, f"{number} " + " ".join(chance.choices(WORDS, k=lengths[0])))
        with Beside(running.gateway) as beside:
            for length in lengths * rounds:
                time.sleep(0.5)  # for the cache events, and for the machine to rest
                asked = _ask(client, persona, " ".join(chance.choices(WORDS, k=length)))
                went_direct = asked.usage["headrace"]["prefill_generated_tokens"] == 0
                assert went_direct == (direct_tokens_max > 0), asked.usage
                gap_s = beside.longest_gap_s(asked.began_s, asked.first_s)
                times[length].append(Met(ttft_s=asked.first_s - asked.began_s, gap_s=gap_s))
        sys.stderr.write(f"direct_tokens_max = {direct_tokens_max}: {rounds} rounds\n")
    return times


def _ask(client: httpx.Client, persona: str, message: str) -> Asked:
    body = {
        "messages": [{"role": "system", "content": persona}, {"role": "user", "content": message}],
        "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    usage: dict[str, Any] = {}
    began_s, first_s = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/chat/completions", json=body, headers={"x-creator-id": "ada"}) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = msgspec.json.decode(line[6:])
            usage = chunk.get("usage") or usage
            if not first_s and any(choice["delta"].get("content") for choice in chunk["choices"]):
                first_s = time.perf_counter()
    assert first_s, "a reply without text"
    return Asked(began_s=began_s, first_s=first_s, usage=usage)


@contextlib.contextmanager
def stack(requests: str, simulated: str = "", up: str = "") -> Iterator[Running]:
    """`headrace up`, ready, with these entries of `[requests]` and `[up]`; at its end nothing is left. On the real engines, but
    for entries of `[simulated]`."""
    with tempfile.TemporaryDirectory(prefix="headrace-crossover-") as folder:
        config, log = Path(folder, "headrace.toml"), Path(folder, "up.log")
        engine = f"[simulated]\n{simulated}" if simulated else ""
        config.write_text(f"{PORTS}[requests]\n{requests}[up]\nstate_dir = '{folder}'\n{up}{engine}")
        which = ["--engine", "simulated"] if simulated else ["--model", _model()]
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.cli", "up", "--config", str(config), *which],
                cwd=ROOT, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        try:
            yield await_ready(process, Path(folder, "last.json"), log)
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _model() -> str:
    """The default model, prepared once for all that is started here."""
    state_dir = os.environ.get("HEADRACE_STATE_DIR", "~/.cache/headrace")
    command = [sys.executable, "-m", "workers.engines.model", "--source", "smollm2", "--state-dir", state_dir]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]


def text(report: Report) -> str:
    """The report for people."""
    head = ["uncached tokens", *(f"{way} {what} ms" for what in ("p50", "min", "gap") for way in ("prefill", "direct"))]
    rows = [[round(figure) for figure in msgspec.structs.astuple(figures)] for figures in report.lengths]
    sooner, smoother = (
        f"from {tokens} uncached tokens on" if tokens else "at no length"
        for tokens in (report.crossover_tokens, report.gap_crossover_tokens)
    )
    said = f"Through prefill the first token came sooner {sooner}; the reply beside had shorter gaps {smoother}."
    return f"{table(head, rows)}\n{said}"


def main(
    rounds: Annotated[int, typer.Option(help="Requests of each length, each way.", min=1, max=ROUNDS_MAX)] = 5,
    lengths: Annotated[str, typer.Option(help="Uncached tokens.")] = LENGTHS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure first-token times through prefill and directly, by the number of tokens that must be computed."""
    report = run(rounds, sorted(int(length) for length in lengths.split(",")))
    sys.stdout.write((msgspec.json.encode(report).decode() if as_json else text(report)) + "\n")


if __name__ == "__main__":
    typer.run(main)
