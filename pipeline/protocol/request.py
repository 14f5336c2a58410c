"""The life of one request, as its two workers live it.

A worker feeds what happens (an event) into `step` and carries out what comes back (effects). It decides nothing itself.

**At prefill** four things must come true, in any order, before the completion event may be sent:

    DELIVERED ─► WORKING ── CLAIMED    the receiver said go
                    │       RENDERED   the prompt is tokens, so its need is known
                    │       STORED     its KV is where decode can load it
                    │       GRANTED    a decode worker keeps blocks for it
                    │ all four
                    ▼
                 HANDING ── accepted ─► ENDED      (the message is decode's now)
                    ├────── refused ──► WORKING    (the grant is gone: ask again)
                    └────── untaken ──► WORKING    (decode is silent: take the claim back, and ask another)

**At decode** the claim is taken over first; only then is the handoff accepted:

    TAKING ── go ─► DECODING ── generated ─► ENDING ── whole ─► ENDED, acked
                     │   ▲
             in doubt│   │go
                     ▼   │
                    SUSPENDED     the broker is silent: no frames, no ack

Both may end early, and how is one table for each (`PREFILL_ENDS`, `DECODE_ENDS`). An error is told to the receiver (ENDING)
before the message is acked; a fenced holder neither acks nor NAKs; one that lets go alive NAKs. Where nobody answers the claim,
the lease is left to end: the message comes back by itself a little later, and keeps no slot until then. One whose conversation
is worked on by another goes back before it is claimed, and stays away for a while.
"""

from enum import Enum, Flag, auto
from typing import Final

import msgspec


class Progress(Flag):
    """What has come true of a request at its prefill worker.

    BEGUN: it is being rendered. OFFERED: a decode worker may have taken it over, and only the receiver knows.
    """

    NOTHING = 0
    BEGUN = auto()
    CLAIMED = auto()
    RENDERED = auto()
    STORED = auto()
    GRANTED = auto()
    OFFERED = auto()


READY: Final = Progress.BEGUN | Progress.CLAIMED | Progress.RENDERED | Progress.STORED | Progress.GRANTED


class Stage(Enum):
    """Where a request is, at either worker."""

    WORKING = auto()
    HANDING = auto()
    TAKING = auto()
    DECODING = auto()
    SUSPENDED = auto()
    ENDING = auto()
    ENDED = auto()


class Event(Enum):
    """What happens to a request. Payloads travel beside it, not in it: the machine does not need them."""

    DELIVERED = auto()
    DELIVERED_AGAIN = auto()
    RENDERED = auto()
    STORED = auto()
    GRANTED = auto()
    GRANT_LOST = auto()
    ACCEPTED = auto()
    REFUSED = auto()
    UNTAKEN = auto()
    """The handoff was not answered, and its decode worker has fallen silent."""
    COUNTED = auto()
    """A start of a redelivered request has been recorded, so that it is remembered should it kill this worker."""
    POISONED = auto()
    """Too many workers have died with it."""
    TAKEN = auto()
    """At decode: a handoff has come under a live grant."""
    GENERATED = auto()
    GO = auto()
    WHOLE = auto()
    GONE = auto()
    FENCED = auto()
    CANCELLED = auto()
    INVALID = auto()
    FAILED = auto()
    DEADLINE = auto()
    DOUBT = auto()
    """The broker has been silent too long."""
    UNANSWERED = auto()
    """Its receiver has not answered the claim for a while, or is not heard of. It may be gone, or be coming back."""
    BUSY = auto()
    """Another request of its conversation is being worked on."""
    UNHEARD = auto()
    """The end of the reply was repeated past the deadline, and nobody answered."""
    LEFT = auto()
    """The worker lets go, alive: it drains, or its engine died."""


class Effect(Enum):
    """What the worker must do now, in this order."""

    CLAIM = auto()
    RECLAIM = auto()
    """Claim it anew, after the claim that was handed over: `go` says that nobody has taken that, and nobody will."""
    COUNT = auto()
    RENDER = auto()
    ASK = auto()
    PREFILL = auto()
    BEGIN = auto()
    """Send the reply's first token, which prefill has made: decode goes on after what the receiver has."""
    HAND_OFF = auto()
    ACCEPT = auto()
    REFUSE = auto()
    DECODE = auto()
    HOLD_FRAMES = auto()
    LET_FRAMES_GO = auto()
    STOP = auto()
    """Abort what the engine does for it, and give back asks, grants and blocks."""
    DEAD_LETTER = auto()
    TELL = auto()
    """Send the frame that ends the reply, until it is answered."""
    ACK = auto()
    NAK = auto()
    NAK_FOR_A_WHILE = auto()


