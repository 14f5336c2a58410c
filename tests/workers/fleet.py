"""A whole fleet in one event loop: a real broker, real loops, simulated engines, and a receiver that plays the gateway's part."""

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import msgspec

from pipeline.bus import streams
from pipeline.bus.connection import Bus, Message
from pipeline.bus.presence import Watcher
from pipeline.bus.settings import Settings
from pipeline.config import Config, Decode, Engine, LMCache, Nats, Requests, Simulated
from pipeline.paths import JETSTREAM
from pipeline.protocol import subjects
from pipeline.protocol.arrangement import Role
from pipeline.protocol.messages import (
    Cancel,
    Done,
    Failed,
    Tokens,
    claim_decoder,
    encode,
    frames_decoder,
    unpack_ids,
)
from pipeline.protocol.presence import Presences
from pipeline.protocol.reply import Receiver
from workers.control import Control
from workers.decode import DecodeWorker
from workers.engines.simulated import SimulatedEngine
from workers.identity import new_identity
from workers.loops import Loops
from workers.prefill import PrefillWorker

MakeEngine = Callable[[Config, Role], SimulatedEngine]

PROMPT = [{"role": "user", "content": "Tell me about the sea. " * 20}]


def config_for(url: str, *, slots: int = 4, default_max_tokens: int = 12, **simulated: Any) -> Config:
    """Quick engines: milliseconds a prefill, one a step."""
    timing = {"prefill_overhead_s": 0.001, "step_s": 0.001, "kv_blocks": 512, **simulated}
    return Config(
        engine="simulated",
        lmcache=LMCache(shm_name=url),  # a tier of this fleet's own
        nats=Nats(url=url),
        prefill=Engine(slots=slots),
        decode=Decode(slots=64),
        requests=Requests(default_max_tokens=default_max_tokens),
        simulated=Simulated(**timing),
    )


class Running(msgspec.Struct):
    """One worker of the fleet."""

    loops: Loops
    engine: SimulatedEngine
    bus: Bus
    scope: anyio.CancelScope
    leaves: bool = False

    def leave(self, tasks: anyio.abc.TaskGroup) -> None:
        """As a process does that is told to drain."""
        self.leaves = True
        tasks.start_soon(self._drain)

    async def _drain(self) -> None:
        await self.loops.drain()
        self.scope.cancel()


class Reply(msgspec.Struct):
    """What a caller got in the end."""

    text: str
    ids: list[int]
    end: Done | Failed
    frames: int


class Fleet:
    """Workers by name, and a bus for the test's own words."""

    def __init__(self, config: Config, bus: Bus, tasks: anyio.abc.TaskGroup, engine: MakeEngine) -> None:
        self.config, self.bus, self._tasks, self._engine = config, bus, tasks, engine
        self.workers: dict[str, Running] = {}

    async def add(self, role: Role, name: str, config: Config | None = None) -> Running:
        """Start one more worker; returns when it serves."""
        started = anyio.Event()
        self._tasks.start_soon(self._live, config or self.config, role, name, started)
        await started.wait()
        return self.workers[name]

    def prefill(self, name: str = "prefill-1") -> PrefillWorker:
        """A prefill loop by name."""
        loop = self.workers[name].loops.prefill
        assert loop is not None
        return loop

    def decode(self, name: str = "decode-1") -> DecodeWorker:
        """A decode loop by name."""
        loop = self.workers[name].loops.decode
        assert loop is not None
        return loop

    def kill(self, name: str) -> None:
        """The worker's connection is gone at once, and so is everything that it would still have said."""
        worker = self.workers.pop(name)
        client = worker.bus.client
        client._status = client.CLOSED
        assert client._transport is not None
        client._transport.close()  # type: ignore[no-untyped-call]
        worker.scope.cancel()

    async def ask(self, *, creator: str = "alice", within_s: float = 10.0, **fields: Any) -> Reply:
        """Publish a request as a gateway does, and receive its reply under the rules of claims."""
        caller = Caller(self.bus, fields.pop("id", None) or secrets.token_hex(8))
        await caller.listen()
        await caller.publish(creator, **fields)
        with anyio.fail_after(within_s):
            return await caller.reply()

    async def _live(self, config: Config, role: Role, name: str, started: anyio.Event) -> None:
        engine, presences = self._engine(config, role), Presences()
        await engine.start()
        async with await Bus.connect(config.nats.url, name) as bus:
            me, settings = new_identity(name), Settings(bus, config)
            await settings.start()
            loops = Loops(bus, engine, settings.now, me, presences, role)
            loops.settings_version = lambda: settings.version
            settings.apply_to(loops.apply)
            watcher = Watcher(bus, presences, time.monotonic)
            await watcher.start()
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    running = self.workers[name] = Running(loops, engine, bus, scope)
                    control = Control(bus, name, loops, lambda: running.leaves, lambda: running.leave(tasks))
                    tasks.start_soon(control.run)
                    tasks.start_soon(settings.run)
                    started.set()
                    await loops.run()
            with anyio.CancelScope(shield=True):
                await watcher.stop()
                await engine.close()


