"""Orders to workers that are at work: nothing is lost, and each says how it stands."""

from typing import Any

import anyio
import pytest

from pipeline.bus.connection import Bus
from pipeline.bus.errors import BusError
from pipeline.protocol import subjects
from pipeline.protocol.control import Action, Order, Standing, standing_decoder
from pipeline.protocol.messages import Done, encode
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, Fleet, backlog, config_for, fleet, nothing_left, until

pytestmark = pytest.mark.anyio

MANY = 24


async def order(bus: Bus, worker: str, action: Action) -> Standing:
    return standing_decoder.decode(await bus.request(subjects.control(worker), encode(Order(action)), 5.0))


async def callers(made: Fleet, count: int, **fields: Any) -> list[Caller]:
    """Requests of as many creators, so that every worker owns some."""
    asked = [Caller(made.bus, f"r{number}") for number in range(count)]
    for number, caller in enumerate(asked):
        await caller.listen()
        await caller.publish(f"creator-{number}", **fields)
    return asked


async def all_whole(asked: list[Caller]) -> list[str]:
    """Every reply is whole; who decoded each."""
    with anyio.fail_after(20.0):
        ends = [(await caller.reply()).end for caller in asked]
    assert all(isinstance(end, Done) for end in ends)
    return [end.usage.decode for end in ends if isinstance(end, Done)]


async def test_a_paused_prefill_worker_takes_nothing_and_others_serve_what_it_owns(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), prefill=2) as made:
        standing = await order(made.bus, "prefill-1", "pause")
        assert (standing.state, standing.role, standing.refused) == ("paused", "prefill", "")
        served = [await made.ask(creator=f"creator-{number}") for number in range(8)]
        assert {reply.end.usage.prefill for reply in served if isinstance(reply.end, Done)} == {"prefill-2"}
        assert made.prefill("prefill-1").slots.outstanding == 0


async def test_a_paused_pool_keeps_its_queue_and_resumes_it(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        await order(made.bus, "prefill-1", "pause")
        asked = await callers(made, 6)
        await anyio.sleep(0.3)
        assert await backlog(made.bus) == 6
        assert not any(caller.holders for caller in asked)
        assert (await order(made.bus, "prefill-1", "resume")).state == "serving"
        await all_whole(asked)


async def test_a_paused_decode_worker_finishes_and_promises_nothing_more(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, step_s=0.01), decode=2) as made:
        before = await callers(made, MANY, max_tokens=40, ignore_eos=True)
        ledger = made.decode("decode-1").ledger
        await until(lambda: not ledger.idle)
        standing = await order(made.bus, "decode-1", "pause")
        assert standing.state == "paused"
        assert standing.under_way > 0
        granted = ledger.totals.granted
        await all_whole(before)
        for number in range(6):
            end = (await made.ask(creator=f"later-{number}")).end
            assert isinstance(end, Done)
            assert end.usage.decode == "decode-2"
        assert ledger.totals.granted == granted
        assert (await order(made.bus, "decode-1", "look")).under_way == 0


@pytest.mark.parametrize("worker", ["prefill-1", "decode-1"])
async def test_a_worker_that_is_told_to_drain_under_load_leaves_and_loses_nothing(
    broker: NatsServer, worker: str
) -> None:
    async with fleet(config_for(broker.url, step_s=0.005, prefill_overhead_s=0.02), prefill=2, decode=2) as made:
        asked = await callers(made, MANY, max_tokens=30, ignore_eos=True)
        await until(lambda: made.workers[worker].loops.under_way > 0)
        assert (await order(made.bus, worker, "drain")).state == "draining"
        refused = await order(made.bus, worker, "resume")
        assert "leaves" in refused.refused
        await all_whole(asked)
        await until(lambda: made.workers[worker].scope.cancel_called)
        with pytest.raises(BusError):
            await order(made.bus, worker, "look")
        await nothing_left(made.bus)


async def test_what_is_no_order_is_refused_with_the_reason(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        answer = await made.bus.request(subjects.control("prefill-1"), b"\x80", 5.0)
        assert "no order" in standing_decoder.decode(answer).refused
