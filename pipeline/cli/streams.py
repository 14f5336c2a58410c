"""`headrace streams`: declare the streams and consumers of `configs/jetstream`, or show what differs."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.options import ConfigOption, configuration

app = typer.Typer(
    no_args_is_help=True,
    help="Declare the streams and consumers, or show what differs.",
)

FolderOption = Annotated[
    Path | None,
    typer.Option("--folder", help="JSON files. Default: the project's configs/jetstream.", show_default=False),
]


@app.command()
def apply(config: ConfigOption = None, folder: FolderOption = None) -> None:
    """Create what is missing and update what differs. Applying twice changes nothing."""
    changed = asyncio.run(_with_bus(config, folder, change=True))
    print("\n".join(changed) if changed else "Streams and consumers are as declared.")


@app.command()
def diff(config: ConfigOption = None, folder: FolderOption = None) -> None:
    """Show what `apply` would change. Exits with 1 where there is something."""
    differing = asyncio.run(_with_bus(config, folder, change=False))
    print("\n".join(differing) if differing else "Streams and consumers are as declared.")
    raise typer.Exit(1 if differing else 0)


async def _with_bus(config_path: Path | None, folder: Path | None, *, change: bool) -> list[str]:
    from pipeline.bus import streams
    from pipeline.bus.connection import Bus
    from pipeline.paths import JETSTREAM, require

    config = configuration(config_path)
    declared = streams.declared(folder or require(JETSTREAM), config.nats.replicas)
    async with await Bus.connect(config.nats, "headrace-streams") as bus:
        found = await streams.apply(bus, declared) if change else await streams.diff(bus, declared)
    return [str(item) for item in found]
