"""Prompts that the decode loop beside us reads, in an engine for both: each keeps its prefill slot until that is done.

So a slot means the same wherever a prompt is read. Without this a worker would take all that its decode loop has seats for, and
the engine would read it in the order of its coming: then no other worker could, and what came later would wait behind it.
"""

from collections.abc import Callable

from workers.prefill_job import PrefillJob
from workers.visits import Visits


class Reading:
    """By their grants. `done` is told of each that has ended."""

    def __init__(self, visits: Visits, weigh: Callable[[int], None], done: Callable[[PrefillJob], None]) -> None:
        self._visits, self._weigh, self._done = visits, weigh, done
        self._jobs: dict[str, PrefillJob] = {}

    def hold(self, ask: str, job: PrefillJob) -> None:
        """Its job has ended, for the decode loop has it now."""
        self._jobs[ask] = job
        cached_tokens = job.prefilled.hbm_tokens if job.prefilled is not None else 0
        self._visits.come(ask, job.prompt_tokens - cached_tokens)
        self._weigh(job.prompt_tokens)

    def end(self, ask: str, cached_tokens: int | None) -> None:
        """The engine has read it, or will not. Does nothing where it is not held."""
        job = self._jobs.pop(ask, None)
        if job is None:
            return
        self._visits.gone(ask)
        self._weigh(-job.prompt_tokens)
        job.has_read(cached_tokens)
        self._done(job)
