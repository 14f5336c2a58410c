"""One request at prefill: from its delivery to the moment that a decode worker has taken it over."""

import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from typing import Any, Final

import anyio
import msgspec

from pipeline import outside
from pipeline.bus.errors import BusError
from pipeline.bus.puller import Delivery
from pipeline.errors import FirstTokenLate, InvalidField, ModelNotFound, Poisoned, PromptTooLong
from pipeline.limits import CLAIM_PATIENCE_S, HOME_ANSWERS_S, LEASE_SPARE_S, SECOND_ASK_AFTER_S
from pipeline.protocol import intake, subjects, tracing
from pipeline.protocol.asking import Asking, Grant, Send
from pipeline.protocol.budget import blocks_needed, cache_salt, reply_tokens
from pipeline.protocol.classes import BATCH
from pipeline.protocol.completions import check_prompt_entries, prompt_logprobs
from pipeline.protocol.conversations import wait_s
from pipeline.protocol.intake import Intake
from pipeline.protocol.messages import (
    Ask,
    Failed,
    Go,
    Handoff,
    Verdict,
    encode,
    pack_ids,
    unpack_ids,
)
from pipeline.protocol.pieces import Echo
from pipeline.protocol.presence import Receiver
from pipeline.protocol.records import Facts, Record, creator_as
from pipeline.protocol.request import Effect, Event, Prefill, Stage, step_prefill
from pipeline.protocol.resume import check_resumable
from pipeline.protocol.stages import AtPrefill, Prefilling, at_prefill, seconds
from pipeline.telemetry import metrics
from workers.beginning import Beginning
from workers.bell import Bell
from workers.dead_letters import keep_delivery
from workers.engines.port import Prefilled
from workers.holding import EVENT_OF, Holding
from workers.identity import new_claim
from workers.jobs import TELLING_GRACE_S, TOO_LATE_TO_BEGIN, Job
from workers.offering import AWAY, offered
from workers.prefill_desk import Desk
from workers.referred import Referred
from workers.suspicion import Start
from workers.warmth import count_tokens

_REFUSALS: Final = {"gone": Event.GONE, "fenced": Event.FENCED}


