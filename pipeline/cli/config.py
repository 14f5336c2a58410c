"""`headrace config`: change what may be changed while the fleet runs, and show what holds now and why.

A change is checked here, stored in the bucket `settings` and followed by every process, whose presence says how far it is.
"""

import asyncio
import getpass
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
import typer

from pipeline.cli.listening import listening
from pipeline.cli.options import ConfigOption, configuration
from pipeline.cli.tables import age, table
from pipeline.config import Config, flat, sources, with_live
from pipeline.errors import InvalidField, OperatorError
from pipeline.paths import LOCAL_CONFIG, require
from pipeline.protocol import settings
from pipeline.protocol.settings import SETTINGS, Live

if TYPE_CHECKING:
    from pipeline.bus.connection import Bus
    from pipeline.bus.kv import Entry
    from pipeline.protocol.presence import Presences

T = TypeVar("T")

FOLLOWED_WITHIN_S: Final = 2.0
"""A process hears of a change at once, and says so a presence period later. One that was away looks again by itself."""

LOOK_PERIOD_S: Final = 0.1

app = typer.Typer(no_args_is_help=True, help="Change settings of a running fleet, and show which hold.")

KeyArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="As in the configuration: prefill.slots.", show_default=False)
]


@app.command("set")
def set_(
    key: KeyArgument,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The new value.", show_default=False)],
    config: ConfigOption = None,
) -> None:
    """Change a setting for all processes at once, until it is unset. It survives their restarts.

    `headrace config show` lists what can be changed, and from where to where.

    Example: headrace config set prefill.slots 8
    """
    chosen = configuration(config)

    async def change(bus: "Bus", presences: "Presences") -> str:
        entries = await _entries(bus)
        number = _checked(key, value, chosen, _live(entries))
        live = Live(value=number, by=f"{getpass.getuser()}@{socket.gethostname().split('.')[0]}", at_s=time.time())
        revision = await _write(bus, key, msgspec.json.encode(live), entries)
        return f"{key} = {number}. {await _followed(presences, revision)}"

    print(_run(chosen, change))


@app.command()
def unset(key: KeyArgument, config: ConfigOption = None) -> None:
    """Let a setting be again what file and environment of each process say.

    Example: headrace config unset prefill.slots
    """
    chosen = configuration(config)

    async def change(bus: "Bus", presences: "Presences") -> str:
        entries = await _entries(bus)
        if key not in entries:
            raise OperatorError(f"{key} is not set live.", "See `headrace config show`.")
        revision = await _delete(bus, key, entries)
        return f"{key} is {flat(chosen)[key]} again. {await _followed(presences, revision)}"

    print(_run(chosen, change))


