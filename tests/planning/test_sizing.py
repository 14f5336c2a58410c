"""Hardware, transports, and the arithmetic of how many: by hand."""

import math
from pathlib import Path

import msgspec
import pytest

from pipeline.errors import OperatorError
from pipeline.planning import data, hardware, models, presets, rates, sizing, transports
from pipeline.planning.hardware import Group
from pipeline.planning.question import Question, memory_of

SEED = presets.seed()


def changed(question: Question, **fields: object) -> Question:
    return msgspec.structs.replace(question, **fields)


@pytest.mark.parametrize(
    ("name", "bf16_tflops", "fp8_tflops", "tb_per_s", "gb"),
    [
        ("h100", 989.5, 1979, 3.35, 80),
        ("h200", 989.5, 1979, 4.8, 141),
        ("a100", 312, 312, 2.039, 80),  # without fp8 tensor cores
        ("l40s", 362.05, 733, 0.864, 48),
        ("b200", 2250, 4500, 7.7, 180),
    ],
)
def test_hardware_is_as_its_data_sheet_says(
    name: str, bf16_tflops: float, fp8_tflops: float, tb_per_s: float, gb: float
) -> None:
    gpu = hardware.known(name)
    assert (gpu.flops("bf16"), gpu.flops("fp8")) == (bf16_tflops * 1e12, fp8_tflops * 1e12)
    assert gpu.memory_bytes_per_s == pytest.approx(tb_per_s * 1e12)
    assert gpu.memory_bytes == gb * 1e9


@pytest.mark.parametrize("file", ["hardware.toml", "transports.toml"])
def test_every_known_one_is_whole(file: str) -> None:
    for name in data.names(file):
        assert hardware.known(name) if file == "hardware.toml" else transports.known(name)


def test_hardware_of_ones_own_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[mine]\nmemory_bytes = 1e9\nmemory_bytes_per_s = 1e9\nbf16_flops = 1e12\nlink_bytes_per_s = 1e9\n")
    assert hardware.known(str(path)).flops("fp8") == 1e12
    path.write_text("bytes_per_s = 2e9\n")
    assert transports.known(str(path)).transfer_s(1e9) == 0.5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[x]\nbytes_per_s = 0\n", r"> 0\.0 - at `\$\.bytes_per_s`"),
        ("[x]\nspeed = 1\n", "unknown field `speed`"),
        ("x", "is not TOML"),
        (None, "Cannot read"),
    ],
)
def test_a_wrong_file_is_refused_by_entry(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OperatorError, match=sentence):
        transports.known(str(path))


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    ethernet = transports.known("ethernet")
    assert ethernet.floor_s(12.5e9) == 1.0
    assert ethernet.transfer_s(12.5e9) == pytest.approx(50e-6 + 1 / 0.7)


def test_a_prompt_leaves_its_last_step_partly_empty_which_chunks_of_others_fill() -> None:
    assert sizing.fill(2210, 512) == 2210 / 2560
    assert sizing.fill(512, 512) == 1
    whole, chunked = sizing.prefill_rates(SEED, 2210)  # 550,000 is said of whole prompts
    assert whole == 550_000
    assert chunked == pytest.approx(550_000 * 2560 / 2210)
    full = changed(SEED, rates=msgspec.structs.replace(SEED.rates, full_steps=True))
    whole, chunked = sizing.prefill_rates(full, 2210)
    assert whole == pytest.approx(550_000 * 2210 / 2560)
    assert chunked == 550_000


def test_sequences_that_run_follow_from_littles_law() -> None:
    slow = changed(SEED, rates=msgspec.structs.replace(SEED.rates, step_s=0.02, step_per_sequence_s=1e-5))
    batch = sizing.running(slow, 1000, 2)  # 15,000 tokens/s: batch = 15,000 × (0.02 + 1e-5 × batch)
    assert batch == pytest.approx(300 / 0.85)
    assert batch == pytest.approx(15_000 * slow.rates.decode_step_s(batch))
    assert sizing.running(slow, 10_000, 2) == math.inf