E, F, S, P = Event, Effect, Stage, Progress

Effects = tuple[Effect, ...]
End = tuple[Stage, Effects]

PREFILL_ENDS: Final[dict[Event, End]] = {
    E.WHOLE: (S.ENDED, (F.STOP, F.ACK)),
    E.GONE: (S.ENDED, (F.STOP, F.ACK)),
    E.CANCELLED: (S.ENDED, (F.STOP, F.ACK)),
    E.FENCED: (S.ENDED, (F.STOP,)),
    E.DOUBT: (S.ENDED, (F.STOP,)),
    E.UNANSWERED: (S.ENDED, (F.STOP,)),
    E.BUSY: (S.ENDED, (F.STOP, F.NAK_FOR_A_WHILE)),
    E.LEFT: (S.ENDED, (F.STOP, F.NAK)),
    E.INVALID: (S.ENDING, (F.STOP, F.DEAD_LETTER)),
    E.POISONED: (S.ENDING, (F.STOP, F.DEAD_LETTER)),
    E.FAILED: (S.ENDING, (F.STOP,)),
    E.DEADLINE: (S.ENDING, (F.STOP,)),
}

DECODE_ENDS: Final[dict[Event, End]] = {
    E.WHOLE: (S.ENDED, (F.STOP, F.ACK)),
    E.GONE: (S.ENDED, (F.STOP, F.ACK)),
    E.CANCELLED: (S.ENDED, (F.STOP, F.ACK)),
    E.FENCED: (S.ENDED, (F.STOP,)),
    E.LEFT: (S.ENDED, (F.STOP, F.NAK)),
    E.GENERATED: (S.ENDING, (F.STOP, F.TELL)),
    E.INVALID: (S.ENDING, (F.STOP, F.TELL)),
    E.FAILED: (S.ENDING, (F.STOP, F.TELL)),
    E.DEADLINE: (S.ENDING, (F.STOP, F.TELL)),
}

TAKING_ENDS: Final = frozenset(
    {E.WHOLE, E.GONE, E.FENCED, E.CANCELLED, E.DEADLINE, E.LEFT, E.DOUBT, E.INVALID, E.FAILED, E.UNANSWERED}
)
"""Where the claim is not taken over: by then its prefill worker has taken it back, or is about to."""

ENDING_ENDS: Final[dict[Event, End]] = {
    E.WHOLE: (S.ENDED, (F.ACK,)),
    E.GONE: (S.ENDED, (F.ACK,)),
    E.CANCELLED: (S.ENDED, (F.ACK,)),
    E.UNHEARD: (S.ENDED, (F.ACK,)),
    E.FENCED: (S.ENDED, ()),
    E.DOUBT: (S.ENDED, ()),
    E.LEFT: (S.ENDED, (F.NAK,)),
}
"""While the end of a reply is being told, at either worker. What else happens then comes too late to matter."""

PROGRESS: Final[dict[Event, tuple[Progress, Effects]]] = {
    E.GO: (P.CLAIMED, ()),
    E.COUNTED: (P.BEGUN, (F.RENDER,)),
    E.RENDERED: (P.RENDERED, (F.ASK, F.PREFILL)),
    E.STORED: (P.STORED, ()),
    E.GRANTED: (P.GRANTED, ()),
}


class Prefill(msgspec.Struct, frozen=True):
    """The state of a request at its prefill worker."""

    stage: Stage = Stage.WORKING
    progress: Progress = Progress.NOTHING


class Decode(msgspec.Struct, frozen=True):
    """The state of a request at its decode worker. `arbitrated`: its receiver answers claims."""

    stage: Stage = Stage.TAKING
    arbitrated: bool = True


def step_prefill(state: Prefill, event: Event) -> tuple[Prefill, Effects]:
    """What `event` makes of a request at prefill. Events that come too late change nothing."""
    if state.stage is S.ENDED:
        return state, ()
    if state.stage is S.ENDING:
        return _tell_at_prefill(state, event)
    if event is E.LEFT and P.OFFERED in state.progress:
        return Prefill(S.ENDED, state.progress), (F.STOP,)  # a NAK could take it from the decode worker that has it
    if event in PREFILL_ENDS:
        stage, effects = PREFILL_ENDS[event]
        tell = stage is S.ENDING and P.CLAIMED in state.progress
        return Prefill(stage, state.progress), (*effects, F.TELL) if tell else effects
    if state.stage is S.HANDING:
        return _hand_off(state, event)
    return _progress(state, event)


