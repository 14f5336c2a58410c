"""Presence over a real broker."""

import time

import pytest
from structlog.testing import capture_logs

from pipeline.bus.connection import Bus
from pipeline.bus.presence import Announcer, Watcher
from pipeline.limits import PRESENCE_PERIOD_S
from pipeline.protocol.messages import Presence
from pipeline.protocol.presence import Presences
from tests.bus.support import Heard, eventually
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio


def says(process: str, **more: object) -> Presence:
    return Presence(role="prefill", id=process, epoch="1", ready=True, **more)  # type: ignore[arg-type]


async def test_a_process_that_announces_itself_is_seen_until_it_stops(bus: Bus, other: Bus) -> None:
    presences = Presences()
    watcher = Watcher(bus, presences, time.monotonic)
    announcer = Announcer(other, lambda: says("p1", load=0.5))
    await watcher.start()
    await announcer.start()
    await eventually(lambda: presences.get("prefill", "p1", time.monotonic()) is not None, within_s=1.0)
    assert presences.ready("prefill", time.monotonic())[0].load == 0.5
    await announcer.stop()
    await eventually(lambda: presences.live("prefill", time.monotonic()) == [], within_s=2.0)
    await watcher.stop()


async def test_a_change_is_said_at_once(bus: Bus, other: Bus) -> None:
    heard = Heard()
    await bus.subscribe("presence.>", heard)
    await bus.barrier()
    announcer = Announcer(other, lambda: says("p2"))
    announcer.now()
    assert await eventually(lambda: len(heard.messages) == 1) < PRESENCE_PERIOD_S
    assert heard.messages[0].subject == "presence.prefill.p2"


async def test_a_word_that_cannot_be_read_disturbs_nobody(bus: Bus, other: Bus) -> None:
    presences = Presences()
    watcher = Watcher(bus, presences, time.monotonic)
    await watcher.start()
    with capture_logs() as said:
        for _ in range(5):
            await other.publish("presence.prefill.odd", b"not msgpack")
        Announcer(other, lambda: says("p3")).now()
        await eventually(lambda: [one.id for one in presences.live("prefill", time.monotonic())] == ["p3"])
    assert [line["subject"] for line in said if line["event"] == "presence_unreadable"] == ["presence.prefill.odd"]
    await watcher.stop()


async def test_an_announcer_survives_its_own_mistakes_and_a_lost_broker(broker: NatsServer) -> None:
    tries: list[int] = []

    def fails_first() -> Presence:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not ready to say")
        return says("p4")

    heard = Heard()
    async with await Bus.connect(broker.url, "test") as bus:
        await bus.subscribe("presence.>", heard)
        announcer = Announcer(bus, fails_first)
        await announcer.start()
        await eventually(lambda: len(heard.messages) == 1)
        broker.kill9()
        await eventually(lambda: not bus.connected)
        known = len(tries)
        await eventually(lambda: len(tries) > known)
        broker.start()
        before = len(heard.messages)
        await eventually(lambda: len(heard.messages) > before, within_s=2.0)
        await announcer.stop()


async def test_who_is_back_says_so_at_once_and_not_a_period_later(broker: NatsServer) -> None:
    heard = Heard()
    async with await Bus.connect(broker.url, "test") as bus:
        await bus.subscribe("presence.>", heard)
        announcer = Announcer(bus, lambda: says("p5"), period_s=60.0)
        await announcer.start()
        await eventually(lambda: len(heard.messages) == 1)
        broker.kill9()
        await eventually(lambda: not bus.connected)
        broker.start()
        await eventually(lambda: len(heard.messages) == 2, within_s=5.0)
        await announcer.stop()
