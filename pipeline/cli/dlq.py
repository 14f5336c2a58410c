"""`headrace dlq`: look at the requests that were not tried again, try them again after all, or drop them.

A replay is published under an id of its own before its dead letter is deleted. The id comes from the letter's place in the DLQ:
a replay that was cut off between the two, and is repeated soon, is not published twice.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import typer

from pipeline.cli.options import ConfigOption, configuration
from pipeline.cli.tables import age, table
from pipeline.errors import CapacityError, OperatorError, RequestError

if TYPE_CHECKING:
    from pipeline.bus.connection import Bus
    from pipeline.bus.reading import Kept
    from pipeline.config import Config
    from pipeline.protocol.dead_letters import Letter

app = typer.Typer(no_args_is_help=True, help="Show dead requests, replay or drop them.")

Reason = Literal["malformed", "poison", "exhausted", "expired", "terminated"]

ReasonOption = Annotated[Reason | None, typer.Option("--reason", help="Only what died of this.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
AllOption = Annotated[bool, typer.Option("--all", help="All that there are now, or all of a --reason.")]
Sequences = Annotated[
    list[int] | None, typer.Argument(metavar="[SEQUENCE]...", help="As `list` shows them.", show_default=False)
]

STORE_TIMEOUT_S: Final = 5.0

BODY_SHOWN_MAX: Final = 20_000
"""Characters of a body that `show` prints for people; --json prints all of it."""


@app.command("list")
def list_(
    reason: ReasonOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="The oldest so many.")] = 100,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Show what lies there, the oldest first.

    Example: headrace dlq list --reason malformed
    """
    from pipeline import outside

    found, total = _run(config, lambda bus, _: _listed(bus, reason, limit))
    rows = [_row(kept, outside.unix_s()) for kept in found]
    if as_json:
        _print_json(rows)
        return
    head = ("SEQUENCE", "REASON", "CLASS", "CREATOR", "AGE", "BYTES", "WHY")
    print(
        table(
            head,
            [
                (
                    str(row["sequence"]),
                    row["reason"],
                    row["class"],
                    row["creator"],
                    age(row["age_s"]),
                    row["bytes"],
                    row["why"],
                )
                for row in rows
            ],
        )
    )
    if len(found) == limit < total:
        print(f"The DLQ holds {total:,}: --limit shows more.")


