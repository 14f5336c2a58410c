"""One request as its client saw it."""

import math

import msgspec

from pipeline.cli.client import Usage


class Outcome(msgspec.Struct, kw_only=True):
    """Times in seconds of `perf_counter`. `code` says why the reply is not whole; empty, it is.

    `due_s` is when it should have been sent, and all latencies count from then: a generator, or a server, that keeps requests
    waiting outside cannot hide it. `gaps_s` lie between pieces of text. `measured` is false in the warm-up.
    """

    due_s: float
    measured: bool = True
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    ended_s: float = 0.0
    gaps_s: list[float] = []
    status: int = 0
    code: str = ""
    message: str = ""
    retry_after_s: float | None = None
    usage: Usage = Usage()

    @property
    def from_s(self) -> float:
        """Where latencies begin. A timer may fire half a millisecond early; that is no merit."""
        return min(self.due_s, self.sent_s)

    @property
    def refused(self) -> bool:
        """Turned away for now, with a time after which to try again."""
        return self.retry_after_s is not None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        tokens = self.usage.completion_tokens
        return (self.last_s - self.first_s) / (tokens - 1) if self.first_s is not None and tokens > 1 else None

    def text_came(self, at_s: float) -> None:
        """A piece of the reply."""
        if self.first_s is None:
            self.first_s = at_s
        else:
            self.gaps_s.append(at_s - self.last_s)
        self.last_s = at_s

    def fail(self, code: str, message: str) -> None:
        """It will not be whole. The first reason counts."""
        if not self.code:
            self.code, self.message = code, message


class Slo(msgspec.Struct, frozen=True):
    """What a client is content with, in milliseconds: its first token, and 99 % of its own gaps. None: any."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def met(self, outcome: Outcome) -> bool:
        """Whether this whole reply was good."""
        if outcome.first_s is None:
            return self.ttft_ms is None
        if self.ttft_ms is not None and (outcome.first_s - outcome.from_s) * 1000 > self.ttft_ms:
            return False
        return self.itl_ms is None or _p99_s(outcome.gaps_s) * 1000 <= self.itl_ms


def _p99_s(gaps_s: list[float]) -> float:
    return sorted(gaps_s)[math.ceil(len(gaps_s) * 0.99) - 1] if gaps_s else 0.0
