"""Lease keeping on a real broker: what survives a busy event loop, and what must not."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from pipeline.bus import acks, streams
from pipeline.bus.connection import Bus
from pipeline.bus.puller import Delivery, Puller
from pipeline.errors import OperatorError, ServiceError
from pipeline.limits import ACK_WAIT_S, LEASE_SILENT_MAX_S, LOOP_SILENT_MAX_S
from pipeline.paths import JETSTREAM
from pipeline.protocol.messages import Done
from pipeline.protocol.subjects import Shard
from tests.bus.support import eventually, fresh, shard_of, stored, subject_of
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, config_for, fleet
from workers.lease_thread import LeaseThread, lease_thread
from workers.leases import LeaseKeeper, Leases

pytestmark = pytest.mark.anyio


class Bench:
    """One delivered message, and a second pull that would take it if its lease lapsed."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.deliveries: list[Delivery] = []
        self.doubts: list[float] = []
        self.puller = Puller(bus, self.deliveries.append, self._pull_again)

    @property
    def ack(self) -> str:
        return self.deliveries[0].ack

    def _pull_again(self, shard: Shard, count: int) -> None:
        self.puller.offer(shard, count, 0)

    def doubt(self) -> None:
        self.doubts.append(time.monotonic())

    def hold(self, leases: Leases, for_s: float = 60.0) -> str:
        return leases.hold(self.ack, self.doubt, time.monotonic() + for_s)

    async def lapsed(self, within_s: float) -> float:
        """Wait until the message has been delivered again; the seconds it took."""
        return await eventually(lambda: len(self.deliveries) > 1, within_s)


@asynccontextmanager
async def bench(broker: NatsServer) -> AsyncIterator[Bench]:
    async with await Bus.connect(broker.url, "test") as bus:
        await streams.apply(bus, streams.declared(JETSTREAM))
        made = Bench(bus)
        await made.puller.start()
        await bus.store(subject_of("ada"), b"work", msg_id=fresh(), timeout_s=2.0)
        await made.puller.pull(shard_of("ada"), 2, 0)
        await eventually(lambda: len(made.deliveries) == 1)
        yield made
        await made.puller.stop()


@asynccontextmanager
async def thread(broker: NatsServer) -> AsyncIterator[LeaseThread]:
    """A lease thread, and the loop's beat."""
    async with lease_thread(broker.url, "worker", 2.0) as leases, anyio.create_task_group() as tasks:
        tasks.start_soon(leases.run)
        yield leases
        tasks.cancel_scope.cancel()


def block(seconds: float) -> None:
    """What a long tokenisation does to the event loop."""
    time.sleep(seconds)


async def test_a_loop_that_is_blocked_for_a_while_keeps_its_messages(broker: NatsServer) -> None:
    async with bench(broker) as made, thread(broker) as leases:
        made.hold(leases)
        await anyio.lowlevel.checkpoint()
        block(2.5)
        await made.bus.barrier()
        assert len(made.deliveries) == 1
        assert made.doubts == []
        assert await stored(made.bus) == 1


async def test_the_same_pause_without_a_thread_loses_them(broker: NatsServer) -> None:
    async with bench(broker) as made, anyio.create_task_group() as tasks:
        leases = LeaseKeeper(made.bus, time.monotonic)
        tasks.start_soon(leases.run)
        made.hold(leases)
        await anyio.lowlevel.checkpoint()
        block(2.5)
        await made.lapsed(within_s=1.0)
        await eventually(lambda: len(made.doubts) == 1)
        tasks.cancel_scope.cancel()


async def test_a_loop_that_is_dead_loses_its_messages_and_is_told_if_it_wakes(broker: NatsServer) -> None:
    async with bench(broker) as made, thread(broker) as leases:
        made.hold(leases)
        await anyio.lowlevel.checkpoint()
        block(LOOP_SILENT_MAX_S + ACK_WAIT_S + 0.6)
        await eventually(lambda: bool(made.doubts), within_s=0.5)
        await made.lapsed(within_s=1.0)
        assert len(made.doubts) == 1


