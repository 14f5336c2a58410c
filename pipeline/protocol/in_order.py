"""Numbered things, taken each once and in order, whatever has become of them on the way.

    next ─► applied          a number that was expected: it, and what waited behind it
    before ─► dropped        it was there already
    beyond ─► kept early     something is missing before it: a gap

Whoever fills the gap repeats what is missing, or says where all before it stands, and `skip_to` there.
"""

from typing import Generic, TypeVar

from pipeline.limits import EARLY_MAX

T = TypeVar("T")


class InOrder(Generic[T]):
    """What has come of one numbered stream."""

    def __init__(self, first: int = 0) -> None:
        self.next = first
        self.repeated = 0
        self._early: dict[int, T] = {}

    @property
    def gap(self) -> bool:
        """Whether something is missing before what has come."""
        return bool(self._early)

    def take(self, number: int, thing: T) -> list[T]:
        """What can be applied now that this has come, in order."""
        if number < self.next or number in self._early:
            self.repeated += 1
            return []
        self._early[number] = thing
        ready = self._ready()
        if len(self._early) > EARLY_MAX:
            del self._early[max(self._early)]
        return ready

    def skip_to(self, number: int) -> list[T]:
        """All before `number` is known otherwise, or lost for good. What can be applied now, in order."""
        self.next = number
        self._early = {early: thing for early, thing in self._early.items() if early >= number}
        return self._ready()

    def _ready(self) -> list[T]:
        ready = []
        while self.next in self._early:
            ready.append(self._early.pop(self.next))
            self.next += 1
        return ready
