"""Requests and what became of them: the part that an HTTP client and the gateway's endpoint play.

A request is opened, published and relayed as `gateway.chat` does it, to a client that reads everything at once, and may leave.
Those who publish for themselves are in `producers.py`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gateway.replies import Reply as Relay
from pipeline import outside
from pipeline.bus.connection import Bus
from pipeline.errors import ErrorBody, ReplyError
from pipeline.protocol import subjects
from pipeline.protocol.messages import Done, encode, unpack_ids
from pipeline.protocol.reply import Piece
from pipeline.protocol.resume import continues
from pipeline.protocol.strays import Queued
from pipeline.protocol.turns import Turn
from tests.simulation.engine import Choices, drawn
from tests.simulation.fleet import Running
from tests.simulation.plan import Order
from workers.engines.simulated.reply import sampling_of
from workers.engines.simulated.words import prompt_of

PUBLISH_TIMEOUT_S: Final = 5.0

Told = Callable[[str, str], None]
"""Hears how a request ends: a verb and a detail."""


class Client(ABC):
    """Who waits for one request. `end` is what it got; `cut` where its process died under it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.choices: Choices = []
        """What it has of each reply, mostly of one: ids and text."""
        self.end: Done | ErrorBody | None = None
        self.cut = False
        self.left = False
        self.task: asyncio.Task[None] | None = None
        self.at: Running | None = None

        self.clear()

    @property
    def tokens(self) -> int:
        """How many it has, of all replies."""
        return sum(len(ids) for ids, _ in self.choices)

    def clear(self) -> None:
        """It has nothing."""
        self.choices = [([], "") for _ in range(self.order.n)]

    def add(self, piece: Piece) -> None:
        """Something more of one reply."""
        ids, text = self.choices[piece.choice]
        self.choices[piece.choice] = ([*ids, *piece.ids], text + piece.text)

    @property
    def over(self) -> bool:
        """Nobody waits for this reply any more."""
        return self.cut or self.left or self.end is not None

    @property
    def may_be_acked(self) -> bool:
        """Whether the message of this request has done its work."""
        return self.over

    @abstractmethod
    async def ask(self, at: Running, told: Told) -> None:
        """Send it from a process, and read the reply."""

    def leave(self) -> None:  # noqa: B027  only who asks over HTTP can
        """It does not wait any more."""

    def say_end(self, told: Told) -> None:
        """Tell how it ended."""
        if isinstance(self.end, Done):
            told("whole", f"{self.tokens} tokens")
        elif self.end is not None:
            told("failed", f"{self.end.code}: {self.end.message}")

    async def store(self, bus: Bus, addresses: dict[str, Any], affinity: str = "") -> int:
        """Publish the request, under its creator's own affinity unless another is given: its sequence. Raises `ReplyError`."""
        order, token = self.order, subjects.token(self.order.creator)
        write = encode if order.encoding == "msgpack" else msgspec.json.encode
        return await bus.store(
            subjects.request_in(order.klass, affinity or token, token),
            write({**body(order), **addresses}),
            msg_id=order.id,
            timeout_s=min(PUBLISH_TIMEOUT_S, order.timeout_s / 2),
        )


class HttpClient(Client):
    """One client of a gateway."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.relay: Relay | None = None

    @property
    def over(self) -> bool:
        return super().over or (self.relay is not None and (self.relay.end is not None or self.relay.left))

    async def ask(self, at: Running, told: Told) -> None:
        gateway, order = at.gateway, self.order
        assert gateway is not None
        self.at = at
        relay = self.relay = gateway.replies.open(order.id, outside.monotonic_s(), order.timeout_s)
        relay.detailed = True  # all tokens are looked at, also those that add no text
        relay.continues = continues(body(order))
        try:
            await self._publish(at, relay)
            await self._relayed(relay)
        finally:
            gateway.replies.close(relay)
        if relay.end is None:
            self.left = True
            told("left", f"after {self.tokens} tokens")
            return
        self.end = relay.end
        self.say_end(told)

    async def _relayed(self, relay: Relay) -> None:
        """As `gateway.chat` sends it, streamed or whole."""
        if self.order.whole:
            await relay.everything()
            if isinstance(relay.end, Done):
                self.choices = all_of(relay.end)
            return
        while relay.end is None and not relay.left:
            await relay.something()
            self._read(relay)
        self._read(relay)

    def _read(self, relay: Relay) -> None:
        for piece in relay.take():
            self.add(piece)

    def leave(self) -> None:
        """The client closes its connection."""
        if self.relay is not None and self.relay.end is None:
            self.relay.leave()

    async def _publish(self, at: Running, relay: Relay) -> None:
        assert at.gateway is not None
        terms = at.gateway.terms
        addresses = {"reply_to": terms.reply_to, "claim_at": terms.claim_at, "receiver": terms.receiver}
        affinity = at.gateway.routing.affinity(subjects.token(self.order.creator), self.order.id)
        try:
            sequence = await self.store(at.gateway.bus, addresses, affinity)
            queue = at.gateway.routing.shard(self.order.klass, affinity).queue
            at.gateway.replies.confirm(relay, None if self.order.conversation else Queued(queue, sequence))
        except ReplyError as error:
            relay.finish(error.body())


def all_of(done: Done) -> Choices:
    """All that a reply's end says."""
    return [(unpack_ids(choice.ids), choice.text) for choice in done.all_choices]


def body(order: Order) -> dict[str, Any]:
    """The request as it lies in the stream, but for where its reply goes."""
    tree: dict[str, Any] = {
        "type": "chat",
        "v": 1,
        "id": order.id,
        **_said(order),
        "max_tokens": order.max_tokens,
        "timeout_ms": max(1, round(order.timeout_s * 1000)),
        **order.sampling,
    }
    bad = {"model": "gpt-5", "max_tokens": 100_000, "temperature": -1}
    return {**tree, order.bad: bad[order.bad]} if order.bad else tree


def _said(order: Order) -> dict[str, Any]:
    if order.conversation:
        return {"message": order.question, "conversation": order.conversation}
    return {"messages": messages(order)}


def persona(creator: str) -> str:
    """What a creator's published persona says."""
    return f"You are {creator}."


def messages(order: Order, before: Turn | None = None) -> list[dict[str, Any]]:
    """What the creator's persona says to all, and what this client asks, after the exchange before it."""
    said = persona(order.creator) if order.conversation else f"You are {order.creator}, and you answer briefly. " * 2
    history = [dict(before.message), {"role": "assistant", "content": before.reply}] if before is not None else []
    return [{"role": "system", "content": said}, *history, {"role": "user", "content": order.question}]


def undisturbed(order: Order, seed: int, before: Turn | None = None) -> Choices:
    """The replies that this request gets when nothing goes wrong."""
    prompt = prompt_of({"messages": messages(order, before)})
    return drawn(seed, prompt, sampling_of(order.sampling), order.max_tokens)
