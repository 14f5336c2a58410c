"""A lease is no fence: what a holder does that may have lost its message, and what keeps a lease, and for how long."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import anyio
import anyio.abc
import pytest

from pipeline.bus.connection import Bus, Message
from pipeline.errors import EngineDead
from pipeline.limits import ACK_WAIT_S, LEASE_PERIOD_S, LEASE_SILENT_MAX_S, LEASE_SPARE_S
from pipeline.protocol.arrangement import Role
from pipeline.protocol.messages import Done
from pipeline.protocol.request import READY, Effect, Event, Prefill, Stage, step_prefill
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, Fleet, config_for, fleet, until
from tests.workers.test_leases import block
from workers import runtime
from workers.engines.simulated import SimulatedEngine
from workers.jobs import TELLING_GRACE_S
from workers.lease_thread import LeaseThread
from workers.leases import PERIOD_S, LeaseKeeper, Told
from workers.runtime import _Process

pytestmark = pytest.mark.anyio

ROLES: tuple[Role, ...] = ("prefill", "decode")


class Posted:
    """A bus that takes everything, and never answers."""

    def __init__(self) -> None:
        self.replies: list[str] = []

    def inbox(self) -> str:
        return "inbox"

    def post(self, subject: str, data: bytes, reply: str) -> None:
        self.replies.append(reply)


class Deaf(Caller):
    """A receiver that can be told not to hear claims."""

    deaf = False

    def _claimed(self, message: Message) -> None:
        if not self.deaf:
            super()._claimed(message)


def test_a_holder_is_in_doubt_before_its_lease_can_have_ended() -> None:
    assert LEASE_SILENT_MAX_S <= 0.8 * ACK_WAIT_S
    assert LEASE_SILENT_MAX_S + 2 * PERIOD_S < ACK_WAIT_S, "the keeper looks no more often than that"
    assert 2 * LEASE_PERIOD_S < LEASE_SILENT_MAX_S, "one lost renewal is no doubt yet"


def test_a_late_answer_renews_the_lease_only_from_when_it_was_asked_for() -> None:
    """The broker may have heard it long ago: what lay unread in our socket says nothing of now."""
    now_s, doubts, bus = 0.0, list[float](), Posted()
    keeper = LeaseKeeper(cast("Bus", bus), lambda: now_s)
    keeper.hold("$JS.ACK.x", lambda: doubts.append(now_s), until_s=60.0)
    now_s = asked_s = LEASE_PERIOD_S
    keeper._renew(now_s)
    now_s = LEASE_SILENT_MAX_S - 0.01
    keeper._answered(Message(bus.replies[-1], "", b"", None))
    keeper._renew(asked_s + LEASE_SILENT_MAX_S - 0.01)
    assert doubts == []
    now_s = asked_s + LEASE_SILENT_MAX_S + 0.01
    keeper._renew(now_s)
    assert doubts == [now_s]


@pytest.mark.parametrize("stage", [Stage.WORKING, Stage.HANDING])
def test_a_prefill_worker_in_doubt_stops_and_says_nothing_more_about_the_message(stage: Stage) -> None:
    after, effects = step_prefill(Prefill(stage, READY), Event.DOUBT)
    assert (after.stage, effects) == (Stage.ENDED, (Effect.STOP,))


async def test_a_decode_worker_in_doubt_sends_no_frames_until_its_receiver_has_confirmed_the_claim(
    broker: NatsServer,
) -> None:
    async with fleet(config_for(broker.url, step_s=0.02)) as made:
        caller = Deaf(made.bus, "doubtful")
        await caller.listen()
        await caller.publish("alice", max_tokens=100, ignore_eos=True)
        await until(lambda: caller.frames > 2)
        (job,) = made.decode()._jobs._jobs.values()
        caller.deaf = True
        job.happen(Event.DOUBT)
        await anyio.sleep(0.1)  # what was on its way has come
        await made.bus.barrier()
        sent, made_so_far = caller.frames, job.outbox.length
        await until(lambda: job.outbox.length > made_so_far + 10)
        await made.bus.barrier()
        assert caller.frames == sent, "the engine goes on, and nobody hears of it"
        caller.deaf = False
        with anyio.fail_after(10.0):
            reply = await caller.reply()
        assert isinstance(reply.end, Done)
        assert len(reply.ids) == 100


class Kept:
    """When each lease would end, by the name of the worker that holds it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.until_s: list[float] = []
        hold = LeaseKeeper.hold

        def spied(keeper: LeaseKeeper, ack: str, in_doubt: Told, until_s: float) -> str:
            self.until_s.append(until_s)
            return hold(keeper, ack, in_doubt, until_s)

        monkeypatch.setattr(LeaseKeeper, "hold", spied)


async def test_both_workers_keep_a_lease_no_longer_than_its_end_may_take_to_be_told(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, timeout_s = Kept(monkeypatch), 7.0
    async with fleet(config_for(broker.url)) as made:
        asked_s = time.monotonic()
        assert isinstance((await made.ask(max_tokens=4, timeout_ms=int(1000 * timeout_s))).end, Done)
        took_s = time.monotonic() - asked_s
    assert len(kept.until_s) == 2, "one at prefill, one at decode"
    for until_s in kept.until_s:
        over_s = until_s - asked_s - timeout_s - TELLING_GRACE_S - LEASE_SPARE_S
        assert -0.1 < over_s < took_s + 0.1


@asynccontextmanager
async def process(made: Fleet, role: Role, name: str) -> AsyncIterator[_Process]:
    """A worker process as it really is, lease thread and all, but in this loop."""
    engine = SimulatedEngine(made.config, role)
    started = _Process(made.config, role, None, name, engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(started.run)
        await until(lambda: started.loop is not None and started.loop.ready)
        try:
            yield started
        finally:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await engine.close()


@pytest.mark.parametrize("stands", ROLES)
async def test_a_worker_process_whose_loop_is_blocked_for_a_while_keeps_its_message(
    broker: NatsServer, stands: Role
) -> None:
    async with (
        fleet(config_for(broker.url, step_s=0.02), prefill=0, decode=0) as made,
        process(made, "decode", "decode-1"),
        process(made, "prefill", "prefill-1") as prefill,
    ):
        assert isinstance(prefill.engine, SimulatedEngine)
        if stands == "prefill":
            prefill.engine.pause()
        caller = Caller(made.bus, "patient")
        await caller.listen()
        await caller.publish("alice", max_tokens=50, ignore_eos=True, timeout_ms=30_000)
        await until(lambda: caller.frames > 2 if stands == "decode" else len(caller.holders) == 1)
        block(2.5 * ACK_WAIT_S)
        prefill.engine.resume()
        with anyio.fail_after(10.0):
            reply = await caller.reply()
        assert isinstance(reply.end, Done)
        assert caller.holders == ["holder.prefill-1", "holder.decode-1"], "it was not delivered again"


async def test_a_worker_process_lets_its_leases_lapse_when_its_engine_fails(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lapsed: list[LeaseThread] = []

    def noted(leases: LeaseThread) -> None:
        lapsed.append(leases)

    monkeypatch.setattr(LeaseThread, "engine_failed", noted)
    monkeypatch.setattr(runtime, "HEALTH_PERIOD_S", 0.05)
    died = False
    async with fleet(config_for(broker.url), prefill=0, decode=0) as made:
        try:
            async with process(made, "prefill", "prefill-1") as worker:
                assert isinstance(worker.engine, SimulatedEngine)
                worker.engine.die("It is out of memory.")
                await anyio.sleep(5.0)
        except* EngineDead:
            died = True
    assert died
    assert len(lapsed) == 1
