"""Server-sent events, in the one form that every client reads: `data: {json}` LF LF.

No CRLF, no comments, no keep-alives: vLLM's own benchmark client silently loses tokens or usage with each of them. The first
chunk carries the role *and* the first text, because clients take the first chunk for the first token. The last event of a whole
reply is `[DONE]`; a reply that fails under way ends with an error object instead, as a stream that merely stops reads as a
whole one.
"""

from typing import Final

import msgspec

from gateway import openai
from pipeline.protocol.messages import Done
from pipeline.protocol.openai import ChunkHead

DONE: Final = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


def event(data: bytes) -> bytes:
    """One event. `data` is JSON, which has no line breaks of its own."""
    return b"data: " + data + b"\n\n"


class Chunks:
    """The events of one streamed reply. All that its chunks have in common is encoded once."""

    def __init__(self, request: str, model: str, created: int, *, include_usage: bool) -> None:
        shared = ChunkHead(id=openai.reply_id(request), created=created, model=model)
        self._shared = event(_json(shared)).removesuffix(b"}\n\n")
        self._delta = self._shared + b',"choices":[{"index":0,"delta":{'
        self._role = b'"role":"assistant",'
        self._include_usage = include_usage
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._open_end = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def text(self, text: str) -> bytes:
        """A chunk with new text. The first one also says who speaks."""
        role, self._role = self._role, b""
        return b"".join((self._delta, role, b'"content":', _json(text), self._open_end))

    def last(self, text: str, done: Done) -> bytes:
        """All that remains of a whole reply: the last text, the finish reason, usage where it is wanted, and `[DONE]`."""
        content = b'"content":' + _json(text) if text or self._role else b""
        finish = b'},"logprobs":null,"finish_reason":' + _json(done.finish_reason) + b"}"
        chunk = b"".join((self._delta, self._role, content, finish, self._tail))
        return chunk + (self._usage(done) if self._include_usage else b"") + DONE

    def _usage(self, done: Done) -> bytes:
        return self._shared + b',"choices":[],"usage":' + _json(openai.usage_of(done.usage)) + b"}\n\n"
