"""How a job ends: with all that it has begun."""

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import pytest

from pipeline import outside
from pipeline.protocol.records import Record
from pipeline.protocol.request import Effect, Event, Stage
from pipeline.protocol.stages import Decoding
from workers.jobs import Job

pytestmark = pytest.mark.anyio


class Asks(Job):
    """Claims for ever, as where nobody answers, and does not hear the first time that it is told to stop."""

    def __init__(self) -> None:
        super().__init__(outside.monotonic_s() + 60.0, outside.monotonic_s)
        self.times = Decoding(began_s=self.began_s)
        self.told_to_stop = 0
        self._stage = Stage.TAKING

    @property
    def stage(self) -> Stage:
        return self._stage

    @property
    def record(self) -> Record:
        raise NotImplementedError

    def step(self, event: Event) -> tuple[Effect, ...]:
        if event is Event.TAKEN:
            return (Effect.CLAIM,)
        self._stage = Stage.ENDED
        return ()

    def beside(self) -> dict[Effect, Callable[[], Awaitable[None]]]:
        return {Effect.CLAIM: self._claim}

    def at_once(self) -> dict[Effect, Callable[[], Awaitable[None]]]:
        return {}

    def resend(self, index: int) -> None:
        raise NotImplementedError

    async def _claim(self) -> None:
        while True:
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                self.told_to_stop += 1
                if self.told_to_stop > 1:
                    raise


async def test_a_job_ends_also_where_a_full_socket_has_swallowed_that_it_is_over() -> None:
    """nats-py does that while it waits to write. Else the job would keep its slot for as long as its receiver is dead."""
    job = Asks()
    job.happen(Event.TAKEN)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(job.run)
        await anyio.sleep(0.05)
        job.happen(Event.GONE)
        with anyio.fail_after(3.0):
            while job.told_to_stop < 2:
                await anyio.sleep(0.01)
