"""Whether to split at all: the same GPUs as two pools, and as replicas that do both, against the same objective.

Goodput is the highest rate at which 99 of 100 meet the objective. A split has to win by more than `BETTER`.
"""

import math
from collections.abc import Callable
from typing import Final

import msgspec

from pipeline.planning import queueing, sizing
from pipeline.planning.estimate import BUSY_MAX, Estimate, aggregated, split
from pipeline.planning.question import Question

BETTER: Final = 1.05
"""Goodput that a split has to gain to be worth its transport, its second pool and its integers."""

IDLE: Final = 0.5
"""Of the time: prefill that is less busy pays for waiting that must not be."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`disaggregate` or not, and why. Goodput in requests/s of all GPUs together."""

    disaggregate: bool
    sentence: str
    reasons: list[str]
    gpus: int
    split_goodput: float
    aggregated_goodput: float
    split: Estimate | None
    aggregated: Estimate


def smallest(question: Question) -> tuple[int, int] | None:
    """Prefill and decode engines, the fewest that meet the objective at the rate asked for; None: no number does."""
    per_s = question.load.requests_per_s
    decode = sizing.decode_for(question, per_s)
    if decode is None:
        return None
    asked = question.source.requests(per_s, question.memory, 1)
    low = max(1, math.floor(per_s * queueing.mean_work_s(asked, question.rates)))
    for prefill in range(max(1, low // 2), 4 * low + 8):
        if split(question, per_s, prefill, decode).meets:
            return prefill, decode
    return None


def best_split(question: Question, per_s: float, gpus: int) -> Estimate | None:
    """As few decode engines as meet the objective, and prefill engines with all other GPUs. None: there is no room for both."""
    decode = sizing.decode_for(question, per_s)
    if decode is None:
        return None
    prefill = (gpus - decode * question.gpus_per_decode) // question.gpus_per_prefill
    return split(question, per_s, prefill, decode) if prefill > 0 else None


def goodput(meets: Callable[[float], bool], around: float) -> float:
    """The highest rate that meets, to a hundredth; 0 where a thousandth of `around` does not."""
    low, high = 0.0, around
    while meets(high) and high < 1e3 * around:
        low, high = high, 2 * high
    while high - low > 0.01 * high and high > 1e-3 * around:
        middle = (low + high) / 2
        if meets(middle):
            low = middle
        else:
            high = middle
    return low


def verdict(question: Question, gpus: int) -> Verdict:
    """On so many GPUs, both ways."""
    per_s, count = question.load.requests_per_s, gpus // question.gpus_per_decode

    def split_meets(rate: float) -> bool:
        estimate = best_split(question, rate, gpus)
        return estimate is not None and estimate.meets

    both = aggregated(question, per_s, max(1, count))
    apart = best_split(question, per_s, gpus)
    apart_goodput = goodput(split_meets, per_s)
    both_goodput = goodput(lambda rate: aggregated(question, rate, max(1, count)).meets, per_s)
    wins = apart_goodput > BETTER * both_goodput
    return Verdict(
        disaggregate=wins,
        sentence=_sentence(question, gpus, apart_goodput, both_goodput),
        reasons=_reasons(question, apart, both, gpus),
        gpus=gpus,
        split_goodput=round(apart_goodput, 2),
        aggregated_goodput=round(both_goodput, 2),
        split=apart,
        aggregated=both,
    )


def _sentence(question: Question, gpus: int, apart: float, both: float) -> str:
    what = f"{gpus} GPUs as two pools meet the objective up to {apart:,.1f} requests/s, as replicas up to {both:,.1f}"
    asked = question.load.requests_per_s
    if apart > BETTER * both:
        return f"Disaggregate: {what}{'' if apart >= asked else f', both short of the {asked:,.0f} asked for'}."
    if not apart and not both:
        return f"Do not disaggregate: {gpus} GPUs meet the objective in neither way, at no rate."
    close = " a gain too small for a second pool and a transport" if apart > both else " no gain"
    return f"Do not disaggregate: {what}:{close}."


def _reasons(question: Question, apart: Estimate | None, both: Estimate, gpus: int) -> list[str]:
    """What speaks for either, in words with figures."""
    objective, reasons = question.objective, list[str]()
    pure_ms = question.rates.decode_step_s(both.decode_batch) * 1e3 if math.isfinite(both.decode_batch) else math.inf
    if both.itl_ms and both.busy > 0.01:
        reasons.append(
            f"Aggregated, {both.busy:.0%} of the time somebody's prompt is in the step, up to {both.chunk_tokens:,} tokens: "
            f"99 % of gaps take up to {both.itl_ms.p99:.1f} ms instead of {pure_ms:.1f}, of {objective.itl_ms:g} allowed."
        )
    elif both.itl_ms is None:
        reasons.append(
            f"Aggregated, {both.gpus} GPUs cannot keep up with this rate: each would be {both.busy:.0%} busy."
        )
    if apart is None:
        reasons.append(f"{gpus} GPUs are too few for two pools that meet the objective between tokens.")
        return reasons
    moved_s = question.load.prompt_tokens / question.rates.handover_tokens_per_s + question.rates.handover_s
    reasons.append(
        f"Split {apart.prefill} : {apart.decode}, prefill is {apart.busy:.0%} busy, and a decode engine runs "
        f"{apart.decode_batch:.0f} sequences; the hand-over takes {moved_s * 1e3:.1f} ms, "
        "which a plain reply has between its first token and its second, and any other before its first, as counted here."
    )
    if apart.busy < 0.5:
        reasons.append(
            "Prefill has little to do: most of the prompt is found in a cache, and its GPUs stand idle in a split."
        )
    if apart.busy >= BUSY_MAX:
        reasons.append(f"At the rate asked for, {apart.prefill} prefill engines cannot keep up.")
    return reasons
