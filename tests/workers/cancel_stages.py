"""A request at each stage where a cancel can meet it, on the fleet of `fleet.py`, and what the cancel did there.

What keeps it there is no matter of timing:

    queued              the prefill worker offers no slots, until the cancel is out
    rendering           the prefill engine does not answer
    prefilling          the prefill engine takes no step; a decode worker has granted blocks meanwhile
    waiting for credit  its KV is stored, and the decode worker's blocks are all another's
    handed off          the receiver does not answer the claim with which decode takes the request over
    loading             the decode engine takes no step, and the KV is on its way to it
    decoding            frames come, and there are many to come

Each stage is a context manager that returns with the request there and nowhere else. Every request has a creator of its own,
so that no cache knows its prompt.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Any, Final, Literal

import anyio
import msgspec

from pipeline.config import Config
from pipeline.protocol.arrangement import Role
from pipeline.protocol.credits import GrantState
from pipeline.protocol.messages import Ask
from pipeline.protocol.pieces import Echo
from pipeline.protocol.request import Progress
from pipeline.protocol.request import Stage as JobStage
from tests.workers.fleet import Caller, Fleet, backlog, config_for, fleet, until
from workers.decode_job import DecodeJob
from workers.engines.port import NO_ECHO, Prefilled, Rendered, Step
from workers.engines.simulated import SimulatedEngine
from workers.pool import J, Pool
from workers.prefill import PrefillWorker
from workers.prefill_job import PrefillJob

PREFILL, DECODE = "prefill-1", "decode-1"

WITHIN_S: Final = 10.0
"""For a cancel to have done all that it does: a bound for what hangs, and no promise."""

LOOK_PERIOD_S: Final = 0.0005
"""Between two looks at slots and blocks."""

Work = Literal["render", "prefill", "decode"]
Way = Literal["cancel", "leave", "gone"]

WAYS: Final[dict[Way, Callable[[Caller], None]]] = {
    "cancel": Caller.cancel,
    "leave": Caller.leave,
    "gone": lambda caller: caller.leave(cancels=False),
}
"""`control.cancel` alone; what a gateway says when its client has left; and the same where the cancel is lost."""


class Witness(SimulatedEngine):
    """A simulated engine that knows what it was asked for, and when its work was broken off.

    `told_s`: when the last one was, monotonic, its abort included. Nothing is rendered while `renders` is not set.
    """

    def __init__(self, config: Config, role: Role) -> None:
        super().__init__(config, role)
        self.renders = asyncio.Event()
        self.renders.set()
        self.forget()

    def forget(self) -> None:
        """Nothing has been asked for, or told."""
        self.asked: list[Work] = []
        self.told_s: float | None = None
        self.steps = 0

    async def render(self, chat: Mapping[str, Any]) -> Rendered:
        """See `Engine`."""
        with self._at("render"):
            await self.renders.wait()
            return await super().render(chat)

    async def prefill(
        self,
        key: str,
        token_ids: Sequence[int],
        salt: str,
        chat: Mapping[str, Any] | None = None,
        trace: Mapping[str, str] | None = None,
        begins: int = 0,
    ) -> Prefilled:
        """See `Engine`."""
        with self._at("prefill"):
            return await super().prefill(key, token_ids, salt, chat, trace=trace, begins=begins)

    async def decode(
        self,
        key: str,
        token_ids: Sequence[int],
        salt: str,
        chat: Mapping[str, Any],
        max_tokens: int,
        delivered: Sequence[int] = (),
        echo: Echo = NO_ECHO,
        here: bool = False,
        trace: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Step, None]:
        """See `Engine`."""
        steps = super().decode(key, token_ids, salt, chat, max_tokens, delivered, echo, here, trace=trace)
        with self._at("decode"):
            async with aclosing(steps):
                async for step in steps:
                    self.steps += 1
                    yield step

    @property
    def loads(self) -> int:
        """Requests whose KV is on its way from LMCache."""
        assert self._model is not None
        return len(self._model._loading)

    @property
    def idle(self) -> bool:
        """Whether it holds nothing for anybody."""
        usage = self.usage()
        return (usage.running, usage.waiting, usage.kv_usage_ratio) == (0, 0, 0.0)

    @contextmanager
    def _at(self, work: Work) -> Iterator[None]:
        self.asked.append(work)
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.told_s = time.monotonic()
            raise


class Stand:
    """A prefill and a decode worker, and what becomes of the one request that is between them."""

    def __init__(self, made: Fleet) -> None:
        self.made = made
        self.prefill, self.decode = made.prefill(), made.decode()
        self.ended_s: dict[str, float] = {}
        """By worker: when its job was over, monotonic."""
        self.others_blocks = 0
        """Blocks of the decode worker that are held for another."""
        self._tell_ends(PREFILL, self.prefill._jobs)
        self._tell_ends(DECODE, self.decode._jobs)

    def engine(self, worker: str) -> Witness:
        """A worker's engine."""
        engine = self.made.workers[worker].engine
        assert isinstance(engine, Witness)
        return engine

    @property
    def asked(self) -> list[Work]:
        """What both engines were asked for, in order."""
        return [*self.engine(PREFILL).asked, *self.engine(DECODE).asked]

    @property
    def progress(self) -> Progress | None:
        """Of the request at prefill, while it is there."""
        job: PrefillJob | None = next(iter(self.prefill._jobs._jobs.values()), None)
        return job.state.progress if job else None

    @property
    def handing(self) -> bool:
        """Whether prefill has sent the completion event, and waits for its answer."""
        return [job.stage for job in self.prefill._jobs._jobs.values()] == [JobStage.HANDING]

    @property
    def at_decode(self) -> JobStage | None:
        """Where the request is at decode, while it is there."""
        job: DecodeJob | None = next(iter(self.decode._jobs._jobs.values()), None)
        return job.stage if job else None

    @property
    def rests(self) -> bool:
        """Whether no slot, no block and no ask is left, at the workers as in their engines."""
        book = self.decode.ledger
        return (
            (self.prefill.slots.busy, self.prefill.queued_tokens, book.count(GrantState.WAITING)) == (0, 0, 0)
            and book.free + self.others_blocks == book.blocks
            and self.engine(PREFILL).idle
            and self.engine(DECODE).idle
        )

    def forget(self) -> None:
        """Another request begins."""
        self.ended_s.clear()
        for worker in (PREFILL, DECODE):
            self.engine(worker).forget()

    async def publish(self, caller: Caller) -> None:
        """Put the request into the queue: one with a long reply, of a creator that nobody knows."""
        await caller.publish(caller.request, max_tokens=400, ignore_eos=True)

    def _tell_ends(self, worker: str, pool: Pool[J]) -> None:
        ended = pool._ended

        def over(job: J) -> None:
            ended(job)
            self.ended_s[worker] = time.monotonic()

        pool._ended = over


