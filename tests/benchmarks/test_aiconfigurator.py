"""The comparison with aiconfigurator: what it reads, and the figures that are kept. It runs where there is a package index."""

import msgspec
import pytest

from tests.benchmarks import aiconfigurator
from tests.benchmarks.aiconfigurator import CASES, RESULTS, Row, _row, parsed

SAID = """
============================================================
  TTFT:             1,091.744 ms
  TPOT:             13.994 ms
"""


class Kept(msgspec.Struct):
    rows: list[Row]


def test_its_figures_are_read() -> None:
    assert (parsed(SAID, "TTFT"), parsed(SAID, "TPOT")) == (1091.744, 13.994)
    with pytest.raises(RuntimeError, match="gave no TTFT: no such model"):
        parsed("no such model", "TTFT")


def test_the_figures_that_are_kept_are_of_the_rates_of_today() -> None:
    kept = msgspec.json.decode(RESULTS.read_bytes(), type=Kept)
    assert [row.model for row in kept.rows] == [case.model for case in CASES]
    for case, row in zip(CASES, kept.rows, strict=True):
        context_ms = (
            aiconfigurator.BATCH
            * aiconfigurator.PROMPT_TOKENS
            / row.prefill_tokens_per_s_per_gpu_theirs
            / case.tp
            * 1e3
        )
        again = _row(case, context_ms, row.decode_step_ms_theirs)
        assert again.prefill_tokens_per_s_per_gpu == row.prefill_tokens_per_s_per_gpu
        assert again.decode_step_ms == row.decode_step_ms
        assert row.reason == case.reason


def test_three_models_agree_within_a_third() -> None:
    kept = msgspec.json.decode(RESULTS.read_bytes(), type=Kept)
    assert all(0.7 < ratio < 1.34 for row in kept.rows for ratio in (row.prefill_ratio, row.decode_ratio))
    assert "theirs" in aiconfigurator.text(kept.rows)
