"""What was measured, summed up: cells, their medians and spread over repetitions, differences and ratios within a repetition."""

import statistics
from collections.abc import Sequence
from typing import Final

import msgspec

from tests.benchmarks.peers.load import Shot
from tests.benchmarks.peers.stages import Stages

FOREIGN_CORES_MAX: Final = 0.15
"""Where others used more than this of the machine, a cell is marked."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One rate on one side in one repetition. Times in milliseconds, CPU in milliseconds a request.

    `goodput_per_s`: replies within the SLO, of those asked for in the window, for each second of it. `added` times are less the
    floor's of the same rate and repetition; `beside` times less what the engines had of each, and where nobody says that,
    the same as added. `stages_ms`: medians of what a gateway says, the warm-up included.
    """

    side: str
    rate: float
    repetition: int
    requests: int
    completed: int
    errors_by: dict[str, int]
    prompt_tokens: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    e2e_p50_ms: float | None
    goodput_per_s: float | None
    front_cpu_ms: float
    beside_engines_cpu_ms: float
    all_cpu_ms: float
    send_lag_p99_ms: float | None
    foreign_cores: float
    load_average: float
    stages_ms: dict[str, float]
    beside_ttft_p50_ms: float | None
    beside_ttft_p99_ms: float | None
    added_ttft_p50_ms: float | None = None
    added_ttft_p99_ms: float | None = None

    @property
    def noisy(self) -> bool:
        """Whether others used much of the machine meanwhile."""
        return self.foreign_cores > FOREIGN_CORES_MAX


class Spread(msgspec.Struct, frozen=True):
    """Over the repetitions."""

    median: float
    least: float
    most: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One side at one rate: its figures by name. `noisy`: how many of its cells shared the machine with others."""

    side: str
    rate: float
    repetitions: int
    noisy: int
    figures: dict[str, Spread]


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of `ours` over the same of `theirs`, at one rate."""

    rate: float
    ours: str
    theirs: str
    figure: str
    ratio: Spread


def cell(side: str, rate: float, repetition: int, shot: Shot, stages: Stages | None, seconds: float) -> Cell:
    """Of one shot, whose window had so many seconds."""
    report = shot.report
    beside = shot.cpu_ms["front"] + shot.cpu_ms["beside"]
    return Cell(
        side=side,
        rate=rate,
        repetition=repetition,
        requests=report.requests,
        completed=report.completed,
        errors_by=report.errors_by,
        prompt_tokens=round(report.prompt_tokens / max(1, report.completed), 1),
        ttft_p50_ms=report.ttft.p50_ms,
        ttft_p99_ms=report.ttft.p99_ms,
        itl_p50_ms=report.itl.p50_ms,
        itl_p99_ms=report.itl.p99_ms,
        e2e_p50_ms=report.e2e.p50_ms,
        goodput_per_s=None if report.goodput is None else round(report.goodput.met / seconds, 3),
        front_cpu_ms=shot.cpu_ms["front"],
        beside_engines_cpu_ms=round(beside, 3),
        all_cpu_ms=round(beside + shot.cpu_ms["engine"], 3),
        send_lag_p99_ms=report.send_lag.p99_ms,
        foreign_cores=shot.foreign_cores,
        load_average=shot.load_average,
        stages_ms=stages.medians_ms if stages else {},
        beside_ttft_p50_ms=stages.beside_engines_p50_ms if stages else None,
        beside_ttft_p99_ms=stages.beside_engines_p99_ms if stages else None,
    )


def over(floor: str, cells: Sequence[Cell]) -> list[Cell]:
    """The same cells, with what each adds to the first tokens of `floor` where that was measured beside it."""
    floors = {(one.rate, one.repetition): one for one in cells if one.side == floor}
    return [_over(beneath, one) if (beneath := floors.get((one.rate, one.repetition))) else one for one in cells]


def _over(floor: Cell, one: Cell) -> Cell:
    p50_ms, p99_ms = _less(one.ttft_p50_ms, floor.ttft_p50_ms), _less(one.ttft_p99_ms, floor.ttft_p99_ms)
    return msgspec.structs.replace(
        one,
        added_ttft_p50_ms=p50_ms,
        added_ttft_p99_ms=p99_ms,
        beside_ttft_p50_ms=p50_ms if one.beside_ttft_p50_ms is None else one.beside_ttft_p50_ms,
        beside_ttft_p99_ms=p99_ms if one.beside_ttft_p99_ms is None else one.beside_ttft_p99_ms,
    )


def _less(upper: float | None, lower: float | None) -> float | None:
    return None if upper is None or lower is None else round(upper - lower, 3)


def spread(values: Sequence[float]) -> Spread:
    """Of at least one."""
    return Spread(round(statistics.median(values), 3), round(min(values), 3), round(max(values), 3))


def rows(cells: Sequence[Cell], figures: Sequence[str]) -> list[Row]:
    """By rate, sides in their order."""
    return [
        _row(side, rate, [one for one in cells if (one.side, one.rate) == (side, rate)], figures)
        for rate in _rates(cells)
        for side in _sides(cells, rate)
    ]


def ratios(cells: Sequence[Cell], ours: Sequence[str], figures: Sequence[str]) -> list[Ratio]:
    """Of each of `ours` to each other side, repetition by repetition, where theirs is more than nothing."""
    return [
        Ratio(rate=rate, ours=our, theirs=their, figure=figure, ratio=spread(values))
        for rate in _rates(cells)
        for our in _sides(cells, rate)
        for their in _sides(cells, rate)
        for figure in figures
        if our in ours and their not in ours and (values := _ratios(cells, rate, (our, their), figure))
    ]


def _rates(cells: Sequence[Cell]) -> list[float]:
    return sorted({one.rate for one in cells})


def _sides(cells: Sequence[Cell], rate: float) -> list[str]:
    return sorted({one.side for one in cells if one.rate == rate}, key=[one.side for one in cells].index)


def _row(side: str, rate: float, cells: Sequence[Cell], figures: Sequence[str]) -> Row:
    found = {figure: list(_values(cells, figure).values()) for figure in figures}
    return Row(
        side=side,
        rate=rate,
        repetitions=len(cells),
        noisy=sum(one.noisy for one in cells),
        figures={figure: spread(values) for figure, values in found.items() if values},
    )


def _ratios(cells: Sequence[Cell], rate: float, sides: tuple[str, str], figure: str) -> list[float]:
    ours, theirs = (_values([one for one in cells if (one.side, one.rate) == (side, rate)], figure) for side in sides)
    return [ours[number] / theirs[number] for number in ours if theirs.get(number, 0.0) > 0.0]


def _values(cells: Sequence[Cell], figure: str) -> dict[int, float]:
    """By repetition."""
    return {one.repetition: value for one in cells if (value := getattr(one, figure)) is not None}
