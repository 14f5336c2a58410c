"""Bugs on purpose: each changes one decision of the product, to show that the simulation would find it.

A planted bug is a context. Within it, everything is as it is but for that decision.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final
from unittest.mock import patch

import msgspec

from pipeline import outside
from pipeline.bus.errors import NoResponders
from pipeline.limits import REPEAT_PERIOD_S
from pipeline.protocol import arrangement, request
from pipeline.protocol.accuser import Accuser
from pipeline.protocol.arrangement import Moves, Now, Role, Sizes
from pipeline.protocol.claims import Arbiter
from pipeline.protocol.credits import Ledger, Verdicts
from pipeline.protocol.messages import Answer, Claim, Gone, read_answer
from pipeline.protocol.request import Decode, Effect, Effects, Event, Prefill, Stage
from pipeline.protocol.strays import Strays
from pipeline.protocol.subjects import parse_ack
from tests.simulation.plan import Plan
from workers import beginning, decode_job, loops, prefill_job
from workers.holding import Holding
from workers.keeper import Keeper
from workers.starts import Starts


def as_drawn(plan: Plan) -> Plan:
    """The seed's own world."""
    return plan


class Planted(msgspec.Struct, frozen=True):
    """A bug, how to plant it, and what the checkers say of it. `world` makes of a plan one that may show it, or none."""

    name: str
    plant: Callable[[], AbstractContextManager[Any]]
    found_as: str
    world: Callable[[Plan], Plan | None] = as_drawn


@contextmanager
def ack_at_dequeue() -> Iterator[None]:
    """The message is acked when it is taken: whoever dies after that loses the request."""

    def step(state: Prefill, event: Event) -> tuple[Prefill, Effects]:
        after, effects = request.step_prefill(state, event)
        dequeued = event in (Event.DELIVERED, Event.DELIVERED_AGAIN)
        return after, (*effects, Effect.ACK) if dequeued else effects

    with patch.object(prefill_job, "step_prefill", step):
        yield


@contextmanager
def ack_before_whole() -> Iterator[None]:
    """The message is acked when the reply is generated, before its receiver has all of it."""

    def step(state: Decode, event: Event) -> tuple[Decode, Effects]:
        after, effects = request.step_decode(state, event)
        generated = event is Event.GENERATED and Effect.TELL in effects
        return after, (Effect.ACK, *effects) if generated else effects

    with patch.object(decode_job, "step_decode", step):
        yield


@contextmanager
def grant_never_expires() -> Iterator[None]:
    """A ledger keeps blocks for an asker that has died."""

    def tick(self: Ledger, now_s: float) -> Verdicts:
        return self._grant(now_s)

    with patch.object(Ledger, "tick", tick):
        yield


@contextmanager
def fence_by_delivery_count() -> Iterator[None]:
    """A claim under a delivery that counts less than the last one's is fenced: counts can go back."""
    take = Arbiter._take

    def counted(self: Arbiter, claim: Claim, *, lives: bool) -> bool:
        begins = claim.follows is None and self.last is not None
        if begins and self.last and parse_ack(claim.ack).delivered <= parse_ack(self.last.ack).delivered:
            return False
        return take(self, claim, lives=lives)

    with patch.object(Arbiter, "_take", counted):
        yield


@contextmanager
def stale_nak() -> Iterator[None]:
    """A fenced holder gives the message back, which another works on."""
    fenced = {Event.FENCED: (Stage.ENDED, (Effect.STOP, Effect.NAK))}
    with patch.dict(request.PREFILL_ENDS, fenced), patch.dict(request.DECODE_ENDS, fenced):
        yield


@contextmanager
def frames_of_an_old_claim() -> Iterator[None]:
    """Frames are taken from whoever has ever held the claim."""

    def hears(self: Arbiter, claim_id: str) -> bool:
        del claim_id
        return self.last is not None and not self.gone

    with patch.object(Arbiter, "hears", hears):
        yield


@contextmanager
def no_responders_means_gone() -> Iterator[None]:
    """Where nobody listens, nobody wants the reply: but a living gateway is unheard while the broker comes back."""
    asked = Holding._asked

    async def hasty(self: Holding, subject: str, payload: bytes) -> Answer:
        try:
            return read_answer(await self.bus.request(subject, payload, REPEAT_PERIOD_S))
        except NoResponders:
            return Gone()
        except Exception:
            return await asked(self, subject, payload)

    with patch.object(Holding, "_asked", hasty):
        yield


