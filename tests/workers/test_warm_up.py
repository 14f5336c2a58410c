"""A prefix is loaded before the requests that need it, by a worker that has time for it."""

import pytest

from pipeline.protocol import subjects
from pipeline.protocol.messages import Done, encode, unpack_ids
from pipeline.protocol.served import ShardServed, shards_served_decoder
from pipeline.protocol.subjects import Shard, partition
from pipeline.protocol.warm_messages import (
    Prefix,
    WantPrefix,
    WantShards,
    WarmedUp,
    WarmUp,
    prefix_decoder,
    warmed_up_decoder,
)
from tests.nats_server import NatsServer
from tests.workers.fleet import Fleet, config_for, fleet, until

pytestmark = pytest.mark.anyio

PERSONA = {"role": "system", "content": "You are Ada, and you answer in verse. " * 20}


async def prefix_at(made: Fleet, worker: str) -> Prefix:
    answer = await made.bus.request(subjects.prefill(worker), encode(WantPrefix("ada")), 2.0)
    return prefix_decoder.decode(answer)


async def warm_up(made: Fleet, worker: str, prefix: Prefix) -> WarmedUp:
    asked = encode(WarmUp(creator="ada", prefix=prefix))
    return warmed_up_decoder.decode(await made.bus.request(subjects.prefill(worker), asked, 2.0))


async def ask(made: Fleet, question: str) -> Done:
    reply = await made.ask(creator="ada", messages=[PERSONA, {"role": "user", "content": question}])
    assert isinstance(reply.end, Done)
    return reply.end


async def test_a_worker_that_has_not_served_a_creator_loads_its_persona_from_lmcache(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), prefill=1) as made:
        await ask(made, "Why is the sea salt?")
        await ask(made, "Who was Grace?")
        prefix = await prefix_at(made, "prefill-1")
        shared = unpack_ids(prefix.ids)
        await made.add("prefill", "prefill-2")
        await until(lambda: made.prefill("prefill-2").ready)
        assert (await prefix_at(made, "prefill-2")).ids == b""
        done = await warm_up(made, "prefill-2", prefix)
        chunk = made.config.lmcache.chunk_size
        assert done == WarmedUp("warm", (len(shared) - 1) // chunk * chunk)
        assert (await prefix_at(made, "prefill-2")).ids == prefix.ids, "and it can tell the next"


async def test_requests_come_before_prefixes(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        await ask(made, "Why is the sea salt?")
        prefix = await prefix_at(made, "prefill-1")
        made.prefill().slots.load = 0.9
        assert await warm_up(made, "prefill-1", prefix) == WarmedUp("busy")


async def test_what_cannot_be_computed_is_said_so(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, failure_ratio=1.0)) as made:
        assert await warm_up(made, "prefill-1", Prefix("ab", b"\1\0\0\0")) == WarmedUp("failed")


async def test_what_is_no_prefix_does_not_end_the_worker(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        assert await warm_up(made, "prefill-1", Prefix("ab", b"half")) == WarmedUp("warm")
        assert await warm_up(made, "prefill-1", Prefix("ab", b"odd")) == WarmedUp("failed")
        await ask(made, "Why is the sea salt?")


async def test_a_prefill_loop_that_is_closed_warms_nothing_up(broker: NatsServer) -> None:
    """The engine may be another loop's now."""
    async with fleet(config_for(broker.url)) as made:
        await made.prefill().pause()
        assert await warm_up(made, "prefill-1", Prefix("ab", b"\1\0\0\0")) == WarmedUp("busy")


async def test_what_a_worker_has_served_is_told_by_shard(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        end = await ask(made, "Why is the sea salt?")
        await until(lambda: made.prefill().slots.busy == 0)
        asked = encode(WantShards())
        served = shards_served_decoder.decode(await made.bus.request(subjects.prefill("prefill-1"), asked, 2.0))
        shard = Shard("interactive", partition("ada", made.config.requests.shards))
        row = ShardServed(
            klass=shard.klass,
            shard=shard.number,
            owned=1,
            hbm_tokens=end.usage.cached_tokens,
            computed_tokens=end.usage.prompt_tokens - end.usage.cached_tokens,
        )
        assert (served.worker, served.shards) == ("prefill-1", [row])
        assert served.warm_creators in (0, 1), "it may have heard of its engine's cache by now"
