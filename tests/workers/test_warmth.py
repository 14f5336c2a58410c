"""What a prefill worker knows of its engine's cache, and a gateway of it; and the short way for what needs little computing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import msgspec
import pytest

from gateway.warm import Warm
from pipeline import outside
from pipeline.bus.connection import Bus
from pipeline.bus.presence import Watcher
from pipeline.config import Config, Requests
from pipeline.limits import UNREAD_MAX
from pipeline.protocol.arrangement import Role
from pipeline.protocol.budget import cache_salt
from pipeline.protocol.messages import Done
from pipeline.protocol.presence import Presences
from pipeline.protocol.warm_view import key_of
from pipeline.telemetry import metrics
from tests.nats_server import NatsServer
from tests.workers.fleet import Fleet, Reply, config_for, fleet, until
from workers.engines.simulated import SimulatedEngine
from workers.engines.simulated.cache_log import CacheFaults
from workers.engines.simulated.words import prompt_of

pytestmark = pytest.mark.anyio

CREATORS = [f"c{number}" for number in range(6)]


def chat(creator: str, tail: str) -> list[dict[str, str]]:
    """Some 700 tokens that all prompts of a creator share, and some that they do not."""
    return [{"role": "system", "content": f"You are {creator}. " * 170}, {"role": "user", "content": tail}]


def faulty(config: Config, role: Role) -> SimulatedEngine:
    return SimulatedEngine(config, role, cache_faults=CacheFaults(lost=0.3, twice=0.2, overtaken=0.2))


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[Warm]:
    """A gateway's view of who is warm where."""
    presences = Presences()
    async with await Bus.connect(url, "gateway") as bus, anyio.create_task_group() as tasks:
        watcher, warm = Watcher(bus, presences, outside.monotonic_s), Warm(bus, presences, outside.monotonic_s)
        await watcher.start()
        await warm.start()
        tasks.start_soon(warm.run)
        yield warm
        tasks.cancel_scope.cancel()
        await warm.stop()
        await watcher.stop()


def salt_of(made: Fleet, creator: str) -> str:
    return cache_salt(creator, "", "creator", made.prefill().engine.info.fingerprint)


def index_is_right(made: Fleet, tails: list[str], name: str = "prefill-1") -> bool:
    worker, engine = made.prefill(name), made.workers[name].engine
    prompts = [
        (salt_of(made, creator), prompt_of({"messages": chat(creator, tail)})) for creator in CREATORS for tail in tails
    ]
    return all(worker.warmth.expects(*prompt) == engine.truly_cached_tokens(*prompt) for prompt in prompts)


def view_is_right(made: Fleet, warm: Warm) -> bool:
    workers = [name for name in made.workers if name.startswith("prefill")]
    return all(
        warm.warm(creator) == {name for name in workers if creator in made.prefill(name).warmth.index.warm}
        for creator in CREATORS
    )


async def test_25_index_and_view_equal_the_truth_within_a_second_on_a_real_broker(broker: NatsServer) -> None:
    """By name, test 25: the engine's events are lost, repeated and reordered; its cache holds half of what is asked of it."""
    tails = [f"Number {number}, please. " * (1 + number % 3) for number in range(5)]
    async with fleet(config_for(broker.url, kv_blocks=80), engine=faulty) as made, watching(broker.url) as warm:
        for number in range(40):
            await made.ask(
                creator=CREATORS[number * 7 % 6],
                messages=chat(CREATORS[number * 7 % 6], tails[number % 5]),
                max_tokens=2,
            )
        await until(lambda: index_is_right(made, tails), within_s=1.0)
        await until(lambda: view_is_right(made, warm), within_s=1.0)
        index = made.prefill().warmth.index
        assert index.whole
        assert index.gaps > 0, "something was lost"
        assert 0 < len(index.warm) < len(CREATORS), "something was evicted"


async def test_a_restarted_worker_is_cold_and_another_stays_warm(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), prefill=1) as made, watching(broker.url) as warm:
        await made.ask(creator="c1", messages=chat("c1", "Hi."), max_tokens=2)
        await until(lambda: warm.warm("c1") == {"prefill-1"}, within_s=1.0)
        assert (warm.is_warm("c1", "prefill-1"), warm.is_warm("c2", "prefill-1")) == (True, False)
        made.kill("prefill-1")
        await made.add("prefill", "prefill-1")
        await until(lambda: warm.warm("c1") == set(), within_s=1.0)
        await made.ask(creator="c1", messages=chat("c1", "Hi."), max_tokens=2)
        await until(lambda: warm.warm("c1") == {"prefill-1"}, within_s=1.0)


