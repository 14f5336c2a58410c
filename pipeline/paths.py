"""Where our own files lie: the configurations that come with the project, and the folder that keeps state.

The configurations are files beside the packages, so that an operator can read, copy and change them.
"""

from pathlib import Path
from typing import Final

from pipeline.errors import OperatorError

CONFIGS: Final = Path(__file__).resolve().parent.parent / "configs"
"""The folder `configs` of the checkout that this package was installed from (`pip install -e .`)."""

LOCAL_CONFIG: Final = CONFIGS / "local.toml"
"""The default of every `--config`."""

JETSTREAM: Final = CONFIGS / "jetstream"
"""Streams and consumers, one JSON file each."""

PLANNING: Final = CONFIGS / "planning"
"""What `headrace plan` knows of models, hardware and transports."""

NATS_CONFIG: Final = CONFIGS / "nats" / "local.conf"
"""The broker that `headrace up` starts."""


def require(path: Path) -> Path:
    """`path`, which must exist. Raises `OperatorError` where it does not."""
    if not path.exists():
        raise OperatorError(
            f"There is no {path}.", "Install headrace from a checkout (pip install -e .), or give --config."
        )
    return path


def state_folder(state_dir: str) -> Path:
    """`up.state_dir` with `~` resolved."""
    return Path(state_dir).expanduser()
