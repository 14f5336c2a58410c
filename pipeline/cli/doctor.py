"""`headrace doctor`: what is wrong with a pipeline, and what to do about it."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from pipeline.cli.options import ConfigOption, configuration

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.doctor.findings import Finding, Level

MARKS: "Final[dict[Level, tuple[str, str]]]" = {
    "ok": ("✓", "\033[32m"),
    "warning": ("!", "\033[33m"),
    "wrong": ("✗", "\033[31m"),
}


def doctor(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Declared streams. Default: configs/jetstream.", show_default=False)
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Look at everything that must be true, and say the remedy for what is not. About two seconds.

    NATS and JetStream, streams and consumers as declared, both pools and the keeper alive, engines alike, clocks, queues,
    ledgers, dead letters, gateway, LMCache, packages, memory. Exits with 1 where something is wrong.

    Example: headrace doctor --config configs/local.toml
    """
    found = asyncio.run(_examined(configuration(config), folder))
    print(msgspec.json.encode(found).decode() if as_json else _page(found))
    raise typer.Exit(1 if any(finding.level == "wrong" for finding in found) else 0)


async def _examined(config: "Config", folder: Path | None) -> "list[Finding]":
    from pipeline.bus import streams
    from pipeline.doctor.findings import findings
    from pipeline.doctor.look import look
    from pipeline.paths import JETSTREAM, require

    return findings(config, await look(config, streams.declared(folder or require(JETSTREAM), config.nats.replicas)))


def _page(found: "list[Finding]") -> str:
    wrong = sum(finding.level == "wrong" for finding in found)
    warnings = sum(finding.level == "warning" for finding in found)
    sum_up = f"{wrong} wrong, {warnings} to look at." if wrong or warnings else "Nothing is wrong."
    return "\n".join([*map(_lines, found), "", sum_up])


def _lines(finding: "Finding") -> str:
    mark, colour = MARKS[finding.level]
    if sys.stdout.isatty():
        mark = f"{colour}{mark}\033[0m"
    remedy = f"\n             → {finding.remedy}" if finding.remedy else ""
    return f"{mark} {finding.what:<11}{finding.said}{remedy}"
