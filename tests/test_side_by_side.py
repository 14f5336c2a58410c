"""Several processes of pytest said as one: their progress at once, the rest in one piece, and one closing line."""

import sys
from pathlib import Path

from tests.side_by_side import Group, Result, added, run_all

SAID = """\
tests/bus/test_acks.py ....F                                  [ 50%]
=================================== FAILURES ===================================
the reason
=========================== short test summary info ============================
FAILED tests/bus/test_acks.py::test_one[a - b, c] - AssertionError: no - never
ERROR tests/bus/test_acks.py::test_two - OSError
============= 1 failed, 3 passed, 1 error in 61.50s (0:01:01) =============
"""


def group(name: str, said: str, status: int = 0) -> Group:
    """A process that says this, and ends so."""
    return Group(name, (sys.executable, "-c", f"import sys; sys.stdout.write({said!r}); sys.exit({status})"), ())


def result(closing: str) -> Result:
    return Result(group("any", ""), 0, closing, ())


def test_what_a_process_says_is_read(tmp_path: Path) -> None:
    said: list[str] = []
    [result] = run_all([group("bus", SAID, 1)], tmp_path, said.append)
    assert result.status == 1
    assert result.ran
    assert result.failed == ("tests/bus/test_acks.py::test_one[a - b, c]", "tests/bus/test_acks.py::test_two")
    assert dict(result.counts) == {"failed": 1, "passed": 3, "error": 1}
    progress, rest = said
    assert progress.endswith("[ 50%]\n")
    assert "the reason" in rest
    assert "[ 50%]" not in rest


def test_processes_run_at_once_and_are_told_in_the_order_of_their_groups(tmp_path: Path) -> None:
    waits = "import pathlib, time\nwhile not pathlib.Path('there').exists(): time.sleep(0.01)"
    writes = "open('there', 'w').close()"
    groups = [Group(name, (sys.executable, "-c", code), ()) for name, code in (("waits", waits), ("writes", writes))]
    assert [result.group.name for result in run_all(groups, tmp_path, lambda _: None)] == ["waits", "writes"]


def test_one_closing_line_for_all() -> None:
    results = [
        result("===== 1 failed, 2 passed, 1 error in 2.50s ====="),
        result("== 40 passed, 2 errors in 100.25s (0:01:40) =="),
    ]
    assert added(results) == "===== 3 error, 1 failed, 42 passed in 102.75s ====="
    assert added(results, forgiven=True) == "===== 46 passed in 102.75s ====="


def test_what_was_not_run_to_its_end_is_told_from_what_has_failed(tmp_path: Path) -> None:
    broken = "ERROR tests/bus/test_acks.py\n===== 1 error in 0.50s ====="
    results = run_all([group("not collected", broken, 2), group("killed", "...", 137)], tmp_path, lambda _: None)
    assert not any(result.ran for result in results)


def test_a_process_that_has_died_is_not_lost_among_those_that_passed() -> None:
    assert (
        added([result("== 40 passed in 1.00s =="), result("Killed")])
        == "===== 40 passed, 1 without a result in 1.00s ====="
    )
