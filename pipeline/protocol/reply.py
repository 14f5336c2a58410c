"""A reply, from both ends: the receiver puts it together, the holder keeps it until the receiver has the whole.

Frames are numbered by token index and stamped with a claim. The receiver takes frames of the last claim only, drops tokens that
it has, and on a gap asks the holder "from i". `Done` carries the whole reply once more, so a lost tail is mended from it.
A stream that merely stops is a lie: a reply ends with `Done` or with `Failed`, said once.
"""

from array import array
from collections.abc import Sequence
from typing import Final

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
    Go,
    Gone,
    Notice,
    Tokens,
    Usage,
    Whole,
    pack_ids,
    unpack_ids,
)
from pipeline.protocol.pieces import Choice, Extra

_NO_EXTRA: Final = Extra()


class Piece(msgspec.Struct, frozen=True):
    """Something new of one choice: text, tokens, and their logprobs as in `Extra`."""

    choice: int
    text: str
    ids: tuple[int, ...]
    logprobs: str = ""
    message: str = ""


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """These, in order, as one piece for each choice."""
    if len(pieces) < 2:
        return list(pieces)
    of: dict[int, list[Piece]] = {}
    for piece in pieces:
        of.setdefault(piece.choice, []).append(piece)
    return [
        Piece(
            choice,
            "".join(one.text for one in mine),
            tuple(token for one in mine for token in one.ids),
            ",".join(one.logprobs for one in mine if one.logprobs),
            ",".join(one.message for one in mine if one.message),
        )
        for choice, mine in of.items()
    ]


class Heard(msgspec.Struct, frozen=True):
    """What a frame meant to its receiver.

    `text` and `ids` are new and in order, of one `choice`; what is new in others, at the end, is in `others`. `answer` goes to
    the frame's reply subject, if it has one; `notice` is (the holder's subject, what to tell it). `end` is set once, when all
    has been said. `repeated` counts tokens that were here already.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    answer: Answer | None = None
    notice: tuple[str, Notice] | None = None
    end: Done | Failed | None = None
    repeated: int = 0
    choice: int = 0
    logprobs: str = ""
    message: str = ""
    others: tuple[Piece, ...] = ()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All that is new."""
        if not self.text and not self.ids and not self.message:
            return self.others
        return (Piece(self.choice, self.text, self.ids, self.logprobs, self.message), *self.others)


class _Had(msgspec.Struct):
    """How much of a choice has been delivered: tokens, characters of text, of logprobs, of the message."""

    tokens: int = 0
    text: int = 0
    logprobs: int = 0
    message: int = 0


