"""All outcomes of a run, and what to say of them. Memory does not grow with the number of requests."""

from collections import Counter
from typing import Final

import msgspec

from pipeline.bench.histogram import Histogram, Times
from pipeline.bench.outcome import Outcome, Slo

LEFT: Final = "left"
"""The code of what was still running when the bench was told to leave."""

MESSAGES_MAX: Final = 64
"""Different messages that are kept; numbers in them may make each a new one."""


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Replies that were whole and met the SLO: how many, their share of all that were sent, and how many a second."""

    slo_ttft_ms: float | None
    slo_itl_ms: float | None
    met: int
    ratio: float
    per_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, the warm-up left out. Times are of whole replies, in milliseconds; null where there are none.

    `requests` = `completed` + `refused` (an error that names a time to try again) + `errors` + `left` (running at the end).
    Prompt tokens by source: `hbm_tokens` + `lmcache_tokens` = `cached_tokens`, the rest were computed. `send_lag`: how late the
    generator itself was. `cpu_ms_per_request`: what it took of this machine, warm-up included.
    """

    requests: int
    completed: int
    errors: int
    refused: int
    left: int
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    e2e_p50_ms: float | None
    e2e_p99_ms: float | None
    prompt_tokens: int
    cached_tokens: int
    hbm_tokens: int
    lmcache_tokens: int
    decode_cached_tokens: int
    output_tokens: int
    duration_s: float
    per_s: float
    output_tokens_per_s: float
    ttft: Times
    itl: Times
    tpot: Times
    e2e: Times
    refusal: Times
    send_lag: Times
    goodput: Goodput | None
    errors_by: dict[str, int]
    error_messages: dict[str, int]
    loop: str
    interrupted: bool
    cpu_ms_per_request: float


class Tally:
    """Counts outcomes as they come. `now` figures are for progress."""

    def __init__(self, slo: Slo | None = None) -> None:
        self._slo = slo
        self.running = 0
        self.ended = 0
        self.completed = self.refused = self.errors = self.left = self._good = 0
        self.ttft, self.itl, self.tpot, self.e2e = (Histogram() for _ in range(4))
        self._refusal, self._lag = Histogram(), Histogram()
        self._from_s: float | None = None
        self._until_s = 0.0
        self._prompt = self._cached = self._hbm = self._decode_cached = self._output = 0
        self._by: Counter[str] = Counter()
        self._messages: Counter[str] = Counter()

    @property
    def measured(self) -> int:
        """Requests that have ended and are not of the warm-up."""
        return self.completed + self.refused + self.errors + self.left

    def add(self, outcome: Outcome) -> None:
        """A request has ended."""
        self.ended += 1
        if not outcome.measured:
            return
        self._from_s = outcome.from_s if self._from_s is None else min(self._from_s, outcome.from_s)
        self._until_s = max(self._until_s, outcome.ended_s)
        self._lag.add(outcome.sent_s - outcome.due_s)
        if outcome.code:
            self._not_whole(outcome)
        else:
            self._whole(outcome)

    def _not_whole(self, outcome: Outcome) -> None:
        if outcome.code == LEFT:
            self.left += 1
            return
        if outcome.refused:
            self.refused += 1
            self._refusal.add(outcome.ended_s - outcome.from_s)
        else:
            self.errors += 1
        self._by[f"{outcome.status} {outcome.code}" if outcome.status not in (0, 200) else outcome.code] += 1
        if outcome.message in self._messages or len(self._messages) < MESSAGES_MAX:
            self._messages[outcome.message] += 1

    def _whole(self, outcome: Outcome) -> None:
        self.completed += 1
        self._good += self._slo is not None and self._slo.met(outcome)
        if outcome.first_s is not None:
            self.ttft.add(outcome.first_s - outcome.from_s)
        if (tpot_s := outcome.tpot_s) is not None:
            self.tpot.add(tpot_s)
        self.e2e.add(outcome.ended_s - outcome.from_s)
        for gap_s in outcome.gaps_s:
            self.itl.add(gap_s)
        usage = outcome.usage
        self._prompt += usage.prompt_tokens
        self._cached += usage.cached_tokens
        self._output += usage.completion_tokens
        if usage.headrace is not None:
            self._hbm += usage.headrace.hbm_tokens
            self._decode_cached += usage.headrace.decode_cached_tokens

    def report(self, loop: str, *, interrupted: bool = False, cpu_s: float = 0.0) -> Report:
        """What has been measured so far. `loop` says how it was sent; `cpu_s` is what all of it has cost us."""
        duration_s = self._until_s - self._from_s if self._from_s is not None else 0.0
        ttft, e2e = self.ttft.times(), self.e2e.times()
        return Report(
            requests=self.measured,
            completed=self.completed,
            errors=self.errors,
            refused=self.refused,
            left=self.left,
            ttft_p50_ms=ttft.p50_ms,
            ttft_p99_ms=ttft.p99_ms,
            e2e_p50_ms=e2e.p50_ms,
            e2e_p99_ms=e2e.p99_ms,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            hbm_tokens=self._hbm,
            lmcache_tokens=self._cached - self._hbm,
            decode_cached_tokens=self._decode_cached,
            output_tokens=self._output,
            duration_s=round(duration_s, 3),
            per_s=_per(self.completed, duration_s),
            output_tokens_per_s=_per(self._output, duration_s),
            ttft=ttft,
            itl=self.itl.times(),
            tpot=self.tpot.times(),
            e2e=e2e,
            refusal=self._refusal.times(),
            send_lag=self._lag.times(),
            goodput=self._goodput(duration_s),
            errors_by=dict(self._by.most_common()),
            error_messages=dict(self._messages.most_common()),
            loop=loop,
            interrupted=interrupted,
            cpu_ms_per_request=_per(cpu_s * 1000, self.ended),
        )

    def _goodput(self, duration_s: float) -> Goodput | None:
        if self._slo is None:
            return None
        return Goodput(
            slo_ttft_ms=self._slo.ttft_ms,
            slo_itl_ms=self._slo.itl_ms,
            met=self._good,
            ratio=_per(self._good, self.measured),
            per_s=_per(self._good, duration_s),
        )


def _per(part: float, whole: float) -> float:
    return round(part / whole, 3) if whole else 0.0
