"""A gateway that was away longer than workers wait for it: it asks, ends what nobody answers for, and never publishes again."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import anyio
import anyio.abc
import pytest

from gateway import vigil
from gateway.replies import Replies
from gateway.vigil import Vigil
from pipeline import outside
from pipeline.bus.connection import Bus, Handler
from pipeline.limits import RECEIVER_SILENT_MAX_S
from pipeline.protocol.accuser import Accuser
from pipeline.protocol.messages import From, Notice, encode
from pipeline.protocol.presence import Presences
from tests.bus.support import api
from tests.gateway.stack import HELLO, connection, stack
from tests.gateway.test_replies import Posted, claim
from tests.gateway.test_vigil import Clock
from tests.gateway.worker_double import STREAM
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

ASKED = [("holder.1", encode(Notice("r", "c1", From(0))))]
"""The holder of the one open reply is asked to go on from its beginning."""


class Line(Posted):
    """A connection that can be lost and found."""

    def __init__(self) -> None:
        super().__init__()
        self.lose: Callable[[], None] = lambda: None
        self.find: Callable[[], None] = lambda: None

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self.lose = callback

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self.find = callback

    async def subscribe(self, subject: str, handler: Handler) -> None:
        """Nothing comes."""

    async def barrier(self) -> None:
        """Everything has been read."""


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    outside.use(clock)
    yield clock
    outside.use(None)


@pytest.fixture
async def line(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The connection of a gateway that watches over one open reply."""
    monkeypatch.setattr(vigil, "PERIOD_S", 0.001)
    line, accuser = Line(), Accuser(clock.now_s)
    bus = cast("Bus", line)
    replies = Replies(bus, accuser, outside.monotonic_s)
    reply = replies.open("r", clock.now_s, 60.0)
    reply.published = True
    replies.on_claim(claim("r"))
    line.take()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Vigil(bus, accuser, Presences(), replies, "me").run)
        await anyio.sleep(0.02)
        yield line
        tasks.cancel_scope.cancel()
    replies.close(reply)


@pytest.mark.parametrize(("away_s", "said"), [(RECEIVER_SILENT_MAX_S + 0.1, ASKED), (0.5, [])])
async def test_a_connection_that_was_lost_for_too_long_makes_it_ask(
    clock: Clock, line: Line, away_s: float, said: list[tuple[str, bytes]]
) -> None:
    line.lose()
    line.lost = True
    clock.now_s += away_s / 2  # in two parts, of which the loop itself misses neither for too long
    await anyio.sleep(0.02)
    clock.now_s += away_s / 2
    await anyio.sleep(0.02)
    line.lost = False
    line.find()
    await anyio.sleep(0.02)
    assert line.take() == said


@pytest.mark.parametrize(("late_s", "said"), [(RECEIVER_SILENT_MAX_S + 0.1, ASKED), (0.3, [])])
async def test_a_loop_that_stood_still_for_too_long_makes_it_ask(
    clock: Clock, line: Line, late_s: float, said: list[tuple[str, bytes]]
) -> None:
    clock.now_s += late_s
    await anyio.sleep(0.02)
    assert line.take() == said


async def test_a_reply_that_nobody_answers_for_ends_with_a_retryable_error_and_is_not_published_again(
    broker: NatsServer,
) -> None:
    async with stack(broker.url) as served, connection(served, HELLO) as client:
        await (await served.double.next_job()).claim()
        broker.kill9()
        await anyio.sleep(RECEIVER_SILENT_MAX_S + 0.5)
        broker.start()
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 502")
        assert b"x-should-retry: true" in answer.lower()
        assert b'"code":"reply_lost"' in answer
    async with await Bus.connect(broker.url, "test") as bus:
        assert (await api(bus, f"STREAM.INFO.{STREAM}"))["state"]["last_seq"] == 1
