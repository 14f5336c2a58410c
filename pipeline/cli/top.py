"""`headrace top`: the pipeline while it runs."""

import asyncio
import io
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from pipeline.cli.listening import listening
from pipeline.cli.options import ConfigOption, configuration

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.config import Config

INTERVAL_S: Final = 2.0
INTERVAL_S_MIN: Final = 0.5
INTERVAL_S_MAX: Final = 60.0

PIPED_WIDTH: Final = 160
"""Of a page that goes to no terminal: all columns."""


def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print one page, and leave.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead: a line each time, with everything.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=INTERVAL_S_MIN, max=INTERVAL_S_MAX, help="Seconds between two looks.")
    ] = INTERVAL_S,
    config: ConfigOption = None,
) -> None:
    """Watch the pipeline: pools, shards, credits, queues, latencies, slowest requests.

    `?` shows the keys, `q` leaves. Only what is on the screen is asked for.

    Example: headrace top --once
    """
    asyncio.run(_top(configuration(config), once=once, as_json=as_json, interval_s=interval))


async def _top(config: "Config", *, once: bool, as_json: bool, interval_s: float) -> None:
    from pipeline.top.gather import Watch
    from pipeline.top.screen import Screen, check_terminal
    from pipeline.top.snapshot import EVERYTHING

    console = console_of()
    if not (once or as_json):
        check_terminal(console)
        _quiet_logs()
    async with listening(config, "headrace-top") as (bus, presences):
        watch = Watch(bus, presences, config)
        if not (once or as_json):
            await Screen(console, watch, interval_s).run()
            return
        while True:
            now = await watch.look(EVERYTHING)
            if as_json:
                print(msgspec.json.encode(now).decode(), flush=True)
            else:
                from pipeline.top.frames import page

                console.print(page(now, console.width))
            if once:
                return
            await asyncio.sleep(interval_s)


def console_of() -> "Console":
    """The terminal, or what else reads our output: that gets as wide a page as there is."""
    from rich.console import Console

    plain = Console(highlight=False, markup=False, emoji=False)
    return plain if plain.is_terminal else Console(highlight=False, markup=False, emoji=False, width=PIPED_WIDTH)


def _quiet_logs() -> None:
    """What the connection would log stands on the screen already."""
    from pipeline.telemetry import logs

    logs.configure("top", io.StringIO(), {logs.LEVEL_VARIABLE: "error"})
