"""What the pipeline itself costs, beside its engines: `headrace bench --profile overhead [--json]`.

A fleet of its own: a real nats-server, one gateway, one prefill and one decode worker with simulated engines that compute in no
time and write a token every 4 ms. Prompts have 2,210 tokens, replies 30. On a machine with few cores the load and the fleet
share them, so all figures are from above. Each is measured apart:

    added first token    what the gateway says of each request until its first token, less what its engines had of it: of plain
                         replies, which prefill begins, and of those with a seed, whose first token comes from decode
    CPU                  of each process, over the seconds of a rate, for each request
    memory               of the gateway, with streams open that it keeps up with and without, for each stream
    refusal              from connecting until all of a 503 is read, with all places taken
    credit               from an ask to its answer, by the broker and back, one at a time
    route                one routing decision of the gateway
    cancel               from a cancel until the engine is told, the slowest of seven stages
    saturation           the highest rate of a ramp that is served as it comes
"""

import asyncio
import math
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import uvloop

from pipeline.bench import session
from pipeline.bench.arrivals import poisson
from pipeline.bench.loops import Bounds
from pipeline.bench.orders import Load, Order, plain
from pipeline.bench.session import Plan
from pipeline.bench.tally import Report as Served
from pipeline.bus.connection import Bus, Message
from pipeline.cli.client import Gateway
from pipeline.planning import scale, traffic
from pipeline.planning.seed import percentile_ms as exact_ms
from pipeline.protocol import subjects
from pipeline.protocol.messages import Ask, Return, encode
from tests.benchmarks import cancel, flood
from tests.chaos.stack import Settings, Stack
from tests.percentiles import percentile_ms

PROMPT_WORDS: Final = 2210
REPLY_TOKENS: Final = 30
CREATORS: Final = 20

ENGINES: Final = Settings(
    prefill=1, decode=1, gateways=1, step_s=0.004, decode_slots=1024, kv_blocks=200_000,
    more={
        "PREFILL__SLOTS": 64, "SIMULATED__PREFILL_OVERHEAD_S": 0.0, "SIMULATED__PREFILL_TOKENS_PER_S": 1e9,
        "SIMULATED__LMCACHE_BLOCKS": 400_000, "SIMULATED__LMCACHE_BLOCKS_PER_S": 1e9, "SIMULATED__STEP_PER_SEQUENCE_S": 0.0,
    },
)  # fmt: skip
"""Room for all that is asked of it, so that nothing but our own work takes time."""

ENGINE_STAGES: Final = {
    "prefill": ("wait", "prefill", "store"),
    "decode": ("wait", "prefill", "store", "load", "first_step"),
}
"""The engines' part of a first token, by who has sent it."""
NOT_OURS: Final = (*ENGINE_STAGES["decode"], "decode", "finish", "relay")
"""Stages of engines, and what follows a first token wherever it is made."""

RATE: Final = 100.0
FAST: Final = 250.0
STREAM_TOKENS: Final = 150
STREAM_STEP_S: Final = 0.05
"""With 300 open, 6,000 tokens a second: what a gateway that has fallen behind keeps for its streams is another question."""
SETTLE_S: Final = 1.0

