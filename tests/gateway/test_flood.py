"""A flood of one key or creator, counted on the whole gateway. `tests/benchmarks/flood.py` measures what it costs the others."""

from collections import Counter
from typing import Any

import anyio
import pytest

from tests.gateway.stack import CHAT, HELLO, Stack, connection, stack
from tests.gateway.test_hygiene import raw
from tests.gateway.test_identity import bearer, key
from tests.gateway.worker_double import Job, saying
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

FLOOD = 60
OTHERS = 12


async def flooded(served: Stack, flood: dict[str, str], others: dict[str, str]) -> tuple[Counter[Any], Counter[Any]]:
    """How a flood ends whose requests are held, and how requests of many creators end meanwhile."""
    release = anyio.Event()

    async def script(job: Job) -> None:
        await job.claim()
        if "flood" in job.subject:
            await release.wait()
        await job.say("yes")
        await job.done()

    served.double.script = script
    hit: Counter[Any] = Counter()
    spared: Counter[Any] = Counter()

    async def one(counter: Counter[Any], headers: dict[str, str]) -> None:
        response = await served.ask(headers=headers)
        code = response.json()["error"]["code"] if response.status_code != 200 else ""
        counter[response.status_code, code] += 1

    async with anyio.create_task_group() as tasks:
        for number in range(FLOOD):
            tasks.start_soon(one, hit, flood | {"x-creator-id": flood.get("x-creator-id", f"flood-{number}")})
        with anyio.fail_after(10):
            while served.double.seen + sum(hit.values()) < FLOOD:
                await anyio.sleep(0.01)
            async with anyio.create_task_group() as inner:
                for number in range(OTHERS):
                    inner.start_soon(one, spared, others | {"x-creator-id": f"other-{number}"})
        release.set()
    return hit, spared


async def test_a_flood_of_one_creator_takes_its_share_and_all_others_are_served(broker: NatsServer) -> None:
    async with stack(broker.url, in_flight_max=20, creator_in_flight_max=3) as served:
        hit, spared = await flooded(served, {"x-creator-id": "flood"}, {})
        assert hit == {(200, ""): 3, (429, "creator_queue_full"): FLOOD - 3}
        assert spared == {(200, ""): OTHERS}
        assert served.double.seen == 3 + OTHERS, "nothing of the rest has reached the queue"
        assert served.gateway.guests.shares.creators == {}


async def test_a_flood_of_one_key_takes_its_share_and_all_others_are_served(broker: NatsServer) -> None:
    keys = (key("bad", in_flight_max=5), key("good"))
    async with stack(broker.url, in_flight_max=20, keys=keys) as served:
        hit, spared = await flooded(served, bearer("bad"), bearer("good"))
        assert hit == {(200, ""): 5, (429, "key_limit_exceeded"): FLOOD - 5}
        assert spared == {(200, ""): OTHERS}
        assert served.double.seen == 5 + OTHERS


async def test_a_flood_beyond_a_rate_never_reaches_the_queue(broker: NatsServer) -> None:
    keys = (key("bad", requests_per_s=0.5), key("good"))
    async with stack(broker.url, keys=keys) as served:
        hit, spared = await flooded(served, bearer("bad"), bearer("good"))
        # The first takes the one turn that there is; another comes after two seconds, should this take so long.
        assert hit[429, "rate_limit_exceeded"] >= FLOOD - 3
        assert hit.total() == FLOOD
        assert spared == {(200, ""): OTHERS}


@pytest.mark.parametrize("bound", [{"in_flight_max": 1}, {"keys": (key("one", in_flight_max=1),)}])
async def test_what_the_head_alone_refuses_has_its_body_never_read(broker: NatsServer, bound: dict[str, Any]) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer one\r\n".encode()
    async with (
        stack(broker.url, **bound) as served,
        connection(served, HELLO, "authorization: Bearer one\r\n") as inside,
        raw(served) as client,
    ):
        job = await served.double.next_job()
        await client.send(head + b"content-length: 100000\r\nexpect: 100-continue\r\n\r\n")
        status, said, _ = await client.answer()
        assert status in (429, 503)
        assert b"retry-after:" in said
        await job.claim()
        await job.done()
        await inside.rest()


async def test_a_creator_that_was_flooded_is_served_again_at_once(broker: NatsServer) -> None:
    async with stack(broker.url, creator_in_flight_max=2) as served:
        await flooded(served, {"x-creator-id": "flood"}, {})
        served.double.script = saying("yes")
        assert (await served.ask(headers={"x-creator-id": "flood"})).status_code == 200


async def test_prompts_whose_replies_have_not_begun_are_bounded_by_their_tokens(broker: NatsServer) -> None:
    begin, end = anyio.Event(), anyio.Event()

    async def script(job: Job) -> None:
        await job.claim()
        await begin.wait()
        await job.say("yes")
        await end.wait()
        await job.done()

    long = [{"role": "user", "content": "x" * 4000}]  # about 1,000 tokens, as long as nothing is known of others
    async with stack(broker.url, queued_tokens_max=2500, creator_queued_tokens_max=1500) as served:
        served.double.script = script
        shares = served.gateway.guests.shares
        async with anyio.create_task_group() as tasks:
            for creator in ("ada", "grace"):
                tasks.start_soon(served.ask, {"messages": long}, {"x-creator-id": creator})
            with anyio.fail_after(5):
                while shares.queue.tokens < 2000:
                    await anyio.sleep(0.005)
            own = await served.ask({"messages": long}, {"x-creator-id": "ada"})
            all_of_them = await served.ask({"messages": long}, {"x-creator-id": "alan"})
            assert (own.status_code, all_of_them.status_code) == (429, 503)
            assert "(gateway.creator_queued_tokens_max)" in own.json()["error"]["message"]
            assert "(gateway.queued_tokens_max)" in all_of_them.json()["error"]["message"]
            assert int(own.headers["retry-after"]) >= 1
            assert int(all_of_them.headers["retry-after"]) >= 1
            tasks.start_soon(served.ask, None, {"x-creator-id": "alan"})
            with anyio.fail_after(5):
                while served.double.seen < 3:  # a short one fits
                    await anyio.sleep(0.005)
            begin.set()
            with anyio.fail_after(5):
                while shares.queue.tokens:
                    await anyio.sleep(0.005)
            assert served.gateway.admission.in_flight == 3, "their replies have begun, and not ended"
            end.set()
        assert shares.lengths.tokens(4000, referred=False) != 1000, "it has learnt from their usage"
