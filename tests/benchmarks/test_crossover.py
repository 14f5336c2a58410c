"""The benchmark of the two ways says where they cross. Its figures are no test, and need the real stack."""

import pytest

from tests.benchmarks import crossover
from tests.benchmarks.crossover import Met

LENGTHS = [32, 64, 128]


@pytest.mark.parametrize(
    ("through", "direct", "crossover_tokens"),
    [
        ([9, 9, 9], [5, 8, 12], 128),
        ([9, 9, 9], [5, 6, 7], None),
        ([9, 9, 9], [12, 5, 12], 128),
        ([4, 4, 4], [5, 5, 5], 32),
    ],
)
def test_prefill_pays_from_where_it_stays_faster(
    monkeypatch: pytest.MonkeyPatch, through: list[int], direct: list[int], crossover_tokens: int | None
) -> None:
    def measured(direct_tokens_max: int, rounds: int, lengths: list[int]) -> dict[int, list[Met]]:
        times = direct if direct_tokens_max else through
        return {length: [Met(ttft_s=ms / 1e3, gap_s=0.01)] * rounds for length, ms in zip(lengths, times, strict=True)}

    monkeypatch.setattr(crossover, "_measured", measured)
    report = crossover.run(2, LENGTHS)
    assert report.crossover_tokens == crossover_tokens
    assert report.gap_crossover_tokens is None
    assert [figures.uncached_tokens for figures in report.lengths] == LENGTHS
    assert f"sooner {f'from {crossover_tokens} ' if crossover_tokens else 'at no length'}" in crossover.text(report)
