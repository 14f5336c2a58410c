"""A fleet under a load: requests go in by some policy, and what became of each is written down.

What differs between policies is `_arrive` and `_done`; engines, caches, LMCache and the requests are the same for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import msgspec

from pipeline.planning import source
from pipeline.planning.engine import SOURCE, Engine, Machine, Served, Tier
from pipeline.planning.events import Events
from pipeline.planning.traffic import Request

UNEVEN_WINDOW_S: Final = 5.0
"""Over windows of this length balance is looked at, too: a mean over the whole run could hide that the load wanders."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, of requests that arrived after the warm-up.

    `loads` are the shares of time that each engine computed, `loads_by_window` the same in windows of `UNEVEN_WINDOW_S`.
    `foreign` requests were served by another worker than the policy prefers, `returned` messages bounced, and `routes` are the
    exceptions at the end.
    """

    served: list[Served]
    loads: list[float]
    loads_by_window: list[list[float]]
    foreign: int
    returned: int = 0
    routes: int = 0


class Fleet(ABC):
    """Workers `p0`, `p1`, …, each with an engine, over one LMCache."""

    def __init__(self, *, workers: int = source.PREFILL_WORKERS, machine: Machine = SOURCE) -> None:
        self.events = Events()
        self.tier = Tier(machine.lmcache_blocks, machine.lmcache_blocks_per_s)
        self.engines = {
            f"p{number}": Engine(f"p{number}", self.events, self.tier, self._done, machine) for number in range(workers)
        }
        self._left = 0
        self._from_s = 0.0
        self._served: list[Served] = []
        self._marks: list[list[float]] = []

    def run(self, trace: Sequence[Request], warm_up: int) -> Outcome:
        """Serve all of `trace`, to the last request; the first `warm_up` of them are not measured."""
        self._left = len(trace)
        self._from_s = trace[warm_up].at_s
        pending = iter(trace)

        def arrive(request: Request) -> None:
            if (following := next(pending, None)) is not None:
                self.events.at(following.at_s, arrive, following)
            self._arrive(request)

        first = next(pending)
        self.events.at(first.at_s, arrive, first)
        self.events.at(self._from_s, self._mark, trace[-1].at_s)
        self.events.run(lambda: self._left > 0)
        return self._outcome(len(trace) - warm_up)

    def foreign(self, served: Served) -> bool:
        """Whether a request was served by another worker than the policy prefers."""
        return False

    @abstractmethod
    def _arrive(self, request: Request) -> None:
        """A request has come to the router, or to a gateway."""

    def _done(self, served: Served) -> None:
        self._left -= 1
        if served.request.at_s >= self._from_s:
            self._served.append(served)

    def _mark(self, until_s: float) -> None:
        """Write down for how long each engine has computed; the last time as the last request arrives."""
        self._marks.append([self.events.now_s, *(engine.computed_s for engine in self.engines.values())])
        if self.events.now_s < until_s:
            self.events.at(min(self.events.now_s + UNEVEN_WINDOW_S, until_s), self._mark, until_s)

    def _loads(self, begin: Sequence[float], end: Sequence[float]) -> list[float]:
        return [(after - before) / (end[0] - begin[0]) for before, after in zip(begin[1:], end[1:], strict=True)]

    def _outcome(self, expected: int) -> Outcome:
        assert len(self._served) == expected, "every request is served once"
        windows = list(zip(self._marks[:-1], self._marks[1:], strict=True))
        return Outcome(
            served=self._served,
            loads=self._loads(self._marks[0], self._marks[-1]),
            loads_by_window=[self._loads(*window) for window in windows[: -1 if len(windows) > 1 else None]],
            foreign=sum(map(self.foreign, self._served)),
        )
