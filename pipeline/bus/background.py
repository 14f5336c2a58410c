"""A task with an owner: it is referenced, its failure is logged, and it ends when the owner says so."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from pipeline.telemetry import logs
from pipeline.telemetry.metrics import HANDLER_ERRORS

_log = logs.get("bus")


class Background:
    """One endless task of an object."""

    def __init__(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._task = asyncio.get_running_loop().create_task(work, name=name)
        self._task.add_done_callback(_report)

    async def stop(self) -> None:
        """Cancel it, and return when it has ended."""
        while not self._task.done():
            self._task.cancel()  # again, because nats-py swallows a cancellation while it waits for a full socket
            await asyncio.wait({self._task}, timeout=0.5)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("background_task_failed", task=task.get_name(), exc_info=error)


def handler_failed(where: str, error: Exception) -> None:
    """A callback has raised. Count it and say so; the connection and its other callbacks go on."""
    HANDLER_ERRORS.inc()
    _log.error("handler_failed", where=where, exc_info=error)
