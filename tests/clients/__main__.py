"""Load a stack with clients that others wrote, and compare their figures with ours: `python -m tests.clients`."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import msgspec
import typer

from pipeline.cli import OPERATOR_EXIT
from pipeline.errors import OperatorError
from tests.clients import compare, results, stand
from tests.clients.benchmarks import AIPerf, GenAIBench, GuideLLM, VllmBench
from tests.clients.client import Client, ClientFailed, Job, Load, programs_of, version_of
from tests.clients.results import Result
from tests.clients.sdk import LiteLLM, OpenAISdk
from tests.clients.stand import Stand
from tests.e2e.running import ROOT

CLIENTS: Final[dict[str, type[Client]]] = {
    client.name: client for client in (OpenAISdk, VllmBench, AIPerf, GuideLLM, GenAIBench, LiteLLM)
}

KNOWN: Final = ", ".join(f"{name} ({client.about})" for name, client in CLIENTS.items())

MODEL_S: Final = 300.0
"""To prepare the model, whose tokenizer the clients need: once, and half a minute."""


def chosen(only: list[str]) -> list[Client]:
    """The clients that were asked for, or all. Raises `OperatorError` for a name that is none."""
    if unknown := [name for name in only if name not in CLIENTS]:
        raise OperatorError(f"There is no client {unknown[0]!r}.", f"--only takes {', '.join(CLIENTS)}.")
    return [client() for name, client in CLIENTS.items() if not only or name in only]


def tokenizer() -> Path:
    """The folder of the default model, prepared by the command that `headrace up` uses."""
    command = [sys.executable, "-m", "workers.engines.model", "--source", "smollm2"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=MODEL_S, text=True)
    return Path(done.stdout.splitlines()[-1])


def measured(client: Client, target: Stand, load: Load, model: Path | None, folder: Path, made_by: str) -> Result:
    """Install a client, run it, and compare. What goes wrong with it is in the result."""
    began = Result(
        client=client.name,
        made_by=made_by,
        load=load,
        stack=target.about,
        machine=results.machine(),
        date=results.today(),
    )
    try:
        programs = programs_of(client, folder)
        with TemporaryDirectory(prefix=f"headrace-{client.name}-") as out:
            job = Job(
                gateway=target.gateway, model=target.model, tokenizer=model, load=load, folder=Path(out), programs=programs
            )  # fmt: skip
            with client.ready(job):
                before = target.counted()
                said = client.run(job)
                rows = compare.rows(
                    said, before, target.counted(), workers=bool(target.workers), times=client.judged_times
                )
                checks = client.checks(job, target.ended)
            return msgspec.structs.replace(
                began,
                version=version_of(client.distribution, programs),
                command=client.told(job),
                rows=rows,
                checks=checks,
                own=said.own,
            )
    except ClientFailed as error:
        return msgspec.structs.replace(began, failed=str(error))


@contextmanager
def target_of(url: str | None, prefill_s: float) -> Iterator[Stand]:
    """A stack that serves already, or one of our own."""
    if url:
        yield stand.at(url)
        return
    with TemporaryDirectory(prefix="headrace-clients-") as folder, stand.up(Path(folder), prefill_s) as own:
        yield own


def tell(words: str) -> None:
    """Progress, beside what is printed."""
    sys.stderr.write(words + "\n")
    sys.stderr.flush()


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"One client; may be repeated. Default: all: {KNOWN}.")] = None,
    requests: Annotated[int, typer.Option(min=4, max=2000, help="Of each client.")] = 120,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Requests at a time.")] = 4,
    prefill_s: Annotated[
        float,
        typer.Option(
            min=0,
            max=10,
            help="Seconds a prompt, beyond its tokens: the longer, the less the client's own time weighs.",
        ),
    ] = stand.PREFILL_S,
    url: Annotated[
        str | None,
        typer.Option(
            help="A gateway that serves already, on loopback. Default: a simulated stack of our own.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where the clients are installed, each once.")] = Path(
        "~/.cache/headrace/clients"
    ),
    keep: Annotated[
        Path | None,
        typer.Option(
            help="Write each client's result into this folder, as tests/clients/results has them.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone, without the table.")] = False,
) -> None:
    """Run clients that others wrote, unmodified, and compare what they say with Headrace's own metrics.

    Each is installed into an environment of its own, a minute or two the first time, and makes a small load of streams.

    Requests, tokens and mean times must agree within 2 %; times through a proxy are only told.

    Exits with 1 where a client differs or fails.

    Example: python -m tests.clients --only vllm-bench --requests 40
    """
    asked = f"--requests {requests} --concurrency {concurrency}" + ("" if url else f" --prefill-s {prefill_s:g}")
    load, found = Load(requests=requests, concurrency=concurrency), list[Result]()
    clients = chosen(only or [])
    model = tokenizer() if any(client.tokenizes for client in clients) else None
    with target_of(url, prefill_s) as target:
        for client in clients:
            tell(f"{client.name}: {client.about}")
            made_by = f"python -m tests.clients --only {client.name} {asked}"
            result = measured(client, target, load, model, folder.expanduser(), made_by)
            tell(f"{client.name}: {'agrees' if result.ok else 'FAILED' if result.failed else 'DIFFERS'}")
            for name, value in result.own.items():
                tell(f"    {name} {value:,.6g}" if isinstance(value, float) else f"    {name} {value}")
            found.append(result)
            if keep and not result.failed:
                results.keep(result, keep)
    if not as_json:
        sys.stdout.write(results.text(found) + "\n")
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    raise typer.Exit(0 if all(result.ok for result in found) else 1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what runs is ended, as after Ctrl-C
    try:
        typer.run(main)
    except OperatorError as error:
        tell(str(error))
        sys.exit(OPERATOR_EXIT)
