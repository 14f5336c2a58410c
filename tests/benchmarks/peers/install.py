"""The peers' own environments: `python -m tests.benchmarks.peers.install [--home ~/.cache/headrace/peers]`.

What goes into them is pinned in `router.lock` and `dynamo.lock`. Dynamo's own requirement `aisimulate` is left out: neither its
frontend nor its mocker imports it, and what the package index has under this name is a stub that points elsewhere.
"""

import subprocess
import sys
import venv
from pathlib import Path
from typing import Annotated, Final

import typer

from pipeline.errors import OperatorError

HOME: Final = Path("~/.cache/headrace/peers")
INSTALL_S: Final = 900.0

ROUTER: Final = "router"
DYNAMO: Final = "dynamo"

LOCKS: Final = {name: Path(__file__).with_name(f"{name}.lock") for name in (ROUTER, DYNAMO)}


def python(home: Path, peer: str) -> Path:
    """The interpreter of a peer's environment. Raises `OperatorError` where it has not been made, or of other versions."""
    place = _place(home, peer)
    if not _made(place, peer):
        raise OperatorError(
            f"{place} is not an environment with {LOCKS[peer].name}.",
            f"Run python -m tests.benchmarks.peers.install --home {home}.",
        )
    return place / "bin" / "python"


def versions(peer: str, wanted: tuple[str, ...]) -> dict[str, str]:
    """What the lock pins of these packages."""
    pins = dict(line.split("==") for line in LOCKS[peer].read_text().split())
    return {name: pins[name] for name in wanted}


def install(home: Path, peer: str) -> None:
    """Make the environment, unless it is there. Raises `subprocess.CalledProcessError` where pip fails."""
    place = _place(home, peer)
    if _made(place, peer):
        return
    venv.create(place, with_pip=True, clear=True)
    command = [str(place / "bin" / "pip"), "install", "--quiet", "--no-deps", "-r", str(LOCKS[peer])]
    subprocess.run(command, check=True, timeout=INSTALL_S)
    _mark(place).write_text(LOCKS[peer].read_text())


def _place(home: Path, peer: str) -> Path:
    return home.expanduser() / peer


def _mark(place: Path) -> Path:
    """Written last: an environment with it is whole, and of these versions."""
    return place / "installed.lock"


def _made(place: Path, peer: str) -> bool:
    return _mark(place).is_file() and _mark(place).read_text() == LOCKS[peer].read_text()


def main(home: Annotated[Path, typer.Option(help="The folder for them.")] = HOME) -> None:
    """Install vllm-router and Dynamo, each into an environment of its own; what is there already stays."""
    for peer in LOCKS:
        sys.stderr.write(f"{peer} …\n")
        install(home, peer)


if __name__ == "__main__":
    typer.run(main)
