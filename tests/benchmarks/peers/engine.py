"""An engine without a model that routers take for `vllm serve`: `python -m tests.benchmarks.peers.engine --port N --step-ms 4`.

It steps as our simulated engine does: at the end of each step every reply under way gets a token, written as a piece of its own.
Prompts take no time, but their KV is looked up and loaded between steps: a request that comes during one is loaded at its end,
and joins at the end of the next; where nothing runs, it begins at once. A request that is not streamed is a prefill: it is
answered at once, with the transfer parameters that a router hands on to decode.
"""

import argparse
import asyncio
import itertools
import json
from typing import Any, Final, cast

import httptools
import msgspec
import uvloop

MODEL: Final = "smollm2-135m-instruct"
WORDS: Final = (" part", " time", " know", " like", " year", " help", " need", " work")

TIMER_SLACK_S: Final = 0.0005
"""uvloop's timers go by the millisecond: half of one early is in time."""

TRANSFER: Final = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [1, 2, 3, 4, 5, 6, 7, 8],
    "remote_engine_id": "simulated", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1,
}  # fmt: skip
"""As vLLM's NIXL connector answers a prefill."""


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's."""

    include_usage: bool = False


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What counts of a request."""

    stream: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: StreamOptions | None = None

    @property
    def tokens(self) -> int:
        """Of the reply."""
        return max(1, self.max_tokens or self.max_completion_tokens or 1)


_asked: Final = msgspec.json.Decoder(Asked)


class Steps:
    """The engine's steps: `step_s` seconds each, while there is a reply to write."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._running: list[Reply] = []
        self._loading: list[Reply] = []
        self._waiting: list[Reply] = []
        self._ends_s: float | None = None

    def join(self, reply: "Reply") -> None:
        """A reply begins with the next step."""
        self._waiting.append(reply)
        if self._ends_s is None:
            self._begin(asyncio.get_running_loop().time())

    def _begin(self, at_s: float) -> None:
        self._running += self._loading
        self._loading, self._waiting = self._waiting, []
        if not self._running:
            self._running, self._loading = self._loading, []
        self._ends_s = at_s + self._step_s if self._running else None
        if self._ends_s is not None:
            asyncio.get_running_loop().call_at(self._ends_s - TIMER_SLACK_S, self._end, self._ends_s)

    def _end(self, at_s: float) -> None:
        self._running = [reply for reply in self._running if reply.step()]
        self._begin(max(at_s, asyncio.get_running_loop().time() - self._step_s))  # a little lateness is made up for


class Reply:
    """One streamed reply."""

    def __init__(self, transport: asyncio.Transport, number: int, asked: Asked) -> None:
        self._transport = transport
        self._left = asked.tokens
        self._total = asked.tokens
        self._usage = asked.stream_options is not None and asked.stream_options.include_usage
        self._id = f"chatcmpl-{number:016x}"

    def step(self) -> bool:
        """Write a token. False: it was the last, or nobody reads."""
        if self._transport.is_closing():
            return False
        if self._left == self._total:
            self._transport.write(HEAD + self._event({"role": "assistant", "content": ""}))
        self._left -= 1
        self._transport.write(
            self._event({"content": WORDS[self._left % len(WORDS)]}, None if self._left else "length")
        )
        if self._left:
            return True
        end = _piece(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self._transport.write((self._last() if self._usage else b"") + end)
        return False

    def _event(self, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._chunk({"choices": [choice]})

    def _last(self) -> bytes:
        usage = {"prompt_tokens": 0, "total_tokens": self._total, "completion_tokens": self._total}
        return self._chunk({"choices": [], "usage": usage})

    def _chunk(self, fields: dict[str, Any]) -> bytes:
        head = {"id": self._id, "object": "chat.completion.chunk", "created": 1_700_000_000, "model": MODEL}
        return _piece(b"data: %b\n\n" % msgspec.json.encode(head | fields))


HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def _piece(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(status: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status.encode(), len(data), data,
    )  # fmt: skip


def prefilled(number: int) -> dict[str, Any]:
    """The answer to a prefill."""
    message = {"role": "assistant", "content": WORDS[0]}
    return {
        "id": f"chatcmpl-{number:016x}", "object": "chat.completion", "created": 1_700_000_000, "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 0, "total_tokens": 1, "completion_tokens": 1}, "kv_transfer_params": TRANSFER,
    }  # fmt: skip


class Connection(asyncio.Protocol):
    """One client's, one request at a time."""

    def __init__(self, steps: Steps, numbers: "itertools.count[int]") -> None:
        self._steps, self._numbers = steps, numbers
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by name

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    # Called by the parser

    def on_message_begin(self) -> None:
        self._url, self._body = b"", b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url == b"/v1/chat/completions":
            self._complete(_asked.decode(self._body))
        elif self._url in (b"/health", b"/v1/models"):
            self._transport.write(_whole("200 OK", {"object": "list", "data": [{"id": MODEL, "object": "model"}]}))
        else:
            self._transport.write(_whole("404 Not Found", {"error": {"message": "There is nothing here."}}))

    def _complete(self, asked: Asked) -> None:
        number = next(self._numbers)
        if asked.stream:
            self._steps.join(Reply(self._transport, number, asked))
        else:
            self._transport.write(_whole("200 OK", prefilled(number)))


async def serve(port: int, step_s: float) -> asyncio.Server:
    """Listen on loopback; port 0 is any."""
    steps, numbers = Steps(step_s), itertools.count(1)
    return await asyncio.get_running_loop().create_server(lambda: Connection(steps, numbers), "127.0.0.1", port)


async def _forever(port: int, step_s: float) -> None:
    async with await serve(port, step_s) as server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    options = parser.parse_args()
    uvloop.run(_forever(options.port, options.step_ms / 1000))
