"""One child process, ended together with all that it has started.

Each child leads a session of its own: a Ctrl-C in the terminal reaches us alone, and whatever the child has started can be found
by its process group. A polite SIGTERM goes to the leader only, since an engine's helper processes must outlive its drain; the
SIGKILL that ends the rest goes to the group. Python's resource trackers go last: they remove the shared memory (hundreds of
megabytes for an engine) that the others leave behind. If we are killed ourselves, the kernel tells the leader (PR_SET_PDEATHSIG).
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
import psutil

PR_SET_PDEATHSIG: Final = 1

GROUP_GONE_S_MAX: Final = 10.0
"""The kernel needs a moment to end what got SIGKILL: seconds, for gigabytes on a busy machine."""

TRACKER_S_MAX: Final = 3.0
"""For a resource tracker to notice that it is alone, to clean up and to end."""

TRACKER: Final = "multiprocessing.resource_tracker"

POLL_S: Final = 0.02
"""Nobody tells us when the last of a group has gone."""

_libc: Final = ctypes.CDLL(None)


class Process:
    """A running child. `started_s` is monotonic; its log grows from `log_offset` on."""

    def __init__(self, name: str, child: subprocess.Popen[bytes], log: Path, log_offset: int) -> None:
        self.name = name
        self.log = log
        self.log_offset = log_offset
        self.started_s = time.monotonic()
        self._child = child
        self._pidfd = os.pidfd_open(child.pid)
        self._cleared = False

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, cores: Collection[int] = ()
    ) -> "Process":
        """Start `command` with output appended to `log`, on these cores or any. Raises `OSError` where it cannot be started."""
        with log.open("ab") as out:
            offset = out.tell()
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid(), cores),  # noqa: PLW1509 - we have no threads, and nothing else does it
            )
        return cls(name, child, log, offset)

    @property
    def pid(self) -> int:
        """Of the leader; also the id of its group."""
        return self._child.pid

    async def wait(self) -> int:
        """The exit status; negative is a signal. Many may wait."""
        if self._child.returncode is None:
            await self._until_exit()
        return self._child.wait()

    async def end(self, grace_s: float, hurry: anyio.Event) -> int:
        """SIGTERM, up to `grace_s` for the leader to go (none once `hurry` is set), then SIGKILL to all that is left.

        Returns the leader's exit status.
        """
        if self._child.poll() is None:
            self._child.terminate()
            with anyio.move_on_after(grace_s):
                await self._exit_or(hurry)
        return await self.clear()

    async def clear(self) -> int:
        """SIGKILL to all of the group that still lives, and wait until it has gone. Once: its number may be another's then."""
        if self._cleared:
            return await self.wait()
        await self._kill_until_gone(lambda pid: not _is_tracker(pid))
        with anyio.move_on_after(TRACKER_S_MAX):
            while members(self.pid):
                await anyio.sleep(POLL_S)
        await self._kill_until_gone(lambda _: True)
        status = await self.wait()
        self._close()
        return status

    async def _kill_until_gone(self, chosen: Callable[[int], bool]) -> None:
        with anyio.move_on_after(GROUP_GONE_S_MAX):
            while left := [pid for pid in members(self.pid) if chosen(pid)]:
                kill(left)
                await anyio.sleep(POLL_S)

    def _close(self) -> None:
        if not self._cleared:
            self._cleared = True
            os.close(self._pidfd)

    async def _exit_or(self, hurry: anyio.Event) -> None:
        async with anyio.create_task_group() as group:

            async def end_when_hurried() -> None:
                await hurry.wait()
                group.cancel_scope.cancel()

            group.start_soon(end_when_hurried)
            await self.wait()
            group.cancel_scope.cancel()

    async def _until_exit(self) -> None:
        mine = os.dup(self._pidfd)  # only one task may wait on a descriptor
        try:
            await anyio.wait_readable(mine)
        finally:
            os.close(mine)


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def members(group: int) -> list[int]:
    """The processes of a group that still run. Zombies do not: they only wait for their parent."""
    return [process.pid for process in psutil.process_iter() if _is_member(process, group)]


def _is_member(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.Error):
        return False


def _is_tracker(pid: int) -> bool:
    try:
        return any(TRACKER in argument for argument in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _die_with_parent(parent: int, cores: Collection[int]) -> Callable[[], None]:
    """Runs in the child, before the command: SIGTERM when `parent` dies, also when it just has; and only these cores."""

    def bind() -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return bind