@asynccontextmanager
async def stand(url: str) -> AsyncIterator[Stand]:
    """Both workers, serving. A step takes 5 ms, so that a reply lasts for seconds."""
    async with fleet(config_for(url, step_s=0.005, kv_blocks=64), engine=Witness) as made:
        yield Stand(made)


# ----------------------------------------------------------------------------------------------------------
# The stages


@asynccontextmanager
async def _queued(at: Stand, caller: Caller) -> AsyncIterator[None]:
    await at.prefill.drain()
    try:
        await at.publish(caller)
        assert await backlog(at.made.bus) == 1
        assert at.progress is None
        yield
    finally:
        await _pull_again(at.prefill)


async def _pull_again(worker: PrefillWorker) -> None:
    """A drained worker offers its slots anew."""
    worker._puller._stopped = False
    await worker._puller.start()
    worker.slots.open = True
    worker._offer()


@asynccontextmanager
async def _rendering(at: Stand, caller: Caller) -> AsyncIterator[None]:
    engine = at.engine(PREFILL)
    engine.renders.clear()
    try:
        await at.publish(caller)
        await until(lambda: engine.asked == ["render"] and at.progress == Progress.BEGUN | Progress.CLAIMED)
        yield
    finally:
        engine.renders.set()


@asynccontextmanager
async def _prefilling(at: Stand, caller: Caller) -> AsyncIterator[None]:
    engine = at.engine(PREFILL)
    engine.pause()
    try:
        await at.publish(caller)
        granted = Progress.BEGUN | Progress.CLAIMED | Progress.RENDERED | Progress.GRANTED
        await until(lambda: engine.usage().running == 1 and at.progress == granted)
        yield
    finally:
        engine.resume()