@app.command()
def show(
    sequence: Annotated[int, typer.Argument(min=1, help="As `list` shows it.", show_default=False)],
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Print one request: why it died, its headers, and its body.

    Example: headrace dlq show 12
    """
    from pipeline import outside

    kept = _run(config, lambda bus, _: _one(bus, sequence))
    body = _body(kept)
    if as_json:
        _print_json({**_row(kept, outside.unix_s()), "headers": dict(kept.headers), "body": body})
        return
    print(f"Subject: {kept.subject}")
    for name, value in sorted(kept.headers.items()):
        print(f"{name}: {value}")
    text = body if isinstance(body, str) else msgspec.json.format(msgspec.json.encode(body)).decode()
    print(f"\n{text[:BODY_SHOWN_MAX]}")
    if len(text) > BODY_SHOWN_MAX:
        print(f"… and {len(text) - BODY_SHOWN_MAX:,} characters more: --json prints them.")


@app.command()
def replay(
    sequences: Sequences = None,
    every: AllOption = False,
    reason: ReasonOption = None,
    reply_to: Annotated[
        str | None,
        typer.Option("--reply-to", help="Send the replies here, where their receivers are gone.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Publish requests again, and take them out of the DLQ. The time that each may take begins anew.

    Example: headrace dlq replay 12 --reply-to replies.operator.12
    """

    async def one(bus: "Bus", kept: "Kept") -> dict[str, Any]:
        return {"replayed_as": await _replay(bus, kept, reply_to)}

    _each(config, _chosen(sequences, every=every, reason=reason), one, "replayed", as_json=as_json, reply_to=reply_to)


@app.command()
def drop(
    sequences: Sequences = None,
    every: AllOption = False,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Delete requests for good.

    Example: headrace dlq drop --all --reason expired
    """

    async def one(bus: "Bus", kept: "Kept") -> dict[str, Any]:
        return {}

    _each(config, _chosen(sequences, every=every, reason=reason), one, "dropped", as_json=as_json)


# --------------------------------------------------------------------------------------------------------------
# Which, and what of each

Choice = tuple[list[int], str | None]
"""Sequences; or none, and a reason, or any."""


def _chosen(sequences: list[int] | None, *, every: bool, reason: str | None) -> Choice:
    """Raises `typer.BadParameter` where it is not clear which are meant."""
    if bool(sequences) == every:
        raise typer.BadParameter("Give sequences, or --all (with --reason R: all of that reason).")
    if sequences and reason:
        raise typer.BadParameter("--reason goes with --all: sequences say by themselves which are meant.")
    return (sequences or [], reason)


async def _those(bus: "Bus", choice: Choice) -> AsyncIterator["tuple[int, Kept | None]"]:
    """The chosen ones. `--all` ends with the last that is there at the start: what dies again meanwhile is not one of them."""
    from pipeline.bus import reading
    from pipeline.protocol.dead_letters import STREAM

    sequences, reason = choice
    for sequence in sequences:
        yield sequence, await reading.get(bus, STREAM, sequence)
    if not sequences:
        last = (await reading.state(bus, STREAM)).last
        async for kept in _from(bus, 1, reason):
            if kept.sequence > last:
                return
            yield kept.sequence, kept


async def _from(bus: "Bus", sequence: int, reason: str | None) -> AsyncIterator["Kept"]:
    from pipeline.bus import reading
    from pipeline.protocol.dead_letters import STREAM

    while (kept := await reading.next_from(bus, STREAM, sequence, f"dlq.{reason or '*'}.>")) is not None:
        yield kept
        sequence = kept.sequence + 1


async def _listed(bus: "Bus", reason: str | None, limit: int) -> "tuple[list[Kept], int]":
    from pipeline.bus import reading
    from pipeline.protocol.dead_letters import STREAM

    found: list[Kept] = []
    async for kept in _from(bus, 1, reason):
        found.append(kept)
        if len(found) == limit:
            break
    return found, (await reading.state(bus, STREAM)).messages


async def _one(bus: "Bus", sequence: int) -> "Kept":
    from pipeline.bus import reading
    from pipeline.protocol.dead_letters import STREAM

    kept = await reading.get(bus, STREAM, sequence)
    if kept is None:
        raise OperatorError(f"The DLQ holds no {sequence}.", "See `headrace dlq list`.")
    return kept


def _letter(kept: "Kept") -> "Letter":
    from pipeline.protocol import dead_letters

    return dead_letters.read(kept.subject, kept.headers)


def _row(kept: "Kept", now_s: float) -> dict[str, Any]:
    letter = _letter(kept)
    request = letter.request
    return {
        "sequence": kept.sequence,
        "reason": letter.reason,
        "class": letter.klass,
        "creator": request.creator if request else "",
        "affinity": request.affinity if request else "",
        "age_s": round(max(0.0, now_s - kept.stored_at_s), 1),
        "bytes": len(kept.data),
        "why": f"{letter.param}: {letter.why}" if letter.param else letter.why,
        "code": letter.code,
        "deliveries": letter.deliveries,
        "stream": letter.stream,
        "stream_sequence": letter.sequence,
        "body": letter.body,
    }


def _body(kept: "Kept") -> Any:
    """The request as a tree, or as text where it is none."""
    from pipeline.protocol import chat, dead_letters

    try:
        data = dead_letters.content(_letter(kept), kept.data)
    except RequestError as error:
        return f"({error})"
    try:
        return chat.to_map(data)
    except RequestError:
        return data.decode("utf-8", "backslashreplace")


# --------------------------------------------------------------------------------------------------------------
# What is done to each

One = Callable[["Bus", "Kept"], Awaitable[dict[str, Any]]]


async def _replay(bus: "Bus", kept: "Kept", reply_to: str | None) -> int | None:
    """Publish it; its new sequence, or None where that has happened before. Raises `RequestError` and `CapacityError`."""
    from pipeline.bus.errors import Duplicate
    from pipeline.protocol import dead_letters

    made = dead_letters.replay(_letter(kept), kept.data, kept.headers, reply_to)
    try:
        return await bus.store(
            made.subject,
            made.data,
            dead_letters.replay_id(kept.sequence, kept.stored_at_s),
            STORE_TIMEOUT_S,
            made.headers,
        )
    except Duplicate:
        return None


def _each(
    config_path: Path | None, choice: Choice, one: One, done: str, *, as_json: bool, reply_to: str | None = None
) -> None:
    """Do it to each and say so; exit status 1 where it did not work for all."""

    async def all_of_them(bus: "Bus", config: "Config") -> list[dict[str, Any]]:
        _check_reply_to(reply_to, config)
        return [await _tried(bus, sequence, kept, one, done) async for sequence, kept in _those(bus, choice)]

    outcomes = _run(config_path, all_of_them)
    if as_json:
        _print_json(outcomes)
    else:
        for outcome in outcomes:
            print(
                f"{outcome['sequence']}: {done}."
                if outcome[done]
                else f"{outcome['sequence']}: not {done}: {outcome['why']}"
            )
        print(f"{sum(outcome[done] for outcome in outcomes):,} {done} of {len(outcomes):,}.")
    if not all(outcome[done] for outcome in outcomes):
        raise typer.Exit(1)


async def _tried(bus: "Bus", sequence: int, kept: "Kept | None", one: One, done: str) -> dict[str, Any]:
    from pipeline.bus import reading
    from pipeline.protocol.dead_letters import STREAM

    if kept is None:
        return {"sequence": sequence, done: False, "why": "The DLQ does not hold it."}
    try:
        more = await one(bus, kept)
    except (RequestError, CapacityError) as error:
        return {"sequence": sequence, done: False, "why": str(error)}
    await reading.delete(bus, STREAM, sequence)
    return {"sequence": sequence, done: True, **more}


def _check_reply_to(reply_to: str | None, config: "Config") -> None:
    from pipeline.protocol.subjects import matches

    allowed = config.requests.reply_subjects
    if reply_to is not None and not any(matches(pattern, reply_to) for pattern in allowed):
        raise OperatorError(
            f"A worker would not publish to {reply_to!r}.", f"Give a subject under {', '.join(allowed)}."
        )


# --------------------------------------------------------------------------------------------------------------
# The broker


def _run(config_path: Path | None, act: "Callable[[Bus, Config], Awaitable[Any]]") -> Any:
    async def connected() -> Any:
        config = configuration(config_path)
        async with _broker(config) as bus:
            return await act(bus, config)

    return asyncio.run(connected())


@asynccontextmanager
async def _broker(config: "Config") -> AsyncIterator["Bus"]:
    from pipeline.bus.connection import Bus
    from pipeline.bus.errors import BusError

    try:
        async with await Bus.connect(config.nats, "headrace-dlq") as bus:
            yield bus
    except BusError as error:
        raise OperatorError(
            f"The DLQ does not answer: {error}.", "Start the broker; `headrace streams apply`."
        ) from None


def _print_json(tree: Any) -> None:
    print(msgspec.json.encode(tree).decode())
