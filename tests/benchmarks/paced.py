"""The worker behind both relays of `relay.py`: `python -m tests.benchmarks.paced NATS_URL`.

It computes nothing: `PREFILL_S` after it has got a request it says a token of each reply at each step, those of all replies in
one message. With our gateway it speaks the whole protocol: a prefill worker claims, a decode worker takes over, the end is asked
for an answer, and the message is acked.
"""

import asyncio
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Final

import anyio
import msgspec
import uvloop

from pipeline import outside
from pipeline.bus.connection import Bus, Message
from pipeline.protocol.messages import Tokens, encode
from tests.benchmarks.bare import REPLIES, REQUESTS, Said
from tests.gateway.worker_double import Job, WorkerDouble

PREFILL_S: Final = 0.02
STEP_S: Final = 0.004
REPLY_TOKENS: Final = 30
WORD: Final = " token"

_pack: Final = msgspec.msgpack.Encoder().encode
_request: Final = msgspec.msgpack.Decoder(tuple[int, bytes]).decode


class Steps:
    """An engine's, without an engine."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._jobs: dict[Job, asyncio.Event] = {}
        self._bare: dict[int, int] = {}
        """How many tokens each bare request has had."""

    async def answer(self, job: Job) -> None:
        """What the workers of both pools do for a request of our gateway."""
        await job.claim()
        await asyncio.sleep(PREFILL_S)
        await job.claim(f"{job.claim_id}-decode", follows=job.claim_id)
        self._jobs[job] = said = asyncio.Event()
        await said.wait()
        await job.done("length")

    def bare(self, message: Message) -> None:
        """A request of the bare relay."""
        number, _ = _request(message.data)
        asyncio.get_running_loop().call_later(PREFILL_S, self._bare.__setitem__, number, 0)

    async def run(self) -> None:
        """One step after the other."""
        due_s = outside.monotonic_s()
        while True:
            due_s = max(due_s + STEP_S, outside.monotonic_s())
            await asyncio.sleep(due_s - outside.monotonic_s())
            for step in (self._step, self._bare_step):
                await step()

    async def _step(self) -> None:
        frames: defaultdict[str, list[Tokens]] = defaultdict(list)
        for job, said in list(self._jobs.items()):
            frames[job.tree["reply_to"]].append(job.tokens(WORD))
            if len(job.ids) == REPLY_TOKENS:
                del self._jobs[job]
                said.set()
        for reply_to, of_a_gateway in frames.items():
            await self._bus.publish(reply_to, encode(of_a_gateway))

    async def _bare_step(self) -> None:
        said: list[Said] = []
        for number, had in list(self._bare.items()):
            last = had + 1 == REPLY_TOKENS
            said.append((number, WORD, last))
            if last:
                del self._bare[number]
            else:
                self._bare[number] = had + 1
        if said:
            await self._bus.publish(REPLIES, _pack(said))


async def work(url: str, ready: Callable[[], None]) -> None:
    """Until it is ended."""
    async with await Bus.connect(url, "paced") as bus, anyio.create_task_group() as tasks:
        steps, double = Steps(bus), WorkerDouble(bus)
        double.script = steps.answer
        await bus.subscribe(REQUESTS, steps.bare)
        await double.listen()
        tasks.start_soon(double.run)
        tasks.start_soon(steps.run)
        ready()


if __name__ == "__main__":
    uvloop.run(work(sys.argv[1], lambda: print("ready", flush=True)))
