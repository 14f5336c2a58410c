"""`configs/tuning.md` tells of every setting that the files make, and what it says of changes is what `streams apply` does."""

import re
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from pipeline.bus.streams import FIXED
from pipeline.paths import JETSTREAM

GUIDE: Final = (JETSTREAM.parent / "tuning.md").read_text()
ROWS: Final = [line.split("|")[1:-1] for line in GUIDE.splitlines() if line.startswith("| `")]
NOT_SETTINGS: Final = frozenset({"name", "durable_name", "description"})


def named(cell: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", cell))


def settings(path: Path) -> set[str]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).keys() - NOT_SETTINGS


@pytest.mark.parametrize("path", sorted(JETSTREAM.glob("*.json")), ids=lambda path: path.name)
def test_every_setting_of_every_file_is_told_of(path: Path) -> None:
    told = set[str]().union(*(named(row[0]) for row in ROWS))
    assert settings(path) - told == set()


def test_what_cannot_be_changed_in_place_is_said_and_nothing_else() -> None:
    said = set[str]().union(*(named(row[0]) for row in ROWS if "**no**" in row[-1]))
    used = set[str]().union(*(settings(path) for path in JETSTREAM.glob("*.json")))
    assert said - {"priority_groups"} == FIXED["stream"].union(FIXED["consumer"]) & used


def test_each_row_has_all_columns() -> None:
    assert {len(row) for row in ROWS} == {6}
