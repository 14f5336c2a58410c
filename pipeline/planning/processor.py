"""An engine's computing: shared evenly by what runs on it at a time (processor sharing), or one after the other."""

import heapq
from collections.abc import Callable
from typing import Any

from pipeline.planning.events import Events


class Processor:
    """`take` work, and `then` is called once it is done."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._jobs: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        """What computes, by when it is through on `_progress`: the seconds that each of them has had."""
        self._progress = 0.0
        self._updated_s = 0.0
        self._count = 0
        self._computed_s = 0.0

    @property
    def computed_s(self) -> float:
        """For how long anything has been computed."""
        since_s = self._events.now_s - self._updated_s if self._jobs else 0.0
        return self._computed_s + since_s

    def take(self, work_s: float, then: Callable[..., None], *args: Any) -> None:
        """Begin with work that would take so long alone."""
        self._pass()
        self._count += 1
        heapq.heappush(self._jobs, (self._progress + work_s, self._count, then, args))
        self._arrange()

    def _pass(self) -> None:
        """Bring `_progress` up to now."""
        now_s = self._events.now_s
        if self._jobs:
            self._progress += (now_s - self._updated_s) / len(self._jobs)
            self._computed_s += now_s - self._updated_s
        self._updated_s = now_s

    def _arrange(self) -> None:
        if self._jobs:
            self._count += 1
            left_s = (self._jobs[0][0] - self._progress) * len(self._jobs)
            self._events.after(left_s, self._step, self._count)

    def _step(self, arranged: int) -> None:
        """The first is through, unless another has come since this was arranged."""
        if arranged != self._count:
            return
        self._pass()
        _, _, then, args = heapq.heappop(self._jobs)
        self._arrange()
        then(*args)


class InOrder:
    """The same, one after the other in order of arrival: as vLLM with chunked prefill, whose steps serve the oldest first."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._free_s = 0.0

    def take(self, work_s: float, then: Callable[..., None], *args: Any) -> None:
        """Begin when all before is done."""
        self._free_s = max(self._free_s, self._events.now_s) + work_s
        self._events.at(self._free_s, then, *args)
