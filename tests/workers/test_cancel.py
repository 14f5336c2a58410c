"""A cancel at every stage of a request: the engine is told, slots and blocks come back, and the message leaves the stream."""

import anyio
import pytest

from tests.nats_server import NatsServer
from tests.workers.cancel_stages import DECODE, STAGES, Stand, Way, cancelled, stand
from tests.workers.fleet import Caller, backlog
from tests.workers.test_loops import at_rest

pytestmark = pytest.mark.anyio


async def nothing_is_left(at: Stand, caller: Caller) -> None:
    """No message, slot or block; the books balance, and no grant had to expire; nothing more is generated or told."""
    await at_rest(at.made)
    totals = at.decode.ledger.totals
    assert totals.granted == totals.released + totals.returned
    assert totals.expired == 0
    made = (at.asked, at.engine(DECODE).steps, caller.frames)
    await anyio.sleep(0.05)  # ten steps of the engine
    assert (at.asked, at.engine(DECODE).steps, caller.frames) == made
    assert not caller.ended
    assert await backlog(at.made.bus, "DLQ") == 0


@pytest.mark.parametrize("way", ["cancel", "leave"])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_cancelled_request_is_stopped_where_it_is_and_leaves_nothing(
    broker: NatsServer, stage: str, way: Way
) -> None:
    async with stand(broker.url) as at:
        met = await cancelled(at, stage, way, "unwanted")
        assert tuple(at.asked) == STAGES[stage].asked, "nothing is begun for it any more"
        await nothing_is_left(at, met.caller)


@pytest.mark.parametrize("stage", STAGES)
async def test_where_the_cancel_is_lost_the_receivers_gone_stops_the_request(broker: NatsServer, stage: str) -> None:
    async with stand(broker.url) as at:
        met = await cancelled(at, stage, "gone", "unwanted")
        await nothing_is_left(at, met.caller)


async def test_after_a_cancel_at_every_stage_the_next_request_is_served(broker: NatsServer) -> None:
    async with stand(broker.url) as at:
        for number, stage in enumerate(STAGES):
            await cancelled(at, stage, "cancel", f"unwanted-{number}")
        assert len((await at.made.ask(max_tokens=5, ignore_eos=True)).ids) == 5
        await at_rest(at.made)
