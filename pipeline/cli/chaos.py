"""`headrace chaos`: kill and pause the processes of a real fleet while it serves, and see whether anybody's reply suffers.

It starts a fleet of its own: a broker, workers with the simulated engine, a gateway, on loopback and free ports.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from pipeline.cli.harness import find_harness
from pipeline.errors import OperatorError

if TYPE_CHECKING:
    from tests.chaos.mischief import Kind


def chaos(
    *,
    requests: Annotated[int, typer.Option("--requests", min=1, help="How many.")] = 1500,
    rate: Annotated[float, typer.Option("--rate", min=0.1, help="Requests a second.")] = 80.0,
    kills: Annotated[int, typer.Option("--kills", min=0, help="Processes to hurt.")] = 17,
    kill: Annotated[
        str, typer.Option("--kill", help="What to do: some of prefill, decode, pause, nats, gateway, stall.")
    ] = "prefill,decode,pause,nats,gateway",
    seed: Annotated[int, typer.Option("--seed", help="Of what happens, to whom and when.")] = 1,
    prefill: Annotated[int, typer.Option("--prefill", min=1, help="Prefill workers.")] = 3,
    decode: Annotated[int, typer.Option("--decode", min=1, help="Decode workers.")] = 3,
    gateways: Annotated[int, typer.Option("--gateways", min=1, help="Gateways.")] = 2,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="Instead, end every worker with SIGTERM, in turn.")
    ] = False,
    overload: Annotated[
        bool, typer.Option("--overload", help="Instead, find the fleet's peak and offer ten times as much.")
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", help="Leave logs and the broker's files in this folder.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Trouble a fleet under load, and check every token of every reply.

    Exits with 1 where a reply was lost, or a token, or anything was left behind.

    Example: headrace chaos --requests 300 --rate 30 --kills 6
    """
    from pipeline.telemetry import logs

    logs.configure("chaos")
    find_harness("chaos")
    from tests.chaos import overload as over
    from tests.chaos import run, verdict
    from tests.chaos.stack import Settings

    if overload:
        outcome = over.run(over.Plan(keep=keep))
        print(msgspec.json.encode(outcome).decode() if as_json else over.table(outcome))
        raise typer.Exit(1 if outcome.failed else 0)
    plan = run.Plan(
        requests=requests,
        rate=rate,
        seed=seed,
        kinds=_kinds(kill),
        kills=kills,
        rolling=rolling,
        keep=keep,
        settings=Settings(prefill=prefill, decode=decode, gateways=gateways),
    )
    report = run.run(plan)
    print(msgspec.json.encode(report).decode() if as_json else verdict.table(report))
    raise typer.Exit(1 if report.failed else 0)


def _kinds(asked: str) -> "tuple[Kind, ...]":
    from tests.chaos.mischief import KINDS

    names = [name.strip() for name in asked.split(",") if name.strip()]
    for name in names:
        if name not in KINDS:
            raise OperatorError(f"--kill knows no {name!r}.", f"It takes some of {', '.join(KINDS)}.")
    return tuple(kind for kind in KINDS if kind in names)
