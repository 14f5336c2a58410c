"""Server-sent events, in the one form that every client reads: `data: {json}` LF LF.

No CRLF, no comments, no keep-alives: vLLM's own benchmark client silently loses tokens or usage with each of them. The first
chunk carries the role *and* the first text, because clients take the first chunk for the first token. The last event of a whole
reply is `[DONE]`; a reply that fails under way ends with an error object instead, as a stream that merely stops reads as a
whole one.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from gateway import openai
from gateway.intake import Order
from pipeline.protocol.messages import Done
from pipeline.protocol.openai import ChunkHead
from pipeline.protocol.reply import Piece, Receiver

DONE: Final = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


def event(data: bytes) -> bytes:
    """One event. `data` is JSON, which has no line breaks of its own."""
    return b"data: " + data + b"\n\n"


class Chunks:
    """The events of one streamed reply. All that its chunks have in common is encoded once."""

    def __init__(self, order: Order, created: int, _receiver: Receiver) -> None:
        include_usage = order.include_usage
        shared = ChunkHead(id=openai.reply_id(order.id), created=created, model=order.model)
        self._shared = event(_json(shared)).removesuffix(b"}\n\n")
        self._delta = self._shared + b',"choices":[{"index":0,"delta":{'
        self._role = b'"role":"assistant",'
        self._include_usage = include_usage
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._open_end = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def pieces(self, pieces: Sequence[Piece]) -> bytes:
        """A chunk with new text. The first one also says who speaks."""
        text = "".join(piece.text for piece in pieces)
        role, self._role = self._role, b""
        return b"".join((self._delta, role, b'"content":', _json(text), self._open_end))

    def last(self, pieces: Sequence[Piece], dones: Sequence[Done]) -> bytes:
        """All that remains of a whole reply: the last text, the finish reason, usage where it is wanted, and `[DONE]`."""
        (done,) = dones
        text = "".join(piece.text for piece in pieces)
        content = b'"content":' + _json(text) if text or self._role else b""
        finish = b'},"logprobs":null,"finish_reason":' + _json(done.finish_reason) + self._stop(done) + b"}"
        chunk = b"".join((self._delta, self._role, content, finish, self._tail))
        return chunk + (self._usage(done) if self._include_usage else b"") + DONE

    def _stop(self, done: Done) -> bytes:
        """What ended it, where it was a string or a token that the client had named."""
        stop_reason = done.all_choices[0].stop_reason
        return b"" if stop_reason is None else b',"stop_reason":' + _json(stop_reason)

    def _usage(self, done: Done) -> bytes:
        return self._shared + b',"choices":[],"usage":' + _json(openai.usage_of(done.usage)) + b"}\n\n"
