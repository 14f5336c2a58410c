"""Block credits: what a decode worker promises.

The unit is the KV block. A decode worker owns its **ledger**; nobody else writes it. One request's grant covers its prompt and
all of its reply, so a decode never runs out of blocks half way:

    ask ─► WAITING ─► GRANTED ─► CONSUMED ─► RELEASED
               │           ├────► EXPIRED      no handoff, and no repeated ask: the asker died
               └─► dropped └────► RETURNED     the asker does not want it any more

A grant is all or nothing, and is given only while a reserve stays free and the engine has seats: a request takes one for each
sequence that it will be there, and one that takes more than there are waits until it has the engine to itself.

**An ask is a lease**: it is repeated under the same id while it is wanted, and answered with its present state: a lost message
costs one period. Waiting asks are served in order, but one that has less time left than a quick reply has taken lately lets
those go first that can still be whole: under overload, a first-in-first-out queue comes to serve none but requests that die
half way. Interactive asks are served before batch ones, with the turns and the room of `classes.py`: each class is a queue of its
own, and batch holds no more than its bound of blocks and seats, or one request alone, where that needs more. What cannot be
whole in time lets all others go first, of either class.

    granted in all = now granted + now consumed + released + expired + returned        at every step
    0 ≤ free ≤ total        seats taken ≤ seats that may be

The asker's half is `asking.py`.
"""

import math
from collections import OrderedDict, deque
from enum import Enum, auto
from typing import Final, Literal

import msgspec

from pipeline.limits import (
    ASK_SILENT_MAX_S,
    ASKS_WAITING_MAX,
    GRANTS_PER_SEAT,
    RESERVE_RATIO,
)
from pipeline.protocol.classes import BATCH, INTERACTIVE, WEIGHTS, Turns, Weights
from pipeline.protocol.handed_over import HandedOver
from pipeline.protocol.messages import Account, Ask, Verdict

ENDED_REMEMBERED: Final = 1024
"""Consumed grants remembered after their release, so that a late repeat of the handoff is not taken for a new one."""

REPLIES_REMEMBERED: Final = 32
"""The last whole replies, whose times say how much time one needs."""

REPLIES_MEASURED_MIN: Final = 8
"""With fewer of them nobody has to let others go first."""

QUICK_RATIO: Final = 0.1
"""A tenth of the replies are quicker than a quick one. Lengths differ: who might be whole in time should not wait for others."""


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
    seats: int = 0
    """Taken by its grant: how many there may be can change meanwhile."""

    @property
    def klass(self) -> str:
        """What is not batch is interactive, whatever it calls itself."""
        return BATCH if self.ask.klass == BATCH else INTERACTIVE