@contextmanager
def accuser_trusts_itself() -> Iterator[None]:
    """Who was away itself takes everybody else for dead."""

    def never(self: Accuser, *_: float) -> None:
        del self

    judge = Accuser.accuses

    def until_now(self: Accuser, claim: Claim, _: float, *, loses: bool = False) -> bool:
        return judge(self, claim, outside.monotonic_s(), loses=loses)

    with (
        patch.object(Accuser, "woke", never),
        patch.object(Accuser, "distrust_myself", never),
        patch.object(Accuser, "accuses", until_now),
    ):
        yield


@contextmanager
def claimed_taken_for_strays() -> Iterator[None]:
    """A receiver gives back what somebody works on."""

    def claimed(self: Strays, request: str, ack: str) -> None:
        del self, request, ack

    with patch.object(Strays, "claimed", claimed):
        yield


@contextmanager
def samplings_spliced() -> Iterator[None]:
    """A reply is continued that hangs on state which has died with its worker."""

    def check(chat: Mapping[str, Any], delivered: Sequence[int]) -> None:
        del chat, delivered

    with patch.object(prefill_job, "check_resumable", check), patch.object(decode_job, "check_resumable", check):
        yield


@contextmanager
def begun_whatever_it_hangs_on() -> Iterator[None]:
    """Prefill begins every reply, also one that hangs on state which decode has not."""

    def begins(chat: Mapping[str, Any], delivered: Sequence[int]) -> bool:
        del chat
        return not delivered

    with patch.object(beginning, "begins_at_prefill", begins):
        yield


@contextmanager
def buried_in_silence() -> Iterator[None]:
    """The keeper takes what has aged out away, and tells nobody."""

    async def told(self: Keeper, *_: Any) -> bool:
        del self
        return True

    with patch.object(Keeper, "_told", told):
        yield


@contextmanager
def starts_forgotten() -> Iterator[None]:
    """Nobody remembers who has died with a request, so that it kills for as long as it may."""

    async def record(self: Starts, *_: Any) -> list[str]:
        del self
        return []

    with patch.object(Starts, "record", record):
        yield


@contextmanager
def blocks_promised_twice() -> Iterator[None]:
    """A worker for both promises to replies what its prefills will need."""
    judge = arrangement.moves

    def all_of_them(role: Role, now: Now, sizes: Sizes) -> Moves:
        return msgspec.structs.replace(judge(role, now, sizes), withhold=0)

    with patch.object(loops, "moves", all_of_them):
        yield


def crowded(plan: Plan) -> Plan | None:
    """Workers for both, whose long requests come at once: what they promise fills an engine nearly, and not by whole requests."""
    if not plan.both:
        return None
    replace = msgspec.structs.replace
    orders = [replace(order, at_s=0.2 * order.at_s, max_tokens=20) for order in plan.orders]
    both, simulated = replace(plan.config.both, prefill_slots=1), replace(plan.config.simulated, kv_blocks=40)
    return replace(plan, orders=orders, config=replace(plan.config, both=both, simulated=simulated))


PLANTED: Final = (
    Planted("ack at dequeue", ack_at_dequeue, "whose client still waits"),
    Planted("ack before whole", ack_before_whole, "whose client still waits"),
    Planted("grant never expired", grant_never_expires, "blocks granted"),
    Planted("fence by delivery count", fence_by_delivery_count, "begins a delivery"),
    Planted("stale NAK", stale_nak, "NAKed an old delivery"),
    Planted("frames of an old claim accepted", frames_of_an_old_claim, "had the go"),
    Planted("no responders taken for gone", no_responders_means_gone, "whose client still waits"),
    Planted("an accuser that does not check itself", accuser_trusts_itself, "NAKed the present delivery"),
    Planted("what is claimed taken for strays", claimed_taken_for_strays, "NAKed an old delivery"),
    Planted("two samplings spliced", samplings_spliced, "is of no one sampling"),
    Planted("begun whatever it hangs on", begun_whatever_it_hangs_on, "is of no one sampling"),
    Planted("a keeper that tells nobody", buried_in_silence, "whose client still waits"),
    Planted("starts forgotten", starts_forgotten, "is poison, and ended otherwise"),
    Planted("blocks promised twice", blocks_promised_twice, "blocks beside", crowded),
)
