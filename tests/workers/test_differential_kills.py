"""A decode worker is killed, and the reply that it wrote is held against the undisturbed one: equal, or an error that says so.

On the simulated engine, whose replies hang on the prompt and the seeds alone, so that each has one right answer.
"""

from typing import Any

import anyio
import pytest

from pipeline.protocol.credits import GrantState
from pipeline.protocol.messages import Done, Failed
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, Fleet, Reply, config_for, fleet, unpack_ids, until

pytestmark = pytest.mark.anyio

TOKENS = 40
TWO: dict[str, Any] = {"n": 2}
CASES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "seed": 7},
    {"temperature": 0, "stop": ["no such words"], "min_tokens": 5},
    TWO,
    TWO | {"temperature": 0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 0, "bad_words": ["never"]},
]
CONTINUED = CASES[:3]
"""What hangs on its tokens alone goes on at another worker. The others end with an error, once anything has been sent."""


def fields(case: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "ignore_eos": True, **case}


def choices(reply: Reply) -> list[tuple[list[int], str]]:
    """Ids and text of every choice, as the end of a reply says them."""
    assert isinstance(reply.end, Done), reply.end
    return [(unpack_ids(choice.ids), choice.text) for choice in reply.end.all_choices]


async def asked(made: Fleet, request: str, case: dict[str, Any]) -> Caller:
    caller = Caller(made.bus, request)
    await caller.listen()
    await caller.publish("alice", **fields(case))
    return caller


async def another_decode(made: Fleet) -> None:
    """The worker dies, and one that has seen nothing takes its place."""
    made.kill("decode-1")
    await made.add("decode", "decode-2")


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_reply_whose_worker_dies_in_the_middle_is_the_same_or_ends_with_an_error(
    broker: NatsServer, case: dict[str, Any]
) -> None:
    async with fleet(config_for(broker.url, step_s=0.01)) as made:
        undisturbed = choices(await made.ask(**fields(case)))
        caller = await asked(made, "killed", case)
        await until(lambda: len(caller.receiver.ids) >= 6)
        await another_decode(made)
        with anyio.fail_after(15):
            reply = await caller.reply()
        if case in CONTINUED:
            assert choices(reply) == undisturbed
        else:
            assert isinstance(reply.end, Failed)
            assert (reply.end.error.code, reply.end.error.retryable) == ("reply_lost", True)
            assert reply.end.error.param in case
            assert f"after {len(reply.ids)} tokens" in reply.end.error.message
            assert undisturbed[0][1].startswith(reply.text), "what had come was right"
            assert len(reply.ids) < TOKENS * len(undisturbed)


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_reply_whose_worker_dies_before_anything_was_sent_starts_again_and_is_the_same(
    broker: NatsServer, case: dict[str, Any]
) -> None:
    async with fleet(config_for(broker.url)) as made:
        undisturbed = choices(await made.ask(**fields(case)))
        made.workers["decode-1"].engine.pause()
        caller = await asked(made, "killed", case)
        await until(lambda: made.decode("decode-1").ledger.count(GrantState.CONSUMED) == 1)
        await until(lambda: len(caller.holders) == 2)
        await another_decode(made)
        with anyio.fail_after(15):
            reply = await caller.reply()
        assert choices(reply) == undisturbed
        assert len(caller.holders) > 2, "another worker has claimed it"
