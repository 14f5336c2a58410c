"""`headrace bench`: load on a running gateway, and what its clients saw. The generator is `pipeline/bench`.

An open loop (`--rate`, `--trace`) sends at set times and counts latencies from them; a closed one (`--concurrency`) keeps so many
requests running. A scenario without a gateway is a fleet in virtual time: `pipeline/planning`.
"""

import sys
from typing import TYPE_CHECKING, Final

import msgspec
import typer

from pipeline.cli import bench_options as options
from pipeline.cli import client
from pipeline.cli.bench_options import Asked
from pipeline.cli.harness import find_harness
from pipeline.cli.options import CaOption, ConfigOption, UrlOption, configuration
from pipeline.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.bench.orders import Order
    from pipeline.bench.session import Plan, Status
    from pipeline.bench.tally import Report

REQUESTS: Final = 20
CONCURRENCY: Final = 4
CREATORS: Final = 4
SCENARIO_S: Final = 40.0
SEED_RATE: Final = 10.0
"""Of the seed scenario on a gateway, where none is given: a hundredth of the source's, with a hundredth of its conversations."""

LINE_PERIOD_S: Final = 5.0
"""Where nobody watches, a line of progress comes this often."""

INTERRUPTED_EXIT: Final = 130

PROFILE_S: Final = 5.0
"""Of each rate of a profile."""


def bench(
    *,
    requests: options.Requests = None,
    concurrency: options.Concurrency = None,
    rate: options.Rate = None,
    arrivals: options.Arrivals = "poisson",
    duration: options.Duration = None,
    warm_up: options.WarmUp = 0.0,
    timeout: options.Timeout = 120.0,
    creators: options.Creators = None,
    prompt_tokens: options.PromptTokens = 200,
    max_tokens: options.MaxTokens = 32,
    slo_ttft_ms: options.SloTtft = None,
    slo_itl_ms: options.SloItl = None,
    trace: options.Trace = None,
    speed: options.Speed = 1.0,
    warm: options.Warm = False,
    as_json: options.AsJson = False,
    scenario: options.Scenario = None,
    profile: options.Profile = None,
    engine: options.Engine = None,
    seed: options.Seed = 1,
    url: UrlOption = None,
    ca: CaOption = None,
    config: ConfigOption = None,
) -> None:
    """Put load on a gateway, and measure what its clients see. Or, with --scenario alone, plan a fleet in virtual time.

    Ctrl-C stops sending and waits for what runs, a second one leaves it; both print what was measured. Exits with 1 where a
    reply was not whole.

    Example: headrace bench --requests 200 --concurrency 8 --creators 4

    Example: headrace bench --rate 20 --duration 60 --warm-up 10 --slo-ttft-ms 200 --slo-itl-ms 50

    Example: headrace bench --trace traffic.jsonl --speed 2 --duration 300

    Example: headrace bench --scenario seed --rate 20 --duration 60

    Example: headrace bench --scenario seed --engine simulated --json

    Example: headrace bench --profile overhead --json
    """
    given = locals()  # every option by its name
    if profile is not None:
        print(overhead(duration or PROFILE_S, as_json=as_json))
        return
    if scenario is not None and (engine is not None or (url is None and rate is None)):
        print(plan(scenario, engine or "simulated", duration or SCENARIO_S, seed, as_json=as_json))
        return
    asked = Asked(**{name: given[name] for name in Asked.__struct_fields__})
    asked.check()
    load(asked, client.gateway(url, ca, configuration(config)), as_json=as_json)


def overhead(seconds: float, *, as_json: bool) -> str:
    """What the pipeline itself costs, on a fleet of its own; what to print."""
    find_harness("benchmarks")
    from tests.benchmarks import overhead as own

    report = own.run(own.Sizes(seconds=seconds), own.progress)
    return msgspec.json.encode(report).decode() if as_json else own.page(report)


def plan(scenario: str, engine: str, duration_s: float, seed: int, *, as_json: bool) -> str:
    """Run a scenario in virtual time; what to print. Raises `OperatorError` for one that there is not."""
    if engine != "simulated":
        raise OperatorError(f"A scenario cannot run on {engine!r}.", "Use --engine simulated, or --url for a gateway.")
    from pipeline.planning import scale
    from pipeline.planning import seed as seeded

    if scenario == "seed":
        by_policy = seeded.run(seed, duration_s, _told)
        return msgspec.json.encode(by_policy).decode() if as_json else seeded.table(by_policy)
    if scenario == "scale":
        at_scale = scale.run(seed, duration_s, _told)
        return msgspec.json.encode(at_scale).decode() if as_json else scale.table(at_scale)
    raise OperatorError(f"There is no scenario {scenario!r}.", "Use --scenario seed or --scenario scale.")