async def test_a_gateway_that_comes_late_asks_and_one_that_was_cut_off_asks_again(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        await made.ask(creator="c1", messages=chat("c1", "Hi."), max_tokens=2)
        await until(lambda: made.prefill().warmth.teller.number > 0)
        async with watching(broker.url) as warm:
            await until(lambda: warm.warm("c1") == {"prefill-1"}, within_s=1.0)
            await warm.stop()
            await made.ask(creator="c2", messages=chat("c2", "Hi."), max_tokens=2)
            await until(lambda: made.prefill().warmth.teller.number > 1)
            await warm.start()
            await until(lambda: view_is_right(made, warm), within_s=1.0)


async def test_presence_carries_a_digest_of_the_warm_creators(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        await made.ask(creator="c1", messages=chat("c1", "Hi."), max_tokens=2)
        await until(lambda: made.prefill().presence().warm == 1)
        assert made.prefill().presence().warm_digest == key_of("c1")


async def test_prompt_tokens_are_counted_by_where_their_kv_came_from(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, kv_blocks=80)) as made:

        async def sources(creator: str) -> tuple[float, float, float, Reply]:
            labels = [metrics.PREFILL_TOKENS.labels(source=source) for source in ("hbm", "lmcache", "none")]
            before = [label._value.get() for label in labels]
            reply = await made.ask(creator=creator, messages=chat(creator, "Hi."), max_tokens=2)
            hbm, lmcache, none = (label._value.get() - was for label, was in zip(labels, before, strict=True))
            return hbm, lmcache, none, reply

        hbm, lmcache, none, cold = await sources("c0")
        assert isinstance(cold.end, Done)
        assert (hbm, lmcache, none) == (0, 0, cold.end.usage.prompt_tokens)
        await until(lambda: index_is_right(made, ["Hi."]))
        hbm, lmcache, _, again = await sources("c0")
        assert isinstance(again.end, Done)
        assert hbm == again.end.usage.hbm_tokens == made.workers["prefill-1"].engine.info.block_size * (hbm // 32) > 600
        assert lmcache == again.end.usage.cached_tokens - hbm == 0
        for creator in CREATORS[1:]:
            await sources(creator)
        await until(lambda: index_is_right(made, ["Hi."]))
        hbm, lmcache, _, evicted = await sources("c0")
        assert isinstance(evicted.end, Done)
        assert (hbm, evicted.end.usage.hbm_tokens) == (0, 0)
        assert lmcache == evicted.end.usage.cached_tokens > 600


# --------------------------------------------------------------------------------------------------------------
# The short way


def direct(url: str, tokens: int) -> Config:
    config = config_for(url)
    return msgspec.structs.replace(config, requests=Requests(default_max_tokens=12, direct_tokens_max=tokens))


async def test_a_prompt_with_little_to_compute_goes_directly_to_decode(broker: NatsServer) -> None:
    async with fleet(direct(broker.url, 64)) as made:
        first = await made.ask(creator="c1", messages=chat("c1", "Hi."), max_tokens=4)
        await until(lambda: "c1" in made.prefill().warmth.index.warm)
        skipped = metrics.PREFILLS_SKIPPED._value.get()
        made.workers["prefill-1"].engine.fail_next("prefill")
        short = await made.ask(creator="c1", messages=chat("c1", "Ho!"), max_tokens=4)
        assert isinstance(first.end, Done)
        assert isinstance(short.end, Done)
        assert metrics.PREFILLS_SKIPPED._value.get() - skipped == 1
        assert (first.end.usage.prefill_generated_tokens, short.end.usage.prefill_generated_tokens) == (1, 0)
        usage = short.end.usage
        assert (usage.cached_tokens, usage.hbm_tokens) == (usage.decode_cached_tokens, 0)
        assert usage.prompt_tokens - 64 < usage.decode_cached_tokens < usage.prompt_tokens
        assert usage.prefill == "prefill-1"
        long = await made.ask(creator="c1", messages=chat("c1", "Hi. " * 200), max_tokens=4)
        assert not isinstance(long.end, Done), "that one went to the prefill engine, which was to fail"


async def test_what_decode_would_only_have_waiting_is_prefilled(broker: NatsServer) -> None:
    """Two prompts that decode has still to read are as many as one engine gets, whose others nobody else could have."""
    async with fleet(direct(broker.url, 64)) as made:
        await made.ask(creator="c1", messages=chat("c1", "Hi."), max_tokens=4)
        await until(lambda: "c1" in made.prefill().warmth.index.warm)
        skipped = metrics.PREFILLS_SKIPPED._value.get()
        decode = made.workers["decode-1"].engine
        decode.pause()

        def known() -> int:
            return sum(peer.unread for peer in made.prefill().decoders())

        async with anyio.create_task_group() as asks:
            for before in range(4):
                asks.start_soon(partial(made.ask, creator="c1", messages=chat("c1", f"Ho {before}!"), max_tokens=4))
                await until(lambda before=before: made.decode().under_way > before)
                await until(lambda before=before: known() > min(before, UNREAD_MAX - 1))
            assert metrics.PREFILLS_SKIPPED._value.get() - skipped == UNREAD_MAX
            decode.resume()
        await until(lambda: known() == 0)


async def test_directly_or_not_the_reply_is_the_same(broker: NatsServer) -> None:
    replies = []
    for tokens in (0, 10_000):
        async with fleet(direct(broker.url, tokens)) as made:
            replies.append(await made.ask(creator="c1", messages=chat("c1", "Hi."), max_tokens=8))
    assert replies[0].ids == replies[1].ids
    assert isinstance(replies[1].end, Done)
    assert replies[1].end.usage.prefill_generated_tokens == 0


async def test_by_default_no_request_skips_prefill(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        for _ in range(2):
            reply = await made.ask(creator="c1", messages=chat("c1", "Hi."), max_tokens=4)
            assert isinstance(reply.end, Done)
            assert reply.end.usage.prefill_generated_tokens == 1