class Caller:
    """A receiver: an arbiter of claims, and an assembler of frames."""

    def __init__(self, bus: Bus, request: str) -> None:
        self.bus, self.request = bus, request
        self.receiver = Receiver(request)
        self.frames = 0
        self.holders: list[str] = []
        self.hears_takeovers = True
        self.takeovers_unheard = 0
        self.inbox = bus.inbox()
        self._end: Done | Failed | None = None
        self._ended = anyio.Event()

    async def listen(self) -> None:
        """Before anything is published."""
        await self.bus.subscribe(f"{self.inbox}.c", self._claimed)
        await self.bus.subscribe(f"{self.inbox}.r", self._framed)
        await self.bus.barrier()

    async def publish(self, creator: str, klass: str = "interactive", **fields: Any) -> None:
        """The request, as a gateway writes it."""
        body = {
            "messages": PROMPT,
            "id": self.request,
            "reply_to": f"{self.inbox}.r",
            "claim_at": f"{self.inbox}.c",
            **fields,
        }
        token = subjects.token(creator)
        subject = subjects.request_in(klass, token, token)
        await self.bus.store(subject, encode(body), msg_id=secrets.token_hex(8), timeout_s=2.0)

    async def reply(self) -> Reply:
        """Wait for the end."""
        await self._ended.wait()
        assert self._end is not None
        return Reply(self.receiver.text, list(self.receiver.ids), self._end, self.frames)

    def leave(self, *, cancels: bool = True) -> None:
        """The client is gone: what a gateway says then. Without `cancels` the cancel is lost on the way."""
        notice = self.receiver.leave()
        if notice is not None:
            self.bus.post(notice[0], encode(notice[1]))
        if cancels:
            self.cancel()

    def cancel(self) -> None:
        """What anybody may say who does not want the reply: the receiver itself knows nothing of it."""
        self.bus.post(subjects.cancel(self.request), encode(Cancel(self.request)))

    @property
    def ended(self) -> bool:
        """Whether the reply has come to its end."""
        return self._ended.is_set()

    def _claimed(self, message: Message) -> None:
        claim = claim_decoder.decode(message.data)
        if claim.follows is not None and not (self.hears_takeovers or self.receiver.arbiter.gone):
            self.takeovers_unheard += 1
            return
        self.holders.append(claim.holder)
        self.bus.post(message.reply, encode(self.receiver.claim(claim)))

    def _framed(self, message: Message) -> None:
        for frame in frames_decoder.decode(message.data):
            self.frames += isinstance(frame, Tokens)
            heard = self.receiver.frame(frame, time.monotonic())
            if heard.answer is not None and message.reply:
                self.bus.post(message.reply, encode(heard.answer))
            if heard.notice is not None:
                self.bus.post(heard.notice[0], encode(heard.notice[1]))
            if heard.end is not None:
                self._end = heard.end
                self._ended.set()


@asynccontextmanager
async def fleet(
    config: Config, *, prefill: int = 1, decode: int = 1, both: int = 0, engine: MakeEngine = SimulatedEngine
) -> AsyncIterator[Fleet]:
    """A fleet that serves."""
    async with await Bus.connect(config.nats.url, "test") as bus, anyio.create_task_group() as tasks:
        await streams.apply(bus, streams.declared(JETSTREAM))
        made = Fleet(config, bus, tasks, engine)
        for number in range(decode):
            await made.add("decode", f"decode-{number + 1}")
        for number in range(prefill):
            await made.add("prefill", f"prefill-{number + 1}")
        for number in range(both):
            await made.add("both", f"both-{number + 1}")
        await until(
            lambda: all(made.prefill(name).decoders() for name in made.workers if not name.startswith("decode"))
        )
        await until(lambda: not any(running.loops.turning for running in made.workers.values()))
        yield made
        tasks.cancel_scope.cancel()


async def until(true: Any, within_s: float = 5.0) -> None:
    """Poll a condition, within a bound."""
    with anyio.fail_after(within_s):
        while not true():
            await anyio.sleep(0.005)


async def backlog(bus: Bus, stream: str = "REQUESTS_interactive") -> int:
    """Messages that the stream still holds."""
    info = msgspec.json.decode(await bus.request(f"$JS.API.STREAM.INFO.{stream}", b"", 2.0))
    return int(info["state"]["messages"])


__all__ = ["Caller", "Fleet", "Reply", "backlog", "config_for", "fleet", "unpack_ids", "until"]


async def nothing_left(bus: Bus) -> None:
    """Return when every request has left the queue: after its receiver has the reply, the ack is still on its way."""
    with anyio.fail_after(5.0):
        while await backlog(bus):
            await anyio.sleep(0.01)