async def test_a_silent_broker_puts_a_lease_in_doubt_before_it_lapses(broker: NatsServer) -> None:
    async with bench(broker) as made, thread(broker) as leases:
        made.hold(leases)
        await anyio.sleep(0.5)
        broker.pause()
        paused_s = time.monotonic()
        await eventually(lambda: bool(made.doubts), within_s=2.0)
        broker.resume()
        assert LEASE_SILENT_MAX_S - 0.4 < made.doubts[0] - paused_s < LEASE_SILENT_MAX_S + 0.15
        assert len(made.doubts) == 1, "told once"


async def test_a_lease_held_anew_after_the_doubt_is_kept_when_the_broker_answers(broker: NatsServer) -> None:
    async with bench(broker) as made, thread(broker) as leases:
        made.hold(leases)
        broker.pause()
        await eventually(lambda: bool(made.doubts), within_s=2.0)
        broker.resume()
        await acks.in_progress(made.bus, made.ack)
        name = made.hold(leases)
        delivered = len(made.deliveries)
        await anyio.sleep(2.5 * ACK_WAIT_S)
        assert (len(made.doubts), len(made.deliveries)) == (1, delivered)
        leases.let_go(name)
        await eventually(lambda: len(made.deliveries) > delivered, within_s=2.0)


async def test_a_lease_let_go_lapses_and_nobody_is_told(broker: NatsServer) -> None:
    async with bench(broker) as made, thread(broker) as leases:
        name = made.hold(leases)
        await anyio.sleep(0.5)
        leases.let_go(name)
        leases.let_go(name)
        await made.lapsed(within_s=2.0)
        assert made.doubts == []


async def test_a_lease_ends_with_its_deadline(broker: NatsServer) -> None:
    async with bench(broker) as made, thread(broker) as leases:
        held_s = time.monotonic()
        made.hold(leases, for_s=1.5)
        await eventually(lambda: bool(made.doubts), within_s=2.5)
        assert 1.5 <= made.doubts[0] - held_s < 1.8
        await made.lapsed(within_s=2.0)


async def test_leases_lapse_when_the_engine_has_failed(broker: NatsServer) -> None:
    async with bench(broker) as made, thread(broker) as leases:
        made.hold(leases)
        await anyio.sleep(0.5)
        leases.engine_failed()
        await eventually(lambda: bool(made.doubts), within_s=0.5)
        await made.lapsed(within_s=2.0)


async def test_a_consumer_that_is_not_there_answers_no_lease(broker: NatsServer) -> None:
    """After a restart the broker says for a moment that nobody listens: that is no renewal."""
    async with bench(broker) as made, thread(broker) as leases:
        nobody = made.ack.replace("REQUESTS_interactive", "REQUESTS_elsewhere")
        leases.hold(nobody, made.doubt, time.monotonic() + 60.0)
        await eventually(lambda: bool(made.doubts), within_s=1.5)


async def test_a_thread_that_ends_is_noticed(broker: NatsServer) -> None:
    async with lease_thread(broker.url, "worker", 2.0) as leases:
        await leases.stop()
        with anyio.fail_after(5.0), pytest.raises(ServiceError, match="has ended"):
            await leases.run()
        leases.let_go(leases.hold("$JS.ACK.none", lambda: None, 0.0))


async def test_a_broker_that_is_not_there_is_said(broker: NatsServer) -> None:
    broker.stop()
    with pytest.raises(OperatorError, match="Cannot reach NATS"):
        async with lease_thread(broker.url, "worker", 0.3):
            raise AssertionError("it started without a broker")


async def test_a_decode_worker_holds_anew_once_its_claim_is_confirmed(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, step_s=0.02)) as made:
        caller = Caller(made.bus, "doubtful")
        await caller.listen()
        await caller.publish("ada", max_tokens=100, ignore_eos=True)
        await eventually(lambda: caller.frames > 5)
        leases = made.decode().desk.leases
        assert isinstance(leases, LeaseKeeper)
        leases.end_all()
        with anyio.fail_after(10.0):
            reply = await caller.reply()
        assert isinstance(reply.end, Done)
        assert len(reply.ids) == 100
        assert caller.holders == ["holder.prefill-1", "holder.decode-1", "holder.decode-1"], "nobody else got it"
        await eventually(lambda: made.decode().ledger.free == made.decode().ledger.blocks)
