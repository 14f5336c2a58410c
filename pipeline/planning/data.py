"""The files of `configs/planning`, and an operator's own in their form: TOML tables by name, checked entry by entry."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipeline.errors import OperatorError
from pipeline.paths import PLANNING, require

T = TypeVar("T")


def names(file: str) -> list[str]:
    """The names in one of our files, such as `hardware.toml`."""
    return list(_tables(require(PLANNING / file)))


def entry(file: str, name: str, of: type[T]) -> T:
    """The table `name` of one of our files. Raises `OperatorError` naming those that there are."""
    tables = _tables(require(PLANNING / file))
    if name not in tables:
        raise OperatorError(
            f"There is no {name!r} in configs/planning/{file}.",
            f"Take one of {', '.join(tables)}, or a file of your own.",
        )
    return convert(tables[name], of, f"{name!r} in configs/planning/{file}")


def own(path: Path, of: type[T]) -> T:
    """The only table of an operator's own TOML file, named or not. Raises `OperatorError`."""
    tree = _tables(path)
    tables = [value for value in tree.values() if isinstance(value, dict)]
    return convert(tables[0] if len(tables) == 1 == len(tree) else tree, of, str(path))


def convert(tree: Any, of: type[T], where: str) -> T:
    """`tree` as what it should be. Raises `OperatorError` naming the entry that is wrong."""
    try:
        return msgspec.convert(tree, of)
    except msgspec.ValidationError as error:
        raise OperatorError(f"{where}: {error}.", "Correct that entry.") from None


def _tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise OperatorError(f"Cannot read {path}: {error.strerror}.", "Give an existing file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OperatorError(f"{path} is not TOML: {error}.", "Correct it there.") from None
