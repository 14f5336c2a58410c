"""Block credits: what a decode worker promises, and how a prefill worker asks for it.

The unit is the KV block. A decode worker owns its **ledger**; nobody else writes it. One request's grant covers its prompt and
all of its reply, so a decode never runs out of blocks half way:

    ask ─► WAITING ─► GRANTED ─► CONSUMED ─► RELEASED
               │           ├────► EXPIRED      no handoff, and no repeated ask: the asker died
               └─► dropped └────► RETURNED     the asker does not want it any more

A grant is all or nothing, and is given only while a reserve stays free. **An ask is a lease**: it is repeated under the same id
while it is wanted, and answered with its present state: a lost message costs one period. Waiting asks are served in order, but
one that has less time left than a quick reply has taken lately lets those go first that can still be whole: under overload, a
first-in-first-out queue comes to serve none but requests that die half way.

    granted in all = now granted + now consumed + released + expired + returned        at every step
    0 ≤ free ≤ total

`Asking` is the other half: which decode workers to ask for one request, when to try a second one, and what to give back.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, Literal

import msgspec

from pipeline.limits import (
    ASK_SILENT_MAX_S,
    ASKS_WAITING_MAX,
    GRANTS_PER_SEAT,
    REPEAT_PERIOD_S,
    RESERVE_RATIO,
    SECOND_ASK_AFTER_S,
)
from pipeline.protocol.messages import Account, Ask, Presence, Return, Verdict

ENDED_REMEMBERED: Final = 1024
"""Consumed grants remembered after their release, so that a late repeat of the handoff is not taken for a new one."""

RECONCILED_WITH: Final = 20
"""Looks at the books that the engine's word may be old: 2 s at ten a second, longer than any step."""

REPLIES_REMEMBERED: Final = 32
"""The last whole replies, whose times say how much time one needs."""

REPLIES_MEASURED_MIN: Final = 8
"""With fewer of them nobody has to let others go first."""

QUICK_RATIO: Final = 0.1
"""A tenth of the replies are quicker than a quick one. Lengths differ: who might be whole in time should not wait for others."""

ASKS_AT_ONCE_MAX: Final = 2
"""Two choices: a third would only hold blocks that another request could use."""


class GrantState(Enum):
    """Where an ask is."""

    WAITING = auto()
    GRANTED = auto()
    CONSUMED = auto()


class Consumption(Enum):
    """What a handoff found."""

    FRESH = auto()
    AGAIN = auto()
    """It was consumed before: a repeated handoff."""
    NO_GRANT = auto()
    OLD_EPOCH = auto()


class Totals(msgspec.Struct, kw_only=True):
    """Counters of one ledger since it began. The first is the sum of the others and of what is outstanding now."""

    granted: int = 0
    released: int = 0
    returned: int = 0
    expired: int = 0
    refused: int = 0


class _Entry(msgspec.Struct):
    ask: Ask
    state: GrantState
    heard_s: float
    until_s: float
    consumed_s: float = 0.0


Verdicts = list[tuple[str, Verdict]]
"""(subject to answer at, verdict)."""


