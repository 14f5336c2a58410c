"""The profile of what the pipeline costs: small, and whether its figures mean what they say."""

import math

import msgspec
import pytest
from typer.testing import CliRunner

from pipeline.cli.main import program
from tests.benchmarks import overhead
from tests.benchmarks.overhead import Report, Sizes, added

SMALL = Sizes(seconds=1.0, ramp=(20.0, 30.0), streams=20, asks=20, cancels=1)


@pytest.mark.timeout(180)
def test_every_figure_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "RATE", 20.0)
    monkeypatch.setattr(overhead, "Sizes", lambda **_: SMALL)
    result = CliRunner().invoke(program(), ["bench", "--profile", "overhead", "--json"])
    report = msgspec.json.decode(result.stdout.splitlines()[-1], type=Report)
    figures = [value for value in msgspec.structs.astuple(report) if isinstance(value, float)]
    assert all(math.isfinite(figure) for figure in figures)
    assert report.added_ttft_p50_ms <= report.added_ttft_p99_ms
    assert report.pipeline_cpu_ms_per_request >= report.gateway_cpu_ms_per_request > 0
    assert report.cpu_ms_per_request.keys() == {"nats", "gateway-1", "prefill-1", "decode-1"}
    assert report.saturation_rps in (0.0, *SMALL.ramp)


def test_what_engines_do_and_what_follows_the_first_token_is_not_ours() -> None:
    stages_ms = {"accept": 1.0, "prefill": 20.0, "load": 2.0, "first_step": 8.0, "decode": 99.0}
    plain = {"ttft_ms": 26.0, "first_of": "prefill", "stages_ms": stages_ms}
    seeded = {"ttft_ms": 40.0, "first_of": "decode", "stages_ms": stages_ms}
    found = added([plain], [seeded])
    assert found["added_ttft_p50_ms"] == 6.0, "what decode does comes after the first token of a plain reply"
    assert found["added_ttft_of_decode_p50_ms"] == 10.0
    assert found["added_by_stage_ms"] == {"accept": 1.0}
