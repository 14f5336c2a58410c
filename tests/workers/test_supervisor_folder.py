"""The folder of a run."""

import os
import time
from pathlib import Path

import pytest

from pipeline.cli import client
from pipeline.errors import OperatorError
from workers.supervisor import folder


def test_old_runs_are_pruned_and_running_ones_stay(tmp_path: Path) -> None:
    old = [f"2026010{day}-120000-{2**22 + day}" for day in range(1, 8)]
    for name in (*old, f"20250101-000000-{os.getpid()}"):
        (tmp_path / "runs" / name / "logs").mkdir(parents=True)
    created = folder.create(tmp_path, folder.name_of(time.gmtime(1_800_000_000), 2**22))
    assert created.name == "20270115-080000-4194304"
    kept = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert kept == [f"20250101-000000-{os.getpid()}", *old[-4:], created.name]


def test_a_state_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder should be")
    with pytest.raises(OperatorError, match=r"Cannot write .* Set up\.state_dir"):
        folder.create(tmp_path, "run")


def test_the_endpoints_of_a_running_stack_are_found(tmp_path: Path) -> None:
    run = folder.create(tmp_path, "run")
    folder.write_endpoints(run, {"pid": os.getpid(), "gateway": "http://127.0.0.1:1"})
    folder.write_endpoints(run, {"pid": os.getpid(), "gateway": "http://127.0.0.1:2", "more": []})
    found = client.last_run(tmp_path / client.LAST_RUN)
    assert found is not None
    assert found.gateway == "http://127.0.0.1:2"
    assert (tmp_path / client.LAST_RUN).resolve() == run / "endpoints.json"


def test_the_endpoints_of_a_dead_stack_are_not(tmp_path: Path) -> None:
    run = folder.create(tmp_path, "run")
    folder.write_endpoints(run, {"pid": 2**22 + 1, "gateway": "http://127.0.0.1:1"})
    assert client.last_run(tmp_path / client.LAST_RUN) is None
    assert client.last_run(tmp_path / "none.json") is None


def test_shared_memory_of_runs_that_were_killed_is_removed(tmp_path: Path) -> None:
    names = ("pool-20260101-120000-4194305", f"pool-20260101-120000-{os.getpid()}", "pool", "other-4194305")
    for name in names:
        (tmp_path / name).touch()
    folder.remove_stale(tmp_path / "pool")
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])


def test_a_tail_shows_only_the_present_life(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("old\nnew 1\n\nnew 2\n")
    assert folder.tail(log, 4, 5) == ["new 1", "new 2"]
    assert folder.tail(log, 0, 1) == ["new 2"]
    assert folder.tail(tmp_path / "none.log", 0, 1) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"event": "engine_started", "level": "info"}', "engine started"),
        ("{no json", "{no json"),
        (
            "(EngineCore pid=412) INFO 11-29 15:17:11 [core.py:95] Initializing a V1 LLM engine",
            "Initializing a V1 LLM engine",
        ),
        ("[2026-11-29 15:17:11,120] LMCache INFO: started", "LMCache INFO: started"),
        ("INFO 11-29 15:17:11 [core.py:95] \x1b[32mLoading\x1b[0m", "Loading"),
        ("Preparing the model", "Preparing the model"),
        ("x" * 200, "x" * 89 + "…"),
    ],
)
def test_a_log_line_becomes_a_short_remark(line: str, expected: str) -> None:
    assert folder.note([line]) == expected


def test_no_line_is_no_remark() -> None:
    assert folder.note([]) == ""
