"""The report of a run, and what in it is a failure.

    lost               a receiver that lived got neither the whole reply nor an error
    cut                its gateway was killed: its client knows, and nothing may be left of it
    duplicate_tokens   said to a client beyond what its reply holds; missing_tokens: of a whole reply, not said

What was said of a reply that did not become whole must be its beginning: nobody may be told what is not true.
"""

import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Final

import msgspec

from tests.chaos.load import Outcome
from tests.chaos.rest import Rest
from tests.percentiles import percentile_ms

_TOKEN: Final = re.compile(r" \S+?(?=[,.!?🌊🎣🐟🌱🔥🌙🚀💧 ]|$)|\S")
"""A piece of the simulated reply: a word, or a mark that may follow one."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome. `errors` are ends that said why; latencies are of completed requests, in seconds."""

    requests: int
    completed: int
    errors: int
    cut: int
    lost: int
    duplicate_tokens: int
    missing_tokens: int
    leaked_blocks: int
    leaked_slots: int
    left_requests: int
    kills: int
    latency_p50_s: float | None
    latency_p99_s: float | None
    latency_max_s: float | None
    error_codes: dict[str, int]
    kills_by_kind: dict[str, int]
    unasked_ends: list[str]
    accusations: int
    duration_s: float

    @property
    def failed(self) -> bool:
        """Whether something is lost, said twice, left out or left behind."""
        return bool(
            self.lost
            or self.duplicate_tokens
            or self.missing_tokens
            or self.leaked_blocks
            or self.leaked_slots
            or self.left_requests
            or self.unasked_ends
        )


def was_cut(outcome: Outcome, gateway_deaths: Sequence[tuple[float, float]]) -> bool:
    """Whether it broke off because its gateway was killed."""
    within = any(outcome.began_s <= gone_s and hit_s <= outcome.ended_s for hit_s, gone_s in gateway_deaths)
    return outcome.ending == "broken" and outcome.code != "silence" and within


def tokens_amiss(outcome: Outcome) -> tuple[int, int]:
    """(tokens too many, tokens missing) in what a client was told."""
    expected, text = outcome.order.expected, outcome.text
    if text == expected or (outcome.ending != "whole" and expected.startswith(text)):
        return 0, 0
    want, got = _TOKEN.findall(expected), _TOKEN.findall(text)
    extra = missing = 0
    for change, want_from, want_to, got_from, got_to in SequenceMatcher(None, want, got, autojunk=False).get_opcodes():
        if change != "equal":
            missing += want_to - want_from
            extra += got_to - got_from
    return max(extra, 0), missing if outcome.ending == "whole" else 0


def judge(
    outcomes: Sequence[Outcome],
    *,
    rest: Rest,
    kills: Sequence[str],
    gateway_deaths: Sequence[tuple[float, float]],
    unasked: Sequence[str],
    duration_s: float,
) -> Report:
    """All in one."""
    whole = [outcome for outcome in outcomes if outcome.ending == "whole"]
    errors = [outcome for outcome in outcomes if outcome.ending == "error"]
    cut = sum(was_cut(outcome, gateway_deaths) for outcome in outcomes)
    amiss = [tokens_amiss(outcome) for outcome in outcomes]
    latencies_s = [outcome.latency_s for outcome in whole]
    return Report(
        requests=len(outcomes),
        completed=len(whole),
        errors=len(errors),
        cut=cut,
        lost=len(outcomes) - len(whole) - len(errors) - cut,
        duplicate_tokens=sum(extra for extra, _ in amiss),
        missing_tokens=sum(missing for _, missing in amiss),
        leaked_blocks=rest.blocks,
        leaked_slots=rest.slots,
        left_requests=rest.requests,
        kills=len(kills),
        latency_p50_s=percentile_s(latencies_s, 50),
        latency_p99_s=percentile_s(latencies_s, 99),
        latency_max_s=percentile_s(latencies_s, 100),
        error_codes=dict(Counter(outcome.code for outcome in errors)),
        kills_by_kind=dict(Counter(kills)),
        unasked_ends=list(unasked),
        accusations=rest.accusations,
        duration_s=round(duration_s, 2),
    )


def percentile_s(times_s: Sequence[float], percent: int) -> float | None:
    """The nearest-rank percentile, in seconds. None of nothing."""
    found_ms = percentile_ms(times_s, percent)
    return None if found_ms is None else round(found_ms / 1000, 4)


def table(report: Report) -> str:
    """The report for people."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.kills_by_kind.items())) or "none"
    codes = ", ".join(f"{count} {code}" for code, count in sorted(report.error_codes.items()))
    lines = [
        f"requests   {report.requests}: {report.completed} whole, {report.errors} errors, {report.cut} cut, {report.lost} lost",
        f"tokens     {report.duplicate_tokens} duplicate, {report.missing_tokens} missing",
        f"left       {report.leaked_blocks} blocks, {report.leaked_slots} slots, {report.left_requests} requests",
        f"troubles   {report.kills}: {kinds}",
        f"latency    p50 {report.latency_p50_s} s   p99 {report.latency_p99_s} s   max {report.latency_max_s} s",
        f"judgement  {report.accusations} accusations by gateways; {report.duration_s} s in all",
    ]
    lines += [f"errors     {codes}"] if codes else []
    lines += [f"ended of its own accord: {end}" for end in report.unasked_ends]
    return "\n".join(lines)
