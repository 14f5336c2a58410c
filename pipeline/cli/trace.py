"""`headrace trace`: the life of one request, stage by stage, as the processes remember it that have worked on it.

All are asked at once on `control.trace.<name>`; who knows nothing of it does not answer.
"""

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from pipeline.cli.options import ConfigOption, configuration
from pipeline.errors import OperatorError

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.protocol.records import Record

ANSWER_S: Final = 1.0
"""Processes answer within milliseconds, busy ones later, and how many will nobody knows."""

BAR_WIDTH: Final = 40

OPENAI_PREFIX: Final = re.compile("^(chat)?cmpl-")


def trace(
    *,
    name: Annotated[
        str,
        typer.Argument(help="Its id (chatcmpl-… or cmpl-… is its reply's), or its x-request-id.", metavar="REQUEST"),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead: a line for each record.")] = False,
    config: ConfigOption = None,
) -> None:
    """Show the life of one request, stage by stage.

    It may be under way, or among the last of each process (telemetry.kept_max). Several requests may have one x-request-id.

    Example: headrace trace chatcmpl-0b7cdc65e2974c38a831afbe3800e809
    """
    records = asyncio.run(ask(configuration(config), OPENAI_PREFIX.sub("", name)))
    if not records:
        raise OperatorError(
            f"No process knows of a request {name!r}.",
            "Each remembers its last ones only (telemetry.kept_max), and none from before its own start.",
        )
    if as_json:
        for record in records:
            print(msgspec.json.encode(record).decode())
    else:
        print("\n\n".join(map(story, grouped(records))))


async def ask(config: "Config", name: str) -> "list[Record]":
    """What all processes know of it, the earliest first. Raises `OperatorError` where NATS cannot be reached."""
    from pipeline.bus.connection import Bus, Message
    from pipeline.protocol import subjects
    from pipeline.protocol.records import records_decoder

    records: list[Record] = []

    def answered(message: Message) -> None:
        if message.data:  # else it is the broker, which says that nobody listens
            records.extend(records_decoder.decode(message.data))

    async with await Bus.connect(config.nats, "headrace-trace") as bus:
        inbox = bus.inbox()
        await bus.subscribe(inbox, answered)
        await bus.barrier()
        await bus.publish(subjects.trace(name), name.encode(), inbox)
        await asyncio.sleep(ANSWER_S)
    return sorted(records, key=lambda record: record.began_unix_s)


def grouped(records: "Iterable[Record]") -> "list[list[Record]]":
    """The records of each request."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.request, []).append(record)
    return list(groups.values())


# --------------------------------------------------------------------------------------------------------------
# For people


def story(records: "Sequence[Record]") -> str:
    """One request. Its gateway's record has all stages of a whole reply; what else there is stands below it."""
    names = {record.request_id for record in records if record.request_id}
    traces = {record.trace_id for record in records if record.trace_id}
    title = [f"Request {records[0].request}"]
    title += [f"x-request-id {name}" for name in sorted(names)] + [f"trace {name}" for name in sorted(traces)]
    told = [record for record in records if record.role == "gateway" and record.outcome == "whole"]
    began_s = min(record.began_unix_s for record in records)
    lines = [", ".join(title)]
    for record in [*told, *(record for record in records if record not in told)]:
        lines += ["", _headline(record, record.began_unix_s - began_s)]
        if record in told or not (told and record.outcome in ("whole", "handed_off")):
            lines += _stages(record)
    return "\n".join(lines)


def _headline(record: "Record", at_s: float) -> str:
    ended = f"{record.outcome} after" if record.outcome else "under way for"
    facts = ", ".join(f"{name} {value}" for name, value in record.facts.items())
    creator = f", creator {record.creator}" if record.creator else ""
    return f"{record.process}: {ended} {1000 * record.took_s:,.1f} ms, from {1000 * at_s:,.1f} ms on ({facts}{creator})"


def _stages(record: "Record") -> Iterator[str]:
    """A line for each stage that took time, as a Gantt chart."""
    from pipeline.protocol.stages import STAGES, unexplained_s

    at_s = 0.0
    whole_s = max(record.took_s, sum(record.stages.values())) or 1.0
    for stage, took_s in record.stages.items():
        if took_s > 0:
            start, end = (round(BAR_WIDTH * s / whole_s) for s in (at_s, at_s + took_s))
            bar = (" " * start + ("█" * (end - start) or "▏")).ljust(BAR_WIDTH)
            yield f"  {stage:<10}  {1000 * took_s:>9,.2f} ms  {bar}  {STAGES.get(stage, '')}"
        at_s += took_s
    left_s = unexplained_s(record.stages, record.took_s)
    if abs(left_s) >= 5e-5:
        yield f"  {'(not told)':<10}  {1000 * left_s:>9,.2f} ms"
