"""Stacks to shares, and clear words where there is nothing to look with, or at."""

import shutil

import pytest

from pipeline.errors import OperatorError
from tests.benchmarks.flames import shares, stacks


def test_a_functions_share_is_its_own_and_that_of_all_it_calls() -> None:
    lines = ["main (a.py:1);work (a.py:9) 30", "main (a.py:1);work (a.py:10);deep (b.py:2) 15", "main (a.py:2) 5"]
    assert shares(lines) == [
        ("work (a.py)", 0.6, 0.9),
        ("deep (b.py)", 0.3, 0.3),
        ("main (a.py)", 0.1, 1.0),
    ]
    assert shares([]) == []


@pytest.mark.anyio
async def test_without_py_spy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(OperatorError, match="pip install py-spy"):
        await stacks("gateway-1", 1.0, 1.0)
