"""What is left out of our processes, and nobody else's imports."""

import subprocess
import sys

import pytest

from pipeline.imports import without


def python(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_what_is_left_out_cannot_be_imported_until_it_is_over() -> None:
    with without("colorsys"), pytest.raises(ImportError):
        import colorsys
    import colorsys

    before = colorsys
    with without("colorsys"):
        pass
    assert sys.modules["colorsys"] is before


@pytest.mark.parametrize("name", ["aiohttp", "rich"])
def test_a_worker_has_it_only_where_somebody_else_imports_it(name: str) -> None:
    ours = "import sys, workers.runtime, workers.command, workers.engines.simulated"
    python(f"{ours}; assert {name!r} not in sys.modules; import {name}")
    python(f"import {name}; {ours}; assert sys.modules[{name!r}] is {name}")
