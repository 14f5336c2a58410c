"""uvicorn's HTTP protocol, with bounds on what it leaves open: how long a head may take, and how long it may be.

uvicorn waits for ever for a first head, for the end of a body that is not wanted any more, and for a response to be read; it
takes headers of any size, and what follows a chunked body (trailers) for headers; of pipelined requests it tells only the last
that the client has left; and it says in plain text what is no HTTP. A connection costs little, but not nothing, and who opens a
thousand of them and says nothing should not have them.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway import errors
from pipeline.errors import ErrorBody, HeadTooLarge, RequestError, TooSlow
from pipeline.limits import HEAD_BYTES_MAX, HEAD_TIMEOUT_S

KEEP_ALIVE_S: Final = 65.0
"""An idle connection is kept longer than common proxies keep theirs (60 s): then it is they who close, and no request is lost."""

LINGER_S: Final = 1.0
"""A refused connection is kept so long for the client to read why."""

UNREAD_MAX_S: Final = 60.0
"""A client that takes nothing for so long, with megabytes in the kernel and more here waiting for it, is taken for gone."""

WRITER: Final = "headrace.writer"
"""Where the scope of a request has its `Writer`."""

Writer = Callable[[Callable[[], bytes]], bool]
"""Writes a part of a streamed body that has begun, at once. False, and it is not even made, while the client does not keep up."""

HEAD_TOO_LARGE: Final = HeadTooLarge(f"The headers are larger than {HEAD_BYTES_MAX} bytes.").body()
HEAD_TOO_SLOW: Final = TooSlow(f"The headers have not come within {HEAD_TIMEOUT_S:g} s.").body()
NO_HTTP: Final = RequestError("This is not valid HTTP.").body()


class Door(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._served: RequestResponseCycle | None = None
        """Whose turn it is to be answered. `cycle` is what is being read, which may have to wait for it."""
        self._head_bytes = 0
        """What has come of a head, or since the last of a body."""
        self._in_head = False
        self._whole = True
        """The last request has come to its end."""
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the loop."""
        super().connection_made(transport)
        self._within(KEEP_ALIVE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._at_ease()
        self._is_read()
        self._forsake()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Called by the transport, when the client does not keep up."""
        super().pause_writing()
        self._see_it_read(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Called by the transport, when it does again."""
        super().resume_writing()
        self._is_read()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self._refused:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > HEAD_BYTES_MAX and not self._whole:
            self._refuse(HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        """Called by the parser, at the first byte of a request."""
        super().on_message_begin()
        self._in_head, self._whole, self._head_bytes = True, False, 0
        self._within(HEAD_TIMEOUT_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser, also for trailers. Those are dropped: they would stand for the key, or what else a head says."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._in_head, self._head_bytes = False, 0
        self._at_ease()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES_MAX:
            self._refuse(HEAD_TOO_LARGE)
            raise ValueError  # the parser stops, and says so where we have refused already
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope[WRITER] = functools.partial(self._write, self.cycle)  # type: ignore[typeddict-unknown-key]

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._whole = True
        self._at_ease()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called by the server. A refused body is still read, to reach the next request, but not for ever."""
        super().on_response_complete()
        if self._idle and not (self._whole or self._in_head):
            self._within(HEAD_TIMEOUT_S)

    def send_400_response(self, msg: str) -> None:
        """Called by the server, for what it cannot read."""
        self._refuse(NO_HTTP)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Called by the server, for each request when those before it have been answered."""
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def _see_it_read(self, waiting: int) -> None:
        """Give a connection up on which nothing of so many bytes is taken: to close it would wait for them to be."""

        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left < waiting:
                self._see_it_read(left)
            else:
                self.transport.abort()

        self._unread = self.loop.call_later(UNREAD_MAX_S, look)

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _forsake(self) -> None:
        """Nothing more reaches the client: who still writes its response should know."""
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()

    def _write(self, cycle: RequestResponseCycle, part: Callable[[], bytes]) -> bool:
        """A `Writer`, for what has no time for the way through the server: one call instead of a task's turn."""
        if self.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        body = part()
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    @property
    def _idle(self) -> bool:
        """No response is owed."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _in_unanswered_body(self) -> bool:
        """What is being read belongs to the one request that is owed a response, of which nothing has been sent."""
        begun = self._in_head or self._whole or self._idle
        return not begun and self._served is self.cycle and not self.cycle.response_started

    def _within(self, seconds: float) -> None:
        self._at_ease()
        self._timer = self.loop.call_later(seconds, self._too_late)

    def _at_ease(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        if self._refused:
            self.transport.close()
        elif not self._idle:
            self._within(HEAD_TIMEOUT_S)  # a response is under way; it has its own bounds
        elif self._in_head:
            self._refuse(HEAD_TOO_SLOW)
        else:
            self.transport.close()

    def _refuse(self, error: ErrorBody) -> None:
        """The last word on this connection. In the middle of a response there is none, as it would be read as its text."""
        if self._refused or self.transport.is_closing():
            return
        if not (self._idle or self._in_unanswered_body):
            self.transport.close()
            return
        self._refused = True
        self._forsake()
        self.transport.write(self._response(error))
        # To close at once, with something unread, would reset the connection, and the client might lose what we have said.
        if self.transport.can_write_eof():  # not over TLS
            self.transport.write_eof()
        self._within(LINGER_S)

    def _response(self, error: ErrorBody) -> bytes:
        body, status = errors.error_object(error), errors.status_of(error)
        headers = [*self.server_state.default_headers, *errors.headers_of(error), (b"connection", b"close")]
        lines = b"".join(b"%s: %s\r\n" % line for line in dict(headers).items())
        phrase = errors.phrase_of(status).encode()
        return b"HTTP/1.1 %d %s\r\n%scontent-length: %d\r\n\r\n%s" % (status, phrase, lines, len(body), body)
