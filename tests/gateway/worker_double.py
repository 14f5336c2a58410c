"""Both pools of workers in one scripted object, on a real broker.

It takes requests from the work queue and speaks the whole protocol to the gateway: claim, frames, the end as a request, the ack
that follows `whole` or `gone`. A test drives each `Job` by hand, or sets `script` to have every job done by itself.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio
import anyio.abc
import msgspec

from pipeline.bus import acks
from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError, Disconnected
from pipeline.errors import ErrorBody
from pipeline.protocol import subjects
from pipeline.protocol.messages import (
    Answer,
    Cancel,
    Claim,
    Done,
    Failed,
    Notice,
    Presence,
    Tokens,
    Usage,
    answer_decoder,
    encode,
    notice_decoder,
    pack_ids,
)

MODEL = "double-1"
MAX_MODEL_LEN = 4096
STREAM = "REQUESTS_double"
PER_CREATOR_MAX = 4
HOLDER = "holder.double"

_cancel_decoder = msgspec.msgpack.Decoder(Cancel)


class Job:
    """One request as the worker holds it."""

    def __init__(self, bus: Bus, message: Message, claim: str) -> None:
        self._bus = bus
        self._ack = message.reply
        self.subject = message.subject
        self.headers = dict(message.headers or {})
        self.tree: dict[str, Any] = msgspec.msgpack.decode(message.data)
        self.id: str = self.tree["id"]
        self.claim_id = claim
        self.ids: list[int] = []
        self.text = ""
        self._last: Done | Failed | None = None

    async def claim(self, claim: str | None = None, follows: str | None = None) -> Answer:
        """Ask for the right to speak, under a new id where one is given."""
        self.claim_id = claim or self.claim_id
        wanted = Claim(request=self.id, claim=self.claim_id, epoch="1", holder=HOLDER, ack=self._ack, follows=follows)
        return answer_decoder.decode(await self._bus.request(self.tree["claim_at"], encode(wanted), 2.0))

    def tokens(self, text: str) -> Tokens:
        """The next frame: one token, and its text."""
        frame = Tokens(1, self.id, self.claim_id, len(self.ids), pack_ids([len(self.ids)]), text)
        self.ids.append(len(self.ids))
        self.text += text
        return frame

    async def say(self, *texts: str) -> None:
        """One token for each text, all in one message."""
        await self.send([self.tokens(text) for text in texts])

    async def send(self, frames: list[Tokens]) -> None:
        """Frames of one step."""
        await self._bus.publish(self.tree["reply_to"], encode(frames))

    async def done(self, finish_reason: str = "stop") -> Answer:
        """The reply is complete."""
        return await self._end(self._done(finish_reason))

    async def done_with(self, frame: Done) -> Answer:
        """The reply is complete, in the test's own words."""
        return await self._end(frame)

    async def done_at_last(self) -> Answer:
        """The end, repeated until it is answered, as a worker does it. The message is left to its redelivery."""
        frame = self._done("stop")
        with anyio.fail_after(10):
            while True:
                try:
                    return await self._ask([frame])
                except BusError:
                    await anyio.sleep(0.05)

    async def fail(self, error: ErrorBody) -> Answer:
        """The reply is not going to be complete."""
        return await self._end(Failed(1, self.id, self.claim_id, len(self.ids), error))

    async def ack(self) -> None:
        """The message is done with."""
        await acks.ack(self._bus, self._ack)

    def usage(self) -> Usage:
        """A prompt of 2,210 tokens, and what was said."""
        return Usage(
            prompt_tokens=2210,
            completion_tokens=len(self.ids),
            cached_tokens=1792,
            decode_cached_tokens=2208,
            prefill_generated_tokens=1,
            prefill="prefill-1",
            decode="decode-1",
        )

    async def end_again(self) -> Answer:
        """Repeat the end, as a worker does that has not heard the answer."""
        assert self._last is not None
        return await self._ask([self._last])

    def _done(self, finish_reason: str) -> Done:
        ids = pack_ids(self.ids)
        return Done(1, self.id, self.claim_id, len(self.ids), ids, self.text, finish_reason, self.usage())

    async def _end(self, frame: Done | Failed) -> Answer:
        self._last = frame
        answer = await self._ask([frame])
        await self.ack()
        return answer

    async def _ask(self, frames: list[Done | Failed]) -> Answer:
        return answer_decoder.decode(await self._bus.request(self.tree["reply_to"], encode(frames), 2.0))


Script = Callable[[Job], Coroutine[Any, Any, None]]


