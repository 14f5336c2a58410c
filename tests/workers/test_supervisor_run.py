"""The life of a stack, with tiny programs in place of real parts."""

import asyncio
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest
from rich.console import Console

from pipeline.config import Config, Up
from pipeline.errors import OperatorError
from workers.supervisor.checks import free_ports
from workers.supervisor.plan import Answers, Ended, Stage, Unit
from workers.supervisor.process import members
from workers.supervisor.run import Stack
from workers.supervisor.screen import Screen

CONFIG = Config(up=Up(start_timeout_s=20.0, drain_s=4.0))

SERVES = """
import http.server, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Told:
    """A screen that keeps its lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = io.StringIO()
        console = Console(file=self._file, width=200)
        self.screen = Screen(console, console)

    @property
    def text(self) -> str:
        return self._file.getvalue()


@pytest.fixture
def told(tmp_path: Path) -> Told:
    (tmp_path / "state" / "runs" / "run" / "logs").mkdir(parents=True)
    return Told(tmp_path)


def server(name: str, **fields: object) -> Unit:
    port = free_ports(1)[0]
    unit = Unit(
        name=name,
        command=(sys.executable, "-c", SERVES, str(port)),
        ready=Answers(f"http://127.0.0.1:{port}/"),
        stage=Stage.WORKERS,
    )
    return msgspec.structs.replace(unit, **fields)


def step(name: str, program: str, **fields: object) -> Unit:
    unit = Unit(name=name, command=(sys.executable, "-c", program), ready=Ended(), stage=Stage.WORKERS)
    return msgspec.structs.replace(unit, **fields)


class Running:
    """A stack that runs while its test looks at it."""

    def __init__(self, stack: Stack, told: Told) -> None:
        self.stack = stack
        self.told = told

    def pid(self, name: str) -> int:
        process = self.stack._slots[name].process
        assert process
        return process.pid

    async def ready_again(self, name: str, unless: int) -> None:
        await until(lambda: self.pid(name) != unless and self.stack._slots[name].ready.is_set())


async def until(condition: Callable[[], bool], limit_s: float = 15.0) -> None:
    with anyio.fail_after(limit_s):
        while not condition():
            await anyio.sleep(0.02)


def stack_of(units: list[Unit], told: Told, config: Config = CONFIG) -> Stack:
    return Stack(config, units, told.folder / "state" / "runs" / "run", told.screen)


def run(units: list[Unit], told: Told, test: Callable[[Running], object], config: Config = CONFIG) -> list[int]:
    """Run `units`; once they are ready, `test`, then SIGTERM to ourselves. The process ids that there were at the end."""
    pids: list[int] = []

    async def main() -> None:
        stack = stack_of(units, told, config)

        async def live() -> None:
            await test(Running(stack, told))  # type: ignore[misc]
            pids.extend(slot.process.pid for slot in stack._slots.values() if slot.process)
            os.kill(os.getpid(), signal.SIGTERM)

        await stack.run(live)

    asyncio.run(main())
    assert not any(members(pid) for pid in pids)
    return pids


async def nothing(running: Running) -> None:
    assert "ready" in running.told.text


def test_units_start_after_what_they_need_and_end_in_order(told: Told) -> None:
    order = told.folder / "order"
    note = f"open({str(order)!r}, 'a').write"
    units = [
        step("second", f"{note}('second ')", after=("first",)),
        step("first", f"import time; time.sleep(0.2); {note}('first ')"),
        server("third", after=("first", "second")),
    ]
    assert len(run(units, told, nothing)) == 3
    assert order.read_text() == "first second "
    assert "Stopping" in told.text
    assert "Ended after" in told.text


def test_what_dies_is_started_again(told: Told) -> None:
    async def test(running: Running) -> None:
        former = running.pid("server")
        os.kill(former, signal.SIGKILL)
        await running.ready_again("server", former)

    run([server("server")], told, test)
    assert "server failed was ended by signal 9; starting it again" in told.text


