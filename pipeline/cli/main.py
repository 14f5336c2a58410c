"""The program `headrace`: the pipeline's own commands, and those that the gateway and the workers offer.

The pipeline may import neither, so they register theirs as entry points (`headrace.commands` in pyproject.toml). Command modules
import what they need inside the command: `headrace --help` has to be quick.
"""

import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated, Final, NoReturn

import typer

from pipeline.cli import (
    OPERATOR_EXIT,
    bench,
    calibrate,
    chaos,
    chat,
    config,
    control,
    dlq,
    doctor,
    key,
    persona,
    plan,
    record,
    schema,
    shards,
    simulate,
    streams,
    top,
    trace,
)
from pipeline.cli import credits as books
from pipeline.errors import OperatorError

GROUP: Final = "headrace.commands"

ORDER: Final = (
    "up",
    "chat",
    "bench",
    "record",
    "gateway",
    "worker",
    "keeper",
    "streams",
    "doctor",
    "workers",
    "drain",
    "pause",
    "resume",
    "role",
    "config",
    "top",
    "credits",
    "shards",
    "trace",
    "dlq",
)
"""Commands in the help, the first to use first. Others follow."""

HELP: Final = """LLM serving with prefill and decode in two pools of vLLM workers, joined by NATS queues and block credits.

Start here:

\b
  headrace up --ask "What is the capital of France?"
      the whole stack on this machine, and a first reply
  headrace chat "And of Italy?" --creator ada
      from another terminal
  headrace up --engine simulated --prefill 4 --decode 1
      a fleet without a model, within seconds

Each process also runs alone, on any host that reaches the broker:

\b
  headrace streams apply
  headrace worker prefill
  headrace worker decode
  headrace keeper
  headrace gateway

Every entry of the configuration may be set by a variable: HEADRACE__GATEWAY__PORT=8080 for gateway.port.
"""


def program() -> typer.Typer:
    """The command line with all its commands."""
    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    offered = dict(_offered())
    for name in [*(name for name in ORDER if name in offered), *sorted(offered.keys() - set(ORDER))]:
        command = offered[name]
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _offered() -> Iterator[tuple[str, typer.Typer | Callable[..., None]]]:
    yield "chat", chat.chat
    yield "bench", bench.bench
    yield "record", record.record
    yield "streams", streams.app
    yield "key", key.app
    yield "schema", schema.schema
    yield "persona", persona.app
    yield "doctor", doctor.doctor
    yield "workers", control.workers
    yield "drain", control.drain
    yield "pause", control.pause
    yield "resume", control.resume
    yield "role", control.role
    yield "config", config.app
    yield "credits", books.show
    yield "shards", shards.shards
    yield "top", top.top
    yield "trace", trace.trace
    yield "dlq", dlq.app
    yield "chaos", chaos.chaos
    yield "plan", plan.plan
    yield "calibrate", calibrate.calibrate
    yield "simulate", simulate.simulate
    for entry in importlib.metadata.entry_points(group=GROUP):
        yield entry.name, entry.load()


def _version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {importlib.metadata.version('headrace')}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> NoReturn:
    """Run the command line. People see sentences, and tracebacks only with HEADRACE_LOG=debug."""
    try:
        program()()
    except Exception as error:
        sys.exit(explain(error))
    except KeyboardInterrupt:
        sys.exit(130)
    raise AssertionError("a command line ends with an exit status")  # pragma: no cover


def explain(error: Exception) -> int:
    """Say on stderr what went wrong; the exit status."""
    known, debug = operator_error(error), os.environ.get("HEADRACE_LOG") == "debug"
    if debug or not (known or sys.stderr.isatty()):  # a log, unlike a person, wants to know where
        traceback.print_exception(error)
    if known:
        _say(str(known))
        return OPERATOR_EXIT
    _say(f"headrace failed: {type(error).__name__}: {error}.{'' if debug else ' HEADRACE_LOG=debug shows where.'}")
    return 1


def operator_error(error: BaseException) -> OperatorError | None:
    """The `OperatorError` that `error` is, or that a task group has wrapped."""
    if isinstance(error, OperatorError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := operator_error(inner))), None)
    return None


def _say(sentence: str) -> None:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}{sentence}{plain}", file=sys.stderr)