def _told(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------------------
# Load on a gateway


def load(asked: Asked, gateway: client.Gateway, *, as_json: bool) -> None:
    """Put it there, and print the report. Raises `typer.Exit` with the exit status."""
    import asyncio

    import uvloop

    from pipeline.bench.page import page

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(measured(asked, gateway))
    print(msgspec.json.encode(report).decode() if as_json else page(report))
    if report.interrupted:
        raise typer.Exit(INTERRUPTED_EXIT)
    raise typer.Exit(1 if report.errors or report.refused else 0)


async def measured(asked: Asked, gateway: client.Gateway) -> "Report":
    """The report of a run."""
    from pipeline.bench import session

    chosen = await planned(asked, gateway)
    return await session.run(gateway, client.headers_of(), chosen, Progress(chosen.bounds.requests))


async def planned(asked: Asked, gateway: client.Gateway) -> "Plan":
    """What is to be sent, when, and for how long. Raises `OperatorError` for a trace or a gateway that is none."""
    from pipeline.bench import arrivals, session
    from pipeline.bench.loops import Bounds
    from pipeline.bench.outcome import Slo

    rate = asked.rate or (SEED_RATE if asked.scenario and asked.concurrency is None else None)
    duration_s, requests = asked.duration, asked.requests
    times_s: Iterator[float] | None = None
    if asked.trace is not None:
        orders, times_s, loop = await _replayed(asked, gateway)
    else:
        orders, loop = _orders(asked, rate), ""
        requests = requests or (REQUESTS if duration_s is None else None)
    if rate is not None:
        times_s = arrivals.times(asked.arrivals, rate, f"arrivals/{asked.seed}")
        loop = f"open loop, {rate:g}/s {asked.arrivals}"
    if asked.concurrency is not None or times_s is None:
        times_s, loop = None, f"closed loop, {asked.concurrency or CONCURRENCY} at a time"
    in_flight = session.in_flight_max() if times_s is not None else asked.concurrency or CONCURRENCY
    slo = Slo(asked.slo_ttft_ms, asked.slo_itl_ms)
    return session.Plan(
        orders=orders,
        times_s=times_s,
        bounds=Bounds(requests=requests, duration_s=duration_s, warm_up_s=asked.warm_up, in_flight=in_flight),
        loop=loop,
        timeout_s=asked.timeout,
        slo=slo if slo != Slo() else None,
    )


def _orders(asked: Asked, rate: float | None) -> "Iterator[Order]":
    from pipeline.bench import orders
    from pipeline.planning import source, traffic

    if asked.scenario is None:
        creators = asked.creators or CREATORS
        return orders.plain(
            orders.Load(creators=creators, prompt_words=asked.prompt_tokens, max_tokens=asked.max_tokens, run=asked.run)
        )
    per_s = rate or SEED_RATE
    work = traffic.Workload(
        seed=asked.seed,
        per_s=per_s,
        creators=asked.creators or source.CREATORS,
        conversations=max(1, round(per_s * source.TURN_GAP_S)),
    )
    return orders.seed(work, asked.run)


async def _replayed(asked: Asked, gateway: client.Gateway) -> "tuple[Iterator[Order], Iterator[float], str]":
    from pipeline.bench import replay, template

    assert asked.trace is not None
    lines = replay.read(asked.trace)
    model = await template.ask(gateway, client.headers_of())
    if not model.exact:
        _told(f"The model takes {model.tokens_per_word:.2f} tokens for one of our words: lengths are only about right.")
    loop = f"open loop, {asked.trace.name} at {asked.speed:g} × its speed"
    return replay.orders(lines, model, asked.run), replay.times_s(lines, asked.speed), loop


class Progress:
    """Tells of a run on stderr: one line that is rewritten on a terminal, and one now and then elsewhere."""

    def __init__(self, requests: int | None) -> None:
        self._requests = requests
        self._terminal = sys.stderr.isatty()
        self._next_s = LINE_PERIOD_S

    def __call__(self, status: "Status") -> None:
        """Where the run is."""
        from pipeline.bench.page import progress

        line = progress(status, self._requests)
        if self._terminal:
            print(f"\r\033[K{line}", end="\n" if status.over else "", file=sys.stderr, flush=True)
        elif status.over or status.elapsed_s >= self._next_s:
            self._next_s = status.elapsed_s + LINE_PERIOD_S
            print(line, file=sys.stderr, flush=True)
