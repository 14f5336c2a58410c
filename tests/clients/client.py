"""What all clients have in common: an environment of their own, a command, and a report to read."""

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import venv
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from tests.clients.compare import Said
from tests.e2e.running import ROOT

OURS: Final = Path(sys.executable).parent
"""The programs of our own environment."""

INSTALL_S: Final = 1800.0
"""Some of them bring a hundred packages."""

RUN_S: Final = 600.0

TOLD_LINES: Final = 15
"""Of the output of a program that failed."""


class ClientFailed(Exception):
    """A client could not be installed, did not run, or left no report that can be read. Says what was seen."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` streams, `concurrency` at a time, each of about so many prompt tokens and exactly so many of reply."""

    requests: int = 120
    concurrency: int = 4
    prompt_tokens: int = 512
    reply_tokens: int = 30


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Something else that was looked at, and what was seen."""

    what: str
    seen: str
    ok: bool


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run: whom to load with what. `folder` is the client's own, and empty; `programs` are those of its environment.

    `tokenizer` is a folder with the model's, for clients that want it.
    """

    gateway: str
    model: str
    tokenizer: Path | None
    load: Load
    folder: Path
    programs: Path

    def shown(self, argument: str) -> str:
        """An argument as it is told: without places of this machine."""
        places = {str(self.folder): "$OUT", self.gateway: "$URL", f"{self.programs}/": "", f"{OURS}/": ""}
        if self.tokenizer:
            places[str(self.tokenizer)] = "$MODEL"
        for place, name in places.items():
            argument = argument.replace(place, name)
        return argument


class Client(ABC):
    """A client that others wrote. `packages` go into an environment of its own; without any, it is in ours."""

    name: ClassVar[str]
    about: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    distribution: ClassVar[str]
    """Whose version is told."""
    tokenizes: ClassVar[bool] = True
    """Whether it wants the model's tokenizer."""
    judged_times: ClassVar[bool] = True
    """Whether nothing of others lies between its clock and the gateway's."""

    @abstractmethod
    def command(self, job: Job) -> Sequence[str]:
        """What to run."""

    @abstractmethod
    def read(self, job: Job) -> Said:
        """What it has reported."""

    def environment(self, job: Job) -> Mapping[str, str]:
        """Variables beside ours."""
        return {}

    def told(self, job: Job) -> str:
        """The command as it is told."""
        return shlex.join(job.shown(argument) for argument in self.command(job))

    @contextmanager
    def ready(self, job: Job) -> Iterator[None]:
        """What must run beside it, for as long as the block does."""
        yield

    def checks(self, job: Job, count: Callable[[str], float]) -> list[Check]:
        """What else is looked at, once the load is over. `count` tells how many requests have ended with an outcome."""
        return []

    def run(self, job: Job) -> Said:
        """The load, to its end. Raises `ClientFailed`."""
        run(self.command(job), job.folder / "output.txt", self.environment(job), RUN_S)
        try:
            return self.read(job)
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise ClientFailed(f"its report cannot be read: {error!r}") from error


def run(command: Sequence[str], log: Path, environment: Mapping[str, str], within_s: float) -> None:
    """Run a program to its end, its output in `log`. Raises `ClientFailed` with the last of it where it does not end well.

    What it has started itself (benchmarks have workers) ends with it.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
        try:
            status: int | str = process.wait(within_s)
        except subprocess.TimeoutExpired:
            status = f"still running after {within_s:g} s"
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status:
        last = log.read_text("utf-8", "replace").splitlines()[-TOLD_LINES:]
        raise ClientFailed(f"{Path(command[0]).name}: status {status}\n" + "\n".join(last))


def programs_of(client: Client, folder: Path) -> Path:
    """Where a client's programs are: in its environment, made in `folder` where it is not there yet. Raises `ClientFailed`."""
    if not client.packages:
        return OURS
    digest = hashlib.sha256(repr(client.packages).encode()).hexdigest()[:8]
    place = folder / "venvs" / f"{client.name}-{digest}"
    if not (place / "installed").exists():
        shutil.rmtree(place, ignore_errors=True)  # what was broken off
        venv.create(place, with_pip=True)
        run((str(place / "bin" / "pip"), "install", *client.packages), place / "install.log", {}, INSTALL_S)
        (place / "installed").touch()
    return place / "bin"


def version_of(distribution: str, programs: Path) -> str:
    """The installed version of a package, in a client's environment."""
    code = f"import importlib.metadata; print(importlib.metadata.version({distribution!r}))"
    command = (str(programs / "python"), "-c", code)
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
