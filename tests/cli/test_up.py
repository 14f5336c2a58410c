"""`headrace up` with the simulated engine: the source's fleet, one real process each, on free ports."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.cli import OPERATOR_EXIT
from workers.supervisor.process import members

READY_S = 60.0
"""Six Python processes start at once, and the cores may be busy."""

CONFIG = """
engine = "simulated"
nats = {{ url = "nats://127.0.0.1:0", monitor_port = 0 }}
gateway = {{ port = 0 }}
lmcache = {{ port = 0, http_port = 0 }}
up = {{ state_dir = "{state_dir}", start_timeout_s = 60.0, drain_s = 10.0 }}
"""


class Up:
    """A running `headrace up`. `shown` is what it has printed, both streams together, line by line."""

    def __init__(self, config: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "pipeline.cli", "up", "--config", str(config), *arguments]
        self.config = config
        self.shown: list[str] = []
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with self._said:
                self.shown.append(line)
                self._said.notify_all()

    def until(self, words: str) -> None:
        """Wait until a line holds `words`."""
        with self._said:
            assert self._said.wait_for(lambda: words in self.text or self.process.poll() is not None, READY_S), (
                self.text
            )
            assert words in self.text, self.text

    def end(self) -> int:
        """SIGTERM, and its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Its exit status. Reads what it still says."""
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self._reader.join(10)
            assert self.process.stdout
            self.process.stdout.close()

    @property
    def text(self) -> str:
        return "".join(self.shown)

    @property
    def endpoints(self) -> dict[str, Any]:
        state = self.config.parent / "state"
        found: dict[str, Any] = json.loads((state / "last.json").read_text("utf-8"))
        return found


def headrace(config: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pipeline.cli", *arguments, "--config", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("up")
    path = folder / "headrace.toml"
    path.write_text(CONFIG.format(state_dir=folder / "state"), "utf-8")
    return path


@pytest.fixture(scope="module")
def stack(config: Path) -> Iterator[Up]:
    up = Up(config, "--prefill", "4", "--decode", "1", "--ask", "Hello?")
    try:
        up.until("first token")
        yield up
    finally:
        up.end()


def test_it_says_what_became_ready_and_what_to_do_next(stack: Up) -> None:
    for name in ("nats", "streams", "prefill-1", "prefill-4", "decode-1", "gateway"):
        assert f"{name} ready" in stack.text
    assert f"Ready at {stack.endpoints['gateway']}" in stack.text
    assert "  curl -N " in stack.text
    assert "Ctrl-C to stop" in stack.text


def test_the_first_question_is_answered_in_the_terminal(stack: Up) -> None:
    after = stack.text.split("> Hello?\n")[1]
    assert after.strip().splitlines()[0]
    assert "handed over" in after


def test_its_endpoints_are_there_for_programs(stack: Up) -> None:
    processes = {process["name"]: process for process in stack.endpoints["processes"]}
    assert set(processes) >= {"nats", "prefill-1", "prefill-2", "prefill-3", "prefill-4", "decode-1", "gateway"}
    for process in processes.values():
        assert psutil.pid_exists(process["pid"])
        assert Path(process["log"]).exists()
    assert processes["decode-1"]["metrics"].startswith("http://127.0.0.1:")
    assert processes["gateway"]["metrics"] == f"{stack.endpoints['gateway']}/metrics"
    assert stack.endpoints["lmcache"] is None


PERSONA = "You are Zoë. " * 30


def test_a_chat_finds_the_stack_and_streams(stack: Up) -> None:
    done = headrace(stack.config, "chat", "Tell me more.", "--creator", "Zoë 🌊", "--system", PERSONA)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "first token" in done.stderr
    assert ", 0 cached" in done.stderr


def test_a_creators_second_chat_finds_its_persona_cached(stack: Up) -> None:
    replies = []
    for question in ("First?", "Second?"):
        arguments = ("chat", question, "--creator", "cached", "--system", PERSONA, "--max-tokens", "4", "--json")
        replies.append(json.loads(headrace(stack.config, *arguments).stdout))
    usages = [reply["usage"] for reply in replies]
    assert [reply["error"] for reply in replies] == [None, None]
    cold, warm = (usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert (cold, warm >= 64, warm % 32) == (0, True, 0)
    for usage in usages:
        assert (
            usage["headrace"]["decode_cached_tokens"] == usage["prompt_tokens"] // 32 * 32
        )  # what the hand-over carried
    assert {usage["headrace"]["prefill_generated_tokens"] for usage in usages} == {1}


def test_a_bench_ends_with_one_json_object(stack: Up) -> None:
    done = headrace(stack.config, "bench", "--requests", "20", "--concurrency", "4", "--json")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (outcome["requests"], outcome["completed"], outcome["errors"]) == (20, 20, 0)
    keys = {"ttft_p50_ms", "ttft_p99_ms", "e2e_p50_ms", "e2e_p99_ms", "prompt_tokens", "cached_tokens", "output_tokens"}
    assert all(outcome[key] > 0 for key in keys)


def test_the_streams_are_as_declared(stack: Up) -> None:
    environment = {**os.environ, "HEADRACE__NATS__URL": stack.endpoints["nats"]}
    command = [sys.executable, "-m", "pipeline.cli", "streams"]
    for verb in ("diff", "apply"):
        done = subprocess.run(
            [*command, verb], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout) == (0, "Streams and consumers are as declared.\n")


def test_a_second_stack_on_the_same_ports_is_refused_in_one_sentence(stack: Up) -> None:
    port = stack.endpoints["gateway"].rpartition(":")[2]
    done = headrace(stack.config, "up", "--port", port)
    assert done.returncode == OPERATOR_EXIT
    assert done.stderr.startswith(f"Port {port} on 127.0.0.1 is in use by python")
    assert done.stderr.count("\n") == 1


def test_a_worker_that_is_killed_comes_back(stack: Up) -> None:
    def worker() -> int:
        return next(int(found["pid"]) for found in stack.endpoints["processes"] if found["name"] == "prefill-2")

    former = worker()
    os.kill(former, signal.SIGKILL)
    stack.until("prefill-2 failed was ended by signal 9; starting it again")
    stack.until("prefill-2 ready again")
    assert worker() != former


def test_sigterm_leaves_nothing_running(config: Path) -> None:
    up = Up(config)
    up.until("Ctrl-C to stop")
    groups = [process["pid"] for process in up.endpoints["processes"]]
    assert all(members(group) for group in groups)
    assert up.end() == 0
    assert not any(members(group) for group in groups)
    assert up.shown[-1].partition("] ")[2].startswith("Ended after")
    run = Path(up.endpoints["folder"]).name
    assert not [path.name for path in Path("/dev/shm").iterdir() if run in path.name]


def test_an_interrupt_while_it_starts_ends_it(config: Path) -> None:
    up = Up(config)
    up.until("nats ready")
    children = psutil.Process(up.process.pid).children(recursive=True)
    assert children
    up.process.send_signal(signal.SIGINT)
    assert up.wait() == 0
    assert "Ended after" in up.text
    assert not psutil.wait_procs(children, timeout=5)[1]
