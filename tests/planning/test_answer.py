"""The source's own figures, by the formulas; verdicts in words; a configuration that loads."""

from pathlib import Path

import msgspec
import pytest

from pipeline import config
from pipeline.planning import presets, report
from pipeline.planning.answer import Answer, answer, ratio
from pipeline.planning.emit import toml
from pipeline.planning.question import Numbers, Objective, Question
from pipeline.planning.workload import Workload


@pytest.fixture(scope="module")
def question() -> Question:
    return presets.seed()


@pytest.fixture(scope="module")
def seed(question: Question) -> Answer:
    return answer(question)


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        ("kv_bytes_per_token", 163_840),
        ("kv_transfer_mib", 345.3),
        ("transfer_nvlink_ms", 0.37),
        ("transfer_infiniband_ms", 6.74),  # "~7"
        ("prefill_gpus", 5),
        ("prefill_gpus_chunked", 4),
        ("prefill_gpus_prefix_hits", 1),
        ("decode_gpus", 1),
        ("prefill_to_decode", "4 : 1"),
        ("block_hit_rate", 0.9854),  # 135 of 137
    ],
)
def test_the_sources_figures_come_out(seed: Answer, figure: str, expected: float | str) -> None:
    assert getattr(seed, figure) == expected


def test_they_come_from_formulas_and_move_with_what_goes_in(question: Question) -> None:
    load = msgspec.structs.replace(question.load, requests_per_s=2000.0, output_tokens=40)
    other = answer(msgspec.structs.replace(question, load=load, source=Numbers(load), kv="bf16"))
    assert other.kv_bytes_per_token == 327_680
    assert other.transfer_nvlink_ms == 0.75
    assert (other.prefill_gpus, other.prefill_gpus_chunked, other.decode_gpus) == (9, 7, 3)


def test_it_says_where_the_source_is_beyond_physics(seed: Answer) -> None:
    assert seed.floor is not None
    assert seed.floor.prefill_gpus > 39 * seed.prefill_gpus_chunked
    assert any("Prefill, cold: 4 GPUs cannot be" in note for note in seed.notes)
    assert any("Decode: 1 GPUs cannot be" in note for note in seed.notes)


def test_it_says_not_to_disaggregate_where_that_is_so(seed: Answer) -> None:
    assert not seed.verdict.disaggregate
    assert seed.verdict.sentence.startswith("Do not disaggregate: 5 GPUs")
    assert seed.verdict.aggregated_goodput > seed.verdict.split_goodput > 1000
    assert seed.verdict.reasons


def test_a_tight_objective_between_tokens_is_what_a_split_is_for(question: Question) -> None:
    """Where prompts are long and cold, a chunk of one delays all who decode beside it, however small."""
    load = Workload(requests_per_s=40, prefix_tokens=0, message_tokens=4000, output_tokens=50)
    rates = msgspec.structs.replace(
        question.rates, prefill_tokens_per_s=200_000.0, step_s=0.008, step_per_sequence_s=1e-5, overlaps=False, in_order=True,
        full_steps=True,
    )  # fmt: skip
    tight = msgspec.structs.replace(
        question, load=load, source=Numbers(load), rates=rates, objective=Objective(ttft_ms=500, itl_ms=8.6)
    )
    found = answer(tight)
    assert found.verdict.disaggregate
    assert found.verdict.sentence.startswith("Disaggregate: ")
    assert found.fleet is not None
    assert found.fleet.meets


def test_where_nothing_meets_the_objective_it_says_so(question: Question) -> None:
    hopeless = answer(msgspec.structs.replace(question, objective=Objective(ttft_ms=1, itl_ms=1)))
    assert hopeless.fleet is None
    assert "in neither way" in hopeless.verdict.sentence
    assert any("No split meets the objective" in note for note in hopeless.notes)


def test_what_is_printed_shows_the_floor_beside_the_figures(question: Question, seed: Answer) -> None:
    text = report.text(question, seed)
    assert "163,840 bytes a token, 345.3 MiB a prompt" in text
    assert "floor 156.12" in text
    assert seed.verdict.sentence in text


def test_the_configuration_it_writes_loads(question: Question, seed: Answer, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(toml(question, seed), "utf-8")
    loaded = config.load(path, {})
    assert (loaded.up.prefill, loaded.up.decode) == (4, 1)
    assert loaded.prefill.slots == seed.settings.prefill_slots
    assert loaded.decode.slots == seed.settings.decode_slots
    assert loaded.simulated.prefill_tokens_per_s == 550_000


def test_a_larger_engine_is_written_with_its_tensor_parallelism(
    question: Question, seed: Answer, tmp_path: Path
) -> None:
    assert question.prefill is not None
    group = msgspec.structs.replace(question.prefill, size=4)
    path = tmp_path / "plan.toml"
    path.write_text(toml(msgspec.structs.replace(question, prefill=group), seed), "utf-8")
    assert config.load(path, {}).prefill.extra == {"tensor_parallel_size": 4}


@pytest.mark.parametrize(("prefill", "decode", "expected"), [(4, 1, "4 : 1"), (28, 12, "7 : 3"), (1, 1, "1 : 1")])
def test_ratios_are_in_lowest_terms(prefill: int, decode: int, expected: str) -> None:
    assert ratio(prefill, decode) == expected