KEPT_UP_MS: Final = 500.0
"""A fleet keeps up with a rate while all are served, and 99 % of first tokens come within this."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything: `seconds` of each rate, `streams` open at a time, `asks` for credit, `cancels` at each stage."""

    seconds: float = 5.0
    ramp: tuple[float, ...] = (100.0, 150.0, 200.0, 250.0, 300.0, 400.0, 500.0)
    streams: int = 300
    asks: int = 500
    cancels: int = 30


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. CPU at 250 requests/s is None where the machine cannot serve them."""

    added_ttft_p50_ms: float
    added_ttft_p99_ms: float
    added_ttft_of_decode_p50_ms: float
    added_ttft_of_decode_p99_ms: float
    added_by_stage_ms: dict[str, float]
    gateway_cpu_ms_per_request: float
    pipeline_cpu_ms_per_request: float
    cpu_ms_per_request: dict[str, float]
    cpu_at_per_s: float
    gateway_kb_per_stream: float
    refusal_p99_ms: float
    credit_p99_ms: float
    route_p99_us: float
    cancel_p99_ms: float
    saturation_rps: float
    ramp: dict[str, dict[str, float]]
    cores: int
    load_average: float


class Shot(msgspec.Struct, frozen=True, kw_only=True):
    """One rate: what its clients saw, and the CPU of each part, in milliseconds a request."""

    served: Served
    cpu_ms: dict[str, float]


def run(sizes: Sizes, told: Callable[[str], None]) -> Report:
    """All of it: about three minutes with 5 s a rate. Nothing is left running."""
    load_average = psutil.getloadavg()[0]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = runner.run(_run(sizes, told))
    told("refusals")
    full = next(one for one in flood.run(rounds=1, seconds=1.0) if one.kind == "full")
    told("cancels")
    stages = cancel.run(sizes.cancels).stages
    told("routing decisions")
    everybody = list(islice(traffic.requests(traffic.Workload(seed=1, hot_share=0.3)), 20_000))
    return Report(
        **measured,
        refusal_p99_ms=full.refused_p99_ms or math.inf,
        cancel_p99_ms=max(stage.told_p99_ms for stage in stages),
        route_p99_us=round(exact_ms(scale.decision_costs(everybody, {}, 256), 99) * 1000, 2),
        cores=psutil.cpu_count() or 0,
        load_average=round(load_average, 2),
    )


async def _run(sizes: Sizes, told: Callable[[str], None]) -> dict[str, Any]:
    async with _stack() as (stack, folder):
        told("warm-up")
        await _shoot(stack, RATE, 2.0, "warm")
        told(f"{RATE:g} requests/s")
        before = len(_lines(folder))
        await _shoot(stack, RATE, sizes.seconds, "base")
        plain_lines = _lines(folder)[before:]
        await _shoot(stack, RATE, sizes.seconds, "seeded", {"seed": 1})
        seeded = _lines(folder)[before + len(plain_lines) :]
        measured = added(plain_lines, seeded)
        ramp = [shot async for shot in _climb(stack, sizes, told)]
        told("credits")
        credit_p99_ms = await _credit_p99_ms(stack, sizes.asks)
    told(f"{sizes.streams} streams")
    kb_per_stream = await _kb_per_stream(sizes.streams)
    at_per_s, shot = next(((rate, shot) for rate, shot in ramp if rate >= FAST and kept_up(shot.served)), ramp[0])
    good = [rate for rate, shot in ramp if kept_up(shot.served)]
    return {
        **measured,
        "gateway_cpu_ms_per_request": shot.cpu_ms["gateway-1"],
        "pipeline_cpu_ms_per_request": round(sum(shot.cpu_ms.values()), 3),
        "cpu_ms_per_request": shot.cpu_ms,
        "cpu_at_per_s": at_per_s,
        "gateway_kb_per_stream": kb_per_stream,
        "credit_p99_ms": credit_p99_ms,
        "saturation_rps": max(good, default=0.0),
        "ramp": {f"{rate:g}": _figures(shot) for rate, shot in ramp},
    }


@asynccontextmanager
async def _stack(settings: Settings = ENGINES) -> AsyncIterator[tuple[Stack, Path]]:
    """A fleet, and the folder of its logs."""
    with tempfile.TemporaryDirectory(prefix="headrace-overhead-") as name:
        folder = Path(name)
        async with Stack(folder, settings).running() as stack:
            yield stack, folder


# --------------------------------------------------------------------------------------------------------------
# First tokens, CPU, saturation


async def _shoot(
    stack: Stack, rate: float, seconds: float, run_name: str, more: Mapping[str, int] | None = None
) -> Shot:
    """An open loop of so many requests a second, with `more` in their bodies."""
    load = Load(creators=CREATORS, prompt_words=PROMPT_WORDS, max_tokens=REPLY_TOKENS, run=run_name)
    plan = Plan(
        orders=exact(plain(load), more or {}),
        times_s=poisson(rate, run_name),
        bounds=Bounds(requests=None, duration_s=seconds, warm_up_s=0.0, in_flight=4096),
        loop=f"{rate:g}/s",
        timeout_s=30.0,
    )
    before = cpu_s(stack)
    served = await session.run(Gateway(stack.gateways()[0].url), {"content-type": "application/json"}, plan, unwatched)
    after = cpu_s(stack)
    requests = max(1, served.requests)
    spent = {part: round((after[part] - before[part]) * 1000 / requests, 3) for part in before}
    await asyncio.sleep(SETTLE_S)
    return Shot(served=served, cpu_ms=spent)


def exact(orders: Iterator[Order], more: Mapping[str, int]) -> Iterator[Order]:
    """Replies of exactly so many tokens, with `more` in their requests."""
    for order in orders:
        body = msgspec.json.decode(order.body)
        yield Order(order.creator, msgspec.json.encode(body | {"ignore_eos": True} | more))


async def _climb(stack: Stack, sizes: Sizes, told: Callable[[str], None]) -> AsyncIterator[tuple[float, Shot]]:
    """Higher and higher rates, and the first that is too high."""
    for rate in sizes.ramp:
        told(f"{rate:g} requests/s")
        shot = await _shoot(stack, rate, sizes.seconds, f"ramp-{rate:g}")
        yield rate, shot
        if not kept_up(shot.served):
            return


def kept_up(served: Served) -> bool:
    """Whether all were served, as they came."""
    return served.completed == served.requests and (served.ttft_p99_ms or math.inf) <= KEPT_UP_MS


def _figures(shot: Shot) -> dict[str, float]:
    served = shot.served
    return {
        "per_s": served.per_s,
        "completed": served.completed,
        "ttft_p50_ms": served.ttft_p50_ms or math.inf,
        "ttft_p99_ms": served.ttft_p99_ms or math.inf,
        "send_lag_p99_ms": served.send_lag.p99_ms or 0.0,
        "pipeline_cpu_ms": round(sum(shot.cpu_ms.values()), 3),
    }


def _lines(folder: Path) -> list[dict[str, Any]]:
    """What the gateway has logged of whole requests."""
    lines = map(msgspec.json.decode, (folder / "gateway-1.log").read_bytes().splitlines())
    return [line for line in lines if line["event"] == "request" and line["outcome"] == "whole"]


def added(plain_lines: list[dict[str, Any]], seeded: list[dict[str, Any]]) -> dict[str, Any]:
    """First-token times less the engines' part: plain replies' and seeded ones'. What is ours of these, by stage: medians."""
    plain_s, seeded_s = added_s(plain_lines), added_s(seeded)
    ours = {stage for line in seeded for stage in line["stages_ms"]} - {*NOT_OURS}
    by_stage = {
        stage: _percentile_ms([line["stages_ms"].get(stage, 0) / 1000 for line in seeded], 50) for stage in sorted(ours)
    }
    return {
        "added_ttft_p50_ms": _percentile_ms(plain_s, 50),
        "added_ttft_p99_ms": _percentile_ms(plain_s, 99),
        "added_ttft_of_decode_p50_ms": _percentile_ms(seeded_s, 50),
        "added_ttft_of_decode_p99_ms": _percentile_ms(seeded_s, 99),
        "added_by_stage_ms": by_stage,
    }


