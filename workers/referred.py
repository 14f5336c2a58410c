"""A request by reference at its prefill worker: its turn in the conversation, and the prompt that it stands for.

    enter ─► the conversation is ours ─► what the prompt is made of is pinned ─► claim ─► go ─► persona + history + message

So that a redelivery renders the same prompt, it is made of what was pinned first: by the slot of the conversation, or without one
by the first claim, whose version of the persona every later `go` says.
"""

from collections.abc import Callable
from typing import Self

import anyio
import msgspec

from pipeline import outside
from pipeline.bus.errors import Unanswered
from pipeline.config import Conversations as Window
from pipeline.errors import PersonaNotFound, PromptTooLong, RequestError
from pipeline.protocol import conversations, subjects, turns
from pipeline.protocol.conversations import Pins, Slot, Talk, Ticket
from pipeline.protocol.intake import Intake
from pipeline.protocol.personas import key_of
from pipeline.protocol.subjects import AckSubject
from pipeline.protocol.turns import Turn
from workers.conversations import Conversations
from workers.personas import Personas


class Shelf(msgspec.Struct, frozen=True):
    """What all requests by reference of a worker share."""

    personas: Personas
    conversations: Conversations
    window: Window


class Referred:
    """One request. `persona` is the version that it is rendered with, 0 where its creator has none."""

    def __init__(self, shelf: Shelf, intake: Intake, ack: AckSubject) -> None:
        assert intake.reference is not None
        self.persona = 0
        self._shelf, self._intake, self._reference = shelf, intake, intake.reference
        self._key = key_of(intake.creator, intake.envelope.tenant)
        named = self._reference.conversation
        self._conversation = None if named is None else f"{self._key}.{subjects.token(named)}"
        # With its time: a stream that was declared anew counts from 1 again.
        self._origin = f"{ack.stream}-{ack.sequence}-{ack.stored_at_s:.3f}"
        self._stored_at_s, self._by = ack.stored_at_s, outside.token(8)
        self._history: list[Turn] = []
        self._number, self._in_prompt = 0, 0
        self._slot: Slot | None = None
        self._may_render = anyio.Event()
        self._entering = anyio.Lock()
        self._closed = False

    @classmethod
    def of(cls, shelf: Shelf, read: Callable[[], Intake], ack: AckSubject) -> Self | None:
        """What a request refers to, if it does. What is malformed refers to nothing: that is said when it is rendered."""
        try:
            intake = read()
        except RequestError:
            return None
        return cls(shelf, intake, ack) if intake.reference is not None else None

    @property
    def talk(self) -> Talk | None:
        """What is to be written down in the end; None without a conversation."""
        if self._conversation is None:
            return None
        return Talk(
            conversation=self._conversation,
            by=self._by,
            origin=self._origin,
            number=self._number,
            request=self._intake.address.request,
            message=self._reference.message,
        )

    async def enter(self) -> bool:
        """Whether it may be worked on now; False while another one of its conversation is. Raises `BusError`."""
        async with self._entering:
            if self._closed:
                return False
            if self._conversation is None:
                self.persona = await self._shelf.personas.last(self._key)
                return True
            me = Ticket(self._stored_at_s, self._origin, self._intake.deadline_s)
            slot = await self._shelf.conversations.enter(self._conversation, me, self._by)
            if not conversations.holds(slot, self._origin, self._by):
                return False
            self._slot = slot
            await self._look_back(self._conversation, slot)
            return True

    async def _look_back(self, conversation: str, slot: Slot) -> None:
        history = await self._shelf.conversations.history(conversation)
        pins = slot.pins
        if pins is None:
            pins = Pins(
                await self._shelf.personas.last(self._key),
                history.turns[-1][0] if history.turns else 0,
                history.sent[-1][0] if history.sent else 0,
            )
            if not await self._shelf.conversations.pin(conversation, self._origin, self._by, pins):
                raise Unanswered("Another delivery of this request has entered its conversation.")
        self.persona = pins.persona
        told = turns.before((turn for at, turn in history.turns if at <= pins.last), self._origin)
        self._history = turns.corrected(told, [said for at, said in history.sent if at <= pins.sent])
        self._number = told[-1].number + 1 if told else 1

    def go(self, persona: int) -> None:
        """The claim is ours. `persona` is the version that the first claim named, 0 where nobody remembers one."""
        self.persona = persona or self.persona
        self._may_render.set()

    async def assembled(self) -> dict[str, object]:
        """The request with all its messages, once its claim is ours. Raises `RequestError` and `BusError`."""
        await self._may_render.wait()
        names, creator = self._reference.names, self._intake.creator
        if not self.persona:
            tenant = self._intake.envelope.tenant and f" --tenant {self._intake.envelope.tenant}"
            raise PersonaNotFound(
                f"{creator} has no persona: publish one (headrace persona put {creator} FILE{tenant}), or send all in messages.",
                param=names.persona,
            )
        persona = await self._shelf.personas.at(self._key, self.persona)
        if persona is None:
            raise PersonaNotFound(
                f"Version {self.persona} of the persona of {creator}, with which this request began, cannot be read any more: "
                "send it again.",
                param=names.persona,
            )
        window = self._shelf.window
        chosen = turns.in_window(self._history, window.window_turns, window.step_turns)
        self._in_prompt = len(chosen)
        return turns.assembled(self._intake.tree, persona, chosen, self._reference.message, names.conversation)

    def explained(self, error: PromptTooLong) -> PromptTooLong:
        """A prompt that does not fit, in the words of who sent only a message."""
        names = self._reference.names
        if error.param == "max_tokens":
            return error
        if self._in_prompt:
            return turns.too_long(self._in_prompt, f"does not fit ({error.message})", names.conversation)
        return PromptTooLong(
            f"The persona of {self._intake.creator} and the message do not fit: {error.message} Shorten either.",
            param=names.message,
        )

    async def close(self, *, whole: bool) -> None:
        """Before the ack. Where the receiver has the whole and its worker has died before it wrote it down, that is done now."""
        async with self._entering:
            self._closed = True
            talk = self.talk
            if talk is None:
                return
            if self._slot is None:
                await self._shelf.conversations.give_up(talk)
            else:
                await self._shelf.conversations.close(talk, self._slot.reply if whole else None)