def test_decode_engines_are_the_fewest_that_meet_time_and_room() -> None:
    load = msgspec.structs.replace(SEED.rates, step_s=0.02, step_per_sequence_s=2e-5, decode_tokens_per_s=math.inf)
    question = changed(SEED, rates=load)
    count = sizing.decode_for(question, 1000)
    assert count is not None
    assert sizing.decodes(question, 1000, count)
    assert not sizing.decodes(question, 1000, count - 1)
    tight = msgspec.structs.replace(SEED.memory, decode_tokens=100 * 141 * 16 / 0.9)
    assert sizing.batch_max(changed(question, memory=tight)) == pytest.approx(100)
    more = sizing.decode_for(changed(question, memory=tight), 1000)
    assert more is not None
    assert more > count
    assert sizing.decode_for(changed(question, rates=msgspec.structs.replace(load, step_s=1.0)), 1000) is None


def test_blocks_are_counted_as_credits_count_them() -> None:
    assert sizing.blocks(SEED) == math.ceil(2240 / 16) + 1


def test_the_floor_is_flops_and_bytes_over_the_peak() -> None:
    floor = sizing.floor(SEED, 1800)
    assert floor is not None
    model = SEED.model
    assert floor.prefill_gpus == pytest.approx(1000 * model.prefill_flops(2210) / 1979e12)
    assert floor.prefill_gpus == pytest.approx(1000 * 2210 * 2 * 70.5e9 / 1979e12, rel=0.02)
    assert floor.decode_gpus_bandwidth == pytest.approx(30_000 * 2225 * 163_840 / 3.35e12)
    assert floor.itl_ms == pytest.approx((model.body + model.head) / 3.35e12 * 1e3)
    memory = floor.decode_gpus_memory * 80e9
    running = (
        30_000 * model.params / (3.35e12 * floor.decode_gpus_memory)
    )  # with n GPUs, a step takes an n-th of the time
    assert memory == pytest.approx(model.params + running * 2225 * 163_840, rel=1e-6)
    assert sizing.floor(changed(SEED, prefill=None), 0) is None


def test_rates_from_data_sheets_are_the_peak_times_the_shares() -> None:
    model, group, way = (
        models.known("llama-3.1-8b"),
        Group(gpu=hardware.known("h100"), size=1),
        transports.known("nvlink"),
    )
    of = rates.of_hardware(model, group, group, way, "bf16", "bf16", 2210, 1)
    assert of.prefill_tokens_per_s == pytest.approx(989.5e12 * 0.55 / (model.prefill_flops(2210) / 2210))
    assert of.step_s == pytest.approx(0.0005 + (model.params - model.embedding) * 2 / (3.35e12 * 0.75))
    assert of.step_per_sequence_s == pytest.approx(2210 * 131_072 / (3.35e12 * 0.75))
    assert of.load_tokens_per_s == pytest.approx(450e9 * 0.8 / 131_072)
    four = rates.of_hardware(model, Group(gpu=group.gpu, size=4), group, way, "bf16", "bf16", 2210, 1)
    assert four.prefill_tokens_per_s == pytest.approx(4 * 0.81 * of.prefill_tokens_per_s)


def test_memory_is_what_weights_leave() -> None:
    model, one = models.known("llama-3.1-70b"), Group(gpu=hardware.known("h100"), size=1)
    none = memory_of(model, one, one, "bf16", "bf16", 1e9)
    assert none.prefill_tokens == 0
    four = memory_of(model, Group(gpu=one.gpu, size=4), one, "fp8", "fp8", 1e9)
    assert four.prefill_tokens == pytest.approx((4 * 80e9 * 0.85 - model.params) / 163_840)
    assert four.lmcache_tokens == pytest.approx(1e9 / 163_840)


def test_settings_follow_from_what_runs() -> None:
    of = sizing.settings(SEED, 4, 1, 4)
    assert of.decode_slots == math.ceil(1.2 * sizing.batch_p99(627.0))
    assert of.decode_blocks * (1 - sizing.RESERVE) >= of.decode_slots * of.blocks_per_request
    assert of.max_ack_pending == 2 * (4 * 4 + of.decode_slots)
    assert of.shards == 64
    assert of.lmcache_bytes > 2 * 16 * 2240 * 163_840
