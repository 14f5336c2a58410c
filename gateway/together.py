"""Replies to several prompts of one HTTP request, as one. It is whole when all are, and fails with the first that fails."""

import asyncio
from collections.abc import Sequence

import msgspec

from gateway.replies import Reply, Sink
from pipeline.errors import ErrorBody
from pipeline.protocol.messages import Done
from pipeline.protocol.reply import Piece, Receiver


class Together:
    """What `Reply` is for one. To each prompt there are `choices` replies, numbered on from those to the prompts before."""

    def __init__(self, replies: Sequence[Reply], choices: int, wake: asyncio.Event) -> None:
        """`wake` is that of the replies."""
        self._replies = replies
        self._choices = choices
        self._wake = wake
        self.delivered = False

    @property
    def receivers(self) -> list[Receiver]:
        """By prompt."""
        return [reply.receiver for reply in self._replies]

    @property
    def dones(self) -> list[Done]:
        """By prompt, once all are whole."""
        whole = [reply.end for reply in self._replies if isinstance(reply.end, Done)]
        return whole if len(whole) == len(self._replies) else []

    @property
    def end(self) -> Done | ErrorBody | None:
        """The last one's, once all are whole; or the first error."""
        failed = next((reply.end for reply in self._replies if isinstance(reply.end, ErrorBody)), None)
        return failed or next(reversed(self.dones), None)

    @property
    def left(self) -> bool:
        """Whether the client has closed the connection."""
        return self._replies[0].left

    def finish(self, end: ErrorBody) -> None:
        """Nothing follows to any of them."""
        for reply in self._replies:
            reply.finish(end)

    def leave(self) -> None:
        """The client does not wait any more."""
        for reply in self._replies:
            reply.leave()

    def take(self) -> list[Piece]:
        """What has not been sent."""
        return [
            msgspec.structs.replace(piece, choice=piece.choice + number * self._choices)
            for number, reply in enumerate(self._replies)
            for piece in reply.take()
        ]

    async def something(self, _: Sink | None = None) -> None:
        """Wait for text or for the end."""
        while not (any(reply.news for reply in self._replies) or self.end or self.left):
            await self._pause()

    async def everything(self) -> None:
        """Wait for the end."""
        for reply in self._replies:
            reply.drop_news()
        while not (self.end or self.left):
            await self._pause()

    async def _pause(self) -> None:
        self._wake.clear()
        await self._wake.wait()


AnyReply = Reply | Together
