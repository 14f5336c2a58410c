"""An inbox that ends while messages are on their way to it. The broker has handed them out: dropped, each waits for its lease."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.abc
import pytest

from pipeline.bus.connection import Bus, Subscription
from pipeline.bus.puller import Delivery, Puller
from tests.bus.support import Heard, eventually, fresh, shard_of, subject_of
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

CREATOR = "anna"
SHARD = shard_of(CREATOR)
COUNT = 20
LATE_S = 0.1
"""For so long the process does not read what has come for it."""


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return ("asyncio", {"use_uvloop": request.param})


async def in_flight(
    bus: Bus, server: NatsServer, send: Callable[[], Awaitable[None]], tasks: anyio.abc.TaskGroup
) -> None:
    """What `send` makes the server send to us has left it, and is read only in a while: it lies in the kernel, or on a wire."""
    transport: Any = bus.client._transport
    reading = transport._io_writer.transport
    before = server.sent_to(bus.client.client_id)
    reading.pause_reading()

    async def read_at_last() -> None:
        await anyio.sleep(LATE_S)
        reading.resume_reading()

    await send()
    server.await_sent_to(bus.client.client_id, before + COUNT)
    tasks.start_soon(read_at_last)


def requests_from(other: Bus) -> Callable[[], Awaitable[None]]:
    async def send() -> None:
        for _ in range(COUNT):
            await other.store(subject_of(CREATOR), b"work", msg_id=fresh(), timeout_s=5.0)

    return send


async def test_a_drained_inbox_waits_for_what_is_on_its_way(bus: Bus, other: Bus, server: NatsServer) -> None:
    heard, subject = Heard(), bus.inbox()
    subscription = await bus.subscribe(subject, heard)
    await bus.barrier()

    async def send() -> None:
        for _ in range(COUNT):
            await other.publish(subject, b"x")
        await other.barrier()

    async with anyio.create_task_group() as tasks:
        await in_flight(bus, server, send, tasks)
        await subscription.drain()
        assert len(heard.messages) == COUNT


async def test_a_puller_that_stops_takes_what_is_on_its_way(queue: Bus, other: Bus, server: NatsServer) -> None:
    got: list[Delivery] = []
    puller = Puller(queue, got.append, lambda shard, count: None)
    await puller.start()
    puller.offer(SHARD, COUNT, 0)
    await queue.barrier()
    async with anyio.create_task_group() as tasks:
        await in_flight(queue, server, requests_from(other), tasks)
        await puller.stop()
    assert len(got) == COUNT


async def test_a_puller_that_takes_a_new_inbox_still_takes_what_is_on_its_way_to_the_old_one(
    queue: Bus, other: Bus, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reconnect the broker may serve an old pull, just before it hears that its inbox is over."""
    got: list[Delivery] = []
    ended: list[int] = []
    puller = Puller(queue, got.append, lambda shard, count: ended.append(count))
    await puller.start()
    old = puller._subscription
    async with anyio.create_task_group() as tasks:
        for name in ("drain", "unsubscribe"):
            end = getattr(Subscription, name)

            async def late(self: Subscription, end: Callable[[Subscription], Awaitable[None]] = end) -> None:
                if self is old:
                    await in_flight(queue, server, requests_from(other), tasks)
                await end(self)

            monkeypatch.setattr(Subscription, name, late)
        puller.offer(SHARD, COUNT, 0)
        await queue.barrier()
        await queue.client.force_reconnect()
        await eventually(lambda: len(got) == COUNT)
    await puller.stop()
