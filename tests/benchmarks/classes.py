"""Interactive requests with batch beside them and without: `python -m tests.benchmarks.classes [--rounds 5] [--json]`.

A nats-server, a gateway, a prefill and a decode worker with simulated engines, each a process of its own. Interactive requests
come in an open loop, each timed from when it was due. In turn they are alone, beside batch with long prompts and short replies,
which prefill cannot keep up with, and beside batch with short prompts and long replies, which decode cannot; batch is a closed
loop of more clients than the fleet has places. Each round has its own arrivals, the same for all three. It prints

    first token, whole     of interactive requests, p50 and p99 over all rounds; and the median of the rounds' own p99
    ratio                  each p99 beside batch, over the one alone
    batch                  replies a second

Then each class alone, and both together, ask for more than the fleet can do: what a fleet that has only batch to do gives away
for interactive requests that may come, and which part of the replies is batch's where they do.

The engines are slow, so that they are what is scarce, and not the cores that all of this shares: `cpu` says how busy those were.
`--equal` gives both classes the same turns and no room of their own, to compare.
"""

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec
import psutil
import typer
import uvloop

from pipeline.bench.arrivals import poisson
from pipeline.bench.connection import Connections
from pipeline.bench.loops import Bounds, Loop
from pipeline.bench.orders import Load, Order, encoded, prompt
from pipeline.bench.outcome import Outcome
from pipeline.bench.tally import Tally
from pipeline.cli.client import Gateway
from pipeline.cli.tables import table
from tests.chaos.run import stack
from tests.chaos.stack import Settings, Stack
from tests.percentiles import percentile_ms

RATE: Final = 4.0
"""Interactive requests a second: 44 % of what prefill can do."""

PROMPT_WORDS: Final = 2210
REPLY_TOKENS: Final = 30
TIMEOUT_S: Final = 60.0
SETTLE_S: Final = 1.0

WARM_S: Final = 3.0
"""Batch begins so much earlier: by then it has all that it can get."""

GOAL: Final = 1.10
"""Interactive p99 beside batch, over the one without."""

FLEET: Final = Settings(
    prefill=1,
    decode=1,
    gateways=1,
    step_s=0.02,
    decode_slots=32,
    kv_blocks=4000,
    more={
        "PREFILL__SLOTS": 8,
        "SIMULATED__PREFILL_TOKENS_PER_S": 20_000,
        "SIMULATED__STEP_PER_SEQUENCE_S": 0.00006,
        "SIMULATED__LMCACHE_BLOCKS": 400_000,
    },
)
"""Prefill computes 20,000 tokens a second in steps of 512. A sequence more makes a decode step 0.3 % longer: the KV of 400 tokens
beside the weights of an 8B model."""

EQUAL: Final = {
    "CLASSES__INTERACTIVE_WEIGHT": 1,
    "CLASSES__BATCH_WEIGHT": 1,
    "CLASSES__PREFILL_ROOM": 0.0,
    "CLASSES__DECODE_ROOM": 0.0,
}


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """What batch asks: so many clients, prompts of so many words, replies of so many tokens."""

    name: str
    clients: int = 0
    words: int = 0
    tokens: int = 0


ALONE: Final = Beside(name="alone")
KINDS: Final = (
    ALONE,
    Beside(name="long prompts", clients=24, words=PROMPT_WORDS, tokens=4),
    Beside(name="long replies", clients=48, words=200, tokens=300),
)
FLOOR: Final = Beside(name="too much", clients=24, words=PROMPT_WORDS, tokens=4)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Interactive requests of one kind of rounds, in milliseconds, and replies of batch a second beside them."""

    beside: str
    requests: int
    failed: int
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    ttft_p99_median_ms: float | None
    e2e_p50_ms: float | None
    e2e_p99_ms: float | None
    e2e_p99_median_ms: float | None
    ttft_p99_ratio: float | None
    e2e_p99_ratio: float | None
    batch_per_s: float
    batch_failed: int
    cpu_ratio: float


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """Replies a second where classes ask too much: each alone, both together, and batch's part of those."""

    interactive_alone_per_s: float
    batch_alone_per_s: float
    interactive_per_s: float
    batch_per_s: float
    batch_ratio: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `goal`: the ratio that was to be reached."""

    equal: bool
    rounds: int
    seconds: float
    rate: float
    goal: float
    kinds: list[Figures]
    floor: Floor
    cores: int
    load_average: float


class Kept(Tally):
    """A tally that keeps each outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        """A request has ended."""
        super().add(outcome)
        self.outcomes.append(outcome)


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What one round has brought: outcomes of each class, those of batch that ended in its time, and how busy all cores were."""

    interactive: list[Outcome]
    batch: list[Outcome]
    seconds: float
    cpu_ratio: float


def orders(name: str, words: int, tokens: int) -> Iterator[Order]:
    """Each of another creator, so that no prompt is found in a cache; each reply of exactly so many tokens."""
    load = Load(creators=10**9, prompt_words=words, max_tokens=tokens, run=name)
    for number in itertools.count():
        creator, body = prompt(load, number)
        yield Order(f"{name}-{creator}".replace(" ", "-"), encoded(body | {"ignore_eos": True}))


class Clients:
    """One class's clients of a round."""

    def __init__(self, stack: Stack, klass: str) -> None:
        headers = {"content-type": "application/json", "x-request-class": klass}
        self.tally = Kept()
        self._connections = Connections(Gateway(stack.gateways()[0].url), headers, TIMEOUT_S)

    async def at_times(self, asked: Iterator[Order], times_s: Iterator[float], seconds: float) -> None:
        """An open loop."""
        bounds = Bounds(requests=None, duration_s=seconds, warm_up_s=0.0, in_flight=4096)
        await Loop(self._connections, self.tally, bounds).open(asked, times_s)
        self._connections.close()

    def in_turn(self, asked: Iterator[Order], clients: int) -> "Asking":
        """A closed loop, until it is told to stop."""
        loop = Loop(
            self._connections, self.tally, Bounds(requests=None, duration_s=None, warm_up_s=0.0, in_flight=clients)
        )
        return Asking(loop, asyncio.create_task(loop.closed(asked)), self._connections)


