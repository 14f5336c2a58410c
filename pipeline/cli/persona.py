"""`headrace persona`: publish whose voice replies have, and look at what is published.

A file is the system prompt as it is; one that ends in `.toml` or `.json` has `system`, and `template` with arguments of the chat
template. Each `put` is a version, which its owner warms up at once; requests under way keep the one that they began with.
"""

import asyncio
import sys
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
import typer

from pipeline.cli.options import ConfigOption, configuration
from pipeline.cli.tables import age, table
from pipeline.errors import OperatorError, RequestError

if TYPE_CHECKING:
    from pipeline.bus.connection import Bus
    from pipeline.bus.personas import Published
    from pipeline.bus.reading import Kept
    from pipeline.protocol.personas import Persona

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, help="Publish personas of creators, and show them.")

Creator = Annotated[str, typer.Argument(metavar="CREATOR", help="As its requests name it.", show_default=False)]
TenantOption = Annotated[str, typer.Option("--tenant", help="Whose creator it is.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]

SHOWN_CHARS: Final = 60
"""Of a system prompt in a table."""


@app.command()
def put(
    creator: Creator,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The system prompt, .toml or .json; - is stdin.", show_default=False)
    ],
    tenant: TenantOption = "",
    config: ConfigOption = None,
) -> None:
    """Publish a version. One that is the same as the last is none.

    Example: headrace persona put ada ada.txt
    """
    persona = _from_file(creator, tenant, file)

    async def publish(bus: "Bus") -> "Published":
        return await _put(bus, persona)

    revision, new = _run(config, publish)
    print(f"{creator}: version {revision} is published." if new else f"{creator}: version {revision} says the same.")


@app.command()
def get(
    creator: Creator,
    version: Annotated[int | None, typer.Option("--version", help="As `history` shows it.", show_default=False)] = None,
    tenant: TenantOption = "",
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Print a persona: the last version, or another that is still kept.

    Example: headrace persona get ada
    """
    kept = [row for row in _history(config, creator, tenant) if version in (None, row["version"])]
    if not kept:
        what = creator if version is None else f"version {version} of {creator}"
        raise OperatorError(
            f"There is no persona {what}.", "See `headrace persona list` and `headrace persona history`."
        )
    if as_json:
        _print_json(kept[-1])
        return
    print(kept[-1]["system"])
    if kept[-1]["template"]:
        print(f"\ntemplate: {msgspec.json.encode(kept[-1]['template']).decode()}", file=sys.stderr)


@app.command("list")
def list_(as_json: JsonOption = False, config: ConfigOption = None) -> None:
    """Show the last version of every creator's persona."""
    from pipeline.protocol.personas import BUCKET

    async def load(bus: "Bus") -> list[dict[str, Any]]:
        from pipeline.bus import reading

        subjects = await reading.subjects_of(bus, f"KV_{BUCKET}", f"$KV.{BUCKET}.>")
        found = [await reading.last_of(bus, f"KV_{BUCKET}", subject) for subject in sorted(subjects)]
        return [_row(kept) for kept in found if kept is not None and kept.data]

    _show(_run(config, load), as_json=as_json)


@app.command()
def history(
    creator: Creator, tenant: TenantOption = "", as_json: JsonOption = False, config: ConfigOption = None
) -> None:
    """Show the versions that are kept, the oldest first.

    Example: headrace persona history ada
    """
    _show(_history(config, creator, tenant), as_json=as_json)


def _history(config: Path | None, creator: str, tenant: str) -> list[dict[str, Any]]:
    async def load(bus: "Bus") -> list[dict[str, Any]]:
        from pipeline.bus import reading
        from pipeline.protocol.personas import BUCKET

        subject, rows = f"$KV.{BUCKET}.{_key(creator, tenant)}", list[dict[str, Any]]()
        kept = await reading.next_from(bus, f"KV_{BUCKET}", 1, subject)
        while kept is not None:
            if kept.data:  # else NATS's own tools have deleted the key
                rows.append(_row(kept))
            kept = await reading.next_from(bus, f"KV_{BUCKET}", kept.sequence + 1, subject)
        return rows

    return _run(config, load)


def _key(creator: str, tenant: str) -> str:
    from pipeline.protocol import personas, subjects

    return personas.key_of(subjects.token(creator), tenant)


def _from_file(creator: str, tenant: str, file: Path) -> "Persona":
    """Raises `OperatorError` where the file says no persona."""
    from pipeline.protocol import subjects
    from pipeline.protocol.personas import Persona

    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
        fields: Any = {"system": text.strip()}
        if file.suffix == ".toml":
            fields = tomllib.loads(text)
        elif file.suffix == ".json":
            fields = msgspec.json.decode(text)
        if not isinstance(fields, dict) or not fields.keys() <= {"system", "template"}:
            raise OperatorError(f"{file} holds other fields than system and template.", "Take them out.")
        return msgspec.convert(
            {"type": "persona", **fields, "creator": subjects.token(creator), "tenant": tenant}, Persona
        )
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"Cannot read {file}: {error}.", "Give a text file in UTF-8.") from None
    except (tomllib.TOMLDecodeError, msgspec.MsgspecError) as error:
        raise OperatorError(
            f"{file} is no persona: {error}.", "It needs system, a text; see `headrace persona`."
        ) from None


async def _put(bus: "Bus", persona: "Persona") -> "Published":
    from pipeline.bus import personas
    from pipeline.bus.errors import ApiError

    try:
        return await personas.put(bus, persona)
    except RequestError as error:
        raise OperatorError(str(error), "Nothing was published.") from None
    except ApiError as error:
        raise OperatorError(
            f"Not published: {error}.", "If somebody else has just published one, look, and try again."
        ) from None


def _row(kept: "Kept") -> dict[str, Any]:
    from pipeline import outside
    from pipeline.protocol import personas

    row: dict[str, Any] = {"version": kept.sequence, "age_s": round(max(0.0, outside.unix_s() - kept.stored_at_s), 1)}
    try:
        persona = personas.read(kept.data)
    except RequestError as error:
        return {**row, "creator": kept.subject.rpartition(".")[2], "tenant": "", "system": f"({error})", "template": {}}
    return {**row, **msgspec.to_builtins(persona)}


def _show(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        _print_json(rows)
        return
    head = ("CREATOR", "TENANT", "VERSION", "AGE", "CHARACTERS", "SYSTEM")
    lines = [
        (row["creator"], row["tenant"], row["version"], age(row["age_s"]), len(row["system"]), _begin(row["system"]))
        for row in rows
    ]
    print(table(head, lines))


def _begin(system: str) -> str:
    line = " ".join(system.split())
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS - 1]}…"


def _run(config_path: Path | None, work: "Callable[[Bus], Awaitable[T]]") -> T:
    from pipeline.bus.connection import Bus
    from pipeline.bus.errors import BusError

    config = configuration(config_path)

    async def connected() -> T:
        try:
            async with await Bus.connect(config.nats, "headrace-persona") as bus:
                return await work(bus)
        except BusError as error:
            raise OperatorError(
                f"The personas do not answer: {error}.", "Start the broker; `headrace streams apply`."
            ) from None

    return asyncio.run(connected())


def _print_json(tree: Any) -> None:
    print(msgspec.json.encode(tree).decode())
