"""From the times of a few requests' first two tokens to the rates of the engines behind them.

All that is seen is HTTP: prefill sends the first token, and decode the second. So each rate is a difference: two lengths, or two
places where the same prefix was found.

    many at a time, long − short             what computing a token keeps prefill busy for, whatever the client sees beside
    second token, LMCache − own cache        loading it, into prefill and again into decode
    second token, long − short               computing, storing and loading it
    what is then left of the second token    handover, a step of decode, and everything on the way
    what is then left of the first           everything on the way

What is in prefill's own cache is in that of decode, too, as long as there is only one of each: then it is not loaded.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Final, Literal, get_args

import msgspec

from pipeline.errors import OperatorError
from pipeline.planning.rates import Measured, Rates

Kind = Literal["cold", "hbm", "lmcache"]

LOADED_MIN: Final = 0.5
"""Of a prompt: a sample that found less where it should have is no sample of that place."""

FREE_TOKENS_PER_S: Final = 1e9
"""A cost per token that is lost in the noise counts as this much: none."""

LENGTH_STEP: Final = 1.3
"""Prompts that are longer by more than this are of another length: words are not quite tokens."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request with nothing beside it: `computed` of its prompt tokens, `hbm` found in prefill's own cache; `gap_s` is from
    its first token to its second."""

    prompt: int
    cached: int
    hbm: int
    ttft_s: float
    gap_s: float

    @property
    def second_s(self) -> float:
        """Until decode's first token."""
        return self.ttft_s + self.gap_s

    @property
    def computed(self) -> int:
        """Prompt tokens that prefill computed."""
        return self.prompt - self.cached

    @property
    def kind(self) -> Kind:
        """Where most of the prompt was found."""
        if self.cached < LOADED_MIN * self.prompt:
            return "cold"
        return "hbm" if self.hbm >= LOADED_MIN * self.prompt else "lmcache"


class Saturated(msgspec.Struct, frozen=True, kw_only=True):
    """Cold prompts, as many at a time as prefill has slots."""

    requests: int
    computed: int
    duration_s: float


def step_s(streams: Sequence[Sequence[float]]) -> float:
    """One decode step, from the times at which each of several streams got its tokens, while all of them ran."""
    begin, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    gaps = [sum(begin <= at <= end for at in times) - 1 for times in streams]
    steps = sum(gaps) / len(streams)
    if steps < 1:
        raise OperatorError("The streams did not overlap.", "Measure with more reply tokens, or on a machine at rest.")
    return (end - begin) / steps


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: value at 0 and slope. Neither is negative: a cost that falls with the load is noise."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread) if spread else 0.0
    return max(0.0, mean_y - slope * mean_x), slope


def rates(samples: Sequence[Sample], saturated: Sequence[Saturated], steps_s: dict[int, float], model: str) -> Measured:
    """All of it. Raises `OperatorError` where cold prompts of two lengths are missing."""
    cold, hbm, lmcache = (_by_length(samples, kind) for kind in get_args(Kind))
    if len(cold) < 2:
        raise OperatorError(
            "Hardly anything was computed anew: a calibration needs cold prompts of two lengths.",
            "Run it again; nothing else may send the same prompts.",
        )
    overhead_s, busy = line([(one.computed / one.requests, one.duration_s / one.requests) for one in saturated])
    compute = max(busy, 1.0 / FREE_TOKENS_PER_S)
    load, notes = _load(hbm, lmcache)
    store = max(0.0, _slope(cold) - compute - load)
    step_s, per_sequence_s = line([(float(batch), took_s) for batch, took_s in steps_s.items()])
    moved = compute + store + load
    behind_s = median(one.second_s - one.computed * moved for ones in cold for one in ones) - overhead_s
    way_s = median(one.ttft_s - one.computed * (compute + store) for ones in cold for one in ones) - overhead_s
    return Measured(
        model=model,
        rates=Rates(
            origin="measured",
            prefill_tokens_per_s=1.0 / compute,
            prefill_overhead_s=overhead_s,
            load_tokens_per_s=1.0 / max(load, 1.0 / FREE_TOKENS_PER_S),
            store_tokens_per_s=1.0 / max(store, 1.0 / FREE_TOKENS_PER_S),
            way_s=max(0.0, way_s),
            handover_s=max(0.0, behind_s - step_s - per_sequence_s),
            handover_tokens_per_s=1.0 / max(load, 1.0 / FREE_TOKENS_PER_S),
            step_s=step_s,
            step_per_sequence_s=per_sequence_s,
        ),
        notes=notes,
        step_ms_by_batch={str(batch): round(took_s * 1e3, 3) for batch, took_s in steps_s.items()},
        ttft_ms={
            f"{kind} {median(one.prompt for one in ones):.0f}": round(median(one.ttft_s for one in ones) * 1e3, 1)
            for kind in get_args(Kind)
            for ones in _by_length(samples, kind)
        },
    )


def _by_length(samples: Sequence[Sample], kind: Kind) -> list[list[Sample]]:
    """Those of one kind, in groups of about one length each, the shortest first."""
    ordered = sorted((one for one in samples if one.kind == kind), key=lambda one: one.prompt)
    groups: list[list[Sample]] = [[one] for one in ordered[:1]]
    for before, one in pairwise(ordered):
        if one.prompt > LENGTH_STEP * before.prompt:
            groups.append([])
        groups[-1].append(one)
    return groups


def _second_s(samples: Sequence[Sample]) -> float:
    return median(one.second_s for one in samples)


def _slope(groups: Sequence[Sequence[Sample]]) -> float:
    """Seconds per computed token, from the shortest prompts to the longest."""
    short, long = groups[0], groups[-1]
    tokens = median(one.computed for one in long) - median(one.computed for one in short)
    return max(0.0, (_second_s(long) - _second_s(short)) / tokens)


def _load(hbm: Sequence[Sequence[Sample]], lmcache: Sequence[Sequence[Sample]]) -> tuple[float, list[str]]:
    """Seconds per token loaded from LMCache: what left prefill's own cache has left decode's, too, so both load it."""
    if not (hbm and lmcache):
        return 0.0, [
            "Loads from LMCache were not measured, since nothing left prefill's own cache: they count as free."
        ]
    loaded = median(one.cached - one.hbm for one in lmcache[-1])
    return max(0.0, (_second_s(lmcache[-1]) - _second_s(hbm[-1])) / loaded / 2), []