class Asking:
    """A closed loop that runs."""

    def __init__(self, loop: Loop, task: "asyncio.Task[None]", connections: Connections) -> None:
        self._loop, self._task, self._connections = loop, task, connections

    async def stop(self) -> None:
        """Ask no more, and wait for what runs."""
        self._loop.stop()
        await self._task
        self._connections.close()


async def round_of(running: Stack, beside: Beside, name: str, rate: float, seconds: float) -> Round:
    """Interactive requests for so long, and batch from before their first until after their last."""
    interactive, batch = Clients(running, "interactive"), Clients(running, "batch")
    asking = None
    if beside.clients:
        asking = batch.in_turn(orders(f"{name} b", beside.words, beside.tokens), beside.clients)
        await asyncio.sleep(WARM_S)
    cpu = psutil.cpu_times()
    began_s = time.perf_counter()
    asked = orders(f"{name} i", PROMPT_WORDS, REPLY_TOKENS)
    await interactive.at_times(asked, poisson(rate, name.partition("/")[0]), seconds)
    over_s, cpu_ratio = time.perf_counter(), _busy_ratio(cpu, psutil.cpu_times())
    if asking is not None:
        await asking.stop()
    await asyncio.sleep(SETTLE_S)
    return Round(
        interactive=interactive.tally.outcomes,
        batch=[outcome for outcome in batch.tally.outcomes if began_s <= outcome.ended_s <= over_s],
        seconds=over_s - began_s,
        cpu_ratio=cpu_ratio,
    )


def _busy_ratio(before: Any, after: Any) -> float:
    """Of all cores, from what the system says of their time: everybody's work on this machine."""
    idle_s = after.idle + after.iowait - before.idle - before.iowait
    return float(1 - idle_s / max(0.01, sum(after) - sum(before)))


async def floor_of(running: Stack, seconds: float) -> Floor:
    """Closed loops of more clients than there are places."""
    interactive_alone = await most_of(running, seconds, "interactive")
    batch_alone = await most_of(running, seconds, "batch")
    both = await most_of(running, seconds, "interactive", "batch")
    return Floor(
        interactive_alone_per_s=interactive_alone["interactive"],
        batch_alone_per_s=batch_alone["batch"],
        interactive_per_s=both["interactive"],
        batch_per_s=both["batch"],
        batch_ratio=round(both["batch"] / max(0.01, sum(both.values())), 3),
    )


async def most_of(running: Stack, seconds: float, *klasses: str) -> dict[str, float]:
    """Replies a second of each of these classes, all with the same prompts and replies."""
    kinds = {klass: Clients(running, klass) for klass in klasses}
    asking = [
        clients.in_turn(orders(f"{'-'.join(klasses)} {klass}", FLOOR.words, FLOOR.tokens), FLOOR.clients)
        for klass, clients in kinds.items()
    ]
    await asyncio.sleep(WARM_S)
    began_s = time.perf_counter()
    await asyncio.sleep(seconds)
    over_s = time.perf_counter()
    for one in asking:
        await one.stop()
    await asyncio.sleep(SETTLE_S)
    ended = {
        klass: [outcome for outcome in clients.tally.outcomes if began_s <= outcome.ended_s <= over_s]
        for klass, clients in kinds.items()
    }
    return {
        klass: round(sum(not outcome.code for outcome in outcomes) / (over_s - began_s), 2)
        for klass, outcomes in ended.items()
    }


def run(
    rounds: int, seconds: float, *, equal: bool = False, rate: float = RATE, told: Callable[[str], None] = print
) -> Report:
    """Measure on a fleet of its own, and leave nothing running."""
    load_average = psutil.getloadavg()[0]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        kinds, floor = runner.run(_run(rounds, seconds, equal=equal, rate=rate, told=told))
    return Report(
        equal=equal,
        rounds=rounds,
        seconds=seconds,
        rate=rate,
        goal=GOAL,
        kinds=kinds,
        floor=floor,
        cores=psutil.cpu_count() or 0,
        load_average=round(load_average, 2),
    )