def _progress(state: Prefill, event: Event) -> tuple[Prefill, Effects]:
    if event is E.DELIVERED:
        return Prefill(S.WORKING, P.BEGUN), (F.CLAIM, F.RENDER)
    if event is E.DELIVERED_AGAIN:
        # Somebody may have it already, or all of it, or have died of it: ask before spending a prefill on it.
        return state, (F.CLAIM,)
    if event is E.GRANT_LOST:
        return Prefill(S.WORKING, state.progress & ~P.GRANTED), ()
    if event not in PROGRESS:
        return state, ()
    flag, effects = PROGRESS[event]
    progress = state.progress | flag
    if event is E.GO:
        progress &= ~P.OFFERED
    if event is E.GO and P.BEGUN not in progress:
        effects = (F.COUNT,)
    if progress == READY:
        return Prefill(S.HANDING, progress | P.OFFERED), (*effects, F.BEGIN, F.HAND_OFF)
    return Prefill(S.WORKING, progress), effects


def _hand_off(state: Prefill, event: Event) -> tuple[Prefill, Effects]:
    if event is E.ACCEPTED:
        return Prefill(S.ENDED, state.progress), ()
    if event is E.REFUSED:
        return Prefill(S.WORKING, state.progress & ~(P.GRANTED | P.OFFERED)), (F.ASK,)
    # A grant that is lost now is no news: whether the handoff was taken, its own answer says, or the receiver.
    if event is E.UNTAKEN:
        return Prefill(S.WORKING, state.progress & ~(P.GRANTED | P.CLAIMED)), (F.RECLAIM, F.ASK)
    return state, ()


def _tell_at_prefill(state: Prefill, event: Event) -> tuple[Prefill, Effects]:
    """The receiver takes an error only from the holder of the last claim, so an unanswered claim is waited for."""
    if event is E.GO and P.CLAIMED not in state.progress:
        return Prefill(S.ENDING, state.progress | P.CLAIMED), (F.TELL,)
    if event in (E.UNANSWERED, E.BUSY):
        return Prefill(S.ENDED, state.progress), ()
    if event in ENDING_ENDS:
        stage, effects = ENDING_ENDS[event]
        return Prefill(stage, state.progress), effects
    return state, ()


def step_decode(state: Decode, event: Event) -> tuple[Decode, Effects]:
    """What `event` makes of a request at decode. Events that come too late change nothing."""
    match state.stage:
        case S.TAKING:
            return _take(state, event)
        case S.DECODING | S.SUSPENDED:
            return _decode(state, event)
        case S.ENDING:
            stage, effects = ENDING_ENDS.get(event, (S.ENDING, ()))
            return _at(state, stage), effects
        case _:
            return state, ()


def _take(state: Decode, event: Event) -> tuple[Decode, Effects]:
    """Until the claim is ours the message is prefill's: refuse, and leave ack and NAK to it."""
    if event is E.TAKEN:
        return state, (F.CLAIM,)
    if event is E.GO:
        return _at(state, S.DECODING), (F.ACCEPT, F.DECODE)
    return (_at(state, S.ENDED), (F.REFUSE, F.STOP)) if event in TAKING_ENDS else (state, ())


def _decode(state: Decode, event: Event) -> tuple[Decode, Effects]:
    if event is E.DOUBT:
        return _doubt(state)
    if event is E.GO:
        return (_at(state, S.DECODING), (F.LET_FRAMES_GO,)) if state.stage is S.SUSPENDED else (state, ())
    if event in DECODE_ENDS:
        stage, effects = DECODE_ENDS[event]
        return _at(state, stage), effects
    return state, ()


def _doubt(state: Decode) -> tuple[Decode, Effects]:
    """Is the message still ours? The receiver knows, and is asked under the same claim; without one we must assume the worst."""
    if not state.arbitrated:
        return _at(state, S.ENDED), (F.STOP,)
    return (_at(state, S.SUSPENDED), (F.HOLD_FRAMES, F.CLAIM)) if state.stage is S.DECODING else (state, ())


def _at(state: Decode, stage: Stage) -> Decode:
    return Decode(stage, state.arbitrated)