class PrefillJob(Job):
    """Carries out what the machine of `pipeline.protocol.request` says."""

    times: Prefilling

    def __init__(self, desk: Desk, delivery: Delivery) -> None:
        self.desk = desk
        self.delivery = delivery
        self.ack = subjects.parse_ack(delivery.ack)
        self.stored = subjects.parse_stored(delivery.subject)
        self.address = intake.address(delivery.data, delivery.headers, self.ack, desk.rules)
        self.holding = Holding(
            bus=desk.bus,
            me=desk.me,
            request=self.address.request,
            claim=new_claim(desk.me),
            ack_subject=delivery.ack,
            reply_to=self.address.reply_to,
            claim_at=self.address.claim_at,
            encoding=self.address.encoding,
            receiver=Receiver.parse(self.address.receiver),
            request_id=self.address.request_id,
        )
        self.state = Prefill()
        self.asking: Asking | None = None
        self._verdict_came, self._home_answered = Bell(), Bell()
        self.reading: str | None = (
            None  # the grant under which the decode loop beside us takes it over, to read its prompt
        )
        self._ids: list[int] = []
        self._echo = ""
        self._delivered: list[int] = []
        self._max_tokens = self._weight = 0
        self.prefilled: Prefilled | None = None
        self._beginning = Beginning(self.holding)
        self._read = desk.promptness.nothing
        self._counting = Start(desk, self.ack)
        self._unkept = self._told_error = self._stays = self._little = False
        self._handed: AtPrefill | None = None
        self.span = desk.spans.begin(tracing.context_of(delivery.headers))
        longest_s, ahead_s = desk.rules.timeout_max_s[self.stored.shard.klass], desk.clock() - outside.unix_s()
        super().__init__(intake.deadline_s(lambda: self.intake, self.ack, longest_s) + ahead_s, desk.clock)
        self.times = Prefilling(began_s=self.began_s)
        self._bound_s = desk.config.requests.first_token_s if self.stored.shard.klass != BATCH else 0.0
        self._referred = Referred.of(desk.shelf, lambda: self.intake, self.ack)
        self._tree: Mapping[str, Any] = {}
        until_s = max(self.deadline_s, self.began_s) + TELLING_GRACE_S + LEASE_SPARE_S
        self._lease = desk.leases.hold(delivery.ack, lambda: self.happen(Event.DOUBT), until_s)
        self.happen(Event.DELIVERED_AGAIN if self.again else Event.DELIVERED)

    @property
    def stages(self) -> AtPrefill:
        """Where its time has gone, up to now."""
        self.times.asked_s, self.times.answered_s = self.holding.claim_asked_s, self.holding.claim_answered_s
        return at_prefill(self.times, self._clock())

    @property
    def record(self) -> Record:
        """What this worker knows of it now."""
        facts: Facts = {"klass": self.stored.shard.klass, "delivery": self.ack.delivered}
        if self._ids:
            facts["prompt_tokens"] = self.prompt_tokens
        if self.prefilled is not None:
            facts |= {"cached_tokens": self.prefilled.cached_tokens, "hbm_tokens": self.prefilled.hbm_tokens}
        stages = self._handed if self._handed is not None and self.ended else self.stages
        creator = creator_as(self.desk.config.telemetry.creators, self.stored.creator)
        return self.recorded("prefill", seconds(stages), creator, facts, self.told)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, once it is rendered."""
        return len(self._ids)

    @property
    def again(self) -> bool:
        """Whether the broker has delivered it before. A hint, no fence."""
        return self.ack.delivered > 1

    @property
    def stage(self) -> Stage:
        return self.state.stage

    @cached_property
    def intake(self) -> Intake:
        """The request. Raises `RequestError` where it is malformed."""
        return intake.read(self.delivery.data, self.delivery.headers, self.stored, self.ack, self.desk.rules)

    @cached_property
    def salt(self) -> str:
        """Whose cached prefixes this request may share."""
        scope, fingerprint = self.desk.config.requests.salt_scope, self.desk.engine.info.fingerprint
        theirs = self.intake.asked.cache_salt or ""
        return cache_salt(self.stored.creator, self.intake.envelope.tenant, scope, fingerprint, theirs)

    def step(self, event: Event) -> tuple[Effect, ...]:
        self.state, effects = step_prefill(self.state, event)
        return effects

    def beside(self) -> dict[Effect, Callable[[], Awaitable[None]]]:
        return {
            Effect.CLAIM: self._claim,
            Effect.RECLAIM: self._reclaim,
            Effect.COUNT: self._count,
            Effect.RENDER: self._render,
            Effect.ASK: self._ask,
            Effect.PREFILL: self._prefill,
            Effect.HAND_OFF: self._hand_off,
            Effect.TELL: self._tell,
        }

    def at_once(self) -> dict[Effect, Callable[[], Awaitable[None]]]:
        return {
            Effect.BEGIN: self._begin,
            Effect.STOP: self._stop,
            Effect.DEAD_LETTER: self._dead_letter,
            Effect.ACK: self._ack,
            Effect.NAK: self.holding.nak,
            Effect.NAK_FOR_A_WHILE: self._nak_for_a_while,
        }

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self.desk.leases.let_go(self._lease)
            self.desk.weigh(-self._weight)
            if self.reading is None or self.ended_by is not Event.ACCEPTED:
                self._read.give_up(self._clock())
            await self._counting.end()

    def resend(self, index: int) -> None:
        """The receiver misses tokens from this index on: one is sent from here, at most."""
        self._beginning.resend(index)

    def verdict(self, verdict: Verdict) -> list[Send]:
        """A decode worker has answered an ask of this job. Returns what to send it."""
        assert self.asking is not None
        sends = self.asking.verdict(verdict)
        self._verdict_came.ring()
        self._home_answered.ring()
        return sends

    def has_read(self, cached_tokens: int | None) -> None:
        """The decode loop beside us has read the prompt, of which so many tokens were cached; or it will not."""
        self.reading = None
        if cached_tokens is not None and self.prefilled is not None:
            hbm_tokens = min(self.prefilled.hbm_tokens, cached_tokens)
            self.prefilled = msgspec.structs.replace(self.prefilled, cached_tokens=cached_tokens, hbm_tokens=hbm_tokens)
            count_tokens(self.prefilled, self.prompt_tokens)
            self._read.end(self._clock())
        self._read.give_up(self._clock())

    # Effects

    async def _claim(self) -> None:
        """What is too late enters no conversation: its receiver is told, and that needs the claim alone."""
        in_time = self._clock() < self.deadline_s
        if self._referred is not None and in_time and not await self._referred.enter():
            self.happen(Event.BUSY)
            return
        await self._claim_it(follows=None)

    async def _reclaim(self) -> None:
        """Where the decode worker has taken it over, this is fenced; else that one is, should it still come to it."""
        handed_over, self.holding.claim = self.holding.claim, new_claim(self.desk.me)
        await self._claim_it(follows=handed_over)

    async def _claim_it(self, follows: str | None) -> None:
        with anyio.move_on_after(CLAIM_PATIENCE_S):
            answer = await self.holding.claim_it(follows, self._referred.persona if self._referred else 0)
            if isinstance(answer, Go):
                self._delivered = unpack_ids(answer.ids)
                # What has begun goes on; and where nobody can say of what comes again whether it has.
                if self._bound_s and not self._delivered and (self.holding.arbitrated or not self.again):
                    self.first_by_s = self.ack.stored_at_s + self._bound_s + self._clock() - outside.unix_s()
                if self._referred is not None:
                    self._referred.go(answer.persona)
            self.happen(EVENT_OF[type(answer)])
            return
        self.happen(Event.UNANSWERED)

    async def _count(self) -> None:
        """Record this start before the engine sees the request, and see how many have died since theirs."""
        dead = await self._counting.count()
        if dead >= self.desk.config.requests.starts_max:
            self.happen(Event.POISONED, Poisoned(f"{dead} workers have died with this request: it is not tried again."))
        else:
            self.happen(Event.COUNTED)

    async def _render(self) -> None:
        self.check_deadline()
        asked, info = self.intake.asked, self.desk.engine.info
        if asked.model not in (None, info.model):
            raise ModelNotFound(f"The model {asked.model!r} is not served here; {info.model!r} is.", param="model")
        self._tree = self.intake.tree if self._referred is None else await self._referred.assembled()
        check_resumable(self._tree, self._delivered)
        try:
            rendered = await self.desk.engine.render(self._tree)
            self._ids, self._echo = rendered.token_ids, rendered.echo
            bounds = (asked.reply_tokens_max, self.desk.config.requests.default_max_tokens, info.max_model_len)
            self._max_tokens = reply_tokens(len(self._ids), *bounds, asked.prompt_field)
            check_prompt_entries(self._tree, len(self._ids))
        except PromptTooLong as error:
            raise error if self._referred is None else self._referred.explained(error) from None
        self.desk.rendered(self.stored.creator, self.salt, pack_ids(self._ids))
        self.desk.weigh(len(self._ids))
        self._weight = len(self._ids)
        self.happen(Event.RENDERED)

    async def _ask(self) -> None:
        """Ask until there is a grant, and keep asking, so that it is kept, until it has been handed off."""
        if self.asking is not None:
            return  # the first search goes on, and has seen that its grant is lost
        sequences = self.intake.asked.n or 1
        blocks = blocks_needed(len(self._ids), self._max_tokens, self.desk.engine.info.block_size, sequences)
        request, until_s, answer_at = self.address.request, self.intake.deadline_s, self.desk.verdicts_at
        home, klass = self.desk.me.id, self.intake.klass
        self.asking = Asking(
            request, self.holding.claim, blocks, until_s, answer_at, seats=sequences, home=home, klass=klass
        )
        asked_s, had = self._clock(), False
        while True:
            self.send(self.asking.tick(self._clock(), self.desk.decoders(), (outside.roll(), outside.roll())))
            if self.asking.impossible:
                raise InvalidField(f"The request is too large: it {self.asking.impossible}.", param="max_tokens")
            if self.desk.leaves() and self.asking.nowhere:
                self.happen(Event.LEFT)  # it would wait here for a decode worker to come, and we hold up our own end
                return
            has = self.asking.grant is not None
            if has and not had:
                metrics.CREDIT_WAIT_SECONDS.observe(self._clock() - asked_s)
            if has != had:
                self.happen(Event.GRANTED if has else Event.GRANT_LOST)
            had = has
            await self._verdict_came.heard(SECOND_ASK_AFTER_S)

    async def _prefill(self) -> None:
        began_s = self._clock()
        prompt = [*self._ids, *self._delivered]  # what has been delivered is read again: decode continues after it
        expected = self.desk.expects(self.salt, prompt)
        missing = len(prompt) - expected
        if self.desk.promptness.too_late(missing, began_s, self.first_by_s, self._bound_s):
            raise FirstTokenLate(TOO_LATE_TO_BEGIN, retry_after_s=1.0)
        plain = prompt_logprobs(self._tree) is None
        self._little = plain and self.desk.goes_direct(missing, self.asking.grant if self.asking else None)
        self._stays = plain and await self._at_home()
        if self._bound_s and (self._stays or not self._little):  # what goes elsewhere is not read here
            self._read = self.desk.promptness.begin(missing, self._clock())
        if self._stays or self._little:
            self._go_direct(expected if self._stays else 0)
            return
        what = (self.holding.claim, self.intake.klass, prompt, expected, self.salt, self._tree, self.span.context)
        begins = self.desk.config.requests.prefill_begins and self._beginning.may(self._tree, self._delivered)
        prefilled = await self.desk.visits.prefill(*what, self.check_deadline, self._max_tokens * begins)
        self.times.wait_s, self.times.store_s = prefilled.wait_s, prefilled.store_s
        self.prefilled = msgspec.structs.replace(prefilled, hbm_tokens=min(expected, prefilled.cached_tokens))
        self._read.end(self._clock())
        metrics.PREFILL_SECONDS.observe(self._clock() - began_s)
        count_tokens(self.prefilled, len(prompt))
        self.happen(Event.STORED)

    async def _at_home(self) -> bool:
        """Whether its reply is made in this engine: then that reads the prompt in one with it, instead of twice the last block.

        Not of batch, whose prompts are read in pieces, between which others go. Nor of what workers have died with: those are
        read one at a time.
        """
        if self.intake.klass == BATCH or self._counting.suspect:
            return False
        until_s = self._clock() + HOME_ANSWERS_S
        while (home := self.asking and self.asking.at_home) is None and (left_s := until_s - self._clock()) > 0:
            await self._home_answered.heard(left_s)
        return home is True

    def _go_direct(self, found: int) -> None:
        """Decode computes what is missing. Nothing is generated here."""
        self.prefilled = Prefilled(cached_tokens=found, generated_tokens=0, hbm_tokens=found)
        metrics.PREFILLS_SKIPPED.inc(int(self._little))
        self.happen(Event.STORED)

    async def _begin(self) -> None:
        if self.prefilled is not None and self._beginning.send(self._tree, self._ids, self.prefilled):
            self.first_by_s = math.inf

    async def _hand_off(self) -> None:
        self.check_deadline()
        assert self.asking is not None
        grant = self.asking.grant
        if grant is None:
            self.happen(Event.REFUSED)
            return
        self.reading = grant.ask if self._stays and grant.decode == self.desk.me.id else None
        began_s, self._handed = self._clock(), self.stages
        self.times.offered_s = self.times.offered_s or began_s
        answer = await offered(self.desk, grant.decode, self._handoff(grant))
        metrics.HANDOFF_SECONDS.observe(self._clock() - began_s)
        if answer is None:
            # Without an arbiter nobody knows whether it was taken: let go, and not by a NAK.
            self._search_again(Event.UNTAKEN if self.holding.arbitrated else Event.DOUBT, grant, silent=True)
        elif answer.state == "accepted":
            if grant.decode == self.desk.me.id:
                self._counting.goes_over()
            self.send(self.asking.handed_off(grant))
            self.happen(Event.ACCEPTED)
        elif answer.reason in _REFUSALS:
            self.happen(_REFUSALS[answer.reason])
        else:
            self._search_again(Event.REFUSED, grant, silent=answer is AWAY)

    def _search_again(self, why: Event, grant: Grant, *, silent: bool) -> None:
        """What was offered is not wanted there. Another grant may have come meanwhile."""
        assert self.asking is not None
        self.asking.lost(grant, silent=silent)
        self.happen(why)
        if self.asking.grant is not None:
            self.happen(Event.GRANTED)
        self._verdict_came.ring()

    def _handoff(self, grant: Grant) -> Handoff:
        assert self.prefilled is not None
        direct = self.prefilled.generated_tokens == 0
        return Handoff(
            request=self.address.request,
            klass=self.intake.klass,
            ask=grant.ask,
            epoch=grant.epoch,
            claim=self.holding.claim,
            ack=self.delivery.ack,
            reply_to=self.intake.reply_to,
            claim_at=self.address.claim_at,
            receiver=self.intake.envelope.receiver,
            encoding=self.address.encoding,
            deadline_s=self.intake.deadline_s,
            first_by_s=0.0 if math.isinf(self.first_by_s) else self.ack.stored_at_s + self._bound_s,
            ids=pack_ids(self._ids),
            salt=self.salt,
            max_tokens=self._max_tokens,
            chat={name: value for name, value in self._tree.items() if name not in ("messages", "prompt")},
            cached_tokens=min(self.prefilled.cached_tokens, len(self._ids)),
            prefill_generated_tokens=self.prefilled.generated_tokens,
            prefill=self.desk.me.id,
            hbm_tokens=0 if direct and self.reading is None else min(self.prefilled.hbm_tokens, len(self._ids)),
            direct=direct,
            reads=self.reading is not None and not self._little,
            talk=self._referred.talk if self._referred else None,
            echo=Echo(self._echo, self.prefilled.echo_logprobs),
            prompt_logprobs=self.prefilled.prompt_logprobs,
            stages=self._handed,
            trace=self.span.context,
        )

    async def _tell(self) -> None:
        self._told_error = True
        if self._unkept:
            return
        frame = Failed(1, self.address.request, self.holding.claim, 0, self.error.body())
        self.happen(await self.holding.tell(frame, self.resend))

    async def _stop(self) -> None:
        await self.stop_working()
        if self.asking is not None:
            self.send(self.asking.stop())

    async def _ack(self) -> None:
        if self._referred is not None:
            await self._referred.close(whole=self.ended_by is Event.WHOLE and not self._told_error)
        await self.holding.ack()

    async def _nak_for_a_while(self) -> None:
        await self.holding.nak(wait_s(self.ack.delivered))

    async def _dead_letter(self) -> None:
        if not await keep_delivery(self.desk.bus, self.delivery, self.ack, self.error):
            # Without its copy the message must not be acked, nor its receiver told: it comes again.
            self._unkept = True
            self.happen(Event.DOUBT)

    def unheard(self, ask: str) -> None:
        """The broker says that nobody listens where this ask was sent."""
        assert self.asking is not None
        self.asking.unheard(ask)
        self._verdict_came.ring()

    def send(self, sends: list[Send]) -> None:
        """Publish what the asker has to say. What cannot be sent now is repeated, or expires."""
        for send in sends:
            # A reply subject, so that the broker says where nobody listens.
            reply = f"{self.desk.verdicts_at}.{send.message.ask}" if isinstance(send.message, Ask) else ""
            with contextlib.suppress(BusError):
                self.desk.bus.post(subjects.credit(send.decode), encode(send.message), reply)