@app.command()
def show(
    effective: Annotated[bool, typer.Option("--effective", help="All settings, also those of a start.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    config: ConfigOption = None,
) -> None:
    """Show what can be changed while the fleet runs, what holds now, and where it comes from.

    File and environment are those of this command; a process elsewhere may have others.

    Example: headrace config show --effective
    """
    chosen, from_where = configuration(config), sources(config or require(LOCAL_CONFIG))

    async def look(bus: "Bus", _: "Presences") -> list[dict[str, Any]]:
        return rows(chosen, from_where, _live(await _entries(bus)), everything=effective)

    found = _run(chosen, look)
    if as_json:
        print(msgspec.json.encode(found, enc_hook=str).decode())
        return
    head = ("SETTING", "VALUE", "SOURCE", "LIVE BOUNDS", "SET")
    print(table(head, [[str(cell) for cell in row.values()] for row in found]))


# --------------------------------------------------------------------------------------------------------------
# What holds


def rows(
    config: Config, from_where: Mapping[str, settings.Source], live: Mapping[str, Live], *, everything: bool
) -> list[dict[str, Any]]:
    """Each setting: its value now, its source, its live bounds, and who has set it when."""
    used, _ = settings.usable(flat(config), live)
    values = flat(with_live(config, used))
    return [
        {
            "setting": key,
            "value": _shown(key, value),
            "source": "live" if key in used else from_where.get(key, "default"),
            "bounds": _bounds(key, config),
            "set": _set(live[key]) if key in used else "",
        }
        for key, value in values.items()
        if everything or key in SETTINGS
    ]


def _shown(key: str, value: object) -> object:
    """Nothing secret: an address keeps no password, and of keys only how many there are."""
    if key == "gateway.keys":
        return f"{len(value)} keys" if isinstance(value, tuple) else value
    if key == "nats.url" and "@" in str(value):
        return str(value).partition("://")[0] + "://…@" + str(value).rpartition("@")[2]
    return value


def _bounds(key: str, config: Config) -> str:
    if (setting := SETTINGS.get(key)) is None:
        return ""
    high = flat(config)[key] if setting.started_at_most else setting.high
    return f"{setting.low:,} … {high:,}"


def _set(entry: Live) -> str:
    return f"by {entry.by}, {age(time.time() - entry.at_s)} ago"


def _checked(key: str, value: str, config: Config, live: Mapping[str, Live]) -> settings.Number:
    started = flat(config)
    effective = flat(with_live(config, settings.usable(started, live)[0]))
    try:
        return settings.parse(key, value, started, effective)
    except InvalidField as error:
        raise OperatorError(f"Not changed: {error}", "See `headrace config show`.") from None


# --------------------------------------------------------------------------------------------------------------
# The bucket


def _run(config: Config, act: "Callable[[Bus, Presences], Awaitable[T]]") -> T:
    async def connected() -> T:
        from pipeline.bus.errors import BusError

        async with listening(config, "headrace-config") as (bus, presences):
            try:
                return await act(bus, presences)
            except BusError as error:
                raise OperatorError(
                    f"The bucket of live settings does not answer: {error}.",
                    "Declare it with `headrace streams apply`, or correct nats.url.",
                ) from None

    return asyncio.run(connected())


async def _entries(bus: "Bus") -> "dict[str, Entry]":
    from pipeline.bus.kv import Bucket

    return await Bucket(bus, settings.BUCKET).load()


def _live(entries: "Mapping[str, Entry]") -> dict[str, Live]:
    found, _ = settings.readable((key, entry.value) for key, entry in entries.items())
    return found


async def _write(bus: "Bus", key: str, value: bytes, entries: "Mapping[str, Entry]") -> int:
    from pipeline.bus.errors import ApiError
    from pipeline.bus.kv import WRONG_REVISION, Bucket

    try:
        revision = entries[key].revision if key in entries else 0
        return await Bucket(bus, settings.BUCKET).write(key, value, revision)
    except ApiError as error:
        if error.err_code != WRONG_REVISION:
            raise
        raise OperatorError(
            f"Not changed: somebody else has changed {key} in this moment.", "Look at it, and decide again."
        ) from None


async def _delete(bus: "Bus", key: str, entries: "Mapping[str, Entry]") -> int:
    from pipeline.bus.kv import Bucket

    bucket = Bucket(bus, settings.BUCKET)
    await bucket.delete(key, entries[key].revision)
    return await bucket.version()


async def _followed(presences: "Presences", revision: int) -> str:
    """How many of the processes that live say that they have followed, once all have, or after a while."""
    from pipeline import outside

    until_s = time.monotonic() + FOLLOWED_WITHIN_S
    while True:
        now_s = outside.monotonic_s()
        live = [peer for role in ("gateway", "prefill", "decode") for peer in presences.live(role, now_s)]
        behind = sorted(peer.id for peer in live if peer.settings < revision)
        if not behind or time.monotonic() > until_s:
            break
        await asyncio.sleep(LOOK_PERIOD_S)
    followed = f"{len(live) - len(behind)} of {len(live)} processes have followed"
    return f"{followed}; not yet {', '.join(behind)}." if behind else f"{followed}."
