"""One child process, ended with all that it has started. The children are tiny programs that misbehave."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import anyio
import psutil
import pytest

from workers.supervisor.process import Process, members

IGNORES_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""

FORKS = """
import os, signal, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
time.sleep(600)
"""

OBEYS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("up", flush=True)
time.sleep(600)
"""


def start(folder: Path, program: str) -> Process:
    return Process.start("child", [sys.executable, "-c", program], {"COLOUR": "green"}, folder / "child.log")


async def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    with anyio.fail_after(limit_s):
        while not condition():
            await anyio.sleep(0.01)


async def started(process: Process) -> None:
    await until(lambda: "up" in process.log.read_text())


def gone(group: int) -> bool:
    return not members(group)


def shared(segment: Path) -> bool:
    return segment.exists()


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(test())


def test_a_child_that_obeys_ends_with_its_own_status(tmp_path: Path) -> None:
    async def test() -> None:
        process = start(tmp_path, OBEYS)
        await started(process)
        assert await process.end(10.0, anyio.Event()) == 7
        assert gone(process.pid)

    run(test)


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    async def test() -> None:
        process = start(tmp_path, IGNORES_SIGTERM)
        await started(process)
        began_s = time.monotonic()
        assert await process.end(0.3, anyio.Event()) == -signal.SIGKILL
        assert 0.3 <= time.monotonic() - began_s < 5.0

    run(test)


def test_a_second_signal_ends_the_grace(tmp_path: Path) -> None:
    async def test() -> None:
        process, hurry = start(tmp_path, IGNORES_SIGTERM), anyio.Event()
        await started(process)
        hurry.set()
        with anyio.fail_after(5.0):
            assert await process.end(60.0, hurry) == -signal.SIGKILL

    run(test)


def test_grandchildren_end_with_their_group(tmp_path: Path) -> None:
    async def test() -> None:
        process = start(tmp_path, FORKS)
        await started(process)
        assert len(members(process.pid)) == 2
        await process.end(5.0, anyio.Event())
        assert gone(process.pid)

    run(test)


def test_grandchildren_of_a_killed_child_are_cleared(tmp_path: Path) -> None:
    async def test() -> None:
        process = start(tmp_path, FORKS)
        await started(process)
        os.kill(process.pid, signal.SIGKILL)
        assert await process.wait() == -signal.SIGKILL
        assert await process.clear() == -signal.SIGKILL
        assert gone(process.pid)
        assert await process.end(1.0, anyio.Event()) == -signal.SIGKILL  # ended already: nothing happens

    run(test)


LEAVES_SHARED_MEMORY = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(sys.argv[1], create=True, size=4096)
print("up", flush=True)
time.sleep(600)
"""


def test_shared_memory_of_a_killed_child_is_removed(tmp_path: Path) -> None:
    name = f"headrace_test_{os.getpid()}"
    segment = Path("/dev/shm", name)

    async def test() -> None:
        command = [sys.executable, "-c", LEAVES_SHARED_MEMORY, name]
        process = Process.start("child", command, {}, tmp_path / "child.log")
        await started(process)
        assert shared(segment)
        os.kill(process.pid, signal.SIGKILL)
        await process.clear()
        assert gone(process.pid)
        assert not shared(segment)

    run(test)


def test_a_child_with_cores_stays_there_with_all_that_it_starts(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)

    async def test() -> None:
        command = [sys.executable, "-c", FORKS]
        process = Process.start("child", command, {}, tmp_path / "child.log", (core,))
        await started(process)
        assert [os.sched_getaffinity(pid) for pid in members(process.pid)] == [{core}, {core}]
        await process.end(0.0, anyio.Event())

    run(test)
    assert os.sched_getaffinity(0) == before, "we stay where we were"


def test_many_may_wait_for_one_child(tmp_path: Path) -> None:
    async def test() -> None:
        process, statuses = start(tmp_path, OBEYS), list[int]()

        async def wait() -> None:
            statuses.append(await process.wait())

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            group.start_soon(wait)
            await started(process)
            await process.end(5.0, anyio.Event())
        assert statuses == [7, 7]

    run(test)


def test_a_log_keeps_earlier_lives_and_the_environment_reaches_the_child(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "child.log").write_text("before\n")
        process = start(tmp_path, "import os; print(os.environ['COLOUR'])")
        assert await process.wait() == 0
        await process.clear()
        assert process.log_offset == len("before\n")
        assert process.log.read_text() == "before\ngreen\n"

    run(test)


def test_a_program_that_does_not_exist_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nonsense"):
        Process.start("child", ["/nowhere/nonsense"], {}, tmp_path / "child.log")


PARENT = """
import pathlib, sys, time
from workers.supervisor.process import Process
process = Process.start("child", [sys.executable, "-c", "import time; time.sleep(600)"], {}, pathlib.Path(sys.argv[1]))
print(process.pid, flush=True)
time.sleep(600)
"""


def test_a_child_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "child.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    assert not psutil.wait_procs([child], timeout=10)[1]