def test_what_falls_together_is_started_again_together_and_in_order(told: Told, tmp_path: Path) -> None:
    segment = tmp_path / "segment"
    segment.write_text("left behind by an earlier life")

    async def test(running: Running) -> None:
        assert not segment.exists()
        segment.write_text("left behind by this life")
        store, worker, other = (running.pid(name) for name in ("store", "worker", "other"))
        os.kill(store, signal.SIGKILL)
        await running.ready_again("store", store)
        await running.ready_again("worker", worker)
        assert not segment.exists()
        assert running.pid("other") == other
        assert not members(worker)

    units = [
        server("worker", after=("store",), falls_with=("store",)),
        server("store", leftovers=(segment,), stage=Stage.STORE),
        server("other", after=("store",)),
    ]
    run(units, told, test)
    assert "worker stopping falls with store" in told.text


def test_a_worker_that_dies_alone_leaves_the_store_alone(told: Told) -> None:
    async def test(running: Running) -> None:
        store, worker = running.pid("store"), running.pid("worker")
        os.kill(worker, signal.SIGKILL)
        await running.ready_again("worker", worker)
        assert running.pid("store") == store

    run([server("store"), server("worker", after=("store",), falls_with=("store",))], told, test)


def test_endpoints_tell_the_present_processes(told: Told) -> None:
    target = told.folder / "state" / "last.json"

    async def test(running: Running) -> None:
        def listed() -> int:
            return int(msgspec.json.decode(target.read_bytes())["processes"][0]["pid"])

        former = running.pid("server")
        assert listed() == former
        os.kill(former, signal.SIGKILL)
        await running.ready_again("server", former)
        await until(lambda: listed() == running.pid("server"))

    run([step("step", ""), server("server")], told, test)


def test_a_child_that_ignores_sigterm_does_not_hold_up_the_end(told: Told) -> None:
    stubborn = SERVES.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
    unit = server("server")
    units = [msgspec.structs.replace(unit, command=(sys.executable, "-c", stubborn, unit.command[-1]))]
    run(units, told, nothing, Config(up=Up(drain_s=0.5)))


def failing(units: list[Unit], told: Told, config: Config = CONFIG) -> OperatorError:
    """The error that starting these ends with."""

    async def main() -> None:
        await stack_of(units, told, config).run(anyio.sleep_forever)

    with pytest.raises(BaseExceptionGroup) as info:
        asyncio.run(main())
    errors, others = info.value.split(OperatorError)
    assert others is None
    assert errors is not None
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, OperatorError)
    return found


def test_a_step_that_fails_ends_the_start_and_shows_its_log(told: Told) -> None:
    error = failing([server("server"), step("step", "print('no such model'); raise SystemExit(1)")], told)
    assert error.problem == "step cannot be kept running: it ended with exit status 1."
    assert error.remedy.endswith("step.log.")
    assert "    no such model" in told.text


def test_a_unit_that_never_becomes_ready_is_given_up(told: Told) -> None:
    unit = server("server")
    error = failing([msgspec.structs.replace(unit, command=(sys.executable, "-c", "raise SystemExit(3)"))], told)
    assert "died 5 times before it was ready; the last time it ended with exit status 3" in error.problem


def test_a_start_that_takes_too_long_says_what_it_waited_for(told: Told) -> None:
    hangs = step("hangs", "import time; time.sleep(600)")
    error = failing([server("server"), hangs], told, Config(up=Up(start_timeout_s=1.5)))
    assert "Not ready after 1.5 s: still waiting for hangs." in error.problem


def test_a_program_that_does_not_exist_is_said(told: Told) -> None:
    unit = msgspec.structs.replace(server("server"), command=("/nowhere/nonsense",))
    assert "Cannot start server" in failing([unit], told).problem


def test_a_signal_during_the_start_ends_it(told: Told) -> None:
    async def main() -> None:
        stack = stack_of([step("hangs", "import time; time.sleep(600)")], told)

        async def interrupt() -> None:
            await until(lambda: stack._slots["hangs"].process is not None)
            os.kill(os.getpid(), signal.SIGINT)

        async with anyio.create_task_group() as group:
            group.start_soon(stack.run, anyio.sleep_forever)
            group.start_soon(interrupt)
        process = stack._slots["hangs"].process
        assert process
        assert not members(process.pid)

    asyncio.run(main())
