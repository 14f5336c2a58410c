"""What the comparison of measured rates prints. It runs on a stack of its own."""

import pytest

from pipeline.planning.rates import Measured, Rates
from tests.benchmarks.calibrated import Pair, Round, text

MEASURED = Measured(
    model="m",
    rates=Rates(
        origin="measured", prefill_tokens_per_s=1.0, prefill_overhead_s=0.0, step_s=0.1, step_per_sequence_s=0.0
    ),
)


def test_each_round_stands_beside_what_was_expected_of_it() -> None:
    pairs = [
        (Pair(plan=110.0, stack=100.0), Pair(plan=2.0, stack=2.0)),
        (Pair(plan=130.0, stack=100.0), Pair(plan=1.0, stack=2.0)),
    ]
    rounds = [Round(ttft_p50_ms=ttft, throughput_per_s=per_s, measured=MEASURED) for ttft, per_s in pairs]
    first, second = text(rounds).splitlines()[1:]
    assert "110.00 / 100.00  130.00 / 100.00  20%" in first
    assert second.endswith("25%")
    assert pairs[0][0].off == pytest.approx(0.1)
