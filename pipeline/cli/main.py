"""The program `headrace`: the pipeline's own commands, and those that the gateway and the workers offer.

The pipeline may import neither, so they register theirs as entry points (`headrace.commands` in pyproject.toml). Where a command
is named, only its module is loaded: a worker that is started again while its fleet is under load has to be quick.
"""

import importlib.metadata
import os
import pkgutil
import sys
import traceback
from typing import Annotated, Final, NoReturn

import typer

from pipeline.cli import OPERATOR_EXIT
from pipeline.errors import OperatorError

GROUP: Final = "headrace.commands"

OURS: Final = {
    "bench": "pipeline.cli.bench:bench",
    "calibrate": "pipeline.cli.calibrate:calibrate",
    "chaos": "pipeline.cli.chaos:chaos",
    "chat": "pipeline.cli.chat:chat",
    "config": "pipeline.cli.config:app",
    "credits": "pipeline.cli.credits:show",
    "dlq": "pipeline.cli.dlq:app",
    "doctor": "pipeline.cli.doctor:doctor",
    "drain": "pipeline.cli.control:drain",
    "key": "pipeline.cli.key:app",
    "pause": "pipeline.cli.control:pause",
    "persona": "pipeline.cli.persona:app",
    "plan": "pipeline.cli.plan:plan",
    "record": "pipeline.cli.record:record",
    "resume": "pipeline.cli.control:resume",
    "role": "pipeline.cli.control:role",
    "schema": "pipeline.cli.schema:schema",
    "shards": "pipeline.cli.shards:shards",
    "simulate": "pipeline.cli.simulate:simulate",
    "streams": "pipeline.cli.streams:app",
    "top": "pipeline.cli.top:top",
    "trace": "pipeline.cli.trace:trace",
    "workers": "pipeline.cli.control:workers",
}
"""The pipeline's own commands."""

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


def program(asked: str | None = None) -> typer.Typer:
    """The command line: with the command that is asked for alone where there is one of that name, else with all."""
    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    offered = OURS | {entry.name: entry.value for entry in importlib.metadata.entry_points(group=GROUP)}
    ordered = [*(name for name in ORDER if name in offered), *sorted(offered.keys() - set(ORDER))]
    for name in [asked] if asked in offered else ordered:
        command = pkgutil.resolve_name(offered[name])
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


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
        program(sys.argv[1] if len(sys.argv) > 1 else None)()
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
