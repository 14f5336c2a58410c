"""`headrace chaos` as it is called."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli import OPERATOR_EXIT
from pipeline.cli.chaos import _kinds
from pipeline.errors import OperatorError


def test_kinds_are_named_in_any_order_and_a_stranger_is_refused_with_what_there_is() -> None:
    assert _kinds("nats, prefill") == ("prefill", "nats")
    assert _kinds("") == ()
    with pytest.raises(OperatorError, match=r"knows no 'keeper'.*prefill, decode, pause, nats, gateway, stall"):
        _kinds("prefill,keeper")


def test_it_runs_from_any_folder_and_says_in_one_sentence_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "pipeline.cli", "chaos", "--kill", "everything"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == OPERATOR_EXIT
    assert done.stderr.splitlines()[-1].startswith("--kill knows no 'everything'.")
