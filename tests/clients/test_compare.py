"""A client agrees with Headrace where it says the same, and not where either says nothing."""

import pytest

from tests.clients.compare import Row, Said, rows
from tests.clients.scrape import Samples

BEFORE = """
# TYPE headrace_requests_total counter
headrace_requests_total{klass="interactive",outcome="whole"} 5.0
headrace_requests_total{klass="interactive",outcome="cancelled"} 7.0
"""

AFTER = """
# TYPE headrace_requests_total counter
headrace_requests_total{klass="interactive",outcome="whole"} 100.0
headrace_requests_total{klass="batch",outcome="whole"} 5.0
headrace_requests_total{klass="interactive",outcome="cancelled"} 9.0
# TYPE headrace_output_tokens_total counter
headrace_output_tokens_total 3000.0
# TYPE headrace_prompt_tokens_total counter
headrace_prompt_tokens_total 50000.0
# TYPE headrace_ttft_seconds histogram
headrace_ttft_seconds_bucket{le="+Inf"} 100.0
headrace_ttft_seconds_sum 50.0
headrace_ttft_seconds_count 100.0
# TYPE headrace_e2e_seconds histogram
headrace_e2e_seconds_sum 60.0
headrace_e2e_seconds_count 100.0
"""

WORKER = """
# TYPE headrace_prefills_total counter
headrace_prefills_total{outcome="handed_off"} 50.0
# TYPE headrace_decodes_total counter
headrace_decodes_total{outcome="whole"} 100.0
# TYPE headrace_decode_tokens_total counter
headrace_decode_tokens_total 2960.0
# TYPE headrace_prefill_begun_total counter
headrace_prefill_begun_total 25.0
"""

SAID = Said(requests=100, output_tokens=3000, prompt_tokens=50_000, ttft_ms=505.0, e2e_ms=606.0)

SAMPLES = (
    Samples.parsed(AFTER) + Samples.parsed(WORKER) + Samples.parsed(WORKER.replace(" 100", " 0").replace(" 2960", " 0"))
)


def compared(said: Said, after: Samples = SAMPLES, **which: bool) -> dict[str, Row]:
    return {row.what: row for row in rows(said, Samples.parsed(BEFORE), after, **which)}


def test_what_was_counted_meanwhile_is_set_beside_what_the_client_says() -> None:
    found = compared(SAID)
    assert {what: row.headrace for what, row in found.items()} == {
        "requests": 100,
        "output tokens": 3000,
        "prompt tokens": 50_000,
        "requests, at prefill": 100,
        "requests, at decode": 100,
        "output tokens, at workers": 3010,
        "first token, mean ms": 500,
        "whole reply, mean ms": 600,
    }
    assert all(row.ok for row in found.values())


@pytest.mark.parametrize(
    ("said", "differs"),
    [
        (Said(requests=97, output_tokens=3000, ttft_ms=505.0, e2e_ms=606.0), "requests"),
        (Said(requests=100, output_tokens=3100, ttft_ms=505.0, e2e_ms=606.0), "output tokens"),
        (Said(requests=100, output_tokens=3000, prompt_tokens=1, ttft_ms=505.0, e2e_ms=606.0), "prompt tokens"),
        (Said(requests=100, output_tokens=3000, ttft_ms=511.0, e2e_ms=606.0), "first token, mean ms"),
        (Said(requests=100, output_tokens=3000, ttft_ms=505.0, e2e_ms=580.0), "whole reply, mean ms"),
    ],
)
def test_more_than_two_percent_is_no_agreement(said: Said, differs: str) -> None:
    assert not compared(said)[differs].ok


def test_nothing_on_both_sides_is_no_agreement_either() -> None:
    nothing = Said(requests=0, output_tokens=0, ttft_ms=0.0, e2e_ms=0.0)
    assert not any(row.ok for row in compared(nothing, Samples.parsed(BEFORE)).values())


def test_times_through_a_proxy_are_told_and_not_judged() -> None:
    slow = Said(requests=100, output_tokens=3000, ttft_ms=900.0, e2e_ms=990.0)
    found = compared(slow, times=False)
    assert found["first token, mean ms"].off == pytest.approx(0.8)
    assert all(row.ok for row in found.values())


def test_workers_are_left_out_where_they_are_not_known() -> None:
    assert [what for what in compared(SAID, Samples.parsed(AFTER), workers=False) if "at" in what.split()] == []
