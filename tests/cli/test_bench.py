"""The bench: what it sends, and what it makes of the replies."""

import asyncio

import pytest

from pipeline.cli import bench, client
from pipeline.cli.bench import Load, percentile_ms, prompt, report, table
from pipeline.cli.client import PromptDetails, Reply, Usage
from tests.cli import double

LOAD = Load(requests=8, concurrency=3, creators=2, prompt_words=100, max_tokens=4, run="a")


def test_a_load_is_the_same_every_time_and_another_run_is_another_load() -> None:
    assert prompt(LOAD, 3) == prompt(LOAD, 3)
    other = Load(requests=8, concurrency=3, creators=2, prompt_words=100, max_tokens=4, run="b")
    assert prompt(LOAD, 3) != prompt(other, 3)


def test_a_creators_requests_share_its_persona_and_nothing_else() -> None:
    (ada, first), (bob, second), (ada_again, third) = (prompt(LOAD, number) for number in range(3))
    assert ada == ada_again != bob
    assert first["messages"][0] == third["messages"][0] != second["messages"][0]
    assert first["messages"][1] != third["messages"][1]


@pytest.mark.parametrize(
    ("times_s", "percent", "expected"),
    [([], 50, None), ([0.1], 99, 100.0), ([0.3, 0.1, 0.2], 50, 200.0), ([i / 1000 for i in range(1, 101)], 99, 99.0)],
)
def test_percentiles_are_nearest_ranks(times_s: list[float], percent: int, expected: float | None) -> None:
    assert percentile_ms(times_s, percent) == expected


def test_failed_replies_count_as_errors_and_in_nothing_else() -> None:
    usage = Usage(prompt_tokens=70, completion_tokens=2, prompt_tokens_details=PromptDetails(64))
    outcome = report([Reply(ttft_s=0.1, e2e_s=0.2, usage=usage), Reply(e2e_s=9.0, error="lost")], 2.0)
    assert (outcome.requests, outcome.completed, outcome.errors) == (2, 1, 1)
    assert (outcome.ttft_p50_ms, outcome.e2e_p99_ms) == (100.0, 200.0)
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (70, 64, 2)
    assert outcome.error_messages == {"lost": 1}
    assert "1 × lost" in table(outcome)


def test_nothing_whole_is_a_report_without_times() -> None:
    outcome = report([Reply(error="lost")], 0.0)
    assert outcome.ttft_p50_ms is None
    assert "p50 -" in table(outcome)


def test_a_closed_loop_sends_every_request_once(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> tuple[bench.Report, int]:
        async with double.gateway(double.WHOLE) as (url, requests):
            return await bench.run(client.Gateway(url), LOAD), len(set(requests))

    outcome, different = asyncio.run(main())
    assert (outcome.completed, outcome.errors, different) == (8, 0, 8)
    assert outcome.prompt_tokens == 8 * 70
    assert "8 of 8" in capsys.readouterr().err
