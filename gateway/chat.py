"""`POST /v1/chat/completions`: read, check, admit, publish, and relay the reply.

Plain ASGI, because this is the hot path: one write carries all text that is ready, and nothing is allocated for a token but
its chunk. The response begins with the first text or with an error, so an error that comes first has its own status. A client
that leaves is noticed at every stage by a watch on `http.disconnect`: frameworks do that only for servers that announce an
ASGI version below 2.4.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final
from uuid import uuid4

import msgspec
import structlog
from starlette.types import Message, Receive, Scope, Send

from gateway import errors, intake, openai, sse
from gateway.account import Account
from gateway.detailed import DetailedChunks
from gateway.fleet import Lookout
from gateway.intake import Order, Terms
from gateway.keys import Guests
from gateway.replies import Replies, Reply
from gateway.routing import Routing
from pipeline import outside
from pipeline.bus.connection import Bus
from pipeline.errors import CapacityError, ErrorBody, ReplyError, ServiceError, TooSlow
from pipeline.protocol import subjects
from pipeline.protocol.admission import Admission
from pipeline.protocol.keys import Key
from pipeline.protocol.messages import Done
from pipeline.protocol.shares import Place
from pipeline.telemetry import logs

PUBLISH_TIMEOUT_S: Final = 5.0
"""The publish is repeated under its id this long: a broker that restarts is back within one second."""

STALLED_MAX_S: Final = 30.0
"""A client that has not read its whole reply this long after the deadline is taken for gone."""

STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

log = logs.get("gateway")


class ClientLeft(Exception):
    """The client closed the connection before its request was read."""


class Chat:
    """The endpoint, as an ASGI application."""

    def __init__(
        self,
        *,
        bus: Bus,
        replies: Replies,
        admission: Admission,
        guests: Guests,
        lookout: Lookout,
        routing: Routing,
        terms: Terms,
        account: Account,
        body_bytes_max: int,
        body_timeout_s: float,
    ) -> None:
        self._bus = bus
        self._routing = routing
        self._replies = replies
        self._admission = admission
        self._guests = guests
        self._lookout = lookout
        self._terms = terms
        self._account = account
        self._body_bytes_max = body_bytes_max
        self._body_timeout_s = body_timeout_s
        self._clock: Callable[[], float] = outside.monotonic_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        asked_s = self._clock()
        headers = dict(scope["headers"])
        request = uuid4().hex
        request_id = intake.request_id_of(headers) or request
        structlog.contextvars.bind_contextvars(request_id=request_id)
        out = Outgoing(send, request_id)
        try:
            order, place = await self._accept(request, headers, receive)
        except ReplyError as error:
            self._account.refused(error, headers, self._clock() - asked_s)
            await out.fail(error.body())
        except ClientLeft:
            self._account.refused(None, headers, self._clock() - asked_s)
        else:
            await self._serve(order, place, asked_s, receive, out)

    async def _accept(self, request: str, headers: intake.Headers, receive: Receive) -> tuple[Order, Place]:
        """Read and check a request, and take a place for it. What can be refused by its head is, before its body is read."""
        intake.check_encoding(headers)
        key = self._guests.who(headers)
        self._admission.look_in(self._clock())
        place = self._guests.place(key)
        try:
            body = await self._read(headers, receive, place)
            order = intake.take(request, headers, body, self._terms, key or intake.OPEN)
            self._enter(order, key or intake.OPEN, place)
        except BaseException:
            place.leave(self._clock())
            raise
        return order, place

    async def _read(self, headers: intake.Headers, receive: Receive, place: Place) -> bytes:
        """The body, whose bytes are counted as they come."""
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return await read_body(
                    headers, receive, self._body_bytes_max, lambda size: place.grow(size, self._clock())
                )
        except TimeoutError:
            raise TooSlow(f"The body has not come within {self._body_timeout_s:g} s.") from None

    def _enter(self, order: Order, key: Key, place: Place) -> None:
        """Let a request in that is well-formed, or raise why not."""
        fleet = self._lookout.fleet()
        order.model = fleet.choose(order.model)
        if order.model:
            key.check_model(order.model)
        now_s = self._clock()
        place.enter(order.creator, now_s, referred=order.referred)
        self._admission.enter(
            fleet.prefill, fleet.decode, now_s, saturated=fleet.slots_free == 0, timeout_s=order.timeout_s
        )

    async def _serve(self, order: Order, place: Place, asked_s: float, receive: Receive, out: "Outgoing") -> None:
        """From admission to the end: whatever happens, the reply is closed and the place is free again."""
        reply = self._replies.open(order.id, asked_s, order.timeout_s)
        reply.detailed, reply.klass = not order.detail.plain, order.klass
        reply.on_begun = lambda: place.begun(self._clock())
        self._account.begin(order, reply, out.request_id, self._clock())
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(_watch(receive, reply))
                await self._relay(order, reply, out)
                watch.cancel()
        finally:
            self._replies.close(reply)
            usage = reply.end.usage if isinstance(reply.end, Done) else None
            tokens = usage.prompt_tokens if usage else None
            place.leave(self._clock(), drained=reply.published, prompt_tokens=tokens)
            self._admission.leave(self._clock(), drained=reply.published, served=usage is not None)
            self._account.ended(order, self._clock())

    async def _relay(self, order: Order, reply: Reply, out: "Outgoing") -> None:
        """Publish, then pass the reply on. Raises nothing, so that the watch beside it is never broken off."""
        write = stream if order.stream else whole
        try:
            async with asyncio.timeout(order.timeout_s + STALLED_MAX_S):
                await self._publish(order, reply)
                await write(order, reply, out)
                reply.delivered = not reply.left
        except TimeoutError:
            log.warning("client_stalled", request=order.id)
        except Exception:
            log.exception("relay_failed", request=order.id)
            reply.finish(error := ServiceError("The gateway failed at this request.").body())
            await out.fail(error)
            reply.delivered = True

    async def _publish(self, order: Order, reply: Reply) -> None:
        # 2,048 bodies of 900 kB must not be kept until their replies have ended.
        payload, order.payload = order.payload, b""
        timeout_s = min(PUBLISH_TIMEOUT_S, order.timeout_s / 2)
        try:
            affinity = self._routing.affinity(order.creator, order.conversation)
            subject = subjects.request_in(order.klass, affinity, order.creator)
            reply.at.sent_s = self._clock()
            await self._bus.store(subject, payload, msg_id=order.id, timeout_s=timeout_s, headers=order.trace)
            reply.at.stored_s = self._clock()
            self._replies.confirm(reply)
        except CapacityError as error:
            wait_s = error.retry_after_s or self._admission.wait_s(self._clock())
            reply.finish(msgspec.structs.replace(error.body(), retry_after_s=wait_s))
        except ReplyError as error:
            reply.finish(error.body())


class Outgoing:
    """The response: its first message is sent with the first part of its body."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self._send = send
        self._echo = (b"x-request-id", request_id.encode())
        self.started = False

    async def write(self, body: bytes, *, more: bool) -> None:
        """A part of a streamed response."""
        if not self.started:
            await self._start(200, list(STREAM_HEADERS))
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def whole(self, status: int, headers: errors.Headers, body: bytes) -> None:
        """A response in one piece."""
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: ErrorBody, unsent: bytes = b"") -> None:
        """The end of a response that fails: with its own status, or where a stream has begun, as its last event."""
        if self.started:
            await self.write(unsent + sse.event(errors.error_object(error)), more=False)
        else:
            await self.whole(errors.status_of(error), errors.headers_of(error), errors.error_object(error))

    async def _start(self, status: int, headers: errors.Headers) -> None:
        self.started = True
        start: Message = {"type": "http.response.start", "status": status, "headers": [*headers, self._echo]}
        await self._send(start)


