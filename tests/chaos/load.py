"""The clients: what each asks, what it must be told, and how it ended for it.

Every request has a prompt of its own, so that a reply that went astray is seen. The reply that it must get is computed with the
simulated engine's own words, without an engine.
"""

import random
import time
from array import array
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, Literal

import anyio
import msgspec

from pipeline.cli import client, http
from pipeline.config import Simulated
from tests.words import WORDS
from workers.engines.simulated.reply import Reply, sampling_of
from workers.engines.simulated.words import prompt_of

REPLY_TOKENS: Final = 20
PERSONA_WORDS: Final = 120
CREATORS: Final = 40

SPARE_S: Final = 10.0
"""A client waits this long beyond its deadline. Whoever has heard nothing by then has been forgotten."""

RETRY_S: Final = 0.05
"""Before a client that has found no gateway there tries them all again."""

Ending = Literal["whole", "error", "broken"]
"""`broken`: the connection ended before the reply did, or nothing came at all."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `timeout_s` None: the gateway's own."""

    number: int
    creator: str
    body: dict[str, Any]
    timeout_s: float | None = None

    @property
    def expected(self) -> str:
        """What the engine must say to it."""
        prompt = array("I", prompt_of(self.body)).tobytes()
        reply = Reply(Simulated().seed, prompt, (), sampling_of(self.body), self.body["max_tokens"])
        text = ""
        while reply.over is None:
            text += reply.next()[1]
        return text


class Outcome(msgspec.Struct, kw_only=True):
    """How it ended for a client. Times in seconds, monotonic; `code` says why a reply is not whole."""

    order: Order
    began_s: float
    ended_s: float = 0.0
    status: int = 0
    text: str = ""
    ending: Ending = "broken"
    code: str = ""
    retry_after_s: float | None = None
    finish_reason: str | None = None

    @property
    def latency_s(self) -> float:
        """From the first try to the end."""
        return self.ended_s - self.began_s


def orders(count: int, run: str, timeout_s: float | None = None) -> list[Order]:
    """Requests of many creators: the same for the same `run`."""
    return [_order(number, run, timeout_s) for number in range(count)]


def _order(number: int, run: str, timeout_s: float | None) -> Order:
    creator = f"creator-{number % CREATORS}"
    persona = " ".join(random.Random(f"{run}/{creator}").choices(WORDS, k=PERSONA_WORDS))
    body = client.chat_body(
        f"Request {number} of {run}: tell me a story.", system=persona, max_tokens=REPLY_TOKENS, ignore_eos=True
    )
    return Order(number=number, creator=creator, body=body, timeout_s=timeout_s)


# --------------------------------------------------------------------------------------------------------------
# One request


async def ask(urls: Sequence[str], order: Order) -> Outcome:
    """Send one request and follow its reply to the end. Where a gateway is not there the next is tried, as a proxy would."""
    outcome, tries = Outcome(order=order, began_s=time.monotonic()), 0
    try:
        with anyio.fail_after((order.timeout_s or 60.0) + SPARE_S):
            while not await _tried(urls[(order.number + tries) % len(urls)], order, outcome):
                tries += 1
                if tries % len(urls) == 0:
                    await anyio.sleep(RETRY_S)
    except TimeoutError:
        outcome.code = "silence"
    except OSError:
        outcome.code = "broken_off"
    outcome.ended_s = time.monotonic()
    return outcome


async def _tried(url: str, order: Order, outcome: Outcome) -> bool:
    """Whether the request reached a gateway."""
    headers = {"content-type": "application/json", "x-creator-id": order.creator}
    if order.timeout_s is not None:
        headers["x-request-timeout-ms"] = str(round(order.timeout_s * 1000))
    try:
        async with http.requested(
            "POST", f"{url}/v1/chat/completions", body=msgspec.json.encode(order.body), headers=headers
        ) as response:
            await _follow(response, outcome)
    except ConnectionRefusedError:
        return False
    return True


async def _follow(response: http.Response, outcome: Outcome) -> None:
    outcome.status = response.status
    if response.status != 200:
        _refused(outcome, response.headers, await response.body())
        return
    buffer = bytearray()
    async for piece in response.pieces():
        for event in client.events(buffer, piece):
            if event != b"[DONE]":
                _take(outcome, _chunk.decode(event))
            elif not outcome.code and outcome.finish_reason:
                outcome.ending = "whole"
    if outcome.ending == "broken":
        outcome.code = "stopped"


def _take(outcome: Outcome, chunk: client.Chunk) -> None:
    if chunk.error:
        outcome.ending, outcome.code = "error", str(chunk.error.code)
    for choice in chunk.choices:
        outcome.finish_reason = choice.finish_reason or outcome.finish_reason
        outcome.text += choice.delta.content or ""


def _refused(outcome: Outcome, headers: dict[str, str], body: bytes) -> None:
    outcome.ending = "error"
    fault = _chunk.decode(body).error
    outcome.code = str(fault.code) if fault else f"http_{outcome.status}"
    outcome.retry_after_s = float(headers["retry-after"]) if "retry-after" in headers else None


_chunk: Final = msgspec.json.Decoder(client.Chunk)


# --------------------------------------------------------------------------------------------------------------
# Many requests

Ask = Callable[[Order], Coroutine[Any, Any, None]]


async def open_loop(asked: Iterable[Order], rate: float, ask_one: Ask) -> None:
    """Send `rate` requests a second, whatever becomes of them; returns when all have ended."""
    began_s = time.monotonic()
    async with anyio.create_task_group() as requests:
        for count, order in enumerate(asked):
            await anyio.sleep(max(0.0, began_s + count / rate - time.monotonic()))
            requests.start_soon(ask_one, order)


async def closed_loop(asked: Iterable[Order], concurrency: int, ask_one: Ask) -> None:
    """So many clients, each asking as soon as it has been answered."""
    waiting = iter(asked)

    async def keep_asking() -> None:
        for order in waiting:
            await ask_one(order)

    async with anyio.create_task_group() as clients:
        for _ in range(concurrency):
            clients.start_soon(keep_asking)
