"""Models by their published config.json: KV bytes, parameters, FLOPs, worked out by hand beside each."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.errors import OperatorError
from pipeline.planning import data, models
from pipeline.planning.models import HfConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def model(**changes: Any) -> models.Model:
    return models.model("test", msgspec.convert(LLAMA | changes, HfConfig))


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-3.1-8b", 2 * 32 * 8 * 128 * 2),  # 131,072: 2 × layers × KV heads × head size × bf16
        ("llama-3.1-70b", 2 * 80 * 8 * 128 * 2),  # 327,680
        ("llama-3.1-405b", 2 * 126 * 8 * 128 * 2),  # 516,096
        ("qwen3-8b", 2 * 36 * 8 * 128 * 2),  # 147,456
        ("qwen3-32b", 2 * 64 * 8 * 128 * 2),  # 262,144: head_dim 128 is given, and is not 5,120 / 64
        ("qwen3-30b-a3b", 2 * 48 * 4 * 128 * 2),  # 98,304: experts hold no KV
        ("mixtral-8x7b", 2 * 32 * 8 * 128 * 2),  # 131,072
        ("deepseek-v3", 61 * (512 + 64) * 2),  # 70,272: one latent for all heads, and the rotary part
        ("gpt-oss-120b", 2 * 36 * 8 * 64 * 2),  # 73,728 where no window is full
        ("smollm2-135m", 2 * 30 * 3 * 64 * 2),  # 23,040
    ],
)
def test_kv_of_a_token_follows_from_the_attention(name: str, bytes_per_token: int) -> None:
    assert models.known(name).kv_bytes_per_token(2) == bytes_per_token


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    [  # as published: model cards on the hub, the DeepSeek-V3 and gpt-oss reports (active without the embedding for gpt-oss)
        ("llama-3.1-8b", 8.03, 8.03),
        ("llama-3.1-70b", 70.6, 70.6),
        ("llama-3.1-405b", 405.9, 405.9),
        ("qwen3-8b", 8.2, 8.2),
        ("qwen3-32b", 32.8, 32.8),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("mixtral-8x7b", 46.7, 12.9),
        ("deepseek-v3", 671.0, 37.0),
        ("gpt-oss-20b", 20.9, 3.6 + 0.58),
        ("gpt-oss-120b", 116.8, 5.1 + 0.58),
        ("smollm2-135m", 0.1345, 0.1345),
    ],
)
def test_parameters_are_the_published_ones(name: str, billions: float, active_billions: float) -> None:
    known = models.known(name)
    assert known.params / 1e9 == pytest.approx(billions, rel=0.01)
    assert known.active / 1e9 == pytest.approx(active_billions, rel=0.02)


def test_a_window_bounds_the_kv_of_its_layers_alone() -> None:
    known = models.known("gpt-oss-120b")  # 18 layers attend to all, 18 to the last 128
    layer = 2 * 8 * 64 * 2
    assert known.kv_bytes(100, 2) == 36 * layer * 100
    assert known.kv_bytes(2210, 2) == 18 * layer * 2210 + 18 * layer * 128


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, [None] * 32),
        ({"sliding_window": 4096}, [4096] * 32),  # Mistral 7B v0.1
        ({"sliding_window": 4096, "use_sliding_window": False}, [None] * 32),  # Qwen2.5
        ({"sliding_window": 4096, "max_window_layers": 28}, [None] * 28 + [4096] * 4),  # Qwen2, where it is used
        ({"sliding_window": 4096, "model_type": "gemma2"}, [4096, None] * 16),
        ({"sliding_window": 1024, "sliding_window_pattern": 4}, [1024, 1024, 1024, None] * 8),  # Gemma 3 has 6
    ],
)
def test_windows_are_read_as_each_family_writes_them(changes: dict[str, Any], windows: list[int | None]) -> None:
    counted = {group.window: group.layers for group in model(**changes).attention}
    assert counted == {window: windows.count(window) for window in windows}


def test_layers_that_share_kv_keep_none() -> None:
    assert model(num_kv_shared_layers=12).kv_bytes_per_token(2) == 2 * 20 * 8 * 128 * 2


def test_without_kv_heads_every_head_has_its_own() -> None:
    assert model(num_key_value_heads=None).kv_bytes_per_token(2) == 2 * 32 * 32 * 128 * 2


def test_a_batch_reads_the_experts_that_any_of_it_chose() -> None:
    mixtral = models.known("mixtral-8x7b")
    one, many = mixtral.weight_bytes_read(1, 2), mixtral.weight_bytes_read(1000, 2)
    assert one == pytest.approx((mixtral.active - mixtral.embedding) * 2, rel=1e-6)
    assert many == pytest.approx((mixtral.params - mixtral.embedding) * 2, rel=1e-6)
    assert mixtral.weight_bytes_read(2, 2) - one == pytest.approx(mixtral.experts_total * (0.4375 - 0.25) * 2, rel=1e-6)


def test_flops_of_a_prompt_are_two_a_parameter_and_its_attention() -> None:
    llama = models.known("llama-3.1-8b")
    pairs = 1000 * 1001 / 2
    expected = 2 * llama.body * 1000 + 2 * llama.head + 32 * 4 * 32 * 128 * pairs
    assert llama.prefill_flops(1000) == pytest.approx(expected)
    behind = llama.prefill_flops(1000, cached=900)
    assert behind == pytest.approx(2 * llama.body * 100 + 2 * llama.head + 32 * 4 * 32 * 128 * (pairs - 900 * 901 / 2))
    assert llama.decode_flops(1000) == pytest.approx(2 * (llama.body + llama.head) + 32 * 4 * 32 * 128 * 1000)


def test_a_window_bounds_attention_flops() -> None:
    windowed, whole = model(sliding_window=100), model()
    saved = whole.prefill_flops(1000) - windowed.prefill_flops(1000)
    assert saved == pytest.approx(32 * 4 * 32 * 128 * sum(max(0, position - 100) for position in range(1, 1001)))


def test_a_model_is_read_from_its_folder_and_its_text_part(tmp_path: Path) -> None:
    folder = tmp_path / "some-vlm"
    folder.mkdir()
    (folder / "config.json").write_bytes(msgspec.json.encode({"model_type": "vlm", "text_config": LLAMA}))
    read = models.known(str(folder))
    assert (read.name, read.kv_bytes_per_token(2)) == ("some-vlm", 131_072)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", "is not JSON"),
        (b'{"hidden_size": 1}', "missing required field `num_hidden_layers`"),
        (msgspec.json.encode(LLAMA | {"head_dim": 0}), r"`int` >= 1 - at `\$\.head_dim`"),
        (msgspec.json.encode(LLAMA | {"layer_types": ["linear_attention"]}), "layers of linear_attention"),
        (msgspec.json.encode(LLAMA | {"attention_chunk_size": 8192}), "sets attention_chunk_size"),
    ],
)
def test_what_cannot_be_planned_for_is_refused_by_name(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(OperatorError, match=sentence):
        models.known(str(tmp_path / "config.json"))


def test_a_model_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"no 'llama-9' in configs/planning/models\.toml.*llama-3\.1-8b"):
        models.known("llama-9")
    with pytest.raises(OperatorError, match="Cannot read"):
        models.known(str(tmp_path / "none.json"))


def test_every_known_model_is_whole() -> None:
    for name in data.names("models.toml"):
        known = models.known(name)
        assert known.params >= known.active > 0
        assert known.context_max
