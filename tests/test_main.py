"""The gates: what is said of several runs of pytest, and which failures are tried again."""

from collections.abc import Callable

import pytest

from tests import __main__ as gates
from tests.__main__ import Ran

CLEAN = Ran(0, "===== 3 passed, 1 warning in 61.50s (0:01:01) =====", False)
FAILED = Ran(1, "=== 1 failed, 3 passed, 2 errors in 2.25s ===", False)
CRASHED = Ran(1, "=== 1 failed, 3 passed in 2.00s ===", True)
INTERRUPTED = Ran(2, "!!! Interrupted: 1 error during collection !!!", False)

Runs = Callable[[list[Ran], list[str]], list[tuple[str, ...]]]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Have pytest end as told, one run after the other; returns the arguments of each."""

    def told(ends: list[Ran], failed: list[str]) -> list[tuple[str, ...]]:
        asked: list[tuple[str, ...]] = []

        def run(*arguments: str) -> Ran:
            asked.append(arguments)
            return ends[len(asked) - 1]

        monkeypatch.setattr(gates, "pytest", run)
        monkeypatch.setattr(gates, "failed", lambda: failed)
        return asked

    return told


def test_the_closing_lines_are_added() -> None:
    assert gates.added([CLEAN, FAILED]) == "===== 2 error, 1 failed, 6 passed, 1 warning in 63.75s ====="
    assert gates.added([CLEAN, FAILED], forgiven=True) == "===== 9 passed, 1 warning in 63.75s ====="
    assert gates.added([CLEAN, INTERRUPTED]) == "===== 3 passed, 1 warning, 1 without a result in 61.50s ====="


def test_what_all_passes_is_run_once(runs: Runs) -> None:
    asked = runs([CLEAN, CLEAN], [])
    assert gates.tested([]) == (True, "===== 6 passed, 2 warning in 123.00s =====", [])
    assert len(asked) == 2


def test_a_few_failures_are_tried_again_and_named(runs: Runs) -> None:
    asked = runs([FAILED, CLEAN, CLEAN], ["tests/test_a.py::test_a"])
    assert gates.tested([])[0::2] == (True, ["tests/test_a.py::test_a"])
    assert asked[2] == ("--last-failed",)


def test_who_fails_again_has_failed(runs: Runs) -> None:
    runs([FAILED, CLEAN, FAILED], ["tests/test_a.py::test_a"])
    good, closing, unsteady = gates.tested([])
    assert (good, unsteady) == (False, [])
    assert "1 failed" in closing


@pytest.mark.parametrize(
    ("end", "names"),
    [
        (FAILED, [f"tests/test_a.py::test_{number}" for number in range(gates.AGAIN_MAX + 1)]),
        (FAILED, ["tests/test_a.py"]),
        (FAILED, []),
        (CRASHED, ["tests/test_a.py::test_a"]),
        (INTERRUPTED, ["tests/test_a.py::test_a"]),
    ],
    ids=["too many", "a file that cannot be read", "nothing by name", "a crash", "an interruption"],
)
def test_what_is_no_accident_is_not_tried_again(runs: Runs, end: Ran, names: list[str]) -> None:
    asked = runs([end, CLEAN], names)
    assert not gates.tested([])[0]
    assert len(asked) == 2


def test_arguments_go_to_one_run(runs: Runs) -> None:
    asked = runs([FAILED], ["tests/test_a.py::test_a"])
    assert gates.tested(["tests/bus", "-x"])[0] is False
    assert asked == [("tests/bus", "-x")]
