"""Nobody listens where a reply should go. That is no sign of death: a living gateway is unheard while a broker comes back."""

import time
from collections.abc import Mapping

import anyio
import anyio.abc
import msgspec
import pytest

from pipeline.bus.connection import Bus
from pipeline.bus.presence import Announcer
from pipeline.limits import PRESENCE_PERIOD_S, RECEIVER_SILENT_MAX_S, REPEAT_PERIOD_S
from pipeline.protocol.messages import Done, Presence
from tests.nats_server import NatsServer
from tests.workers.fleet import PROMPT, Caller, backlog, config_for, fleet, until

pytestmark = pytest.mark.anyio

UNHEARD_S = 0.6
"""Four times as long as a restarted broker leaves a living gateway unheard."""


async def announcing(bus: Bus, epoch: str = "1") -> Announcer:
    """A gateway that lives, in its first life or in another."""
    announcer = Announcer(bus, lambda: Presence(role="gateway", id="gateway-x", epoch=epoch, ready=True))
    await announcer.start()
    return announcer


async def test_a_claim_that_nobody_can_hear_for_a_while_costs_the_while_and_not_the_request(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        announcer, caller = await announcing(made.bus), Caller(made.bus, "unheard")
        await caller.publish("alice", max_tokens=8, ignore_eos=True, receiver="gateway-x/1")
        await anyio.sleep(UNHEARD_S)
        assert await backlog(made.bus) == 1
        await caller.listen()
        with anyio.fail_after(10.0):
            reply = await caller.reply()
        await announcer.stop()
    assert isinstance(reply.end, Done)
    assert len(reply.ids) == 8


async def test_an_end_that_nobody_can_hear_for_a_while_is_told_all_the_same(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        announcer, caller = await announcing(made.bus), Caller(made.bus, "unheard")
        await made.bus.subscribe(f"{caller.inbox}.c", caller._claimed)
        await caller.publish("alice", max_tokens=8, ignore_eos=True, receiver="gateway-x/1")
        await until(lambda: len(caller.holders) == 2)
        await anyio.sleep(UNHEARD_S)
        assert await backlog(made.bus) == 1, "not acked: nobody has the reply"
        await made.bus.subscribe(f"{caller.inbox}.r", caller._framed)
        with anyio.fail_after(10.0):
            reply = await caller.reply()
        await announcer.stop()
    assert isinstance(reply.end, Done)
    assert len(reply.ids) == 8


async def test_what_nobody_can_hear_is_repeated_after_a_pause_and_not_in_a_storm(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    request = Bus.request

    async def counted(
        bus: Bus, subject: str, data: bytes, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> bytes:
        asked.append(subject)
        return await request(bus, subject, data, timeout_s, headers)

    monkeypatch.setattr(Bus, "request", counted)
    async with fleet(config_for(broker.url)) as made:
        caller = Caller(made.bus, "unheard")
        began_s = time.monotonic()
        await caller.publish("alice", receiver="gateway-x/1")
        await anyio.sleep(UNHEARD_S)
        claims = asked.count(f"{caller.inbox}.c")
        assert 1 <= claims <= 2 + (time.monotonic() - began_s) / (REPEAT_PERIOD_S / 4)


async def test_a_receivers_silence_counts_only_from_our_own_connection_on(broker: NatsServer) -> None:
    """It is silent for longer than a receiver may be, but the worker's own connection was new meanwhile."""
    async with fleet(config_for(broker.url)) as made:
        caller = Caller(made.bus, "patient")
        await caller.publish("alice", max_tokens=8, ignore_eos=True, receiver="gateway-x/1", timeout_ms=30_000)
        await anyio.sleep(RECEIVER_SILENT_MAX_S - 0.4)
        await made.workers["prefill-1"].bus.client.force_reconnect()
        await anyio.sleep(1.2)
        assert await backlog(made.bus) == 1
        await caller.listen()
        announcer = await announcing(made.bus)
        with anyio.fail_after(10.0):
            reply = await caller.reply()
        await announcer.stop()
    assert isinstance(reply.end, Done)


async def test_a_receiver_that_is_never_heard_is_given_up_after_its_time_and_not_before(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        began_s = time.monotonic()
        await Caller(made.bus, "orphan").publish("alice", receiver="gateway-x/1", timeout_ms=30_000)
        with anyio.fail_after(RECEIVER_SILENT_MAX_S + 5.0):
            while await backlog(made.bus):
                await anyio.sleep(0.02)
        assert time.monotonic() - began_s >= RECEIVER_SILENT_MAX_S


async def test_a_receiver_in_a_new_life_is_not_waited_for(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        announcer = await announcing(made.bus, epoch="2")
        await anyio.sleep(2 * PRESENCE_PERIOD_S)
        began_s = time.monotonic()
        await Caller(made.bus, "orphan").publish("alice", receiver="gateway-x/1", timeout_ms=30_000)
        with anyio.fail_after(10.0):
            while await backlog(made.bus):
                await anyio.sleep(0.02)
        assert time.monotonic() - began_s < RECEIVER_SILENT_MAX_S
        await announcer.stop()


async def test_the_request_of_a_plain_producer_is_finished_though_nothing_is_heard_of_it(broker: NatsServer) -> None:
    """It names no gateway that could be known to be gone, so it is not asked whether it still waits."""
    steps, step_s = 60, 0.05
    async with fleet(config_for(broker.url, step_s=step_s)) as made:
        body = {"messages": PROMPT, "max_tokens": steps, "ignore_eos": True, "reply_to": made.bus.inbox()}
        payload = msgspec.json.encode(body)
        await made.bus.store("requests.in.interactive.ada.ada", payload, msg_id="m", timeout_s=2.0)
        await until(lambda: bool(made.decode()._jobs._jobs))
        (job,) = made.decode()._jobs._jobs.values()
        assert steps * step_s > RECEIVER_SILENT_MAX_S + 0.5, "there was time to lose patience"
        with anyio.fail_after(15.0):
            while await backlog(made.bus):
                await anyio.sleep(0.02)
        assert job.outbox.length == steps
