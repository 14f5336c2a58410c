"""A reply, from both ends: the receiver puts it together, the holder keeps it until the receiver has the whole.

Frames are numbered by token index and stamped with a claim. The receiver takes frames of the last claim only, drops tokens that
it has, and on a gap asks the holder "from i". `Done` carries the whole reply once more, so a lost tail is mended from it.
A stream that merely stops is a lie: a reply ends with `Done` or with `Failed`, said once.
"""

from collections.abc import Sequence

import msgspec

from pipeline.limits import REPEAT_PERIOD_S
from pipeline.protocol.claims import Arbiter
from pipeline.protocol.messages import (
    Answer,
    AnyFrame,
    Claim,
    Done,
    Failed,
    Fenced,
    From,
    Gone,
    Notice,
    Tokens,
    Usage,
    Whole,
    pack_ids,
    unpack_ids,
)


class Heard(msgspec.Struct, frozen=True):
    """What a frame meant to its receiver.

    `text` and `ids` are new and in order. `answer` goes to the frame's reply subject, if it has one; `notice` is (the holder's
    subject, what to tell it). `end` is set once, when the reply has ended. `repeated` counts tokens that were here already.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    answer: Answer | None = None
    notice: tuple[str, Notice] | None = None
    end: Done | Failed | None = None
    repeated: int = 0


class Receiver:
    """One reply as its receiver sees it. `ids` and `text` are what has been delivered so far."""

    def __init__(self, request: str) -> None:
        self.request = request
        self.arbiter = Arbiter()
        self.ids: list[int] = []
        self.text = ""
        self._repair_asked_s = float("-inf")

    def claim(self, claim: Claim) -> Answer:
        """A worker wants to work on it."""
        return self.arbiter.claim(claim, self.ids)

    def leave(self) -> tuple[str, Notice] | None:
        """The client is gone. What to tell the present holder, if there is one that still works."""
        if self.arbiter.whole or self.arbiter.gone:
            return None
        self.arbiter.gone = True
        return self._notice(Gone())

    def frame(self, frame: AnyFrame, now_s: float) -> Heard:
        """A frame has come. Raises nothing: what does not fit is answered."""
        if self.arbiter.gone:
            return Heard(answer=Gone())
        if not self.arbiter.hears(frame.claim):
            return Heard(answer=Fenced(), notice=self._fence(frame.claim))
        if self.arbiter.whole:
            return Heard(answer=Whole(), repeated=len(self.ids))
        if isinstance(frame, Tokens):
            return self._tokens(frame, now_s)
        self.arbiter.whole = True
        if isinstance(frame, Failed):
            return Heard(answer=Whole(), end=frame)
        return self._done(frame)

    def _tokens(self, frame: Tokens, now_s: float) -> Heard:
        ids = unpack_ids(frame.ids)
        if frame.index > len(self.ids):
            return Heard(notice=self._repair(now_s))
        if frame.index < len(self.ids):
            # A holder resends whole frames, so a frame is new from its first token or not at all.
            return Heard(repeated=len(ids))
        self.ids += ids
        self.text += frame.text
        return Heard(text=frame.text, ids=tuple(ids))

    def _done(self, frame: Done) -> Heard:
        ids = unpack_ids(frame.ids)[len(self.ids) :]
        text = frame.text[len(self.text) :]
        self.ids += ids
        self.text += text
        return Heard(text=text, ids=tuple(ids), answer=Whole(), end=frame)

    def _repair(self, now_s: float) -> tuple[str, Notice] | None:
        """Ask for what is missing, but not again for every frame that follows the gap."""
        if now_s - self._repair_asked_s < REPEAT_PERIOD_S:
            return None
        self._repair_asked_s = now_s
        return self._notice(From(len(self.ids)))

    def _notice(self, answer: Gone | From) -> tuple[str, Notice] | None:
        last = self.arbiter.last
        return (last.holder, Notice(self.request, last.claim, answer)) if last else None

    def _fence(self, claim_id: str) -> tuple[str, Notice] | None:
        """A tokens frame is no request, so a holder that has been superseded is told where it listens."""
        stale = self.arbiter.superseded(claim_id)
        return (stale.holder, Notice(self.request, claim_id, Fenced())) if stale else None


class Outbox:
    """One reply as its holder sends it: every frame is kept until the receiver has the whole."""

    def __init__(self, request: str, claim: str, delivered: Sequence[int] = ()) -> None:
        self.request = request
        self.claim = claim
        self.length = len(delivered)
        self.before = ""
        """The text that the `delivered` tokens have given, under other claims."""
        self._delivered = pack_ids(delivered)
        self._frames: list[Tokens] = []
        self._tail = ""

    def add(self, ids: list[int], text: str) -> Tokens | None:
        """The frame for these new tokens. Text without a token has no index of its own: it goes with `Done`."""
        if not ids:
            self._tail += text
            return None
        frame = Tokens(1, self.request, self.claim, self.length, pack_ids(ids), self._tail + text)
        self._tail = ""
        self.length += len(ids)
        self._frames.append(frame)
        return frame

    def since(self, index: int) -> list[Tokens]:
        """The frames to send again to a receiver that has `index` tokens."""
        return [frame for frame in self._frames if frame.index >= index]

    def done(self, finish_reason: str, usage: Usage) -> Done:
        """The frame that ends the reply: all of it once more."""
        ids = self._delivered + b"".join(frame.ids for frame in self._frames)
        text = self.before + "".join(frame.text for frame in self._frames) + self._tail
        return Done(1, self.request, self.claim, self.length, ids, text, finish_reason, usage)
