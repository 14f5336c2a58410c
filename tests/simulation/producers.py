"""Producers: programs that publish straight to the stream, with a NATS client and what the README tells them.

Subscriber   holds a subscription and no more. A reply that starts again comes under another claim, and it discards the old one
Keeping      holds nothing: its reply is kept in REPLIES, whole
Arbiter      has a claim subject of its own, and answers as a gateway does
"""

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final

import anyio

from pipeline import outside
from pipeline.bus.client import Message
from pipeline.bus.connection import Bus
from pipeline.bus.errors import Disconnected
from pipeline.errors import ErrorBody, ReplyError
from pipeline.limits import EXPIRED_AFTER_S
from pipeline.protocol.messages import AnyFrame, Claim, Done, Failed, Tokens, claim_decoder, encode, unpack_ids
from pipeline.protocol.reply import Piece, Receiver
from tests.simulation.clients import Client, Told, all_of
from tests.simulation.engine import Choices
from tests.simulation.fleet import Running
from tests.simulation.frames import frames_of
from tests.simulation.plan import Order

PATIENCE_S: Final = EXPIRED_AFTER_S + 15.0
"""After its deadline a producer gives up: the keeper's scan, its tries, and the time in which a dead keeper's item comes back."""


LOST_AFTER_S: Final = 4.0
"""Longer than any process or connection stands still."""


class Producer(Client):
    """One request of a producer. It waits until it has its end, or has heard nothing for far too long."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.shaken: set[str] = set()
        """What may have kept frames from it that were sent: the weather, and connections that broke."""
        self.unsent = False
        """Its publish has failed. The stream may have it all the same."""
        self.waited_s = 0.0
        self._ended = anyio.Event()

    async def ask(self, at: Running, told: Told) -> None:
        assert at.bus is not None
        self.at, asked_s = at, asyncio.get_running_loop().time()
        with contextlib.ExitStack() as stack:
            stack.callback(at.bus.on_disconnect(lambda: self.shaken.add("cut off")))
            addresses = await self.listen(at.bus)
            try:
                await self.store(at.bus, addresses)
            except ReplyError as error:
                self.unsent = True
                self.finish(error.body())
            with anyio.move_on_after(self.order.timeout_s + PATIENCE_S):
                await self._ended.wait()
        self.waited_s = asyncio.get_running_loop().time() - asked_s
        if self.end is None:
            told("unheard", f"{', '.join(sorted(self.shaken)) or 'for no reason'}")
        self.say_end(told)

    @abstractmethod
    async def listen(self, bus: Bus) -> dict[str, Any]:
        """Be there for the reply. Returns what the request says of it."""

    def finish(self, end: Done | ErrorBody) -> None:
        """Nothing follows."""
        if self.end is None:
            self.end = end
            self._ended.set()

    def read_whole(self, done: Done) -> None:
        """What counts in the end is what `done` says."""
        self.choices = all_of(done)


class Subscriber(Producer):
    """A producer that is only a subscription. What was lost on the way to it nobody will send again."""

    def __init__(
        self, order: Order, wrong: Callable[[str], None], listens: Callable[[str, "Subscriber"], None]
    ) -> None:
        super().__init__(order)
        self._said = False
        self._wrong = wrong
        self._listens = listens
        self._claim = ""
        self._old: set[str] = set()

    @property
    def may_be_acked(self) -> bool:
        return self._said

    def said(self, loop: asyncio.AbstractEventLoop) -> None:
        """The broker has had the end of its reply: a while after that it need not wait any more."""
        self._said = True
        loop.call_later(LOST_AFTER_S, self._ended.set)

    async def listen(self, bus: Bus) -> dict[str, Any]:
        inbox = bus.inbox()
        self._listens(inbox, self)
        await bus.subscribe(inbox, self._came)
        return {"reply_to": inbox}

    def _came(self, message: Message) -> None:
        for frame in frames_of(message.data):
            if self.end is None:
                self._take(frame)

    def _take(self, frame: AnyFrame) -> None:
        if isinstance(frame, Failed):
            self.finish(frame.error)
        elif isinstance(frame, Done):
            if frame.claim == self._claim and not self.shaken and _ids(all_of(frame)) != _ids(self.choices):
                self._wrong(
                    f"{self.order.id} was sent {self.choices} under {frame.claim}, and told that it was {frame}"
                )
            self.read_whole(frame)
            self.finish(frame)
        elif frame.claim not in self._old:
            self._add(frame)

    def _add(self, frame: Tokens) -> None:
        if frame.claim != self._claim:
            self._old.add(self._claim)
            self._claim = frame.claim
            self.clear()
        if frame.index == self.tokens:
            self.add(Piece(frame.extra.choice if frame.extra else 0, frame.text, tuple(unpack_ids(frame.ids))))
        elif not self.shaken:
            self._wrong(f"{self.order.id} has {self.tokens} tokens of {frame.claim}, and is sent number {frame.index}")


def _ids(choices: Choices) -> list[list[int]]:
    return [ids for ids, _ in choices]


class Keeping(Producer):
    """A producer that will look for its reply in REPLIES, which nothing keeps from it."""

    @property
    def subject(self) -> str:
        """Where its reply is kept."""
        return f"replies.producer-1.{self.order.id}"

    async def listen(self, bus: Bus) -> dict[str, Any]:
        return {"reply_to": self.subject}

    def kept(self, data: bytes) -> None:
        """Something is stored there."""
        (frame,) = frames_of(data)
        if isinstance(frame, Done):
            self.read_whole(frame)
        assert not isinstance(frame, Tokens)
        self.finish(frame if isinstance(frame, Done) else frame.error)


class Arbiter(Producer):
    """A producer that answers claims. `claimed` is told of each before it is answered, `grown` of claims that brought tokens."""

    def __init__(
        self, order: Order, claimed: Callable[[str, Claim], None], grown: Callable[[str, set[str]], None]
    ) -> None:
        super().__init__(order)
        self._claimed, self._grown = claimed, grown
        self._receiver = Receiver(order.id)
        self._bus: Bus

    async def listen(self, bus: Bus) -> dict[str, Any]:
        """Until the world ends: who tells the end of a reply may have to tell it again."""
        self._bus, inbox = bus, bus.inbox()
        await bus.subscribe(f"{inbox}.r", self._frames_came)
        await bus.subscribe(f"{inbox}.c", self._claim_came)
        return {"reply_to": f"{inbox}.r", "claim_at": f"{inbox}.c"}

    def _claim_came(self, message: Message) -> None:
        claim = claim_decoder.decode(message.data)
        self._claimed(message.reply, claim)
        self._say(message.reply, self._receiver.claim(claim))

    def _frames_came(self, message: Message) -> None:
        for frame in frames_of(message.data):
            heard = self._receiver.frame(frame, outside.monotonic_s())
            if any(piece.ids for piece in heard.pieces):
                self._grown(self.order.id, {frame.claim})
            if heard.answer is not None and message.reply:
                self._say(message.reply, heard.answer)
            if heard.notice is not None:
                self._say(*heard.notice)
            for piece in heard.pieces:
                self.add(piece)
            if heard.end is not None:
                self.finish(heard.end if isinstance(heard.end, Done) else heard.end.error)

    def _say(self, subject: str, said: Any) -> None:
        with contextlib.suppress(Disconnected):
            self._bus.post(subject, encode(said))
