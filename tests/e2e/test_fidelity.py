"""Headrace answers as `vllm serve` of the same model does, field by field, less the differences that `fidelity_compare` lists."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from pipeline import config as configuration
from tests.e2e.conftest import ROOT, free_port
from tests.e2e.fidelity import Answer, ask, ask_all
from tests.e2e.fidelity_compare import differences
from tests.e2e.fidelity_requests import MODEL, all_requests
from tests.e2e.running import Running
from workers.engines import launch

pytestmark = pytest.mark.timeout(600)  # the fixtures' start counts to the first test that uses them

START_S = 180.0

OPTIONS = (
    *("--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", "3072", "--max-num-seqs", "8"),
    *("--block-size", "32", "--kv-cache-memory-bytes", "268435456", "--enforce-eager", "--host", "127.0.0.1"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


@pytest.fixture(scope="module")
def theirs(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What `vllm serve` answers, by the request's name. It has ended before Headrace is asked: two stacks do not fit."""
    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    (folder / "headrace.toml").touch()
    environment = launch.environment(configuration.load(folder / "headrace.toml", {}), "decode")
    command = [sys.executable, "-m", "tests.e2e.vllm_serve", "serve", model_path, *OPTIONS, "--port", str(port)]
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _await_healthy(process, f"http://127.0.0.1:{port}/health", folder / "serve.log")
        return ask_all(f"http://127.0.0.1:{port}")
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


@pytest.fixture(scope="module")
def ours(theirs: dict[str, Answer], request: pytest.FixtureRequest) -> str:
    """Headrace's URL, started after the other has ended."""
    assert theirs
    running: Running = request.getfixturevalue("brought_up")
    running.await_whole()
    return running.gateway


@pytest.mark.parametrize("name", all_requests())
def test_headrace_answers_as_vllm_serve_does(name: str, theirs: dict[str, Answer], ours: str) -> None:
    assert differences(theirs[name], ask(ours, all_requests()[name])) == []