def added_s(lines: list[dict[str, Any]]) -> list[float]:
    """First-token times of these requests, less what engines had of them."""
    return [
        (line["ttft_ms"] - sum(line["stages_ms"].get(stage, 0) for stage in ENGINE_STAGES[line["first_of"]])) / 1000
        for line in lines
    ]


def cpu_s(stack: Stack) -> dict[str, float]:
    """CPU seconds that each part has had, with all that it has started."""
    return {name: sum(map(_spent_s, _family(pid))) for name, pid in _pids(stack).items()}


def _spent_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _pids(stack: Stack) -> Mapping[str, int]:
    return {name: part.process.pid for name, part in stack.parts.items() if part.process is not None}


# --------------------------------------------------------------------------------------------------------------
# Credits and memory


async def _credit_p99_ms(stack: Stack, asks: int) -> float:
    """An ask for one block, its grant, and its return, again and again."""
    worker, took_s = stack.workers("decode")[0].name, list[float]()
    async with await Bus.connect(stack.nats_url, "overhead") as bus:
        inbox, came = bus.inbox(), asyncio.Event()

        def heard(_: Message) -> None:
            came.set()

        await bus.subscribe(inbox, heard)
        await bus.barrier()
        for number in range(asks):
            came.clear()
            ask = Ask(ask=f"o{number}", request="o", claim="o", blocks=1, deadline_s=time.time() + 60, answer_to=inbox)
            began_s = time.perf_counter()
            await bus.publish(subjects.credit(worker), encode(ask))
            async with asyncio.timeout(5):
                await came.wait()
            took_s.append(time.perf_counter() - began_s)
            await bus.publish(subjects.credit(worker), encode(Return(ask=ask.ask)))
    return _percentile_ms(took_s, 99)


async def _kb_per_stream(streams: int) -> float:
    """Memory of a gateway with replies open that are written slowly enough to keep up with, over that without."""
    async with _stack(msgspec.structs.replace(ENGINES, step_s=STREAM_STEP_S)) as (stack, _):
        await _shoot(stack, RATE, 1.0, "warm")
        load = Load(creators=CREATORS, prompt_words=PROMPT_WORDS, max_tokens=STREAM_TOKENS, run="streams")
        plan = Plan(
            orders=exact(islice(plain(load), streams), {}),
            times_s=poisson(RATE, "streams"),
            bounds=Bounds(requests=streams, duration_s=None, warm_up_s=0.0, in_flight=streams),
            loop="streams",
            timeout_s=120.0,
        )
        gateway = psutil.Process(_pids(stack)["gateway-1"])
        before, most = gateway.memory_info().rss, 0
        url = Gateway(stack.gateways()[0].url)
        asking = asyncio.create_task(session.run(url, {"content-type": "application/json"}, plan, unwatched))
        while not asking.done():
            most = max(most, gateway.memory_info().rss)
            await asyncio.sleep(0.1)
        served = await asking
    assert served.completed == streams, served.errors_by
    return round((most - before) / 1024 / streams, 1)


def _percentile_ms(times_s: list[float], percent: int) -> float:
    found = percentile_ms(times_s, percent)
    return math.inf if found is None else round(found, 2)


def unwatched(_: session.Status) -> None:
    """Nobody looks on."""


def progress(what: str) -> None:
    """On stderr."""
    sys.stderr.write(f"{what} …\n")


def page(report: Report) -> str:
    """The report for people."""
    tree = msgspec.to_builtins(report)
    plain_figures = [f"{name:<30}{value}" for name, value in tree.items() if not isinstance(value, dict)]
    stages = [f"  {stage:<12}{ms} ms" for stage, ms in report.added_by_stage_ms.items()]
    parts = [f"  {part:<12}{ms} ms CPU a request" for part, ms in report.cpu_ms_per_request.items()]
    rates = [f"  {rate:>5}/s    {figures}" for rate, figures in report.ramp.items()]
    return "\n".join([*plain_figures, "added by stage, medians", *stages, "by process", *parts, "ramp", *rates])
