"""What a client says of its run beside what Headrace counted meanwhile.

Counts are of the same events, so they should be equal; up to `TOLERANCE` is let pass, because a client that ends its run by
leaving (genai-bench does) takes a few tokens of decode with it. Times are the means of two clocks: the client's begins before it
connects and ends when it has parsed the first text; the gateway's histogram begins when the request's head is there and ends
when the first text arrives from the worker. What lies between is loopback and the client itself: 7 to 15 ms here, 34 ms of
genai-bench's on busy cores. The stack's prefill is slow enough (`stand.py`) that this is less than the tolerance. Where a proxy
stands between them, its time is in the client's as well: then times are told and not judged.
"""

from typing import Any, Final

import msgspec

from tests.clients.scrape import Samples

TOLERANCE: Final = 0.02


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A client's own report, of its whole replies. `prompt_tokens`: where it takes the server's. `own` is what else it tells."""

    requests: int
    output_tokens: int
    prompt_tokens: int | None = None
    ttft_ms: float
    e2e_ms: float
    own: dict[str, Any] = {}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, from both. `metric` is where Headrace's comes from; one that is not judged is only told."""

    what: str
    metric: str
    client: float
    headrace: float
    judged: bool = True

    @property
    def off(self) -> float:
        """The difference, as a share of what Headrace says. Nothing on either side is no agreement."""
        return abs(self.client - self.headrace) / self.headrace if self.headrace else float("inf")

    @property
    def ok(self) -> bool:
        """Whether they agree, or need not."""
        return not self.judged or self.off <= TOLERANCE


def rows(said: Said, before: Samples, after: Samples, *, workers: bool = True, times: bool = True) -> list[Row]:
    """All figures that both have. `workers`: their metrics are among the samples. `times`: the means are judged."""

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    def mean_ms(name: str) -> float:
        count = grown(f"{name}_count")
        return 1000 * grown(f"{name}_sum") / count if count else 0.0

    def row(what: str, client: float, headrace: float, metric: str, *, judged: bool = True) -> Row:
        return Row(what=what, metric=metric, client=round(client, 2), headrace=round(headrace, 2), judged=judged)

    requests, tokens = said.requests, said.output_tokens
    found = [
        row("requests", requests, grown("headrace_requests_total", outcome="whole"), "headrace_requests_total"),
        row("output tokens", tokens, grown("headrace_output_tokens_total"), "headrace_output_tokens_total"),
    ]
    if said.prompt_tokens is not None:
        prompt = grown("headrace_prompt_tokens_total")
        found.append(row("prompt tokens", said.prompt_tokens, prompt, "headrace_prompt_tokens_total"))
    if workers:
        prefills = grown("headrace_prefills_total", outcome="handed_off")
        found += [
            row("requests, at prefill", requests, prefills, "headrace_prefills_total"),
            row(
                "requests, at decode",
                requests,
                grown("headrace_decodes_total", outcome="whole"),
                "headrace_decodes_total",
            ),
            row(
                "output tokens, at workers",
                tokens,
                grown("headrace_decode_tokens_total") + grown("headrace_prefill_begun_total"),
                "headrace_decode_tokens_total + headrace_prefill_begun_total",
            ),
        ]
    for what, client_ms, name in (
        ("first token, mean ms", said.ttft_ms, "headrace_ttft_seconds"),
        ("whole reply, mean ms", said.e2e_ms, "headrace_e2e_seconds"),
    ):
        found.append(row(what, client_ms, mean_ms(name), f"{name}_sum / _count", judged=times))
    return found
