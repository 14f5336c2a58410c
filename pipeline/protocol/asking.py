"""How a prefill worker asks for block credits: whom to ask for one request, when to try a second one, and what to give back.

What decode workers answer is `credits.py`. Two choices on free blocks from presence; a slow answer leads to a second ask where
there is room; whoever has granted first gets the request, and the other its blocks back.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from pipeline.limits import REPEAT_PERIOD_S, SECOND_ASK_AFTER_S
from pipeline.protocol.classes import INTERACTIVE
from pipeline.protocol.messages import Ask, Presence, Return, Verdict

ASKS_AT_ONCE_MAX: Final = 2
"""Two choices: a third would only hold blocks that another request could use."""


HOME_BEHIND_MAX: Final = 0.05
"""Of its blocks that a worker promises: so much fuller than another it may be, and what it has prefilled stays. A transfer costs
about what a few more sequences in its steps do; beyond that, one creator's worker would do the work of two."""


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
    waits: bool = False


class Asking:
    """One request's search for a grant. `grant` is set when it has one; `impossible` says why none can ever come.

    `seats`: the sequences that it will be; `klass`: its class. `home` is the asker's own worker: where that decodes as well,
    and is not much fuller than others, what it has prefilled need not travel. `rolls` are two numbers in [0, 1) from the
    caller, which owns the dice.
    """

    def __init__(
        self,
        request: str,
        claim: str,
        blocks: int,
        deadline_s: float,
        answer_to: str,
        seats: int = 1,
        home: str = "",
        klass: str = INTERACTIVE,
    ) -> None:
        self.request = request
        self.claim = claim
        self.blocks = blocks
        self.seats = seats
        self.deadline_s = deadline_s
        self.answer_to = answer_to
        self.home = home
        self.klass = klass
        self.grant: Grant | None = None
        self.impossible: str | None = None
        self.nowhere = False
        """Nobody has been asked, and nobody is there who could be."""
        self._asked: dict[str, _Asked] = {}
        self._never: dict[str, str] = {}
        self._silent: set[str] = set()
        self._count = 0
        self._last_s = float("-inf")
        self._over = False

    @property
    def at_home(self) -> bool | None:
        """Whether our own worker has granted. None while it has been asked and has not answered."""
        if self.grant is not None:
            return self.grant.decode == self.home
        return None if any(one.decode == self.home and not one.waits for one in self._asked.values()) else False

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
        self.nowhere = self.grant is None and not self._asked and not any(presence.takes for presence in live)
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
            self._silent.add(verdict.decode)
            return []
        if verdict.state == "waiting":
            # A restarted decode worker has forgotten its grant: the repeated ask waits there anew.
            self.grant = None
            asked.waits = True
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
        candidates = [presence for presence in live if presence.takes and presence.id not in asked]
        if self._asked:
            candidates = [presence for presence in candidates if presence.blocks_free >= self.blocks]
        heard = [presence for presence in candidates if presence.id not in self._silent]
        if not candidates or not (heard or now_s - self._last_s >= SECOND_ASK_AFTER_S):
            return None
        candidates = heard or candidates
        at_home = next((presence for presence in candidates if presence.id == self.home), None)
        if at_home is not None and self._room(at_home) >= self.blocks:
            least = min(map(self._filled, candidates))
            if self._filled(at_home) <= least + HOME_BEHIND_MAX:
                return at_home
        drawn = [candidates[int(roll * len(candidates))] for roll in rolls]
        return max(drawn, key=lambda presence: (self._room(presence), presence.id))

    def _room(self, presence: Presence) -> int:
        """Blocks that are free there, once those have theirs who wait, and would go before us."""
        waiting = presence.asks_waiting - (presence.batch_asks_waiting if self.klass == INTERACTIVE else 0)
        return presence.blocks_free - waiting * self.blocks

    def _filled(self, presence: Presence) -> float:
        """The part of its blocks that is promised, or waited for."""
        return 1.0 - self._room(presence) / max(1, presence.blocks)

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
            klass=self.klass,
            blocks=self.blocks,
            seats=self.seats,
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
