"""`python -m tests.clients` as it is called. The clients themselves are not run here, but for the SDK that we have anyway."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pipeline.cli import OPERATOR_EXIT
from tests.clients.__main__ import CLIENTS, chosen
from tests.clients.benchmarks import VllmBench
from tests.clients.client import Client, ClientFailed, Job, Load, run
from tests.clients.results import RESULTS, Result
from tests.e2e.running import ROOT


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    run = [sys.executable, "-m", "tests.clients", *arguments]
    wide = os.environ | {"COLUMNS": "200"}
    return subprocess.run(run, cwd=ROOT, env=wide, capture_output=True, text=True, timeout=110, check=False)


def test_help_names_every_client_and_shows_how_to_run_one() -> None:
    told = command("--help").stdout
    assert [name for name in CLIENTS if name not in told] == []
    assert "Example: python -m tests.clients" in told


def test_a_stranger_is_refused_with_what_there_is() -> None:
    done = command("--only", "curl")
    assert done.returncode == OPERATOR_EXIT
    assert done.stderr.splitlines()[-1].startswith("There is no client 'curl'. --only takes openai-sdk, vllm-bench")


def test_a_gateway_that_is_not_there_is_said_so_in_one_sentence() -> None:
    done = command("--only", "openai-sdk", "--url", "http://127.0.0.1:9")
    assert done.returncode == OPERATOR_EXIT
    assert done.stderr.splitlines()[-1].startswith("http://127.0.0.1:9 does not answer")


def test_the_sdk_counts_what_headrace_counts(tmp_path: Path) -> None:
    done = command("--only", "openai-sdk", "--requests", "8", "--json", "--keep", str(tmp_path))
    (result,) = msgspec.json.decode(done.stdout, type=list[Result])
    assert not result.failed, done.stderr
    counts = {row.what: row for row in result.rows if not row.what.endswith("ms")}
    assert (counts["requests"].client, counts["output tokens"].client) == (8, 240)
    assert all(row.ok for row in counts.values()), "its times are no test: the cores may be busy"
    assert json.loads((tmp_path / "openai-sdk.json").read_text())["client"] == "openai-sdk"
    assert done.stderr.splitlines()[0] == "openai-sdk: the openai SDK, streaming"


def job_in(folder: Path) -> Job:
    return Job(
        gateway="http://127.0.0.1:8000",
        model="smol",
        tokenizer=folder / "model",
        load=Load(requests=7, concurrency=3),
        folder=folder / "out",
        programs=folder / "venv" / "bin",
    )


@pytest.mark.parametrize("client", chosen([]), ids=lambda client: client.name)
def test_a_command_has_the_load_and_is_told_without_places_of_this_machine(client: Client, tmp_path: Path) -> None:
    job = job_in(tmp_path)
    asked = " ".join(client.command(job))
    assert all(number in asked.replace("=", " ").replace(",", " ").split() for number in ("7", "3"))
    assert str(tmp_path) not in client.told(job)
    assert "127.0.0.1:8000" not in client.told(job)


def test_a_program_that_fails_tells_the_last_of_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(ClientFailed, match=r"status 3\nno tokenizer"):
        run(("/bin/sh", "-c", "echo no tokenizer; exit 3"), tmp_path / "output.txt", {}, 10.0)
    with pytest.raises(ClientFailed, match=r"still running after 0\.1 s"):
        run(("/bin/sleep", "30"), tmp_path / "output.txt", {}, 0.1)


def test_what_a_program_has_started_ends_with_it(tmp_path: Path) -> None:
    os.mkfifo(held := tmp_path / "held")
    with open(os.open(held, os.O_RDONLY | os.O_NONBLOCK), "rb") as end:
        with pytest.raises(ClientFailed, match="still running"):
            run(("/bin/sh", "-c", f"sleep 60 > {held} & wait"), tmp_path / "output.txt", {}, 0.5)
        assert select.select([end], [], [], 5.0)[0], "whoever had it open is gone"


def test_a_report_that_is_not_there_is_a_client_that_failed(tmp_path: Path) -> None:
    class Silent(VllmBench):
        def command(self, job: Job) -> tuple[str, ...]:
            return ("/bin/true",)

    (job := job_in(tmp_path)).folder.mkdir()
    with pytest.raises(ClientFailed, match="its report cannot be read"):
        Silent().run(job)


@pytest.mark.parametrize("name", CLIENTS)
def test_every_client_has_a_kept_result_of_its_present_version_that_agrees(name: str) -> None:
    result = msgspec.json.decode((RESULTS / f"{name}.json").read_bytes(), type=Result)
    assert result.client == name
    assert result.ok
    assert result.rows
    for package in CLIENTS[name].packages:
        assert package.endswith(f"=={result.version}")
