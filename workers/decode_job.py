"""One request at decode: from its handoff to the ack of the message that brought it."""

import contextlib
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Final

import anyio
import msgspec

from pipeline import outside
from pipeline.bus import acks
from pipeline.bus.connection import Bus
from pipeline.bus.errors import BusError
from pipeline.errors import BodyTooLarge, CapacityError, InvalidField
from pipeline.limits import HANDOFF_PATIENCE_S, LEASE_SPARE_S
from pipeline.protocol.chat import wants_prompt, wants_prompt_ids
from pipeline.protocol.credits import Ledger, Verdicts
from pipeline.protocol.messages import (
    Done,
    Failed,
    Go,
    Handoff,
    HandoffAnswer,
    Tokens,
    Usage,
    encode,
    unpack_ids,
)
from pipeline.protocol.presence import Receiver
from pipeline.protocol.records import Facts, Record
from pipeline.protocol.reply import Outbox
from pipeline.protocol.request import Decode, Effect, Event, Stage, step_decode
from pipeline.protocol.resume import check_resumable
from pipeline.protocol.stages import AtDecode, AtPrefill, Decoding, Stages, at_decode, seconds
from pipeline.protocol.subjects import parse_ack
from pipeline.telemetry import metrics
from pipeline.telemetry.spans import Spans
from workers.conversations import Conversations
from workers.engines.port import Engine, Step
from workers.frames import FrameSender
from workers.holding import EVENT_OF, Holding
from workers.identity import Identity, new_claim
from workers.jobs import TELLING_GRACE_S, Job
from workers.leases import Leases
from workers.starts import Starts

TOO_LARGE: Final = (
    "The whole reply is larger than one message of the broker: ask for fewer tokens, or for fewer logprobs."
)


class Desk(msgspec.Struct, frozen=True, kw_only=True):
    """What every decode job of a worker shares. `publish` sends the ledger's verdicts.

    `read` is told when the engine has read the prompt of a grant, and how many tokens of it were cached; None: it will not.
    """

    bus: Bus
    engine: Engine
    me: Identity
    ledger: Ledger
    leases: Leases
    frames: FrameSender
    starts: Starts
    conversations: Conversations
    publish: Callable[[Verdicts], None]
    read: Callable[[str, int | None], None]
    spans: Spans
    clock: Callable[[], float]


