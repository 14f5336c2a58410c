"""From first-token times to rates: what was put in comes out."""

import math
from pathlib import Path

import msgspec
import pytest

from pipeline.errors import OperatorError
from pipeline.planning import calibration, rates
from pipeline.planning.calibration import Sample, Saturated, line, step_s
from pipeline.planning.rates import Rates

TRUE = Rates(
    origin="measured",
    prefill_tokens_per_s=4000.0,
    prefill_overhead_s=0.02,
    load_tokens_per_s=30_000.0,
    store_tokens_per_s=20_000.0,
    way_s=0.004,
    handover_s=0.005,
    handover_tokens_per_s=30_000.0,
    step_s=0.02,
    step_per_sequence_s=0.002,
)


def sample(prompt: int, cached: int = 0, hbm: int = 0) -> Sample:
    computed, loaded = prompt - cached, cached - hbm
    prefill_s = TRUE.prefill_overhead_s + computed / TRUE.prefill_tokens_per_s + computed / TRUE.store_tokens_per_s
    prefilled_s = prefill_s + loaded / TRUE.load_tokens_per_s
    first_s, second_s = prefilled_s + TRUE.way_s, prefilled_s + TRUE.behind_prefill_s(prompt - hbm, 1)
    return Sample(prompt=prompt, cached=cached, hbm=hbm, ttft_s=first_s, gap_s=second_s - first_s)


def saturated(tokens: int) -> Saturated:
    busy_s = TRUE.prefill_overhead_s + tokens / TRUE.prefill_tokens_per_s
    return Saturated(requests=8, computed=8 * tokens, duration_s=8 * busy_s)


COLD = [sample(256), sample(1024), sample(260), sample(1020)]
WARM = [sample(256, 224, 224), sample(1024, 992, 992)]
ELSEWHERE = [sample(1024, 992)]
BUSY = [saturated(256), saturated(1024)]
STEPS = {batch: TRUE.decode_step_s(batch) for batch in (1, 2, 4, 8)}


def test_the_rates_that_made_the_times_come_out() -> None:
    found = calibration.rates([*COLD, *WARM, *ELSEWHERE], BUSY, STEPS, "m").rates
    for field in Rates.__struct_fields__:
        ours, true = getattr(found, field), getattr(TRUE, field)
        assert ours == (pytest.approx(true, rel=0.02, abs=1e-3) if isinstance(true, float) else true), field


def test_samples_know_where_their_prompt_was_found() -> None:
    assert [one.kind for one in (COLD[0], WARM[1], ELSEWHERE[0])] == ["cold", "hbm", "lmcache"]


def test_what_was_not_measured_is_said_and_counts_as_free() -> None:
    found = calibration.rates([*COLD, *WARM], BUSY, STEPS, "m")
    assert found.rates.load_tokens_per_s == pytest.approx(1e9)
    assert "not measured" in found.notes[0]
    assert set(found.ttft_ms) == {"cold 258", "cold 1022", "hbm 256", "hbm 1024"}


def test_without_cold_prompts_of_two_lengths_there_is_no_calibration() -> None:
    with pytest.raises(OperatorError, match="cold prompts of two lengths"):
        calibration.rates([sample(256), *WARM], BUSY, STEPS, "m")


def test_a_step_is_timed_while_all_streams_run() -> None:
    first = [0.1 * number for number in range(11)]
    second = [0.35 + 0.1 * number for number in range(11)]
    assert step_s([first, second]) == pytest.approx(0.65 / 6)
    with pytest.raises(OperatorError, match="did not overlap"):
        step_s([[0.0, 0.1], [5.0, 5.1]])


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1.0, 3.0), (2.0, 5.0), (3.0, 7.0)], (1.0, 2.0)),
        ([(1.0, 3.0), (2.0, 1.0)], (2.0, 0.0)),  # falling with the load: noise
        ([(4.0, 3.0)], (3.0, 0.0)),
    ],
)
def test_a_line_has_no_negative_costs(points: list[tuple[float, float]], expected: tuple[float, float]) -> None:
    assert line(points) == pytest.approx(expected)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    found = calibration.rates([*COLD, *WARM, *ELSEWHERE], BUSY, STEPS, "m")
    path = tmp_path / "measured.json"
    path.write_bytes(msgspec.json.encode(found))
    again = rates.measured(path)
    assert again.rates == found.rates
    assert again.memory(100.0).lmcache_tokens == 100.0
    assert again.memory(100.0).prefill_tokens == math.inf


@pytest.mark.parametrize(("content", "sentence"), [(b'{"model": 1}', "Write it anew"), (None, "Cannot read")])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "measured.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OperatorError, match=sentence):
        rates.measured(path)
