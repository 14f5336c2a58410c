"""The replies that are under way: what workers say goes in, text for HTTP clients comes out.

All of a gateway's requests share two subjects, one for frames and one for claims, because a subscription for each request
costs twice as much a frame. So a message is sorted by the request that it names:

    open       frames go to its receiver; claims are arbitrated
    whole      the client has been given everything: `whole`, and the worker acks
    any other  its client has left, or never was: `gone`, and the worker acks; to tokens, which take no answer, a cancel

The handlers never wait. Text that a slow client has not read yet is joined, so a client costs at most the length of its reply,
and nobody else's time.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import Disconnected
from pipeline.errors import DeadlineExceeded, ErrorBody
from pipeline.protocol import subjects
from pipeline.protocol.accuser import Accuser
from pipeline.protocol.messages import (
    Answer,
    AnyFrame,
    Cancel,
    Claim,
    Done,
    Failed,
    Fenced,
    From,
    Go,
    Gone,
    Notice,
    Whole,
    claim_decoder,
    encode,
    frames_decoder,
)
from pipeline.protocol.reply import Piece, Receiver, joined
from pipeline.protocol.stages import AtGateway
from pipeline.protocol.strays import Queued, Strays
from pipeline.protocol.subjects import CLASSES
from pipeline.telemetry import logs, metrics

ANSWER_WITHIN_S: Final = 1.0
"""For somebody to answer for a reply, after we were away."""

WHOLE_REMEMBERED_MAX: Final = 4096
"""Finished requests that still answer `whole` to a late claim. One that is forgotten answers `gone`, and is acked as well."""

Sink = Callable[[Piece], bool]
"""Sends news at once. False, and nothing is sent, where that cannot be."""

_ITL_SECONDS: Final = {klass: metrics.ITL_SECONDS.labels(klass=klass) for klass in CLASSES}

log = logs.get("gateway")


class Reply:
    """One reply on its way to a client.

    `end` is set once. `published`: its request is in the queue. `left`: the client has closed the connection before it was
    `delivered` all there is.
    """

    __slots__ = (
        "_parts",
        "_seen",
        "_sink",
        "_wake",
        "answer_by_s",
        "at",
        "continues",
        "delivered",
        "detailed",
        "doubted",
        "end",
        "klass",
        "last_frame_s",
        "left",
        "on_begun",
        "published",
        "queued",
        "receiver",
        "request",
        "timer",
    )

    def __init__(self, request: str, asked_s: float, wake: asyncio.Event | None = None) -> None:
        """`wake`: shared with the replies that go the same way."""
        self.request = request
        self.at = AtGateway(asked_s)
        self.klass = CLASSES[0]
        self.receiver = Receiver(request)
        self.answer_by_s: float | None = None
        """Set while it is not known whether anybody works on it: until then somebody must answer for it."""
        self.doubted = False
        self.published = False
        self.queued: Queued | None = None
        """Where it lies, if whoever it is delivered to claims it at once."""
        self.delivered = False
        self.detailed = False
        """Tokens count as news even where they add no text."""
        self.continues = True
        """Another worker can go on with it. Where not, it begins again, as long as the client has seen nothing."""
        self.end: Done | ErrorBody | None = None
        self.left = False
        self.last_frame_s: float | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.on_begun: Callable[[], None] | None = None
        """Called at the first token."""
        self._sink: Sink | None = None
        self._seen = False
        self._parts: list[Piece] = []
        self._wake = wake or asyncio.Event()

    @property
    def receivers(self) -> list[Receiver]:
        """Who puts it together: one for each prompt."""
        return [self.receiver]

    @property
    def dones(self) -> list[Done]:
        """The whole reply, once it is: one for each prompt."""
        return [self.end] if isinstance(self.end, Done) else []

    @property
    def lost_with_holder(self) -> bool:
        """The client has seen of it, and nobody else can go on."""
        return self._seen and not self.continues

    @property
    def news(self) -> bool:
        """Whether there is something to take."""
        return bool(self._parts)

    def add(self, piece: Piece) -> None:
        """News for the client."""
        if self._sink is not None and not self._parts:
            try:
                if self._sink(piece):
                    self._seen = self._seen or self._sink is not _dropped
                    return
            except Exception as error:
                # It meets who takes the piece, in this reply's own task, and not the replies whose frames came with it.
                log.warning("sink_failed", request=self.request, error=repr(error))
        self._parts.append(piece)
        self._wake.set()

    def finish(self, end: Done | ErrorBody) -> None:
        """Nothing follows. Only the first end counts."""
        if self.end is None:
            self.end = end
            self._wake.set()

    def leave(self) -> None:
        """The client does not wait any more."""
        self.left = True
        self._wake.set()

    def take(self) -> list[Piece]:
        """What has not been sent, joined: a piece for each choice that goes on."""
        parts, self._parts = self._parts, []
        self._seen = self._seen or bool(parts)
        return joined(parts)

    def claim(self, claim: Claim, *, lives: bool = False) -> Answer:
        """A worker wants to work on it. `lives`: the one that does is heard."""
        afresh = not (self.continues or self._seen)
        answer = self.receiver.claim(claim, afresh=afresh, lives=lives)
        if afresh and not self.receiver.ids:
            self._parts.clear()
        return answer

    def hold(self) -> None:
        """What comes from now on waits to be taken."""
        self._sink = None

    async def something(self, sink: Sink | None = None) -> None:
        """Wait for text or for the end. Meanwhile news goes to `sink`, until it does not take one: that one is to be taken."""
        self._sink = sink
        while not (self._parts or self.end or self.left):
            await self._pause()
        self._sink = None

    def drop_news(self) -> None:
        """Nobody takes it: the end says all of it once more."""
        self._parts.clear()
        self._sink = _dropped

    async def everything(self) -> None:
        """Wait for the end."""
        self.drop_news()
        while not (self.end or self.left):
            await self._pause()

    async def _pause(self) -> None:
        self._wake.clear()
        await self._wake.wait()


def _dropped(_: Piece) -> bool:
    return True


class Replies:
    """All replies of this gateway, and the handlers of its two subjects."""

    def __init__(self, bus: Bus, accuser: Accuser, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._accuser = accuser
        self._clock = clock
        self.strays = Strays()
        self._open: dict[str, Reply] = {}
        self._whole: dict[str, None] = {}
        self._stopping: ErrorBody | None = None

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: str, asked_s: float, timeout_s: float, wake: asyncio.Event | None = None) -> Reply:
        """Expect a reply. Comes before the request is published, or its first claim would be answered `gone`."""
        reply = self._open[request] = Reply(request, asked_s, wake)
        reply.timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, reply, timeout_s)
        if self._stopping is not None:
            reply.finish(self._stopping)
        return reply

    def close(self, reply: Reply) -> None:
        """The client has all that it will get. Work that still goes on for it is stopped, wherever it is."""
        if reply.timer is not None:
            reply.timer.cancel()
        self.strays.forget(reply.request)
        if self._open.pop(reply.request, None) is None or not reply.published:
            return
        notice = reply.receiver.leave()
        if notice is not None:
            self._say(*notice)
        self._say(subjects.cancel(reply.request), Cancel(reply.request))

    def confirm(self, reply: Reply, queued: Queued | None = None) -> None:
        """The queue has its request. Where we were away meanwhile, it may have been taken up and dropped already."""
        reply.published = True
        reply.queued = queued
        if queued is not None and reply.receiver.arbiter.last is None and reply.request in self._open:
            self.strays.waits(reply.request, queued, self._clock())
        if reply.doubted:
            reply.answer_by_s = self._clock() + ANSWER_WITHIN_S

    def given_back(self, reply: Reply) -> None:
        """Its message lies in the queue again, because its holder is dead.

        Whoever gets one that is not claimed at once has entered its conversation before it claims: it is not sent away.
        """
        last = reply.receiver.arbiter.last
        if reply.queued is not None and last is not None:
            reply.receiver.arbiter.accused(last)
            self.strays.waits(reply.request, reply.queued, self._clock(), first=False)

    def leave_to_the_living(self) -> None:
        """Who was accused and has spoken since was only slow: it still works on what nobody else has claimed."""
        for request in self.strays.of_the_dead:
            claim = self._open[request].receiver.arbiter.last
            if claim is not None and self._accuser.lives(claim):
                self.strays.forget(request)
                self._accuser.forgive(claim)

    def doubt_all(self, now_s: float) -> None:
        """We were away: somebody must answer for every reply now, or once it is known that its request was stored."""
        for reply in self._open.values():
            reply.doubted = True
            if reply.published:
                reply.answer_by_s = now_s + ANSWER_WITHIN_S

    def fail_all(self, error: ErrorBody) -> None:
        """End every reply that is not whole, and whatever is asked for from now on, as the gateway stops."""
        self._stopping = error
        for reply in self._open.values():
            reply.finish(error)

    def all(self) -> list[Reply]:
        """The open ones."""
        return list(self._open.values())

    def ask_holders(self) -> None:
        """Frames may have been lost, with a connection or while we were away: ask every holder to go on from what is here."""
        for reply in self._open.values():
            last = reply.receiver.arbiter.last
            if last is not None:
                notice = Notice(reply.request, last.claim, From(len(reply.receiver.ids)))
                self._say(last.holder, notice)

    def on_frames(self, message: Message) -> None:
        """Frames of one engine step, of any number of requests."""
        try:
            frames = frames_decoder.decode(message.data)
        except msgspec.DecodeError as error:
            log.warning("frames_unreadable", subject=message.subject, error=str(error))
            return
        now_s = self._clock()
        for frame in frames:
            reply = self._open.get(frame.request)
            answer = self._late(frame.request) if reply is None else self._take(reply, frame, now_s)
            if answer is not None and message.reply:
                self._say(message.reply, answer)
            elif isinstance(answer, Gone):
                # Its worker has not heard the cancel yet, or never will: what is lost with a connection nobody repeats.
                self._say(subjects.cancel(frame.request), Cancel(frame.request))

    def on_claim(self, message: Message) -> None:
        """A worker asks for the right to work on a request."""
        try:
            claim = claim_decoder.decode(message.data)
        except msgspec.DecodeError as error:
            log.warning("claim_unreadable", subject=message.subject, error=str(error))
            return
        now_s = self._clock()
        self._accuser.heard(claim.holder, claim.epoch, now_s)
        reply = self._open.get(claim.request)
        answer = self._late(claim.request) if reply is None else reply.claim(claim, lives=self._holder_lives(reply))
        if reply is not None and isinstance(answer, Go):
            reply.answer_by_s = None
            reply.at.claimed(claim.claim, claim.follows, now_s)
            self.strays.claimed(claim.request, claim.ack)
        if message.reply:
            self._say(message.reply, answer)

    def _holder_lives(self, reply: Reply) -> bool:
        last = reply.receiver.arbiter.last
        if last is None:
            return False
        if reply.last_frame_s is not None:
            self._accuser.heard(last.holder, last.epoch, reply.last_frame_s)
        return self._accuser.lives(last)

    def _say(self, subject: str, said: Answer | Notice | Cancel) -> None:
        """Nothing is kept for a broker that is away: claims and ends are repeated by who sent them."""
        try:
            self._bus.post(subject, encode(said))
        except Disconnected:
            log.warning("not_said", subject=subject)

    def _late(self, request: str) -> Answer:
        return Whole() if request in self._whole else Gone()

    def _take(self, reply: Reply, frame: AnyFrame, now_s: float) -> Answer | None:
        heard = reply.receiver.frame(frame, now_s)
        if not isinstance(heard.answer, Fenced):
            reply.answer_by_s = None
        if heard.end is not None:
            reply.hold()  # the last text goes with the end
        for piece in heard.pieces:
            if piece.text or piece.message or reply.detailed:
                reply.add(piece)
                _measure(reply, now_s)
                if reply.on_begun is not None:
                    reply.on_begun()
                    reply.on_begun = None
        if heard.repeated:
            metrics.DUPLICATE_TOKENS.inc(heard.repeated)
        if heard.notice is not None:
            self._say(*heard.notice)
        if heard.end is not None:
            reply.at.ended_s = now_s
            self._end(reply, heard.end)
        return heard.answer

    def _end(self, reply: Reply, end: Done | Failed) -> None:
        reply.finish(end if isinstance(end, Done) else end.error)
        self.strays.forget(reply.request)
        del self._open[reply.request]
        self._whole[reply.request] = None
        if len(self._whole) > WHOLE_REMEMBERED_MAX:
            del self._whole[next(iter(self._whole))]

    def _expire(self, reply: Reply, timeout_s: float) -> None:
        reply.finish(DeadlineExceeded(f"The reply was not whole after {timeout_s:g} s.").body())


def _measure(reply: Reply, now_s: float) -> None:
    if reply.last_frame_s is None:
        last = reply.receiver.arbiter.last
        reply.at.begins(last.follows if last else None, now_s)
    else:
        _ITL_SECONDS[reply.klass].observe(now_s - reply.last_frame_s)
    reply.last_frame_s = now_s