def saying(*texts: str, finish_reason: str = "stop") -> Script:
    """A script: claim, say this, done."""

    async def script(job: Job) -> None:
        await job.claim()
        for text in texts:
            await job.say(text)
        await job.done(finish_reason)

    return script


def failing(error: ErrorBody) -> Script:
    """A script: claim, and fail at once."""

    async def script(job: Job) -> None:
        await job.claim()
        await job.fail(error)

    return script


def stream_config() -> dict[str, Any]:
    """The work queue, with the bounds that a gateway meets."""
    return {
        "name": STREAM,
        "subjects": ["requests.in.>"],
        "retention": "workqueue",
        "storage": "file",
        "discard": "new",
        "discard_new_per_subject": True,
        "max_msgs_per_subject": PER_CREATOR_MAX,
        "max_msg_size": 1_000_000,
    }


class WorkerDouble:
    """A prefill and a decode worker."""

    def __init__(self, bus: Bus) -> None:
        self.script: Script | None = None
        self.requests: set[str] = set()
        self.deliveries = 0
        self.silent = False
        self.cancels: asyncio.Queue[str] = asyncio.Queue()
        self.notices: asyncio.Queue[Notice] = asyncio.Queue()
        self._bus = bus
        self._taken: asyncio.Queue[Job] = asyncio.Queue()
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()

    @property
    def seen(self) -> int:
        """The requests that have come, however often each: whom the gateway takes for silent, it has delivered again."""
        return len(self.requests)

    async def next_job(self) -> Job:
        """The next request that nobody has taken."""
        with anyio.fail_after(5):
            return await self._jobs.get()

    async def next_cancel(self) -> str:
        """The next request that is cancelled."""
        with anyio.fail_after(5):
            return await self.cancels.get()

    async def next_notice(self) -> Notice:
        """The next thing that the gateway tells a holder."""
        with anyio.fail_after(5):
            return await self.notices.get()

    async def announce(self, role: str, *, ready: bool = True, model: str = MODEL) -> None:
        """Say that a worker of this role lives."""
        presence = Presence(
            role="prefill" if role == "prefill" else "decode",
            id=f"{role}-1",
            epoch="1",
            ready=ready,
            model=model,
            max_model_len=MAX_MODEL_LEN,
            slots=8,
            slots_free=8,
        )
        with suppress(Disconnected):
            await self._bus.publish(subjects.presence(role, presence.id), encode(presence))

    async def forget_all(self) -> None:
        """As between two tests: nothing is queued, nothing is scripted, nothing is remembered."""
        self.script = None
        self.requests.clear()
        await self._api(f"STREAM.PURGE.{STREAM}", {})
        for queue in (self.cancels, self.notices, self._jobs):
            while not queue.empty():
                queue.get_nowait()

    async def undeclare(self) -> None:
        """The work queue is gone, as on a broker that was never set up."""
        await self._api(f"STREAM.DELETE.{STREAM}", {})

    async def listen(self) -> None:
        """Take part: declare the work queue, and have everything in it delivered here."""
        inbox = self._bus.inbox()
        await self._bus.subscribe(inbox, self._on_request)
        await self._bus.subscribe("control.cancel.*", self._on_cancel)
        await self._bus.subscribe(HOLDER, self._on_notice)
        await self._api(f"STREAM.CREATE.{STREAM}", stream_config())
        consumer = {"durable_name": "double", "deliver_subject": inbox, "ack_policy": "explicit"}
        await self._api(f"CONSUMER.CREATE.{STREAM}.double", {"stream_name": STREAM, "config": consumer})

    async def _api(self, call: str, body: dict[str, Any]) -> None:
        answer = msgspec.json.decode(await self._bus.request(f"$JS.API.{call}", msgspec.json.encode(body), 5.0))
        assert "error" not in answer, answer

    async def run(self) -> None:
        """Live: announce both workers again and again, and do jobs by the script."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._announce)
            tasks.start_soon(self._work, tasks)

    async def _announce(self) -> None:
        while True:
            if not self.silent:
                await self.announce("prefill")
                await self.announce("decode")
            await anyio.sleep(0.2)

    async def _work(self, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            job = await self._taken.get()
            if self.script is not None:
                tasks.start_soon(self.script, job)
            else:
                self._jobs.put_nowait(job)

    def _on_request(self, message: Message) -> None:
        self.deliveries += 1
        job = Job(self._bus, message, f"claim-{self.deliveries}")
        self.requests.add(job.id)
        self._taken.put_nowait(job)

    def _on_cancel(self, message: Message) -> None:
        self.cancels.put_nowait(_cancel_decoder.decode(message.data).request)

    def _on_notice(self, message: Message) -> None:
        self.notices.put_nowait(notice_decoder.decode(message.data))
