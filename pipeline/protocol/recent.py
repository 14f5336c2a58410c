"""How requests have fared of late at one gateway: what `headrace top` asks every gateway for, on `control.recent`.

An answer is small whatever the load: spreads are counts in buckets that grow by a tenth, so that those of several gateways add up
to the spread over all of them; of requests themselves, only the slowest and the oldest are told.
"""

import heapq
import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from pipeline.protocol.records import Record

LOOKED_AT_MAX: Final = 256
"""Ended requests that one answer is made from, the newest: about a millisecond of the gateway's loop."""

NAMED_MAX: Final = 32
"""Requests that an answer names, of either kind, at 0.7 KB."""

SINCE_S_MAX: Final = 3600.0

_FINEST_S: Final = 1e-4
_GROWTH: Final = 1.1
_BUCKETS: Final = 160
"""From 0.1 ms to 6 minutes; what is longer counts as the last one."""

_EDGES_S: Final = tuple(_FINEST_S * _GROWTH**bucket for bucket in range(_BUCKETS))

Counts = dict[int, int]
"""How many by bucket."""


class WantRecent(msgspec.Struct, frozen=True, kw_only=True, tag="want-recent"):
    """How have requests fared in the last `since_s` seconds? Name so many of the slowest, and of those longest under way."""

    since_s: float = 60.0
    named: int = 8


class Recent(msgspec.Struct, frozen=True, kw_only=True, tag="recent"):
    """One gateway's answer: `outcomes` of what has ended in the last `over_s` seconds, and spreads of what ended whole.

    `over_s` is less than was asked for where the gateway is younger, or more ended than are looked at. A spread counts
    durations by bucket: `quantile_s`.
    """

    process: str
    over_s: float
    outcomes: dict[str, int]
    took: Counts
    ttft: Counts
    stages: dict[str, Counts]
    slowest: list[Record]
    under_way: int
    oldest: list[Record]


def recent(
    process: str,
    asked: WantRecent,
    ended: Sequence[Record],
    under_way: int,
    oldest: Iterable[Record],
    now_unix_s: float,
    lived_s: float = math.inf,
    most: int = LOOKED_AT_MAX,
) -> Recent:
    """The answer of a gateway that has lived for `lived_s`, from records in the order in which they ended, `most` at a time.

    `oldest` of what is under way come first.
    """
    named = max(0, min(asked.named, NAMED_MAX))
    since_s = max(0.0, min(asked.since_s, SINCE_S_MAX)) if math.isfinite(asked.since_s) else SINCE_S_MAX
    since_s = min(since_s, max(0.0, lived_s))
    looked_at = [one for one in ended[-most:] if now_unix_s - _ended_s(one) <= since_s]
    if len(looked_at) == most:  # what ended before is not counted, nor is its time
        since_s = max(0.0, now_unix_s - _ended_s(looked_at[0]))
    outcomes: dict[str, int] = {}
    took: list[float] = []
    ttft: list[float] = []
    stages: dict[str, list[float]] = {}
    for one in looked_at:
        outcomes[one.outcome] = outcomes.get(one.outcome, 0) + 1
        if one.outcome == "whole":
            took.append(one.took_s)
            if isinstance(first_ms := one.facts.get("ttft_ms"), float | int):
                ttft.append(first_ms / 1e3)
            for stage, took_s in one.stages.items():
                if took_s > 0:
                    stages.setdefault(stage, []).append(took_s)
    return Recent(
        process=process,
        over_s=since_s,
        outcomes=outcomes,
        took=_counted(took),
        ttft=_counted(ttft),
        stages={stage: _counted(times) for stage, times in stages.items()},
        slowest=heapq.nlargest(named, looked_at, key=lambda one: one.took_s),
        under_way=under_way,
        oldest=list(itertools.islice(oldest, named)),
    )


def together(spreads: Iterable[Mapping[int, int]]) -> Counts:
    """One spread of them all."""
    counts: Counts = {}
    for spread in spreads:
        for bucket, count in spread.items():
            counts[bucket] = counts.get(bucket, 0) + count
    return counts


def quantile_s(counts: Mapping[int, int], share: float) -> float | None:
    """The duration that `share` (0…1) of them do not exceed, within 5 %. None where there are none."""
    buckets = sorted(counts)
    reached = list(itertools.accumulate(counts[bucket] for bucket in buckets))
    if not reached:
        return None
    return _middle_s(buckets[bisect_left(reached, max(1, math.ceil(share * reached[-1])))])


def mean_s(counts: Mapping[int, int]) -> float | None:
    """Their mean, as exactly. None where there are none."""
    total = sum(counts.values())
    return sum(count * _middle_s(bucket) for bucket, count in counts.items()) / total if total else None


def _middle_s(bucket: int) -> float:
    return float(_FINEST_S * _GROWTH ** (bucket - 0.5))


def _counted(durations_s: Iterable[float]) -> Counts:
    """How many fall into each bucket. This runs on a gateway's loop: hence no logarithm for each."""
    return dict(Counter([bisect_left(_EDGES_S, duration_s) for duration_s in durations_s]))


def _ended_s(record: Record) -> float:
    return record.began_unix_s + record.took_s


want_recent_decoder: Final = msgspec.msgpack.Decoder(WantRecent)
recent_decoder: Final = msgspec.msgpack.Decoder(Recent)
