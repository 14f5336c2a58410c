"""`POST /v1/chat/completions` and `/v1/completions`: read, check, admit, publish, and relay the reply.

Plain ASGI, because this is the hot path: one write carries all text that is ready, and nothing is allocated for a token but
its chunk. While a client keeps up, its tokens are written as they come, past the task that waits for the end. The response
begins with the first text or with an error, so an error that comes first has its own status. A client that leaves is noticed
at every stage by a watch on `http.disconnect`: frameworks do that only for servers that announce an ASGI version below 2.4.
"""

import asyncio
import functools
import itertools
import time
from collections.abc import Callable
from typing import Final
from uuid import uuid4

import msgspec
from starlette.types import Message, Receive, Scope, Send

from gateway import completions, errors, intake, openai, sse
from gateway.account import Account
from gateway.detailed import DetailedChunks
from gateway.door import WRITER, Writer
from gateway.fleet import Lookout
from gateway.intake import Order, Terms
from gateway.keys import Guests
from gateway.replies import Replies, Reply
from gateway.routing import Routing
from gateway.together import AnyReply, Together
from pipeline import outside
from pipeline.bus.connection import Bus
from pipeline.errors import CapacityError, ErrorBody, ReplyError, ServiceError, TooSlow
from pipeline.protocol import subjects
from pipeline.protocol.admission import Admission
from pipeline.protocol.chat import Chat
from pipeline.protocol.completions import Request
from pipeline.protocol.keys import Key
from pipeline.protocol.messages import Done
from pipeline.protocol.reply import Piece
from pipeline.protocol.shares import Place
from pipeline.protocol.strays import Queued
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