@asynccontextmanager
async def _waiting_for_credit(at: Stand, caller: Caller) -> AsyncIterator[None]:
    book = at.decode.ledger
    all_of_it = Ask(
        ask=f"before-{caller.request}", request="another", claim="another", answer_to="nobody",
        blocks=book.blocks - book.reserve, deadline_s=time.time() + WITHIN_S,
    )  # fmt: skip
    book.ask(all_of_it, at.decode.clock(), WITHIN_S)
    book.consume(all_of_it.ask, book.epoch, at.decode.clock())
    at.others_blocks = all_of_it.blocks
    try:
        await at.publish(caller)
        stored = Progress.BEGUN | Progress.CLAIMED | Progress.RENDERED | Progress.STORED
        await until(lambda: book.count(GrantState.WAITING) == 1 and at.progress == stored)
        yield
    finally:
        book.release(all_of_it.ask, at.decode.clock(), whole=False)
        at.others_blocks = 0


@asynccontextmanager
async def _handed_off(at: Stand, caller: Caller) -> AsyncIterator[None]:
    caller.hears_takeovers = False
    await at.publish(caller)
    await until(lambda: caller.takeovers_unheard > 0)
    assert at.handing
    assert at.at_decode is JobStage.TAKING
    yield


@asynccontextmanager
async def _loading(at: Stand, caller: Caller) -> AsyncIterator[None]:
    engine = at.engine(DECODE)
    engine.pause()
    try:
        await at.publish(caller)
        await until(lambda: engine.loads == 1 and PREFILL in at.ended_s)
        assert at.at_decode is JobStage.DECODING
        yield
    finally:
        engine.resume()


@asynccontextmanager
async def _decoding(at: Stand, caller: Caller) -> AsyncIterator[None]:
    await at.publish(caller)
    await until(lambda: caller.frames > 2)
    yield


class Stage(msgspec.Struct, frozen=True):
    """`reached` brings a request there. `asked` is all that engines are asked for until then.

    `told`: whose engine must hear of the cancel; where no engine works, whose jobs must end.
    """

    reached: Callable[[Stand, Caller], AbstractAsyncContextManager[None]]
    told: tuple[str, ...]
    asked: tuple[Work, ...] = ()
    at_engine: bool = False

    def told_s(self, at: Stand) -> float | None:
        """When the cancel was there, monotonic; None while it is not."""
        if self.at_engine:
            return at.engine(self.told[0]).told_s
        return max(at.ended_s.values()) if at.ended_s.keys() >= set(self.told) else None


STAGES: Final = {
    "queued": Stage(_queued, (PREFILL,)),
    "rendering": Stage(_rendering, (PREFILL,), ("render",), at_engine=True),
    "prefilling": Stage(_prefilling, (PREFILL,), ("render", "prefill"), at_engine=True),
    "waiting for credit": Stage(_waiting_for_credit, (PREFILL,), ("render", "prefill")),
    "handed off": Stage(_handed_off, (PREFILL, DECODE), ("render", "prefill")),
    "loading": Stage(_loading, (DECODE,), ("render", "prefill", "decode"), at_engine=True),
    "decoding": Stage(_decoding, (DECODE,), ("render", "prefill", "decode"), at_engine=True),
}


class Met(msgspec.Struct, frozen=True):
    """What a cancel did. Seconds from its publication: until it was told, and until slots and blocks were back as well."""

    caller: Caller
    told_s: float
    freed_s: float


async def cancelled(at: Stand, stage: str, way: Way, request: str) -> Met:
    """Bring a new request to this stage, cancel it, and return once nothing is left of it at the workers.

    Raises `TimeoutError` where something is left after `WITHIN_S`.
    """
    here = STAGES[stage]
    caller = Caller(at.made.bus, request)
    at.forget()
    await caller.listen()
    async with AsyncExitStack() as kept:
        await kept.enter_async_context(here.reached(at, caller))
        said_s = time.monotonic()
        WAYS[way](caller)
        if stage == "queued":
            await at.made.bus.barrier()  # the cancel goes by another connection than the pulls
            await kept.aclose()  # nothing but its turn can show that it is dropped
        with anyio.fail_after(WITHIN_S):
            while (told_s := here.told_s(at)) is None or not at.rests:
                await anyio.sleep(LOOK_PERIOD_S)
        freed_s = time.monotonic()
    return Met(caller, told_s - said_s, freed_s - said_s)
