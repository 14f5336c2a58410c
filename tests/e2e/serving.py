"""A real `vllm serve` of the same model, which answers first: it ends before Headrace is asked, for two stacks do not fit."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline import config as configuration
from tests.e2e.conftest import ROOT
from tests.e2e.fidelity import Answer, ask_all
from tests.e2e.fidelity_completions import MODEL
from tests.ports import free_port
from workers.engines import launch

START_S = 180.0

OPTIONS = (
    *("--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", "3072", "--max-num-seqs", "8"),
    *("--block-size", "32", "--kv-cache-memory-bytes", "268435456", "--enforce-eager", "--host", "127.0.0.1"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


def answers_of_vllm(
    model_path: str, folder: Path, requests: Mapping[str, dict[str, Any]], *more: str
) -> dict[str, Answer]:
    """What `vllm serve` with these further options answers, by the request's name."""
    port = free_port()
    (folder / "headrace.toml").touch()
    environment = launch.environment(configuration.load(folder / "headrace.toml", {}), "decode")
    command = [sys.executable, "-m", "tests.e2e.vllm_serve", "serve", model_path, *OPTIONS, *more, "--port", str(port)]
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _await_healthy(process, f"http://127.0.0.1:{port}/health", folder / "serve.log")
        return ask_all(f"http://127.0.0.1:{port}", requests)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _await_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"vllm serve ended: {log.read_text()[-2000:]}"
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.2)  # between two questions; nothing tells us
    pytest.fail(f"vllm serve did not answer within {START_S} s: {log.read_text()[-2000:]}")