class DecodeJob(Job):
    """Carries out what the machine of `pipeline.protocol.request` says. Its blocks are the ledger's until STOP."""

    times: Decoding

    def __init__(self, desk: Desk, handoff: Handoff, answer_at: str) -> None:
        self.desk = desk
        self.handoff = handoff
        self.answer_at = answer_at
        self.accepted = False
        self.holding = Holding(
            bus=desk.bus,
            me=desk.me,
            request=handoff.request,
            claim=new_claim(desk.me),
            ack_subject=handoff.ack,
            reply_to=handoff.reply_to,
            claim_at=handoff.claim_at,
            encoding=handoff.encoding,
            receiver=Receiver.parse(handoff.receiver),
            request_id=str(handoff.chat.get("request_id") or ""),
        )
        self.state = Decode(arbitrated=self.holding.arbitrated)
        self.outbox = Outbox(handoff.request, self.holding.claim)
        self._delivered: list[int] = []
        self._generated = False
        self._reply: str | None = None
        self._cached_tokens = 0
        self._reasoning_tokens: int | None = None
        self._said: AtDecode | None = None
        self._frames_held = False
        self._holds_blocks = True
        self._refused_for = Event.FAILED
        self._lease: str | None = None
        self._message = parse_ack(handoff.ack)
        self._counted = False
        self._stop_watching: Callable[[], None] | None = None
        self.span = desk.spans.begin(handoff.trace)
        ahead_s = desk.clock() - outside.unix_s()
        super().__init__(handoff.deadline_s + ahead_s, desk.clock)
        if handoff.first_by_s:
            self.first_by_s = handoff.first_by_s + ahead_s
        self.times = Decoding(began_s=self.began_s)
        self.happen(Event.TAKEN)

    @property
    def stages(self) -> AtDecode:
        """Where its time has gone, up to now."""
        self.times.asked_s, self.times.answered_s = self.holding.claim_asked_s, self.holding.claim_answered_s
        return at_decode(self.times, self._clock())

    @property
    def record(self) -> Record:
        """What this worker knows of it now."""
        facts: Facts = {
            "klass": self.handoff.klass,
            "prefill": self.handoff.prefill,
            "prompt_tokens": len(self.handoff.ids) // 4,
            "decode_cached_tokens": self._cached_tokens,
            "completion_tokens": self.outbox.length,
        }
        told = None if self._generated else self.told
        return self.recorded("decode", seconds(self._said or self.stages), facts=facts, told=told)

    @property
    def unread(self) -> bool:
        """Whether our engine has its prompt still to read, because no prefill engine has."""
        return self.handoff.direct and self.times.first_s is None

    @property
    def stage(self) -> Stage:
        return self.state.stage

    def step(self, event: Event) -> tuple[Effect, ...]:
        self.state, effects = step_decode(self.state, event)
        self._refused_for = event
        return effects

    def beside(self) -> dict[Effect, Callable[[], Awaitable[None]]]:
        return {Effect.CLAIM: self._claim, Effect.DECODE: self._decode, Effect.TELL: self._tell}

    def at_once(self) -> dict[Effect, Callable[[], Awaitable[None]]]:
        return {
            Effect.ACCEPT: self._accept,
            Effect.REFUSE: self._refuse,
            Effect.HOLD_FRAMES: self._hold_frames,
            Effect.LET_FRAMES_GO: self._let_frames_go,
            Effect.STOP: self._stop,
            Effect.ACK: self._ack,
            Effect.NAK: self.holding.nak,
        }

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self._release()
            if self._stop_watching is not None:
                self._stop_watching()
            if self._counted:
                await self.desk.starts.take_back_shielded(self._message)
            if self._lease is not None:
                self.desk.leases.let_go(self._lease)

    def resend(self, index: int) -> None:
        """The receiver misses tokens from this index on."""
        for frame in self.outbox.since(index):
            self._send(frame)

    async def answer(self, state: HandoffAnswer) -> None:
        """Answer the handoff, where it was last repeated."""
        await self.desk.bus.publish(self.answer_at, encode(state))

    # Effects

    async def _claim(self) -> None:
        """Take over from prefill, which offers it for no longer than we try; in doubt, ask again under the same claim."""
        with anyio.move_on_after(HANDOFF_PATIENCE_S if self.stage is Stage.TAKING else math.inf):
            answer = await self.holding.claim_it(follows=self.handoff.claim)
            if isinstance(answer, Go) and self.stage is Stage.TAKING:
                self._delivered = unpack_ids(answer.ids)
                self.outbox = Outbox(self.handoff.request, self.holding.claim, self._delivered)
                if self._delivered:
                    self.first_by_s = math.inf
            self.happen(EVENT_OF[type(answer)])
            return
        self.happen(Event.UNANSWERED)

    async def _accept(self) -> None:
        self._hold()
        if self._message.delivered > 1:
            self._counted = True
            if not self.handoff.reads:  # else its prompt is still to be read, as its record says
                await self._write_start()
        if not (self.holding.arbitrated or self.holding.kept):
            # Nobody asks again for what a broken connection loses, so there the reply would go on with a hole.
            self._stop_watching = self.desk.bus.on_disconnect(lambda: self.happen(Event.DOUBT))
        self.accepted = True
        await self.answer(HandoffAnswer(state="accepted"))

    async def _write_start(self) -> None:
        """A start that is not counted, rather than a reply that fails."""
        with contextlib.suppress(BusError, CapacityError):
            await self.desk.starts.write(self._message)

    async def _refuse(self) -> None:
        match self._refused_for:
            case Event.FENCED:
                await self.answer(HandoffAnswer(state="refused", reason="fenced"))
            case Event.GONE | Event.WHOLE | Event.CANCELLED:
                await self.answer(HandoffAnswer(state="refused", reason="gone"))
            case _:
                await self.answer(HandoffAnswer(state="refused", reason="no_grant"))

    async def _decode(self) -> None:
        handoff, began_s = self.handoff, self._clock()
        check_resumable(handoff.chat, self._delivered)
        prompt = unpack_ids(handoff.ids)
        self.outbox.prompt_logprobs = handoff.prompt_logprobs
        steps = self.desk.engine.decode(
            self.holding.claim,
            prompt,
            handoff.salt,
            handoff.chat,
            handoff.max_tokens,
            self._delivered,
            handoff.echo,
            here=handoff.prefill == self.desk.me.id and not handoff.reads,
            trace=self.span.context,
        )
        async with aclosing(steps):
            async for step in steps:
                first = self.times.first_s is None
                if first:
                    self._began(began_s, step, len(prompt))
                metrics.DECODE_TOKENS.inc(len(step.token_ids))
                new = (list(step.token_ids), step.text, step.choice, step.logprobs, step.message)
                if frame := self.outbox.add(*new):
                    self._send(frame)
                if first and self._counted and handoff.reads:
                    await self._write_start()
                if step.finish_reason is not None:
                    self.outbox.end(step.choice, step.finish_reason, step.stop_reason)
                if step.reasoning_tokens is not None:
                    self._reasoning_tokens = (self._reasoning_tokens or 0) + step.reasoning_tokens
        self._generated = self.outbox.ended == (handoff.chat.get("n") or 1)
        self.happen(Event.GENERATED)

    def _began(self, began_s: float, step: Step, prompt_tokens: int) -> None:
        self.outbox.before = step.before
        if wants_prompt(self.handoff.chat):
            self.outbox.prompt_tokens = prompt_tokens
            self.outbox.prompt = self.handoff.ids if wants_prompt_ids(self.handoff.chat) else b""
        self._cached_tokens = min(step.cached_tokens, prompt_tokens)
        self.first_by_s = math.inf
        self.times.first_s, self.times.load_s = self._clock(), step.load_s
        self.desk.read(self.handoff.ask, self._cached_tokens)
        metrics.FIRST_STEP_SECONDS.observe(self.times.first_s - began_s)
        if self._delivered and step.finish_reason is not None and not step.token_ids:
            return  # all of it was there: the engine has done nothing
        metrics.DECODE_LOADED_TOKENS.inc(step.cached_tokens)
        metrics.DECODE_RECOMPUTED_TOKENS.inc(prompt_tokens + len(self._delivered) - step.cached_tokens)

    async def _hold_frames(self) -> None:
        self._frames_held = True

    async def _let_frames_go(self) -> None:
        """The receiver drops what it has, so all of them may go again: which ones got through before the doubt is not known."""
        self._frames_held = False
        await acks.in_progress_unconfirmed(self.desk.bus, self.handoff.ack)
        self._hold()
        self.resend(0)

    def _hold(self) -> None:
        """Keep the lease: from acceptance on, and anew once the receiver has confirmed the claim after a doubt."""
        if self._lease is not None:
            self.desk.leases.let_go(self._lease)  # the doubt may have been ours alone
        until_s = max(self.deadline_s, self.began_s) + TELLING_GRACE_S + LEASE_SPARE_S
        self._lease = self.desk.leases.hold(self.handoff.ack, lambda: self.happen(Event.DOUBT), until_s)

    async def _tell(self) -> None:
        await self.desk.frames.flush()
        end = self._end()
        if self.handoff.talk is not None and isinstance(end, Done):
            self._reply = end.text.removeprefix(self.handoff.echo.text)
            # Should we die once it is told, the next one writes it down. What fails costs that, and not the reply.
            with contextlib.suppress(BusError):
                await self.desk.conversations.keep(self.handoff.talk, self._reply)
        if isinstance(end, Done):
            self._said = self.stages
            end = msgspec.structs.replace(end, stages=Stages(self.handoff.stages or AtPrefill(), self._said))
        try:
            self.happen(await self.holding.tell(end, self.resend))
        except BodyTooLarge:
            # Its tokens may all be there, but nobody can be sure of it: better told than waited for until the deadline.
            self._generated, self._reply = False, None
            self.error = self.told = InvalidField(TOO_LARGE, param="max_tokens")
            self.happen(await self.holding.tell(self._end(), self.resend))

    async def _ack(self) -> None:
        if self.handoff.talk is not None:
            whole = self.ended_by is Event.WHOLE
            await self.desk.conversations.close(self.handoff.talk, self._reply if whole else None)
        await self.holding.ack()

    def _end(self) -> Done | Failed:
        if not self._generated:
            return Failed(1, self.handoff.request, self.holding.claim, self.outbox.length, self.error.body())
        # Where no prefill engine has seen the prompt, what was not computed is what we have found.
        cached_tokens = self._cached_tokens if self.handoff.direct else self.handoff.cached_tokens
        usage = Usage(
            prompt_tokens=len(self.handoff.ids) // 4,
            completion_tokens=self.outbox.length,
            cached_tokens=cached_tokens,
            decode_cached_tokens=self._cached_tokens,
            prefill_generated_tokens=self.handoff.prefill_generated_tokens,
            prefill=self.handoff.prefill,
            decode=self.desk.me.id,
            hbm_tokens=min(self.handoff.hbm_tokens, cached_tokens),
            reasoning_tokens=self._reasoning_tokens,
        )
        return self.outbox.done(usage)

    async def _stop(self) -> None:
        await self.stop_working()
        self._release()

    def _release(self) -> None:
        """The engine holds nothing for this request any more. Once."""
        if self._holds_blocks:
            self._holds_blocks = False
            self.desk.publish(self.desk.ledger.release(self.handoff.ask, self._clock(), whole=self._generated))

    def _send(self, frame: Tokens) -> None:
        if not self._frames_held and not self.holding.kept:
            self.desk.frames.send(self.handoff.reply_to, frame, self.handoff.encoding)