class _Class:
    """What one class has of a ledger: asks that wait, what is granted and consumed, and how long its last replies have taken."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[str, _Entry] = OrderedDict()
        self.held = 0
        self.blocks = 0
        self.seats = 0
        self.replies_s: deque[float] = deque(maxlen=REPLIES_REMEMBERED)

    def hold(self, entry: _Entry, sign: Literal[1, -1]) -> None:
        """One more is granted, or has ended."""
        self.held += sign
        self.blocks += sign * entry.ask.blocks
        self.seats += sign * entry.seats


Verdicts = list[tuple[str, Verdict]]
"""(subject to answer at, verdict)."""


class Ledger:
    """The blocks of one decode worker, in one epoch of its life. Times are monotonic seconds.

    `seats`: sequences that its engine runs at once; None where it has no bound of them.
    """

    def __init__(
        self,
        decode: str,
        epoch: str,
        blocks: int,
        reserve_ratio: float = RESERVE_RATIO,
        seats: int | None = None,
        weights: Weights = WEIGHTS,
    ) -> None:
        self.decode = decode
        self.epoch = epoch
        self.blocks = blocks
        self.withheld = 0
        self.free = blocks
        self.seats = 0
        self._reserve_ratio = reserve_ratio
        self._to_withhold, self._settled = 0, True
        self.resize(reserve_ratio, seats)
        self.totals = Totals()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._turns = Turns(weights)
        self._classes = {INTERACTIVE: _Class(), BATCH: _Class()}
        self._most = blocks
        self.open = True
        self.disagreements = 0
        self._handed_over = HandedOver()

    @property
    def weights(self) -> Weights:
        """How the classes share."""
        return self._turns.weights

    def weigh(self, weights: Weights) -> None:
        """The classes share so, from the next grant on."""
        if weights != self.weights:
            self._turns = Turns(weights)

    def resize(self, reserve_ratio: float, seats: int | None) -> None:
        """Keep so much in reserve, and serve so many sequences at a time, from the next grant on."""
        self._reserve_ratio = reserve_ratio
        self.reserve = math.ceil(self.blocks * reserve_ratio)
        self.seats_max = None if seats is None else math.ceil(seats * GRANTS_PER_SEAT)
        self._engine_seats = seats

    def withhold(self, blocks: int, *, for_good: bool = True) -> None:
        """Keep so many blocks of the engine for others than replies: those that are free at once, more as they come back."""
        self._to_withhold, self._settled = blocks, for_good
        self._withhold()

    def _withhold(self) -> None:
        change = min(self._to_withhold - self.withheld, self.free)
        if change:
            self.withheld += change
            self.blocks -= change
            self.free -= change
            self.reserve = math.ceil(self.blocks * self._reserve_ratio)

    def quick_s(self, klass: str) -> float:
        """From handoff to release, for a reply of this class that is quicker than most. 0 while too few have been measured."""
        replies_s = self._classes[klass].replies_s
        if len(replies_s) < REPLIES_MEASURED_MIN:
            return 0.0
        return sorted(replies_s)[int(len(replies_s) * QUICK_RATIO)]

    def ask(self, ask: Ask, now_s: float, left_s: float) -> Verdicts:
        """An ask, new or repeated. Answers with its present state, or with a refusal. `left_s`: until the request's deadline."""
        entry = self._entries.get(ask.ask)
        if entry is not None:
            # The first words count: a repeat renews an ask, and cannot change what it asks for.
            entry.heard_s = now_s
            return [self._verdict(entry)]
        entry = _Entry(ask, GrantState.WAITING, now_s, now_s + left_s)
        if reason := self._refusal(entry):
            self.totals.refused += 1
            return [self._refused(ask, reason)]
        self._entries[ask.ask] = self._classes[entry.klass].waiting[ask.ask] = entry
        said = self._grant(now_s)
        waits = entry.state is GrantState.WAITING and ask.ask in self._entries
        return [*said, self._verdict(entry)] if waits else said

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
        self._handed_over.more(entry.ask.blocks)
        return Consumption.FRESH

    def release(self, ask_id: str, now_s: float, *, whole: bool) -> Verdicts:
        """The request that consumed it holds no blocks any more. `whole`: its reply was generated to its end."""
        entry = self._entries[ask_id]
        assert entry.state is GrantState.CONSUMED, entry
        self.totals.released += 1
        self._handed_over.less(entry.ask.blocks)
        if whole:
            self._classes[entry.klass].replies_s.append(now_s - entry.consumed_s)
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

    def close(self) -> Verdicts:
        """Grant nothing any more. Who waits is told, and asks elsewhere; what is granted stays so."""
        self.open = False
        waiting = [entry.ask for entry in self._entries.values() if entry.state is GrantState.WAITING]
        for ask in waiting:
            self._drop(ask.ask)
        self.totals.refused += len(waiting)
        return [self._refused(ask, "takes nothing new") for ask in waiting]

    def reopen(self) -> None:
        """Grant again."""
        self.open = True

    @property
    def idle(self) -> bool:
        """Whether nothing is granted or consumed."""
        return not self.seats

    def count(self, state: GrantState) -> int:
        """Asks that are in this state now."""
        return sum(entry.state is state for entry in self._entries.values())

    def blocks_in(self, state: GrantState) -> int:
        """Blocks of the asks that are in this state now."""
        return sum(entry.ask.blocks for entry in self._entries.values() if entry.state is state)

    def waiting(self, klass: str | None = None) -> int:
        """Asks that wait, of this class or of both."""
        return sum(len(one.waiting) for name, one in self._classes.items() if klass in (None, name))

    def account(self, engine_blocks: int, preemptions: int) -> Account:
        """The books, beside what the engine itself says it uses."""
        return Account(
            decode=self.decode,
            epoch=self.epoch,
            blocks=self.blocks,
            free=self.free,
            reserve=self.reserve,
            waiting=self.waiting(),
            granted_now=self.count(GrantState.GRANTED),
            granted_blocks=self.blocks_in(GrantState.GRANTED),
            consumed_now=self.count(GrantState.CONSUMED),
            consumed_blocks=self.blocks_in(GrantState.CONSUMED),
            engine_blocks=engine_blocks,
            preemptions=preemptions,
            disagreements=self.disagreements,
            seats=self.seats,
            seats_max=self.seats_max,
            **msgspec.structs.asdict(self.totals),
        )

    def reconcile(self, engine_blocks: int, beside: int = 0) -> bool:
        """Whether the engine uses no more than was handed over. Counts it where it does: then somebody goes past the ledger.

        `beside`: what prefills may hold in the same engine.
        """
        agrees = engine_blocks <= self._handed_over.look(beside)
        self.disagreements += not agrees
        return agrees

    def check(self) -> None:
        """Assert what must be true between any two events."""
        totals, held = self.totals, self.blocks_in(GrantState.GRANTED) + self.blocks_in(GrantState.CONSUMED)
        outstanding = self.count(GrantState.GRANTED) + self.count(GrantState.CONSUMED)
        assert totals.granted == totals.released + totals.expired + totals.returned + outstanding, self.totals
        taken = sum(entry.seats for entry in self._entries.values() if entry.state is not GrantState.WAITING)
        assert self.seats == taken, (self.seats, taken)
        assert 0 <= self.free <= self.blocks, self.free
        assert self.free + held == self.blocks, (self.free, held, self.blocks)
        assert self._handed_over.now == self.blocks_in(GrantState.CONSUMED)
        assert self.count(GrantState.WAITING) == self.waiting() <= ASKS_WAITING_MAX
        for klass, one in self._classes.items():
            mine = [entry for entry in self._entries.values() if entry.klass == klass]
            assert all(entry.state is GrantState.WAITING for entry in one.waiting.values())
            granted = [entry for entry in mine if entry.state is not GrantState.WAITING]
            assert (one.held, one.blocks) == (len(granted), sum(entry.ask.blocks for entry in granted)), klass
            assert one.seats == sum(entry.seats for entry in granted), klass

    def _refusal(self, entry: _Entry) -> str:
        ask = entry.ask
        if not self.open:
            return "takes nothing new"
        if too_large := self._too_large(ask):
            return too_large
        bound = self.weights.most(ASKS_WAITING_MAX) if entry.klass == BATCH else ASKS_WAITING_MAX
        if self.waiting() >= ASKS_WAITING_MAX or len(self._classes[entry.klass].waiting) >= bound:
            return "too many asks wait"
        return ""

    def _too_large(self, ask: Ask) -> str:
        most = self.blocks - self.reserve
        return f"needs {ask.blocks} KV blocks, and no request may hold more than {most}" if ask.blocks > most else ""

    def _refuse_too_large(self) -> Verdicts:
        """Where there is less to grant than there was, those who wait for more would wait, and hold up the rest, for ever."""
        before, self._most = self._most, self.blocks - self.reserve
        if self._most >= before:
            return []
        waiting = [entry.ask for one in self._classes.values() for entry in one.waiting.values()]
        refused = [(ask, reason) for ask in waiting if (reason := self._too_large(ask))]
        for ask, _ in refused:
            self._drop(ask.ask)
        self.totals.refused += len(refused)
        return [self._refused(ask, reason) for ask, reason in refused]

    def _grant(self, now_s: float) -> Verdicts:
        """Serve the waiting, each whole or not at all. One that does not fit holds up the rest, or it would starve."""
        self._withhold()
        out = self._refuse_too_large()
        while (entry := self._next(now_s)) is not None and self._fits(entry.ask):
            of_class = self._classes[entry.klass]
            del of_class.waiting[entry.ask.ask]
            entry.state = GrantState.GRANTED
            self.free -= entry.ask.blocks
            entry.seats = self._seats(entry.ask)
            self.seats += entry.seats
            of_class.hold(entry, 1)
            self._turns.served(entry.klass)
            self.totals.granted += 1
            out.append(self._verdict(entry))
        return out

    def _fits(self, ask: Ask) -> bool:
        if self.seats_max is not None and self.seats + self._seats(ask) > self.seats_max:
            return False
        return self.free - ask.blocks >= self.reserve

    def _seats(self, ask: Ask) -> int:
        """What it takes of them. All that there are, where it is more sequences: it runs alone, some after the others."""
        return ask.seats if self.seats_max is None else min(ask.seats, self.seats_max)

    def _next(self, now_s: float) -> _Entry | None:
        """The first of the waiting that has the time for a quick reply; where none has, the first of all.

        Those come first whose class's turn it is. Batch that has all it may have lets the others go on.
        """
        late: _Entry | None = None
        for klass in self._turns.order:
            waiting = self._classes[klass].waiting
            if not waiting:
                continue
            soon_s = now_s + self.quick_s(klass)
            timely = next((entry for entry in waiting.values() if entry.until_s >= soon_s), None)
            first = timely or next(iter(waiting.values()))
            if klass == BATCH and not self._leaves_room(first.ask):
                continue
            if timely is not None:
                return timely
            late = late or first
        return late

    def _leaves_room(self, ask: Ask) -> bool:
        """Whether batch may hold so much more, or this one alone.

        The room is one of seats that the engine has: what is granted beyond them would be waited for inside it.
        """
        batch, weights = self._classes[BATCH], self.weights
        if not batch.held:
            return True
        if self._engine_seats is not None and batch.seats + self._seats(ask) > weights.most(self._engine_seats):
            return False
        return batch.blocks + ask.blocks <= weights.most(self.blocks - self.reserve)

    def _drop(self, ask_id: str) -> None:
        entry = self._entries.pop(ask_id)
        of_class = self._classes[entry.klass]
        if entry.state is GrantState.WAITING:
            del of_class.waiting[ask_id]
        else:
            self.free += entry.ask.blocks
            self.seats -= entry.seats
            of_class.hold(entry, -1)

    def _verdict(self, entry: _Entry) -> tuple[str, Verdict]:
        state: Literal["waiting", "granted"] = "waiting" if entry.state is GrantState.WAITING else "granted"
        ask = entry.ask
        return ask.answer_to, Verdict(
            ask=ask.ask, request=ask.request, state=state, decode=self.decode, epoch=self.epoch
        )

    def _refused(self, ask: Ask, reason: str) -> tuple[str, Verdict]:
        never = self.open and self._settled and ask.blocks > self.blocks - self.reserve
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