class Ledger:
    """The blocks of one decode worker, in one epoch of its life. Times are monotonic seconds.

    `seats`: sequences that its engine runs at once; None where it has no bound of them.
    """

    def __init__(
        self, decode: str, epoch: str, blocks: int, reserve_ratio: float = RESERVE_RATIO, seats: int | None = None
    ) -> None:
        self.decode = decode
        self.epoch = epoch
        self.blocks = blocks
        self.reserve = math.ceil(blocks * reserve_ratio)
        self.free = blocks
        self.grants_max = math.inf if seats is None else math.ceil(seats * GRANTS_PER_SEAT)
        self.totals = Totals()
        self._outstanding = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._waiting: OrderedDict[str, _Entry] = OrderedDict()
        self.draining = False
        self.disagreements = 0
        self._handed_over: deque[int] = deque(maxlen=RECONCILED_WITH)
        self._replies_s: deque[float] = deque(maxlen=REPLIES_REMEMBERED)

    @property
    def quick_s(self) -> float:
        """From handoff to release, for a reply that is quicker than most. 0 while too few have been measured."""
        if len(self._replies_s) < REPLIES_MEASURED_MIN:
            return 0.0
        return sorted(self._replies_s)[int(len(self._replies_s) * QUICK_RATIO)]

    def ask(self, ask: Ask, now_s: float, left_s: float) -> Verdicts:
        """An ask, new or repeated. Answers with its present state, or with a refusal. `left_s`: until the request's deadline."""
        entry = self._entries.get(ask.ask)
        if entry is not None:
            # The first words count: a repeat renews an ask, and cannot change what it asks for.
            entry.heard_s = now_s
            return [self._verdict(entry)]
        if reason := self._refusal(ask):
            self.totals.refused += 1
            return [self._refused(ask, reason)]
        entry = _Entry(ask, GrantState.WAITING, now_s, now_s + left_s)
        self._entries[ask.ask] = self._waiting[ask.ask] = entry
        granted = self._grant(now_s)
        return granted if entry.state is GrantState.GRANTED else [*granted, self._verdict(entry)]

    def give_back(self, ask_id: str, now_s: float) -> Verdicts:
        """The asker does not want it any more. Unknown or consumed: nothing to give back."""
        entry = self._entries.get(ask_id)
        if entry is None or entry.state is GrantState.CONSUMED:
            return []
        if entry.state is GrantState.GRANTED:
            self.totals.returned += 1
        self._drop(ask_id)
        return self._grant(now_s)

    def consume(self, ask_id: str, epoch: str, now_s: float) -> Consumption:
        """A handoff names this grant."""
        if epoch != self.epoch:
            return Consumption.OLD_EPOCH
        entry = self._entries.get(ask_id)
        if ask_id in self._ended or (entry and entry.state is GrantState.CONSUMED):
            return Consumption.AGAIN
        if entry is None or entry.state is GrantState.WAITING:
            return Consumption.NO_GRANT
        entry.state, entry.consumed_s = GrantState.CONSUMED, now_s
        return Consumption.FRESH

    def release(self, ask_id: str, now_s: float, *, whole: bool) -> Verdicts:
        """The request that consumed it holds no blocks any more. `whole`: its reply was generated to its end."""
        entry = self._entries[ask_id]
        assert entry.state is GrantState.CONSUMED, entry
        self.totals.released += 1
        if whole:
            self._replies_s.append(now_s - entry.consumed_s)
        self._drop(ask_id)
        self._ended[ask_id] = None
        if len(self._ended) > ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        return self._grant(now_s)

    def tick(self, now_s: float) -> Verdicts:
        """Let go of what has not been asked for again, and of asks whose deadline has passed; grant what fits now."""
        for ask_id, entry in list(self._entries.items()):
            if entry.state is GrantState.CONSUMED:
                continue
            if now_s - entry.heard_s > ASK_SILENT_MAX_S or now_s > entry.until_s:
                self.totals.expired += entry.state is GrantState.GRANTED
                self._drop(ask_id)
        return self._grant(now_s)

    def count(self, state: GrantState) -> int:
        """Asks that are in this state now."""
        return sum(entry.state is state for entry in self._entries.values())

    def blocks_in(self, state: GrantState) -> int:
        """Blocks of the asks that are in this state now."""
        return sum(entry.ask.blocks for entry in self._entries.values() if entry.state is state)

    def account(self, engine_blocks: int, preemptions: int) -> Account:
        """The books, beside what the engine itself says it uses."""
        return Account(
            decode=self.decode,
            epoch=self.epoch,
            blocks=self.blocks,
            free=self.free,
            reserve=self.reserve,
            waiting=len(self._waiting),
            granted_now=self.count(GrantState.GRANTED),
            granted_blocks=self.blocks_in(GrantState.GRANTED),
            consumed_now=self.count(GrantState.CONSUMED),
            consumed_blocks=self.blocks_in(GrantState.CONSUMED),
            engine_blocks=engine_blocks,
            preemptions=preemptions,
            disagreements=self.disagreements,
            **msgspec.structs.asdict(self.totals),
        )

    def reconcile(self, engine_blocks: int) -> bool:
        """Whether the engine uses no more than was handed over. Counts it where it does: then somebody goes past the ledger.

        The engine speaks once a step, so its word is held against the most that was handed over since about then.
        """
        self._handed_over.append(self.blocks_in(GrantState.CONSUMED))
        agrees = engine_blocks <= max(self._handed_over)
        self.disagreements += not agrees
        return agrees

    def check(self) -> None:
        """Assert what must be true between any two events."""
        totals, held = self.totals, self.blocks_in(GrantState.GRANTED) + self.blocks_in(GrantState.CONSUMED)
        outstanding = self.count(GrantState.GRANTED) + self.count(GrantState.CONSUMED)
        assert totals.granted == totals.released + totals.expired + totals.returned + outstanding, self.totals
        assert outstanding == self._outstanding <= self.grants_max, outstanding
        assert 0 <= self.free <= self.blocks, self.free
        assert self.free + held == self.blocks, (self.free, held, self.blocks)
        assert self.count(GrantState.WAITING) == len(self._waiting) <= ASKS_WAITING_MAX

    def _refusal(self, ask: Ask) -> str:
        if ask.blocks > self.blocks - self.reserve:
            return f"needs {ask.blocks} KV blocks, and no request may hold more than {self.blocks - self.reserve}"
        if self.draining:
            return "draining"
        if len(self._waiting) >= ASKS_WAITING_MAX:
            return "too many asks wait"
        return ""

    def _grant(self, now_s: float) -> Verdicts:
        """Serve the waiting, each whole or not at all. One that does not fit holds up the rest, or it would starve."""
        out: Verdicts = []
        while self._waiting and self._outstanding < self.grants_max:
            entry = self._next(now_s)
            if self.free - entry.ask.blocks < self.reserve:
                break
            del self._waiting[entry.ask.ask]
            entry.state = GrantState.GRANTED
            self.free -= entry.ask.blocks
            self._outstanding += 1
            self.totals.granted += 1
            out.append(self._verdict(entry))
        return out

    def _next(self, now_s: float) -> _Entry:
        """The first of the waiting that has the time for a quick reply; where none has, the first of all."""
        soon_s = now_s + self.quick_s
        timely = (entry for entry in self._waiting.values() if entry.until_s >= soon_s)
        return next(timely, None) or next(iter(self._waiting.values()))

    def _drop(self, ask_id: str) -> None:
        entry = self._entries.pop(ask_id)
        if entry.state is GrantState.WAITING:
            del self._waiting[ask_id]
        else:
            self.free += entry.ask.blocks
            self._outstanding -= 1

    def _verdict(self, entry: _Entry) -> tuple[str, Verdict]:
        state: Literal["waiting", "granted"] = "waiting" if entry.state is GrantState.WAITING else "granted"
        ask = entry.ask
        return ask.answer_to, Verdict(
            ask=ask.ask, request=ask.request, state=state, decode=self.decode, epoch=self.epoch
        )

    def _refused(self, ask: Ask, reason: str) -> tuple[str, Verdict]:
        never = ask.blocks > self.blocks - self.reserve
        verdict = Verdict(
            ask=ask.ask,
            request=ask.request,
            state="refused",
            decode=self.decode,
            epoch=self.epoch,
            reason=reason,
            never=never,
        )
        return ask.answer_to, verdict


