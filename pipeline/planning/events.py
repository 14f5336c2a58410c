"""Virtual time: a heap of what happens next. Equal times keep the order in which they were arranged."""

import heapq
from collections.abc import Callable
from typing import Any


class Events:
    """The clock, in seconds from the beginning of a run."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._count = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, at_s: float, act: Callable[..., None], *args: Any) -> None:
        """Do something then; not before now."""
        self._count += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._count, act, args))

    def after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Do something after a while."""
        self.at(self.now_s + delay_s, act, *args)

    def run(self, going: Callable[[], bool]) -> None:
        """Let time pass as long as `going` says so, and anything is to come."""
        heap = self._heap
        while heap and going():
            self.now_s, _, act, args = heapq.heappop(heap)
            act(*args)