class Endpoint:
    """One of the two, by the `kind` of its requests, as an ASGI application."""

    def __init__(
        self,
        kind: type[Request],
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
        self._kind = kind
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
        logs.bind(request_id=request_id)
        out = Outgoing(send, request_id, scope.get(WRITER))
        try:
            order, places = await self._accept(request, headers, receive)
        except ReplyError as error:
            self._account.refused(error, headers, self._clock() - asked_s)
            await out.fail(error.body())
        except ClientLeft:
            self._account.refused(None, headers, self._clock() - asked_s)
        else:
            await self._serve(order, places, asked_s, receive, out)

    async def _accept(self, request: str, headers: intake.Headers, receive: Receive) -> tuple[Order, list[Place]]:
        """Read and check a request, and take a place for each part. What its head refuses is not read."""
        intake.check_encoding(headers)
        key = self._guests.who(headers)
        self._admission.look_in(self._clock())
        places = [self._guests.place(key)]
        try:
            body = await self._read(headers, receive, places[0])
            order = intake.take(request, headers, body, self._terms, key or intake.OPEN, self._kind)
            places.extend(self._guests.place(key) for _ in order.parts[1:])
            self._enter(order, key or intake.OPEN, places)
        except BaseException:
            for place in places:
                place.leave(self._clock())
            raise
        return order, places

    async def _read(self, headers: intake.Headers, receive: Receive, place: Place) -> bytes:
        """The body, whose bytes are counted as they come."""
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return await read_body(
                    headers, receive, self._body_bytes_max, lambda size: place.grow(size, self._clock())
                )
        except TimeoutError:
            raise TooSlow(f"The body has not come within {self._body_timeout_s:g} s.") from None

    def _enter(self, order: Order, key: Key, places: list[Place]) -> None:
        """Let a request in that is well-formed, or raise why not."""
        fleet = self._lookout.fleet()
        order.model = fleet.choose(order.model)
        if order.model:
            key.check_model(order.model)
        now_s = self._clock()
        for place in places:
            place.enter(order.creator, now_s, referred=order.referred)
        self._admission.enter(
            fleet.prefill,
            fleet.decode,
            now_s,
            saturated=fleet.saturated(order.klass),
            timeout_s=order.timeout_s,
            requests=len(order.parts),
            klass=order.klass,
        )

    async def _serve(
        self, order: Order, places: list[Place], asked_s: float, receive: Receive, out: "Outgoing"
    ) -> None:
        """From admission to the end: whatever happens, the reply is closed and the places are free again."""
        wake = asyncio.Event()
        parts = [self._replies.open(part.id, asked_s, order.timeout_s, wake) for part in order.parts]
        for part, place in zip(parts, places, strict=True):
            part.detailed, part.klass, part.continues = not order.detail.plain, order.klass, order.continues
            part.on_begun = functools.partial(self._begun, place)
        reply = parts[0] if len(parts) == 1 else Together(parts, order.detail.choices, wake)
        self._account.begin(order, parts, out.request_id, self._clock())
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(_watch(receive, reply))
                await self._relay(order, parts, reply, out)
                watch.cancel()
        finally:
            # The first place holds the body, and with it the prompts of all.
            tokens = [sum(done.usage.prompt_tokens for done in reply.dones) if reply.dones else None]
            for part, place, told in itertools.zip_longest(parts, places, tokens):
                self._replies.close(part)
                place.leave(self._clock(), drained=part.published, prompt_tokens=told)
                served = isinstance(part.end, Done)
                self._admission.leave(self._clock(), drained=part.published, served=served, klass=order.klass)
            self._account.ended(order, reply, self._clock())

    def _begun(self, place: Place) -> None:
        place.begun(self._clock())

    async def _relay(self, order: Order, parts: list[Reply], reply: AnyReply, out: "Outgoing") -> None:
        """Publish, then pass the reply on. Raises nothing, so that the watch beside it is never broken off."""
        write = stream if order.stream else whole
        try:
            async with asyncio.timeout(order.timeout_s + STALLED_MAX_S):
                if reply.end is None:  # the gateway may be stopping
                    await self._publish(order, parts, reply)
                await write(self._kind, order, reply, out)
                reply.delivered = not reply.left
        except TimeoutError:
            log.warning("client_stalled", request=order.id)
        except Exception:
            log.exception("relay_failed", request=order.id)
            reply.finish(error := ServiceError("The gateway failed at this request.").body())
            await out.fail(error)
            reply.delivered = True

    async def _publish(self, order: Order, parts: list[Reply], reply: AnyReply) -> None:
        """Store its requests. One that cannot be is an end of the whole reply."""
        timeout_s = min(PUBLISH_TIMEOUT_S, order.timeout_s / 2)
        try:
            affinity = self._routing.affinity(order.creator, order.conversation)
            subject = subjects.request_in(order.klass, affinity, order.creator)
            queue = self._routing.shard(order.klass, affinity).queue
            sent_s = self._clock()
            for one in parts:  # later ones wait for those before: that is no time of their acceptance
                one.at.sent_s = sent_s
            for part, one in zip(order.parts, parts, strict=True):
                # 2,048 bodies of 900 kB must not be kept until their replies have ended.
                payload, part.payload = part.payload, b""
                sequence = await self._bus.store(
                    subject, payload, msg_id=part.id, timeout_s=timeout_s, headers=order.trace
                )
                one.at.stored_s = self._clock()
                # One by reference goes back unclaimed, and stays away, while its conversation is worked on.
                self._replies.confirm(one, None if order.referred else Queued(queue, sequence))
        except CapacityError as error:
            wait_s = error.retry_after_s or self._admission.wait_s(self._clock())
            reply.finish(msgspec.structs.replace(error.body(), retry_after_s=wait_s))
        except ReplyError as error:
            reply.finish(error.body())


class Outgoing:
    """The response: its first message is sent with the first part of its body."""

    def __init__(self, send: Send, request_id: str, writer: Writer | None = None) -> None:
        self.request_id = request_id
        self._send = send
        self._writer = writer
        self._echo = (b"x-request-id", request_id.encode())
        self.started = False

    async def write(self, body: bytes, *, more: bool) -> None:
        """A part of a streamed response."""
        if not self.started:
            await self._start(200, list(STREAM_HEADERS))
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def write_now(self, part: Callable[[], bytes]) -> bool:
        """A part of a response that has begun, without waiting. False, and it is not made, where that cannot be: `write` it."""
        return self.started and self._writer is not None and self._writer(part)

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


async def stream(kind: type[Request], order: Order, reply: AnyReply, out: Outgoing) -> None:
    """The reply as server-sent events."""
    await reply.something()
    pieces = reply.take()
    chunks = _chunks(kind, order, reply, pieces)
    while reply.end is None and not reply.left:
        await out.write(chunks.pieces(pieces), more=True)
        await reply.something(lambda piece: out.write_now(lambda: chunks.pieces((piece,))))
        pieces = reply.take()
    if reply.left:
        return
    if isinstance(reply.end, ErrorBody):
        await out.fail(reply.end, chunks.pieces(pieces) if pieces else b"")
    else:
        await out.write(chunks.last(pieces, reply.dones), more=False)


def _chunks(
    kind: type[Request], order: Order, reply: AnyReply, first: list[Piece]
) -> sse.Chunks | DetailedChunks | completions.CompletionChunks:
    """Who writes the events. That a worker's parser makes messages of the text, its first words tell."""
    created = int(time.time())
    if kind is not Chat:
        return completions.CompletionChunks(order, created, reply.receivers)
    plain = order.detail.plain and not any(piece.message for piece in first)
    of: type[sse.Chunks | DetailedChunks] = sse.Chunks if plain else DetailedChunks
    return of(order, created, reply.receivers[0])


async def whole(kind: type[Request], order: Order, reply: AnyReply, out: Outgoing) -> None:
    """The reply in one piece."""
    await reply.everything()
    if reply.left:
        return
    if isinstance(reply.end, ErrorBody):
        await out.fail(reply.end)
        return
    created = int(time.time())
    if kind is Chat:
        body = openai.completion(order, created, *reply.dones)
    else:
        body = completions.completion(order, created, reply.dones)
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


async def _watch(receive: Receive, reply: AnyReply) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    reply.leave()
