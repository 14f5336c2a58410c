"""The least that a gateway in Python can do: `python -m tests.benchmarks.bare NATS_URL PORT`. `relay.py` measures ours beside it.

uvicorn on uvloop with httptools, a plain ASGI application and nats-py as they come: read the body, publish it, write each token
of the reply as a chunk of its own. Tokens of all replies come in one message a step, as ours do. Nothing is checked, admitted,
placed, kept, counted or told, and what is lost is lost.
"""

import asyncio
import itertools
import sys
from typing import Any, Final

import msgspec
import nats
import uvicorn
import uvloop

REQUESTS: Final = "bare.requests"
REPLIES: Final = "bare.replies"

_HEAD: Final = (
    b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":'
)
_TAIL: Final = b'},"finish_reason":null}]}\n\n'
_DONE: Final = b"data: [DONE]\n\n"

Said = tuple[int, str, bool]
"""A request's number, a token's text, and whether it is the last."""

_json: Final = msgspec.json.Encoder().encode
_pack: Final = msgspec.msgpack.Encoder().encode
_said: Final = msgspec.msgpack.Decoder(list[Said]).decode


class Relay:
    """An ASGI application. `broker`: a connected client."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Queue[Said]] = {}

    async def hear(self, message: Any) -> None:
        """The tokens of a step."""
        for said in _said(message.data):
            self._open[said[0]].put_nowait(said)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
        number, said = next(self._numbers), asyncio.Queue[Said]()
        self._open[number] = said
        await self._broker.publish(REQUESTS, _pack((number, body)))
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = False
        while not last:
            _, text, last = await said.get()
            chunk = _HEAD + _json(text) + _TAIL + (_DONE if last else b"")
            await send({"type": "http.response.body", "body": chunk, "more_body": not last})
        del self._open[number]


async def serve(url: str, port: int) -> None:
    """Until SIGTERM."""
    broker = await nats.connect(url)
    relay = Relay(broker)
    await broker.subscribe(REPLIES, cb=relay.hear)
    await broker.flush()
    await uvicorn.Server(uvicorn.Config(relay, port=port, lifespan="off", log_config=None, access_log=False)).serve()
    await broker.close()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