# --------------------------------------------------------------------------------------------------------------
# The asker's half


class Grant(msgspec.Struct, frozen=True):
    """What an asker holds: the ask's id, and who granted it in which epoch."""

    ask: str
    decode: str
    epoch: str


class Send(msgspec.Struct, frozen=True):
    """To be published on `credit.<decode>`."""

    decode: str
    message: Ask | Return


class _Asked(msgspec.Struct):
    decode: str
    first_s: float
    sent_s: float


class Asking:
    """One request's search for a grant. `grant` is set when it has one; `impossible` says why none can ever come.

    `rolls` are two numbers in [0, 1) from the caller, which owns the dice.
    """

    def __init__(self, request: str, claim: str, blocks: int, deadline_s: float, answer_to: str) -> None:
        self.request = request
        self.claim = claim
        self.blocks = blocks
        self.deadline_s = deadline_s
        self.answer_to = answer_to
        self.grant: Grant | None = None
        self.impossible: str | None = None
        self._asked: dict[str, _Asked] = {}
        self._never: dict[str, str] = {}
        self._silent: set[str] = set()
        self._count = 0
        self._last_s = float("-inf")
        self._over = False

    def tick(self, now_s: float, live: Sequence[Presence], rolls: tuple[float, float]) -> list[Send]:
        """Repeat what is due, forget the dead, and ask one more worker where that helps."""
        self._forget_dead({presence.id for presence in live})
        sends = [
            self._send(ask_id, now_s)
            for ask_id, asked in self._asked.items()
            if now_s - asked.sent_s >= REPEAT_PERIOD_S
        ]
        if self._wants_another(now_s) and (choice := self._choose(now_s, live, rolls)):
            sends.append(self._ask(choice, now_s))
        elif live and not self._asked and len(self._never) >= len(live):
            self.impossible = next(iter(self._never.values()))
        return sends

    def verdict(self, verdict: Verdict) -> list[Send]:
        """A decode worker has answered. Returns what to give back."""
        asked = self._asked.get(verdict.ask)
        if asked is None:
            return [Send(verdict.decode, Return(ask=verdict.ask))] if verdict.state != "refused" else []
        if verdict.state == "refused":
            del self._asked[verdict.ask]
            if verdict.never:
                self._never[verdict.decode] = verdict.reason
            return []
        if verdict.state == "waiting":
            # A restarted decode worker has forgotten its grant: the repeated ask waits there anew.
            self.grant = None
            return []
        # With a grant there are no other asks, so this is the first one, or the same one again.
        self.grant = Grant(verdict.ask, verdict.decode, verdict.epoch)
        return self._give_back_all_but(verdict.ask)

    def lost(self, grant: Grant, *, silent: bool = False) -> None:
        """That grant is worth nothing any more. Search again, if that has not begun yet.

        Its worker has refused the handoff, or is `silent`: then it is asked again only where nobody else can be.
        """
        if silent:
            self._silent.add(grant.decode)
        if self.grant == grant:
            self._asked.pop(grant.ask, None)
            self.grant = None

    def unheard(self, ask: str) -> None:
        """Nobody listens where this ask was sent: its worker is dead, or the broker has just come back. Others come first now."""
        asked = self._asked.pop(ask, None)
        if asked is None:
            return
        self._silent.add(asked.decode)
        if self.grant is not None and self.grant.ask == ask:
            self.grant = None

    def stop(self) -> list[Send]:
        """The request is over: no more asks. Returns what to give back."""
        sends = self._give_back_all_but(None)
        self.grant = None
        self._over = True
        return sends

    def handed_off(self, grant: Grant) -> list[Send]:
        """That grant has been consumed: it is not ours any more. Returns what to give back: all else that was asked for since."""
        sends = self._give_back_all_but(grant.ask)
        self._asked.clear()
        self._over = True
        return sends

    def _wants_another(self, now_s: float) -> bool:
        if self._over or self.grant is not None or len(self._asked) >= ASKS_AT_ONCE_MAX:
            return False
        return all(now_s - asked.first_s >= SECOND_ASK_AFTER_S for asked in self._asked.values())

    def _choose(self, now_s: float, live: Sequence[Presence], rolls: tuple[float, float]) -> Presence | None:
        """Of two drawn workers, the one with more free blocks. A second ask goes only where there seems to be room.

        Where all have been silent they are asked again, but not at once: a restarted broker knows nobody for a moment.
        """
        asked = {entry.decode for entry in self._asked.values()} | self._never.keys()
        candidates = [
            presence for presence in live if presence.ready and not presence.draining and presence.id not in asked
        ]
        if self._asked:
            candidates = [presence for presence in candidates if presence.blocks_free >= self.blocks]
        heard = [presence for presence in candidates if presence.id not in self._silent]
        if not candidates or not (heard or now_s - self._last_s >= SECOND_ASK_AFTER_S):
            return None
        candidates = heard or candidates
        drawn = [candidates[int(roll * len(candidates))] for roll in rolls]
        return max(
            drawn, key=lambda presence: (presence.blocks_free - presence.asks_waiting * self.blocks, presence.id)
        )

    def _ask(self, choice: Presence, now_s: float) -> Send:
        self._count += 1
        self._last_s = now_s
        ask_id = f"{self.claim}.{self._count}"
        self._asked[ask_id] = _Asked(choice.id, now_s, now_s)
        return self._send(ask_id, now_s)

    def _send(self, ask_id: str, now_s: float) -> Send:
        asked = self._asked[ask_id]
        asked.sent_s = now_s
        ask = Ask(
            ask=ask_id,
            request=self.request,
            claim=self.claim,
            blocks=self.blocks,
            deadline_s=self.deadline_s,
            answer_to=self.answer_to,
        )
        return Send(asked.decode, ask)

    def _forget_dead(self, live: set[str]) -> None:
        self._asked = {ask_id: asked for ask_id, asked in self._asked.items() if asked.decode in live}
        self._never = {decode: reason for decode, reason in self._never.items() if decode in live}
        if self.grant is not None and self.grant.ask not in self._asked:
            self.grant = None

    def _give_back_all_but(self, kept: str | None) -> list[Send]:
        sends = [Send(asked.decode, Return(ask=ask_id)) for ask_id, asked in self._asked.items() if ask_id != kept]
        self._asked = {ask_id: asked for ask_id, asked in self._asked.items() if ask_id == kept}
        return sends
