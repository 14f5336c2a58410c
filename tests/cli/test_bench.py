"""`headrace bench`: what its options mean, what it prints, and how it ends."""

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from pipeline.bench.session import Plan
from pipeline.bench.tally import Report
from pipeline.cli import bench
from pipeline.cli.bench_options import Asked
from pipeline.cli.client import Gateway
from pipeline.cli.main import program
from pipeline.errors import OperatorError
from tests.bench.server import Script, Served, refusal, reply, serving

WHOLE = reply("Pa", "ris")
FULL = refusal("503 Service Unavailable", '{"error":{"message":"Full.","code":"overloaded"}}', "Retry-After: 1")


def against(script: Script, act: Callable[[str], Any]) -> tuple[Any, Served]:
    """What `act` returns, in a thread, beside a gateway's double whose URL it gets."""

    async def main() -> tuple[Any, Served]:
        async with serving(script) as served:
            return await asyncio.to_thread(act, served.url), served

    return asyncio.run(main())


def run(script: Script, *arguments: str) -> tuple[int, str, str, Served]:
    """Exit status, both streams, and what the server saw."""
    done, served = against(
        script, lambda url: CliRunner().invoke(program(), ["bench", "--url", url, *arguments], catch_exceptions=False)
    )
    return done.exit_code, done.stdout, done.stderr, served


def planned(**asked: Any) -> Plan:
    return asyncio.run(bench.planned(Asked(**asked), Gateway("http://127.0.0.1:1")))


# What options mean


def test_without_options_it_is_twenty_requests_four_at_a_time() -> None:
    plan = planned()
    assert plan.times_s is None
    assert (plan.bounds.requests, plan.bounds.in_flight, plan.bounds.duration_s) == (20, 4, None)
    assert (plan.slo, plan.loop) == (None, "closed loop, 4 at a time")


def test_a_rate_makes_an_open_loop() -> None:
    plan = planned(rate=4.0, arrivals="constant", duration=60.0, warm_up=5.0, slo_ttft_ms=200.0)
    assert plan.times_s is not None
    assert list(itertools.islice(plan.times_s, 3)) == [0.0, 0.25, 0.5]
    assert (plan.bounds.requests, plan.bounds.duration_s, plan.bounds.warm_up_s) == (None, 60.0, 5.0)
    assert plan.bounds.in_flight > 100
    assert plan.slo is not None
    assert plan.loop == "open loop, 4/s constant"


def test_the_seed_scenario_on_a_gateway_is_an_open_loop_of_its_own_rate() -> None:
    plan = planned(scenario="seed", duration=10.0)
    assert plan.loop == "open loop, 10/s poisson"
    assert len(msgspec.json.decode(next(plan.orders).body)["messages"]) > 10
    assert planned(scenario="seed", concurrency=2).loop == "closed loop, 2 at a time"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"rate": 1.0, "concurrency": 2}, "open loop"),
        ({"trace": Path("t"), "scenario": "seed"}, "both say what to send"),
        ({"trace": Path("t"), "rate": 1.0}, "Use --speed"),
        ({"speed": 2.0}, "of a replay"),
        ({"scenario": "scale", "rate": 1.0}, "No scenario 'scale' runs on a gateway"),
    ],
)
def test_options_that_contradict_each_other_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(OperatorError, match=words):
        Asked(**asked).check()


def test_the_same_prompts_come_again_where_they_are_wanted() -> None:
    assert next(planned(warm=True).orders) == next(planned(warm=True).orders)
    assert next(planned().orders) != next(planned().orders)


# What is printed


def test_it_ends_with_one_json_object() -> None:
    status, out, err, served = run(lambda _: WHOLE, "--requests", "8", "--concurrency", "3", "--json")
    report = msgspec.json.decode(out.splitlines()[-1], type=Report)
    assert (status, report.requests, report.completed, report.errors) == (0, 8, 8, 0)
    assert (report.prompt_tokens, len(served.bodies)) == (8 * 70, 8)
    assert "8 of 8" in err


def test_the_keys_of_old_are_there() -> None:
    _, out, _, _ = run(lambda _: WHOLE, "--json")
    keys = {
        "requests", "completed", "errors", "ttft_p50_ms", "ttft_p99_ms", "e2e_p50_ms", "e2e_p99_ms", "prompt_tokens",
        "cached_tokens", "output_tokens", "duration_s", "error_messages",
    }  # fmt: skip
    assert keys <= json.loads(out.splitlines()[-1]).keys()


def test_people_get_a_table() -> None:
    status, out, _, _ = run(lambda _: WHOLE, "--requests", "4", "--slo-itl-ms", "1000")
    assert status == 0
    assert out.startswith("requests  4, 4 whole, 0 failed; ")
    assert "between tokens" in out
    assert "100.0% of requests: 99 % of gaps within 1000 ms" in out


def test_what_was_not_whole_shows_in_the_exit_status() -> None:
    status, out, err, _ = run(lambda number: [FULL] if number == 2 else WHOLE, "--rate", "50", "--requests", "5")
    assert status == 1
    assert "4 whole, 1 refused for now, 0 failed" in out
    assert "1 × HTTP 503: Full." in out
    assert "1 refused, 0 failed" in err


def test_on_a_terminal_one_line_is_rewritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    asked = Asked(requests=4, concurrency=1)
    report, _ = against(lambda _: [0.3, *WHOLE], lambda url: asyncio.run(bench.measured(asked, Gateway(url))))
    assert report.completed == 4
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.count("\r\033[K") >= 2
    assert shown.endswith("\n")


# How it ends


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in running:
        process.kill()
        process.wait()


def interrupted(times: int, script: Script, started: list["subprocess.Popen[str]"]) -> tuple[int, Report, Served]:
    """A bench of a minute that gets so many Ctrl-C once four requests have come."""
    come = threading.Event()

    def noticed(number: int) -> Any:
        if number == 3:
            come.set()
        return script(number)

    def act(url: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pipeline.cli", "bench", "--url", url, "--duration", "60", "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert come.wait(30)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            come.clear()
            come.wait(0.3)  # two at once would be one
        out, _ = process.communicate(timeout=30)
        return process.returncode, out

    (status, out), served = against(noticed, act)
    return status, msgspec.json.decode(out.splitlines()[-1], type=Report), served


def test_ctrl_c_lets_end_what_runs_and_prints_what_there_is(started: list["subprocess.Popen[str]"]) -> None:
    status, report, served = interrupted(1, lambda _: [0.3, *WHOLE], started)
    assert (status, report.interrupted) == (bench.INTERRUPTED_EXIT, True)
    assert report.requests == report.completed == len(served.bodies) >= 4


def test_a_second_ctrl_c_leaves_what_runs(started: list["subprocess.Popen[str]"]) -> None:
    status, report, _ = interrupted(2, lambda _: [60.0, *WHOLE], started)
    assert (status, report.completed, report.left) == (bench.INTERRUPTED_EXIT, 0, 4)


def test_a_scenario_in_virtual_time_asks_no_gateway() -> None:
    done = CliRunner().invoke(program(), ["bench", "--scenario", "other"])
    assert isinstance(done.exception, OperatorError)
    done = CliRunner().invoke(program(), ["bench", "--scenario", "seed", "--engine", "vllm", "--rate", "1"])
    assert "Use --engine simulated, or --url for a gateway" in str(done.exception)
