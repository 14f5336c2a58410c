"""Real parts for the end-to-end tests: a prepared model, an LMCache server, engines in processes of their own.

The model is prepared once, into `HEADRACE_STATE_DIR` or `~/.cache/headrace`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec
import pytest

from pipeline import config as configuration
from pipeline.config import Config
from tests.e2e.engines import Reply
from tests.e2e.running import PREFILL_WORKERS, Running, await_ready
from tests.ports import free_port
from workers.engines import launch

ROOT = Path(__file__).parents[2]
ENGINES = "[model]\ndtype = 'float32'\nmax_model_len = 3072\ntool_parser = 'hermes'\n"
"""How all engines that are compared with each other are set up. In bfloat16 near-ties come out differently (`test_split.py`)."""
SMALL_DECODE = "[decode]\nkv_cache_bytes = 160_000_000\n"
"""3,400 tokens in float32: room for one full context, as vLLM demands, and not for a dozen short requests: some must wait."""
PORTS = (
    "[nats]\nurl = 'nats://127.0.0.1:0'\nmonitor_port = 0\n[gateway]\nport = 0\n[lmcache]\nport = 0\nhttp_port = 0\n"
)
START_S = 90.0
"""For an LMCache server to answer: it imports torch, and there may be one busy core."""


@pytest.fixture(scope="session")
def model_path() -> str:
    """The default model, prepared by the command that `headrace up` uses."""
    state_dir = os.environ.get("HEADRACE_STATE_DIR", "~/.cache/headrace")
    command = [sys.executable, "-m", "workers.engines.model", "--source", "smollm2", "--state-dir", state_dir]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=180, text=True)
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A configuration file whose LMCache server runs. At its end the server and its shared memory are gone."""
    with lmcache_server(tmp_path_factory.mktemp("stack"), "e2e") as path:
        yield path


@contextlib.contextmanager
def lmcache_server(folder: Path, name: str, more: str = "") -> Iterator[Path]:
    """The configuration file of an LMCache server that runs; `more` lines are of its table. At the end nothing of it is left."""
    path = folder / "headrace.toml"
    lmcache = f"[lmcache]\nport = {free_port()}\nhttp_port = {free_port()}\nshm_name = '{name}-{os.getpid()}'\n{more}"
    path.write_text(ENGINES + lmcache)
    config = configuration.load(path, {})
    segment = launch.shm_path(config)
    assert segment is not None
    with (folder / "lmcache.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "workers.engines.store", "--config", str(path)], cwd=ROOT, stdout=log, stderr=log
        )
        try:
            _await_healthy(config, server, folder / "lmcache.log")
            yield path
        finally:
            server.terminate()
            server.wait(20)
            segment.unlink(missing_ok=True)


def _await_healthy(config: Config, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, f"lmcache server ended: {log.read_text()[-2000:]}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{config.lmcache.http_port}/healthcheck", timeout=1):
                return
        except OSError:
            time.sleep(0.1)  # between two questions; nothing tells us
    pytest.fail(f"lmcache server did not answer within {START_S} s: {log.read_text()[-2000:]}")


Engines = Callable[..., bytes]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Runs `python -m tests.e2e.engines` and returns the JSON that it prints."""
    folder = tmp_path_factory.mktemp("engines")

    def run(*arguments: str, timeout_s: float) -> bytes:
        temporary = tempfile.TemporaryDirectory(prefix="engines-")  # a short path, for sockets, and theirs alone
        with (folder / f"{arguments[0]}.log").open("w+") as log, temporary as path:
            return _run(arguments, log, timeout_s, {**os.environ, "TMPDIR": path})

    return run


def _run(arguments: tuple[str, ...], log: IO[str], timeout_s: float, environment: Mapping[str, str]) -> bytes:
    command = [sys.executable, "-m", "tests.e2e.engines", *arguments]
    # A session of its own, so that what vLLM has started can be ended with it, whatever happens.
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, start_new_session=True
    ) as process:
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    log.seek(0)
    assert process.returncode == 0, f"{command[3:]} failed: {log.read()[-4000:]}"
    return out


@pytest.fixture(scope="session")
def reference_replies(engines: Engines, model_path: str, tmp_path_factory: pytest.TempPathFactory) -> list[Reply]:
    """What one plain vLLM engine answers to each of `PROMPTS`, in order. About 50 s."""
    path = tmp_path_factory.mktemp("reference") / "headrace.toml"
    path.write_text(ENGINES)
    return msgspec.json.decode(engines("reference", model_path, str(path), timeout_s=300), type=list[Reply])


@pytest.fixture
def running(stacks: "Stacks") -> Running:
    """The running stack, whole: earlier tests may have killed parts of it."""
    running = stacks.up()
    running.await_whole()
    return running


class Stacks:
    """`headrace up`, one at a time: two do not fit. `model` are lines of that table beside those of `ENGINES`."""

    def __init__(self, folder: Path, model_path: str) -> None:
        self._folder = folder
        self._model_path = model_path
        self._present = contextlib.ExitStack()
        self._running: tuple[str, Running] | None = None
        self._count = 0

    def up(self, model: str = "") -> Running:
        """The stack with this model, ready: the present one, or one in its place."""
        if self._running is None or self._running[0] != model:
            self.down()
            self._count += 1
            folder = self._folder / str(self._count)
            folder.mkdir()
            self._running = (model, self._present.enter_context(brought_up(folder, self._model_path, model)))
        return self._running[1]

    def down(self) -> None:
        """End the present one, if there is one."""
        self._running = None
        self._present.close()


@pytest.fixture(scope="package")
def stacks(tmp_path_factory: pytest.TempPathFactory, model_path: str) -> Iterator[Stacks]:
    """The stack that all tests share, and others in its place."""
    stacks = Stacks(tmp_path_factory.mktemp("up"), model_path)
    try:
        yield stacks
    finally:
        stacks.down()


@contextlib.contextmanager
def brought_up(folder: Path, model_path: str, model: str) -> Iterator[Running]:
    """`headrace up`, ready. At its end nothing is left: no process, no shared memory."""
    config, log = folder / "headrace.toml", folder / "up.log"
    config.write_text(
        f"{PORTS}{ENGINES}{model}[requests]\ndefault_max_tokens = 256\n{SMALL_DECODE}"
        # All seats for batch, too: what dies in a test has the time of batch, and nothing else is asked beside it.
        f"[classes]\ndecode_room = 0.0\n[up]\nprefill = {PREFILL_WORKERS}\nstate_dir = '{folder}'\n"
    )
    with up(config, log, folder, model_path) as running:
        yield running


@contextlib.contextmanager
def up(config: Path, log: Path, folder: Path, model_path: str, *options: str) -> Iterator[Running]:
    """`headrace up` with its state in `folder`, ready. At its end nothing of it is left."""
    command = [sys.executable, "-m", "pipeline.cli", "up", "--config", str(config), "--model", model_path, *options]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
    try:
        running = await_ready(process, folder / "last.json", log)
        yield running
        pids = running.pids
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()[-3000:]
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert not list(Path("/dev/shm").glob(f"*-{process.pid}")), "its KV segment has its process id in its name"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
