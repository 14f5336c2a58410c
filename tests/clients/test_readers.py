"""Where in a client's report its figures are. The reports are real ones, of 40 requests, without what is not read."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.clients.benchmarks import AIPerf, GenAIBench, GuideLLM, VllmBench
from tests.clients.client import Client, Job, Load
from tests.clients.compare import Said


def statistic(mean: float, total: float = 0.0) -> dict[str, Any]:
    return {"successful": {"mean": mean, "total_sum": total}, "errored": {"mean": 0.0, "total_sum": 0.0}}


VLLM = {
    "completed": 40, "total_output_tokens": 1200, "total_input_tokens": 27_235, "mean_ttft_ms": 880.72,
    "mean_e2el_ms": 1001.94, "duration": 10.27, "failed": 0, "request_throughput": 3.9, "output_throughput": 116.9,
    "p99_ttft_ms": 1343.49, "mean_tpot_ms": 4.18, "mean_itl_ms": 4.32,
}  # fmt: skip

AIPERF = {
    "request_count": {"unit": "requests", "avg": 40.0},
    "total_usage_completion_tokens": {"unit": "tokens", "avg": 1200.0},
    "total_usage_prompt_tokens": {"unit": "tokens", "avg": 20_807.0},
    "time_to_first_token": {"unit": "ms", "avg": 757.23, "p99": 1347.68},
    "request_latency": {"unit": "ms", "avg": 880.88},
    "benchmark_duration": {"unit": "sec", "avg": 9.02},
    "request_throughput": {"unit": "requests/sec", "avg": 4.43},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 132.94},
    "inter_token_latency": {"unit": "ms", "avg": 4.26},
    "request_error_rate": {"unit": "%", "avg": 0.0},
}

GUIDELLM = {
    "benchmarks": [
        {
            "metrics": {
                "request_totals": {"successful": 40, "errored": 0, "incomplete": 0, "total": 40},
                "output_token_count": statistic(30.0, 1200.0),
                "prompt_token_count": statistic(680.9, 27_237.0),
                "time_to_first_token_ms": statistic(785.9),
                "request_latency": statistic(0.908),
                "requests_per_second": statistic(4.3),
                "output_tokens_per_second": statistic(129.7),
                "inter_token_latency_ms": statistic(4.2),
            }
        }
    ]
}

GENAI_BENCH = {
    "_time_unit": "s",
    "aggregated_metrics": {
        "run_duration": 11.2, "num_error_requests": 1, "requests_per_second": 3.9,
        "mean_output_throughput_tokens_per_s": 117.7, "mean_input_throughput_tokens_per_s": 9441.7,
    },
    "individual_request_metrics": [
        {"ttft": 0.4, "e2e_latency": 0.5, "num_input_tokens": 2416, "num_output_tokens": 30, "error_code": None},
        {"ttft": 0.8, "e2e_latency": 0.9, "num_input_tokens": 2400, "num_output_tokens": 30, "error_code": None},
        {"ttft": None, "e2e_latency": None, "num_input_tokens": None, "num_output_tokens": None, "error_code": 503},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("client", "name", "report", "said"),
    [
        (VllmBench(), "vllm.json", VLLM, (40, 1200, 27_235, 880.72, 1001.94)),
        (AIPerf(), "profile_export_aiperf.json", AIPERF, (40, 1200, 20_807, 757.23, 880.88)),
        (GuideLLM(), "guidellm.json", GUIDELLM, (40, 1200, 27_237, 785.9, 908.0)),
        (
            GenAIBench(),
            "run/D2210_30_text-to-text_num_concurrency_4_time_11s.json",
            GENAI_BENCH,
            (2, 60, 4816, 600.0, 700.0),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Client) else "",
)
def test_a_reports_figures_are_found(
    client: Client, name: str, report: Any, said: tuple[float, ...], tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(msgspec.json.encode(report))
    job = Job(gateway="", model="", tokenizer=None, load=Load(), folder=tmp_path, programs=tmp_path)
    found: Said = client.read(job)
    figures = (found.requests, found.output_tokens, found.prompt_tokens, found.ttft_ms, found.e2e_ms)
    assert figures == pytest.approx(said)
    assert found.own