async def _run(
    rounds: int, seconds: float, *, equal: bool, rate: float, told: Callable[[str], None]
) -> tuple[list[Figures], Floor]:
    settings = msgspec.structs.replace(FLEET, more={**FLEET.more, **EQUAL}) if equal else FLEET
    seen: dict[Beside, list[Round]] = {kind: [] for kind in KINDS}
    async with stack(settings, None) as running:
        await round_of(running, ALONE, "warm-up", rate, min(seconds, 3.0))  # what is slow only once is not counted
        for number in range(rounds):
            for kind in KINDS:
                told(f"round {number + 1} of {rounds}: {kind.name}")
                seen[kind].append(await round_of(running, kind, f"{number}/{kind.name}", rate, seconds))
        told("too much")
        floor = await floor_of(running, seconds)
    alone = _figures(ALONE, seen[ALONE], None)
    return [alone, *(_figures(kind, seen[kind], alone) for kind in KINDS[1:])], floor


def _figures(kind: Beside, found: Sequence[Round], alone: Figures | None) -> Figures:
    whole = [[outcome for outcome in one.interactive if not outcome.code] for one in found]
    ttft_s = [[outcome.first_s - outcome.from_s for outcome in one if outcome.first_s is not None] for one in whole]
    e2e_s = [[outcome.ended_s - outcome.from_s for outcome in one] for one in whole]
    batch = [outcome for one in found for outcome in one.batch]
    figures = Figures(
        beside=kind.name,
        requests=sum(map(len, e2e_s)),
        failed=sum(len(one.interactive) for one in found) - sum(map(len, e2e_s)),
        ttft_p50_ms=percentile_ms(list(itertools.chain(*ttft_s)), 50),
        ttft_p99_ms=percentile_ms(list(itertools.chain(*ttft_s)), 99),
        ttft_p99_median_ms=_median_p99_ms(ttft_s),
        e2e_p50_ms=percentile_ms(list(itertools.chain(*e2e_s)), 50),
        e2e_p99_ms=percentile_ms(list(itertools.chain(*e2e_s)), 99),
        e2e_p99_median_ms=_median_p99_ms(e2e_s),
        ttft_p99_ratio=None,
        e2e_p99_ratio=None,
        batch_per_s=round(sum(not outcome.code for outcome in batch) / sum(one.seconds for one in found), 2),
        batch_failed=sum(bool(outcome.code) for outcome in batch),
        cpu_ratio=round(statistics.fmean(one.cpu_ratio for one in found), 2),
    )
    if alone is None:
        return figures
    return msgspec.structs.replace(
        figures,
        ttft_p99_ratio=_ratio(figures.ttft_p99_ms, alone.ttft_p99_ms),
        e2e_p99_ratio=_ratio(figures.e2e_p99_ms, alone.e2e_p99_ms),
    )


def _median_p99_ms(rounds_s: Sequence[Sequence[float]]) -> float | None:
    found = [ms for ms in (percentile_ms(one, 99) for one in rounds_s) if ms is not None]
    return round(statistics.median(found), 2) if found else None


def _ratio(beside: float | None, alone: float | None) -> float | None:
    return round(beside / alone, 3) if beside is not None and alone else None


def page(report: Report) -> str:
    """The report for people."""
    head = [
        "BESIDE", "REQUESTS", "FAILED", "FIRST P50 MS", "P99", "RATIO", "WHOLE P50 MS", "P99", "RATIO", "BATCH/S", "CPU",
    ]  # fmt: skip
    rows = [
        [
            one.beside, one.requests, one.failed, one.ttft_p50_ms or "", one.ttft_p99_ms or "", one.ttft_p99_ratio or "",
            one.e2e_p50_ms or "", one.e2e_p99_ms or "", one.e2e_p99_ratio or "", one.batch_per_s or "",
            f"{one.cpu_ratio:.0%}",
        ]
        for one in report.kinds
    ]  # fmt: skip
    floor = report.floor
    return (
        f"{table(head, rows)}\n\n"
        f"Too much: {floor.interactive_alone_per_s}/s interactive alone, {floor.batch_alone_per_s}/s batch alone; together "
        f"{floor.interactive_per_s}/s and {floor.batch_per_s}/s ({floor.batch_ratio:.0%} batch)."
    )


def main(
    rounds: Annotated[int, typer.Option(help="Each of three kinds.", min=1, max=100)] = 5,
    seconds: Annotated[float, typer.Option(help="Of each of them.", min=0.5, max=120)] = 15.0,
    equal: Annotated[bool, typer.Option("--equal", help="Give both classes the same turns, and no room.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time interactive requests alone and beside batch that the fleet cannot keep up with."""
    report = run(rounds, seconds, equal=equal, told=lambda what: print(what, file=sys.stderr))
    print(msgspec.json.encode(report).decode() if as_json else page(report))


if __name__ == "__main__":
    typer.run(main)
