"""vLLM's own schedulers, with our bound of a step: what they plan, without an engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STEPS = [
    {"read-1": 256},
    {"read-1": 44, "read-2": 212},
    {"read-2": 88},
    {},
    {"reply": 40},
    {"reply": 1, "beside": 32},
    {"reply": 1, "beside": 32},
    {"reply": 1, "beside": 32},
    {"beside": 54},
    {},
]
"""Prompts that are only read fill a step. Beside a reply they have 32 tokens of it, and all of it again once that is whole."""


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_step_has_room_for_little_of_a_prompt_only_while_a_reply_is_written(kind: str, model_path: str) -> None:
    command = [sys.executable, "-m", "tests.e2e.scheduled", model_path, kind]
    quiet = {**os.environ, "VLLM_CONFIGURE_LOGGING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, check=True, stdout=subprocess.PIPE, timeout=120, text=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == STEPS
