"""`headrace plan`: its options become a question, its errors name what is wrong."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline import config
from pipeline.cli import OPERATOR_EXIT
from pipeline.planning import calibration
from tests.planning.test_calibration import BUSY, COLD, ELSEWHERE, STEPS, WARM

SMALL = ("--requests-per-s", "20", "--creators", "50")


def plan(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pipeline.cli", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def answered(*arguments: str) -> dict[str, Any]:
    done = plan(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = msgspec.json.decode(done.stdout)
    return found


def test_the_seed_preset_prints_the_sources_figures() -> None:
    found = answered("--preset", "seed")
    wanted = {
        "kv_bytes_per_token": 163_840, "kv_transfer_mib": 345.3, "transfer_nvlink_ms": 0.37, "transfer_infiniband_ms": 6.74,
        "prefill_gpus": 5, "prefill_gpus_chunked": 4, "decode_gpus": 1, "block_hit_rate": 0.9854,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


def test_a_plan_for_ones_own_load_has_a_verdict_and_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    done = plan(*SMALL, "--hardware", "l40s", "--transport", "ethernet", "--emit", str(path))
    assert done.returncode == 0, done.stderr
    assert "isaggregate" in done.stdout
    assert "floor" in done.stdout
    assert config.load(path, {}).model.served_name == "llama-3.1-8b"


def test_experts_and_several_gpus_are_planned_for() -> None:
    found = answered(*SMALL, "--model", "mixtral-8x7b", "--prefill-tp", "2", "--decode-tp", "2", "--weights", "bf16")
    assert found["prefill_gpus"] % 2 == 0
    assert found["fleet"]["gpus"] % 2 == 0
    assert found["params_active"] < found["params"]


def test_a_trace_is_planned_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 50 * at,
            "input_length": 3000,
            "output_length": 40,
            "hash_ids": [0, 1, 2, 10 + at, 1000 + at, 2000 + at],
        }
        for at in range(400)
    ]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    found = answered("--trace", str(path), "--model", "qwen3-8b")
    assert found["requests_per_s"] == pytest.approx(20.0)
    assert found["prompt_tokens"] == 3000
    assert found["fleet"]["cached"] == pytest.approx(1536, rel=0.02)


def test_measured_rates_are_planned_with_and_have_no_floor(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_bytes(msgspec.json.encode(calibration.rates([*COLD, *WARM, *ELSEWHERE], BUSY, STEPS, "m")))
    found = answered("--measured", str(path), "--model", "smollm2-135m", "--requests-per-s", "2", "--ttft-ms", "2000")
    assert found["rates"]["origin"] == "measured"
    assert found["floor"] is None
    assert any("no physical floor" in note for note in found["notes"])


def test_it_lists_what_it_knows() -> None:
    done = plan("--known")
    for name in ("deepseek-v3", "b200", "roce", "seed"):
        assert name in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--preset", "none"), "There is no preset 'none'. Give one of seed."),
        (("--hardware", "abacus"), "There is no 'abacus' in configs/planning/hardware.toml."),
        (("--transport", "pigeon"), "There is no 'pigeon'"),
        (("--weights", "fp3"), "--weights is 'fp3'. Give one of bf16, fp8, fp4."),
        (("--model", "llama-3.1-70b"), "leave no room for KV on 1 of these GPUs (80 GB). Give a larger --prefill-tp"),
        (("--trace", "/nowhere.jsonl"), "Cannot read /nowhere.jsonl"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    done = plan(*arguments)
    assert done.returncode == OPERATOR_EXIT
    assert sentence in done.stderr
