"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from pipeline.config import Config, load
from pipeline.paths import LOCAL_CONFIG, require

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file. Default: the project's configs/local.toml.", show_default=False),
]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", help="The gateway. Default: that of the running `headrace up`.", show_default=False),
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        help="PEM file of who has signed the gateway's certificate. Default: the running stack's own, or the system's.",
        show_default=False,
    ),
]


def configuration(path: Path | None) -> Config:
    """The configuration of `--config`, or the project's own. Raises `OperatorError`."""
    return load(path or require(LOCAL_CONFIG))