class Receiver:
    """One reply as its receiver sees it. `ids` and `text` have been delivered so far: ids of all choices, text of the first.
    Ids take 4 bytes each, where those of a list would take 36: a long reply is mostly ids.

    `prompt_tokens` and `prompt` (packed ids) are known from the first tokens on, where they were asked for.
    """

    def __init__(self, request: str) -> None:
        self.request = request
        self.arbiter = Arbiter()
        self.ids = array("I")
        self.text = ""
        self.prompt_tokens = 0
        self.prompt = b""
        self._had: dict[int, _Had] = {}
        self._repair_asked_s = float("-inf")

    def claim(self, claim: Claim, *, afresh: bool = False, lives: bool = False) -> Answer:
        """A worker wants to work on it. `afresh`: unless it is the one that does, it begins again, and what came is forgotten.

        `lives`: whoever works on it is heard.
        """
        last = self.arbiter.last
        again = afresh and last is not None and last.claim != claim.claim
        answer = self.arbiter.claim(claim, [] if again else self.ids, lives=lives)
        if again and isinstance(answer, Go):
            self.ids, self.text, self._had = array("I"), "", {}
        return answer

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
        extra = frame.extra
        if extra is None:
            self._keep(0, ids, frame.text)
            return Heard(frame.text, tuple(ids))
        if extra.prompt_tokens:
            self.prompt_tokens, self.prompt = extra.prompt_tokens, extra.prompt
        had = self._keep(extra.choice, ids, frame.text)
        had.logprobs += len(extra.logprobs) + bool(had.logprobs and extra.logprobs)
        had.message += len(extra.message) + bool(had.message and extra.message)
        said = (extra.choice, extra.logprobs, extra.message)
        return Heard(frame.text, tuple(ids), None, None, None, 0, *said)

    def _keep(self, choice: int, ids: list[int], text: str) -> _Had:
        had = self._had.get(choice)
        if had is None:
            had = self._had[choice] = _Had()
        had.tokens += len(ids)
        had.text += len(text)
        self.ids.extend(ids)
        if choice == 0:
            self.text += text
        return had

    def _done(self, frame: Done) -> Heard:
        first, *others = (self._rest(index, choice) for index, choice in enumerate(frame.all_choices))
        new = tuple(piece for piece in others if piece.text or piece.ids or piece.message)
        more = (first.choice, first.logprobs, first.message, new)
        return Heard(first.text, first.ids, Whole(), None, frame, 0, *more)

    def _rest(self, index: int, choice: Choice) -> Piece:
        """What has not come of a choice that is whole."""
        had = self._had.get(index, _Had())
        ids, text = unpack_ids(choice.ids)[had.tokens :], choice.text[had.text :]
        logprobs = choice.logprobs[had.logprobs :].removeprefix(",")
        message = choice.message[had.message :].removeprefix(",")
        self._keep(index, ids, text)
        return Piece(index, text, tuple(ids), logprobs, message)

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
    """One reply as its holder sends it: every frame is kept until the receiver has the whole.

    `prompt_tokens`, `prompt` (packed ids) and `prompt_logprobs` are set for a receiver that has asked for them.
    """

    def __init__(self, request: str, claim: str, delivered: Sequence[int] = ()) -> None:
        self.request = request
        self.claim = claim
        self.prompt_tokens = 0
        self.prompt = b""
        self.prompt_logprobs = ""
        self.length = len(delivered)
        self.before = ""
        """The text that the `delivered` tokens have given, under other claims."""
        self._delivered = pack_ids(delivered)
        self._frames: list[Tokens] = []
        self._tails: dict[int, tuple[str, str]] = {}
        self._ends: dict[int, tuple[str, int | str | None]] = {}

    def add(self, ids: list[int], text: str, choice: int = 0, logprobs: str = "", message: str = "") -> Tokens | None:
        """The frame for these new tokens. What has no token has no index of its own: it goes with the next, or with `Done`."""
        held_text, held_message = self._tails.pop(choice, ("", ""))
        text, message = held_text + text, ",".join(filter(None, (held_message, message)))
        if not ids:
            self._tails[choice] = (text, message)
            return None
        extra: Extra | None = None
        if not self._frames and self.prompt_tokens:
            extra = Extra(choice, logprobs, self.prompt_tokens, self.prompt, message)
        elif choice or logprobs or message:
            extra = Extra(choice, logprobs, message=message)
        frame = Tokens(1, self.request, self.claim, self.length, pack_ids(ids), text, extra)
        self.length += len(ids)
        self._frames.append(frame)
        return frame

    def since(self, index: int) -> list[Tokens]:
        """The frames to send again to a receiver that has `index` tokens."""
        return [frame for frame in self._frames if frame.index >= index]

    def end(self, choice: int, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """A choice is whole."""
        self._ends[choice] = (finish_reason, stop_reason)

    @property
    def ended(self) -> int:
        """Choices that are whole."""
        return len(self._ends)

    def done(self, usage: Usage) -> Done:
        """The frame that ends the reply, once all choices have: all of it once more."""
        choices = [self._choice(index) for index in sorted(self._ends)]
        first = choices[0]
        plain = len(choices) == 1 and first.stop_reason is None and not first.logprobs and not first.message
        said = (first.ids, first.text, first.finish_reason)
        more = [] if plain else choices
        return Done(1, self.request, self.claim, self.length, *said, usage, more, self.prompt, self.prompt_logprobs)

    def _choice(self, index: int) -> Choice:
        mine = [frame for frame in self._frames if (frame.extra or _NO_EXTRA).choice == index]
        extras = [frame.extra for frame in mine if frame.extra]
        held_text, held_message = self._tails.get(index, ("", ""))
        ids = b"".join(frame.ids for frame in mine)
        text = "".join(frame.text for frame in mine) + held_text
        logprobs = ",".join(extra.logprobs for extra in extras if extra.logprobs)
        message = ",".join(filter(None, (*(extra.message for extra in extras), held_message)))
        if index == 0:
            ids, text = self._delivered + ids, self.before + text
        return Choice(ids, text, *self._ends[index], logprobs, message)
