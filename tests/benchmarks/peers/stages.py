"""What Headrace's gateway says of its requests: where the time of each went."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from tests.benchmarks import overhead
from tests.percentiles import percentile_ms


class Line(msgspec.Struct, frozen=True):
    """Of a gateway's log. Stages in milliseconds; `ttft_ms` from accepting a request until its first token, `first_of` whom."""

    event: str = ""
    outcome: str = ""
    ttft_ms: float | None = None
    first_of: str = "prefill"
    stages_ms: dict[str, float] = {}


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of each stage, and first tokens without what their engines had of them."""

    medians_ms: dict[str, float]
    beside_engines_p50_ms: float
    beside_engines_p99_ms: float


def whole(log: Path | None) -> list[Line]:
    """The requests in this log that were answered whole; none without a log."""
    lines = log.read_bytes().splitlines() if log else []
    found = [msgspec.json.decode(line, type=Line) for line in lines if line.startswith(b"{")]
    return [line for line in found if line.event == "request" and line.outcome == "whole" and line.ttft_ms is not None]


def summed_up(lines: Sequence[Line]) -> Stages | None:
    """None of none."""
    if not lines:
        return None
    names = sorted({name for line in lines for name in line.stages_ms})
    beside_s = overhead.added_s([msgspec.to_builtins(line) for line in lines])
    return Stages(
        medians_ms={name: round(median(line.stages_ms.get(name, 0.0) for line in lines), 2) for name in names},
        beside_engines_p50_ms=percentile_ms(beside_s, 50) or 0.0,
        beside_engines_p99_ms=percentile_ms(beside_s, 99) or 0.0,
    )
