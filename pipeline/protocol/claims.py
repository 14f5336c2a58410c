"""Who may work on a request, and speak for it.

JetStream promises at-least-once, not mutual exclusion: a first holder's `+WPI`, NAK and ack still work while a second one holds
the message, and delivery counts may go backwards. So the right to work is a **claim**; its arbiter is the reply's receiver:

    worker ── Claim(id, follows?) ──► receiver
           ◄── go       yours; here is what I have of the reply
           ◄── whole    I have all of it: ack
           ◄── gone     nobody wants it: ack
           ◄── fenced   a later claim exists: stop, neither ack nor NAK

The rules, and there are no others:

1. A reply that is whole answers `whole`, one that nobody wants `gone`, to whoever claims.
2. The claim that is last gets the same answer again, so a claim may be repeated until it is answered.
3. A claim that has been superseded never gets `go` again.
4. A claim that begins a delivery (`follows` unset) becomes the last one.
5. A claim that follows another becomes the last one only if the claim it names is the last.
6. Where the last one was accused, and its holder has spoken since, it was only slow and still works: the delivery that the
   accusation has brought about is fenced, or the reply would be begun again, and lost where nobody can go on with it. Once.

The first claim that names a version of a persona pins it: every later `go` says that version, so that who begins again renders
the same prompt.

The holder's half is the `Lease`: what it may assume of its message while the broker is silent.
"""

from collections.abc import Sequence
from enum import Enum, auto

from pipeline.limits import LEASE_PERIOD_S, LEASE_SILENT_MAX_S
from pipeline.protocol.messages import Answer, Claim, Fenced, Go, Gone, Whole, pack_ids


class Arbiter:
    """The receiver's half, for one request. `superseded` grows by one with every delivery, which the consumer bounds."""

    def __init__(self) -> None:
        self.last: Claim | None = None
        self.whole = False
        self.gone = False
        self._persona = 0
        self._accused = ""
        self._superseded: dict[str, Claim] = {}

    def claim(self, claim: Claim, have: Sequence[int], *, lives: bool = False) -> Answer:
        """Answer a claim. `have` are the token ids that the receiver has already; `lives`: the last claim's holder is heard."""
        if self.whole:
            return Whole()
        if self.gone:
            return Gone()
        if not self._is_last(claim.claim) and not self._take(claim, lives=lives):
            return Fenced()
        self._persona = self._persona or claim.persona
        return Go(pack_ids(have), self._persona)

    def accused(self, claim: Claim) -> None:
        """Its message has been given back, because its holder is taken for dead."""
        self._accused = claim.claim

    def hears(self, claim_id: str) -> bool:
        """Whether frames under this claim are taken."""
        return self._is_last(claim_id) and not self.gone

    def superseded(self, claim_id: str) -> Claim | None:
        """The claim of that id, where it was last once and is not any more."""
        return self._superseded.get(claim_id)

    def _is_last(self, claim_id: str) -> bool:
        return self.last is not None and self.last.claim == claim_id

    def _take(self, claim: Claim, *, lives: bool) -> bool:
        if claim.claim in self._superseded:
            return False
        if claim.follows is not None and not self._is_last(claim.follows):
            return False
        if claim.follows is None and lives and self._is_last(self._accused):
            self._accused = ""
            self._superseded[claim.claim] = claim
            return False
        if self.last is not None:
            self._superseded[self.last.claim] = self.last
        self.last = claim
        return True


class LeaseState(Enum):
    """What a holder may assume of its message."""

    HELD = auto()
    DOUBTFUL = auto()
    """The broker has been silent too long: the message may be with another. No frames, no `+WPI`, no ack."""


class Lease:
    """The holder's knowledge of its lease: renewed by every answer of the broker. All times are seconds, monotonic."""

    def __init__(self, now_s: float) -> None:
        self._answered_s = now_s
        self._asked_s = now_s

    def due(self, now_s: float) -> bool:
        """Whether it is time to send `+WPI`; remembers that it was."""
        if now_s - self._asked_s < LEASE_PERIOD_S:
            return False
        self._asked_s = now_s
        return True

    def answered(self, asked_at_s: float) -> None:
        """The broker has answered a `+WPI` that was sent at `asked_at_s`. The lease runs from the asking, not from the answer."""
        self._answered_s = max(self._answered_s, asked_at_s)

    def state(self, now_s: float) -> LeaseState:
        """Held, or in doubt."""
        silent_s = now_s - self._answered_s
        return LeaseState.HELD if silent_s < LEASE_SILENT_MAX_S else LeaseState.DOUBTFUL
