"""How a request waits for the engine, and the engine for its next event."""

import asyncio

from pipeline.errors import EngineFailed
from workers.engines.port import Prefilled, Step


class Mailbox:
    """News of one request. Steps that its reader has not fetched become one, as in vLLM: one for each choice."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._steps: dict[int, Step] = {}
        self._done: Prefilled | None = None
        self._error: EngineFailed | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, what: Step | Prefilled | EngineFailed) -> None:
        """Leave a message, and wake the reader. An error is read after the steps before it."""
        if isinstance(what, Step):
            unread = self._steps.get(what.choice)
            self._steps[what.choice] = what if unread is None else _joined(unread, what)
        elif isinstance(what, Prefilled):
            self._done = what
        else:
            self._error = what
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def step(self) -> Step:
        """The steps of one choice since it was last read, as one. Raises what was put as an error."""
        if not self._steps:
            await self._news()
        assert self._steps, "a decode has steps or an error"
        return self._steps.pop(next(iter(self._steps)))

    async def done(self) -> Prefilled:
        """The end of a prefill. Raises what was put as an error."""
        if self._done is None:
            await self._news()
        assert self._done is not None, "a prefill has an end or an error"
        return self._done

    async def _news(self) -> None:
        if self._error is None:
            self._waiter = self._loop.create_future()
            await self._waiter
            self._waiter = None
        if self._error is not None and not self._steps:
            raise self._error


def _joined(first: Step, second: Step) -> Step:
    return Step(
        token_ids=(*first.token_ids, *second.token_ids),
        text=first.text + second.text,
        cached_tokens=first.cached_tokens,
        finish_reason=second.finish_reason,
        choice=first.choice,
        load_s=first.load_s,
    )


class Alarm:
    """A sleep that can be cut short. One sleeper at a time."""

    def __init__(self) -> None:
        self._sleeper: asyncio.Future[None] | None = None

    async def sleep(self, until_s: float | None) -> None:
        """Until this time of the event loop, or until `ring`. None: until `ring` alone."""
        loop = asyncio.get_running_loop()
        self._sleeper = loop.create_future()
        timer = None if until_s is None else loop.call_at(until_s, self.ring)
        try:
            await self._sleeper
        finally:
            self._sleeper = None
            if timer is not None:
                timer.cancel()

    def ring(self) -> None:
        """Wake the sleeper, if there is one."""
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)