async def stream(order: Order, reply: Reply, out: Outgoing) -> None:
    """The reply as server-sent events."""
    of: type[sse.Chunks | DetailedChunks] = sse.Chunks if order.detail.plain else DetailedChunks
    chunks = of(order, int(time.time()), reply.receiver)
    await reply.something()
    while reply.end is None and not reply.left:
        await out.write(chunks.pieces(reply.take()), more=True)
        await reply.something()
    end, pieces = reply.end, reply.take()
    if reply.left:
        return
    if isinstance(end, Done):
        await out.write(chunks.last(pieces, end), more=False)
    elif end is not None:
        await out.fail(end, chunks.pieces(pieces) if pieces else b"")


async def whole(order: Order, reply: Reply, out: Outgoing) -> None:
    """The reply in one piece."""
    await reply.everything()
    if reply.left:
        return
    if isinstance(reply.end, ErrorBody):
        await out.fail(reply.end)
    elif reply.end is not None:
        body = openai.completion(order, int(time.time()), reply.end)
        await out.whole(200, [(b"content-type", b"application/json")], body)


async def read_body(headers: intake.Headers, receive: Receive, bytes_max: int, count: Callable[[int], None]) -> bytes:
    """The request's body; `count` is told of its pieces. Raises `BodyTooLarge` as soon as it is known to be, and `ClientLeft`."""
    if intake.declared_too_large(headers, bytes_max):
        raise intake.too_large(bytes_max)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > bytes_max:
            raise intake.too_large(bytes_max)
        count(len(parts[-1]))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _watch(receive: Receive, reply: Reply) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    reply.leave()
