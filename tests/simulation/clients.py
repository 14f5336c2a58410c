"""Requests and what became of them: the part that an HTTP client and the gateway's endpoint play.

A request is opened, published and relayed as `gateway.chat` does it, to a client that reads everything at once, and may leave.
"""

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

from gateway.intake import Terms
from gateway.replies import Reply as Relay
from pipeline import outside
from pipeline.errors import ErrorBody, ReplyError
from pipeline.protocol import subjects
from pipeline.protocol.messages import Done, encode
from tests.simulation.fleet import Running
from tests.simulation.plan import Order
from workers.engines.simulated.reply import Reply, sampling_of
from workers.engines.simulated.words import prompt_of

PUBLISH_TIMEOUT_S = 5.0


class Client:
    """One client and its request. `end` is what it got; `cut` where its gateway died under it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.relay: Relay | None = None
        self.text = ""
        self.end: Done | ErrorBody | None = None
        self.cut = False
        self.left = False
        self.task: asyncio.Task[None] | None = None
        self.gateway: Running | None = None

    @property
    def over(self) -> bool:
        """Nobody waits for this reply any more."""
        if self.cut or self.left or self.end is not None:
            return True
        return self.relay is not None and (self.relay.end is not None or self.relay.left)

    async def ask(self, at: Running, told: Callable[[str, str], None]) -> None:
        """Send it through a gateway, and read the reply. `told` hears how it ends."""
        gateway, order = at.gateway, self.order
        assert gateway is not None
        self.gateway = at
        relay = self.relay = gateway.replies.open(order.id, outside.monotonic_s(), order.timeout_s)
        try:
            await self._publish(at, relay)
            while relay.end is None and not relay.left:
                await relay.something()
                self.text += relay.take()
            self.text += relay.take()
        finally:
            gateway.replies.close(relay)
        if relay.end is None:
            self.left = True
            told("left", f"after {len(relay.receiver.ids)} tokens")
            return
        self.end = relay.end
        if isinstance(self.end, Done):
            told("whole", f"{len(relay.receiver.ids)} tokens")
        else:
            told("failed", f"{self.end.code}: {self.end.message}")

    def leave(self) -> None:
        """The client closes its connection."""
        if self.relay is not None and self.relay.end is None:
            self.relay.leave()

    async def _publish(self, at: Running, relay: Relay) -> None:
        assert at.gateway is not None
        order, token = self.order, subjects.token(self.order.creator)
        try:
            await at.gateway.bus.store(
                subjects.request_in(order.klass, token, token),
                encode(body(order, at.gateway.terms)),
                msg_id=order.id,
                timeout_s=min(PUBLISH_TIMEOUT_S, order.timeout_s / 2),
            )
            at.gateway.replies.confirm(relay)
        except ReplyError as error:
            relay.finish(error.body())


def body(order: Order, terms: Terms) -> dict[str, Any]:
    """The request as it lies in the stream."""
    tree: dict[str, Any] = {
        "type": "chat",
        "v": 1,
        "id": order.id,
        "messages": messages(order),
        "max_tokens": order.max_tokens,
        "reply_to": terms.reply_to,
        "claim_at": terms.claim_at,
        "receiver": terms.receiver,
        "timeout_ms": max(1, round(order.timeout_s * 1000)),
    }
    bad = {"model": "gpt-5", "max_tokens": 100_000, "temperature": -1}
    return {**tree, order.bad: bad[order.bad]} if order.bad else tree


def messages(order: Order) -> list[dict[str, str]]:
    """What the creator's persona says to all, and what this client asks."""
    persona = f"You are {order.creator}, and you answer briefly. " * 2
    return [{"role": "system", "content": persona}, {"role": "user", "content": order.question}]


def undisturbed(order: Order, seed: int) -> tuple[list[int], str]:
    """The reply that this request gets when nothing goes wrong."""
    prompt = array("I", prompt_of({"messages": messages(order)}))
    reply = Reply(seed, prompt.tobytes(), (), sampling_of({}), order.max_tokens)
    ids, text, finish = [], "", None
    while finish is None:
        token_id, new, finish = reply.next()
        ids.append(token_id)
        text += new
    return ids, text
