"""An event loop in virtual time, and the processes that live on it.

Nothing sleeps: when nobody can run, time jumps to the next timer. Callbacks run in the order in which they were asked for, so a
run depends on its seed alone. Python's sets of tasks order by address, so tasks and cancel scopes are numbered here.

A callback belongs to the process in whose context it was asked for. A frozen process's callbacks wait, its timers included,
and run all at once when it thaws: what SIGSTOP, a stalled machine or a blocked loop look like from inside.
"""

import asyncio
import contextvars
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

import anyio._backends._asyncio as anyio_asyncio
import sniffio

UNIX_S: Final = 1_750_000_000.0
"""When every simulation begins."""

STUCK_TURNS: Final = 200_000
"""Turns of the loop without time passing: somebody spins."""

Context = contextvars.Context


class Stuck(Exception):
    """Time does not pass any more, or nothing is left that could happen."""


class Process:
    """One life of one process: a name, a clock that may be wrong, and whether it runs."""

    def __init__(self, name: str, life: int, seed: int, skew_s: float) -> None:
        self.name = name
        self.life = life
        self.chance = random.Random(f"{seed}/{name}/{life}")
        self.skew_s = skew_s
        self.born_s = self.chance.uniform(10.0, 1e6)
        self.dead = False
        self.frozen: list[asyncio.Handle] | None = None
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)


PROCESS: Final[contextvars.ContextVar[Process | None]] = contextvars.ContextVar("process", default=None)


class _Task(asyncio.Task[Any]):
    """A task that is the same in every run of a seed."""

    numbers = itertools.count()

    def __init__(self, coro: Coroutine[Any, Any, Any], *, context: Context | None, **named: Any) -> None:
        self.number = next(self.numbers)
        self.process = PROCESS.get() if context is None else context.get(PROCESS)
        super().__init__(coro, context=context, **named)

    def __hash__(self) -> int:
        return self.number


class _Scope(anyio_asyncio.CancelScope):
    """A cancel scope that is the same in every run of a seed."""

    __slots__ = ("number",)
    numbers = itertools.count()

    def __init__(self, *args: Any, **named: Any) -> None:
        self.number = next(self.numbers)
        super().__init__(*args, **named)

    def __hash__(self) -> int:
        return self.number


def _context_of(handle: asyncio.Handle) -> Context:
    context: Context = handle._context  # type: ignore[attr-defined]
    return context


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop."""

    _ready: "deque[asyncio.Handle]"

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.context = contextvars.copy_context()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._frozen = 0
        self._turns = 0

    def time(self) -> float:
        """Virtual seconds since the world began."""
        return self.now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As asyncio's. Timers of one instant run in the order in which they were set."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """As asyncio's."""
        return _Task(coro, loop=self, name=name, context=context)

    def freeze(self, process: Process) -> None:
        """Let nothing of `process` run."""
        if process.frozen is None:
            process.frozen = []
            self._frozen += 1

    def thaw(self, process: Process) -> None:
        """Let it run again, and first all that would have run meanwhile."""
        if process.frozen is not None:
            self._ready.extend(process.frozen)
            process.frozen = None
            self._frozen -= 1

    def end(self, process: Process) -> "list[asyncio.Task[Any]]":
        """Cancel every task of `process`; those that have not ended yet."""
        self.thaw(process)
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, _Task) and task.process is process]
        for task in sorted(tasks, key=hash):
            task.cancel()
        return list(tasks)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays in the heap until its time, and is passed over."""

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready:
            self._pass_time()
        while timers and timers[0][0] <= self.now_s:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)
        self._turns += 1
        if self._turns > STUCK_TURNS:
            raise Stuck(f"{STUCK_TURNS} turns of the loop at {self.now_s:.6f} s")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if self._frozen and (process := _context_of(handle).get(PROCESS)) and process.frozen is not None:
                process.frozen.append(handle)
                continue
            handle._run()

    def _pass_time(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Stuck("nothing is left that could happen")
        if timers[0][0] > self.now_s:
            self.now_s = timers[0][0]
            self._turns = 0

    def _process_events(self, event_list: Any) -> None:
        """There is no I/O."""

    def _write_to_self(self) -> None:
        """Nobody sleeps, so nobody has to be woken."""


class VirtualSource:
    """Time and chance for `pipeline.outside`: the loop's time, by each process's own clock, and each process's own dice."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self._loop = loop
        self._chance = random.Random(f"{seed}/outside")

    def monotonic_s(self) -> float:
        """Its zero is another one in each process: it may not travel."""
        process = PROCESS.get()
        return self._loop.now_s + (process.born_s if process else 0.0)

    def unix_s(self) -> float:
        """As this process's clock has it."""
        process = PROCESS.get()
        return UNIX_S + self._loop.now_s + (process.skew_s if process else 0.0)

    def token(self, length_bytes: int) -> str:
        """Hex from this process's dice."""
        return f"{self._dice().getrandbits(8 * length_bytes):0{2 * length_bytes}x}"

    def roll(self) -> float:
        """A number from this process's dice."""
        return self._dice().random()

    def _dice(self) -> random.Random:
        process = PROCESS.get()
        return process.chance if process else self._chance


@contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """A loop, closed at the end. anyio is told where it runs, and makes scopes that are numbered."""
    _Task.numbers, _Scope.numbers = itertools.count(), itertools.count()
    loop = VirtualLoop()
    scope, library = anyio_asyncio.CancelScope, sniffio.thread_local.name
    anyio_asyncio.CancelScope = _Scope  # type: ignore[misc]
    sniffio.thread_local.name = "asyncio"
    try:
        yield loop
    finally:
        anyio_asyncio.CancelScope, sniffio.thread_local.name = scope, library  # type: ignore[misc]
        loop.close()
