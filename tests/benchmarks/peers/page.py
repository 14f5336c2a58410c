"""The results of a run: as JSON, and as a page for people."""

from collections.abc import Sequence
from typing import Final

import msgspec

from pipeline.cli.tables import table
from tests.benchmarks.peers.figures import Cell, Ratio, Row, Spread

NAMES: Final = {
    "goodput_per_s": "goodput/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "added_ttft_p50_ms": "added TTFT p50 ms",
    "added_ttft_p99_ms": "added TTFT p99 ms",
    "beside_ttft_p50_ms": "beside engines p50 ms",
    "beside_ttft_p99_ms": "p99 ms",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "ITL p99 ms",
    "front_cpu_ms": "CPU ms/request: front",
    "beside_engines_cpu_ms": "beside engines",
    "all_cpu_ms": "all",
}
"""Of the figures that are printed."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured. `load_average` is of the minute before."""

    processor: str
    cores: int
    memory_gib: float
    system: str
    python: str
    load_average: float


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints and the file holds. `failures`: sides that did not start, or did not answer."""

    engines: str
    command: str
    date: str
    commit: str
    machine: Machine
    versions: dict[str, str]
    repetitions: int
    seconds: float
    failures: list[str]
    rows: list[Row]
    ratios: list[Ratio]
    cells: list[Cell]


def page(results: Results) -> str:
    """For people. A star marks figures of a machine that others used as well."""
    machine = results.machine
    head = (
        f"{results.engines} engines, {results.date}, {results.repetitions} repetitions of {results.seconds:g} s; "
        f"{machine.cores} × {machine.processor}, load average {machine.load_average:g} before"
    )
    parts = [head, *(_rate(results, rate) for rate in sorted({row.rate for row in results.rows}))]
    if any(row.noisy for row in results.rows):
        parts.append("* others used the machine in some of its repetitions")
    return "\n\n".join([*parts, *results.failures])


def _rate(results: Results, rate: float) -> str:
    rows = [row for row in results.rows if row.rate == rate]
    figures = [figure for figure in NAMES if any(figure in row.figures for row in rows)]
    head = (f"{rate:g}/s", *(NAMES[figure] for figure in figures))
    lines = [[row.side + "*" * bool(row.noisy), *_spreads(row.figures, figures)] for row in rows]
    ours = [ratio for ratio in results.ratios if ratio.rate == rate]
    pairs = dict.fromkeys((ratio.ours, ratio.theirs) for ratio in ours)
    for pair in pairs:
        found = {ratio.figure: ratio.ratio for ratio in ours if (ratio.ours, ratio.theirs) == pair}
        lines.append([" ÷ ".join(pair), *_spreads(found, figures, "×")])
    return table(head, lines)


def _spreads(found: dict[str, Spread], figures: Sequence[str], unit: str = "") -> list[str]:
    return [_text(found[figure], unit) if figure in found else "" for figure in figures]


def _text(spread: Spread, unit: str) -> str:
    """The median, and where they differ the least and the most."""
    median, least, most = (f"{value:.{_digits(value)}f}" for value in (spread.median, spread.least, spread.most))
    return f"{median}{unit}" if least == most else f"{median}{unit} ({least}–{most})"


def _digits(value: float) -> int:
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
