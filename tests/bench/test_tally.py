"""What a run makes of its outcomes."""

import msgspec
import pytest

from pipeline.bench.outcome import Outcome, Slo
from pipeline.bench.page import page, progress
from pipeline.bench.session import Status
from pipeline.bench.tally import LEFT, MESSAGES_MAX, Tally
from pipeline.cli.client import PromptDetails, Split, Usage

USAGE = Usage(
    prompt_tokens=70, completion_tokens=3, prompt_tokens_details=PromptDetails(64), headrace=Split(hbm_tokens=32)
)


def whole(
    at_s: float = 0.0, ttft_s: float = 0.1, gaps_s: tuple[float, ...] = (0.02, 0.04), late_s: float = 0.0
) -> Outcome:
    outcome = Outcome(due_s=at_s, sent_s=at_s + late_s, usage=USAGE, status=200)
    outcome.text_came(at_s + ttft_s)
    for gap_s in gaps_s:
        outcome.text_came(outcome.last_s + gap_s)
    outcome.ended_s = outcome.last_s
    return outcome


def failed(code: str, status: int = 200, retry_after_s: float | None = None, message: str = "lost") -> Outcome:
    outcome = Outcome(due_s=0.0, status=status, retry_after_s=retry_after_s, ended_s=0.004)
    outcome.fail(code, message)
    return outcome


def tally(*outcomes: Outcome, slo: Slo | None = None) -> Tally:
    made = Tally(slo)
    for outcome in outcomes:
        made.add(outcome)
    return made


def test_latencies_count_from_when_a_request_was_due() -> None:
    report = tally(whole(ttft_s=0.5, late_s=0.4)).report("open")
    assert report.ttft_p50_ms == 500
    assert report.e2e_p50_ms == pytest.approx(560)
    assert report.send_lag.max_ms == 400


def test_a_timer_that_fires_early_is_no_merit() -> None:
    assert tally(whole(ttft_s=0.1, late_s=-0.0004)).report("open").ttft_p50_ms == pytest.approx(100.4)


def test_gaps_and_time_per_token_are_of_what_follows_the_first() -> None:
    report = tally(whole()).report("open")
    assert (report.itl.count, report.itl.mean_ms, report.itl.max_ms) == (2, 30, 40)
    assert report.tpot.mean_ms == 30


def test_refused_failed_and_left_are_counted_apart_and_in_no_time() -> None:
    report = tally(
        whole(),
        failed("overloaded", 503, retry_after_s=2.0),
        failed("internal", 500),
        failed("timeout", 0),
        failed(LEFT, 0),
    ).report("closed")
    assert (report.requests, report.completed, report.refused, report.errors, report.left) == (5, 1, 1, 2, 1)
    assert report.errors_by == {"503 overloaded": 1, "500 internal": 1, "timeout": 1}
    assert (report.e2e.count, report.refusal.max_ms) == (1, 4)
    assert report.error_messages == {"lost": 3}
    assert "3 × lost" in page(report)


def test_prompt_tokens_are_told_by_source() -> None:
    report = tally(whole(), whole()).report("closed")
    assert (report.prompt_tokens, report.cached_tokens) == (140, 128)
    assert (report.hbm_tokens, report.lmcache_tokens, report.output_tokens) == (64, 64, 6)


def test_the_warm_up_is_in_no_figure() -> None:
    warm = msgspec.structs.replace(whole(ttft_s=9.0), measured=False)
    made = tally(warm, whole(at_s=10.0))
    report = made.report("closed")
    assert (made.ended, report.requests, report.duration_s) == (2, 1, 0.16)
    assert report.ttft.max_ms == pytest.approx(100)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(ttft_ms=100.1), 1),
        (Slo(ttft_ms=99), 0),
        (Slo(itl_ms=40.1), 1),
        (Slo(itl_ms=39), 0),
        (Slo(ttft_ms=100.1, itl_ms=39), 0),
    ],
)
def test_goodput_is_what_is_whole_and_within_the_slo(slo: Slo, met: int) -> None:
    goodput = tally(whole(), failed("internal", 500), slo=slo).report("open").goodput
    assert goodput is not None
    assert (goodput.met, goodput.ratio) == (met, met / 2)
    assert "goodput" in page(tally(whole(), slo=slo).report("open"))


def test_one_gap_in_a_hundred_may_be_longer_than_the_slo() -> None:
    assert Slo(itl_ms=5).met(whole(gaps_s=(0.001,) * 99 + (0.5,)))
    assert not Slo(itl_ms=5).met(whole(gaps_s=(0.001,) * 98 + (0.5,) * 2))


def test_a_reply_without_text_meets_no_first_token() -> None:
    silent = Outcome(due_s=0.0, usage=USAGE)
    assert not Slo(ttft_ms=100).met(silent)
    assert Slo(itl_ms=100).met(silent)
    assert silent.tpot_s is None


def test_nothing_whole_is_a_report_without_times() -> None:
    report = tally(failed("lost")).report("closed")
    assert (report.ttft_p50_ms, report.per_s, report.duration_s) == (None, 0.0, 0.004)
    assert "first token" not in page(report)
    assert Tally().report("closed").requests == 0


def test_different_messages_are_kept_up_to_a_bound() -> None:
    report = tally(*(failed("odd", 500, message=f"number {number}") for number in range(1000))).report("closed")
    assert report.errors_by == {"500 odd": 1000}
    assert len(report.error_messages) == MESSAGES_MAX


def test_a_generator_that_was_late_says_so() -> None:
    assert "Sent late" in page(tally(whole(late_s=0.05)).report("open"))
    assert "Sent late" not in page(tally(whole()).report("open"))


def test_progress_is_one_line() -> None:
    made = Tally()
    assert progress(Status(0.2, made, stopping=False, over=False), 8) == "0 s · 0 of 8 measured · 0 running"
    made.add(Outcome(due_s=0.0, measured=False))
    assert "warming up: 1" in progress(Status(1.0, made, stopping=False, over=False), 8)
    made.add(whole())
    made.add(failed("overloaded", 503, retry_after_s=1.0))
    line = progress(Status(2.0, made, stopping=True, over=False), None)
    assert line.startswith("2 s · 2 measured · 0 running · first token p50 100 p99 100 ms · 1 refused, 0 failed")
    assert line.endswith("Ctrl-C again leaves them")
    assert "Ctrl-C" not in progress(Status(2.0, made, stopping=True, over=True), None)
