"""Lease keeping that does not share the fate of a busy event loop: a thread of its own, with its own loop and connection.

The worker's loop may stand still for seconds (a long tokenisation, a burst of frames, a collection of garbage) and keep its
messages. But a lease must not outlive who works for it, so the thread lets all of them lapse, and tells their holders, when

    the worker's loop has not beaten for `LOOP_SILENT_MAX_S`
    it is told to: the engine has failed its health check

and each of them when its own time is up. Calls go into the thread by `call_soon_threadsafe`, and doubts come back the same way:
the worker's side of this class is touched by the worker's loop alone, the keeper by the thread's alone. Only the beat is
shared, one float. What holds the GIL for good stops the thread, too, and then the broker alone decides.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVarTuple

import anyio

from pipeline import outside
from pipeline.bus.connection import Bus
from pipeline.config import Nats
from pipeline.errors import ServiceError
from pipeline.limits import LOOP_BEAT_S, LOOP_SILENT_MAX_S
from pipeline.telemetry import logs
from workers.leases import LeaseKeeper, Told

_log: Final = logs.get("leases")

Args = TypeVarTuple("Args")

_JOIN_S: Final = 5.0
"""The thread ends within the two seconds that closing a connection may take; one that does not is left to the process's end."""


class LeaseThread:
    """Keeps leases for the loop that it was made in. Made by `lease_thread`."""

    def __init__(self, at: str | Nats, name: str, connect_timeout_s: float | None) -> None:
        self._at, self._name, self._connect_timeout_s = at, name, connect_timeout_s
        self._main = asyncio.get_running_loop()
        self._beat_s = outside.monotonic_s()
        self._holders: dict[str, Told] = {}
        self._count = 0
        self._ready: asyncio.Future[None] = self._main.create_future()
        self._over: asyncio.Future[None] = self._main.create_future()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._live,), name="leases", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._keeper: LeaseKeeper

    # The worker's side

    def hold(self, ack: str, in_doubt: Told, until_s: float) -> str:
        """See `workers.leases.Leases`. `in_doubt` is called on the worker's loop."""
        self._beat_s = outside.monotonic_s()
        self._count += 1
        name = str(self._count)
        self._holders[name] = in_doubt
        self._call(self._keep, name, ack, until_s)
        return name

    def let_go(self, name: str) -> None:
        """See `workers.leases.Leases`."""
        self._holders.pop(name, None)
        self._call(self._keeper.let_go, name)

    def engine_failed(self) -> None:
        """Nobody computes any more: let every lease lapse."""
        self._call(self._keeper.end_all)

    async def run(self) -> None:
        """Beat, until cancelled. Raises `ServiceError` where the thread has died: then no lease is kept any more."""
        while not self._over.done():
            self._beat_s = outside.monotonic_s()
            await asyncio.wait({self._over}, timeout=LOOP_BEAT_S)
        raise ServiceError("The thread that keeps leases has ended.")

    async def start(self) -> None:
        """Return when it can keep leases. Raises `OperatorError` where the broker cannot be reached."""
        self._thread.start()
        await self._ready

    async def stop(self) -> None:
        """End the thread. What is held then lapses."""
        self._call(self._stop.set)
        with anyio.move_on_after(_JOIN_S):
            await asyncio.wait({self._over})

    def _call(self, act: Callable[[*Args], None], *args: *Args) -> None:
        """In the thread. After its end nothing is kept, and nothing can be told."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act, *args)

    def _doubt(self, name: str) -> None:
        in_doubt = self._holders.pop(name, None)
        if in_doubt is not None:
            in_doubt()

    # The thread's side

    def _live(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception as error:
            _log.exception("lease_thread_failed")
            self._back(_settle, self._ready, error)
        finally:
            self._back(_settle, self._over, None)

    async def _serve(self) -> None:
        async with await Bus.connect(self._at, f"{self._name}-leases", self._connect_timeout_s) as bus:
            self._keeper = LeaseKeeper(bus, outside.monotonic_s)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keeper.run)
                tasks.start_soon(self._watch)
                self._back(_settle, self._ready, None)
                await self._stop.wait()
                tasks.cancel_scope.cancel()

    def _keep(self, name: str, ack: str, until_s: float) -> None:
        self._keeper.keep(name, ack, lambda: self._back(self._doubt, name), until_s)

    async def _watch(self) -> None:
        """The worker's loop, by its beat."""
        silent = False
        while True:
            await asyncio.sleep(LOOP_BEAT_S)
            was_silent, silent = silent, outside.monotonic_s() - self._beat_s > LOOP_SILENT_MAX_S
            if silent:
                self._keeper.end_all()
            if silent and not was_silent:
                _log.warning("loop_silent", remedy="letting every lease lapse", seconds=LOOP_SILENT_MAX_S)

    def _back(self, act: Callable[[*Args], None], *args: *Args) -> None:
        """On the worker's loop, which may have ended."""
        with contextlib.suppress(RuntimeError):
            self._main.call_soon_threadsafe(act, *args)


def _settle(future: "asyncio.Future[None]", error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


@asynccontextmanager
async def lease_thread(at: str | Nats, name: str, connect_timeout_s: float | None = None) -> AsyncIterator[LeaseThread]:
    """A thread that keeps leases while the block runs. Raises `OperatorError` where the broker cannot be reached."""
    thread = LeaseThread(at, name, connect_timeout_s)
    try:
        await thread.start()
        yield thread
    finally:
        with anyio.CancelScope(shield=True):
            await thread.stop()
