"""What no linter checks of how the code is written."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pipeline", "gateway", "workers")

TOP_LEVEL = {"pyproject.toml", "pipeline", "workers", "gateway", "configs", "tests", "README.md", "LICENSE"}
GENERATED = {"headrace.egg-info", "build", "dist", "__pycache__"}

FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 450

WITHOUT_A_LOOP = {"workers/engines/connector.py"}
"""Runs in vLLM's scheduler, a process without an event loop."""

SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_functions_and_files_can_be_seen_whole(path: Path) -> None:
    long = [f"{node.name}:{node.lineno}" for node in functions(path) if lines(node) > FUNCTION_LINES_MAX]
    assert not long
    assert len(path.read_text("utf-8").splitlines()) <= FILE_LINES_MAX


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno
    return node.end_lineno - node.lineno + 1


def test_the_tree_has_the_agreed_shape() -> None:
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - GENERATED
    assert found <= TOP_LEVEL


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_nothing_blocks_the_event_loop_by_sleeping(path: Path) -> None:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    blocking = [f"{path.name}:{call.lineno}" for call in calls if ast.unparse(call) == "time.sleep"]
    assert bool(blocking) == (name(path) in WITHOUT_A_LOOP)


def test_the_readme_and_ci_run_the_same_command() -> None:
    command = (ROOT / ".ci" / "run").read_text("utf-8").strip().splitlines()[-1]
    assert command.endswith("python -m tests")
    assert command in (ROOT / "README.md").read_text("utf-8")
