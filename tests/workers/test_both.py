"""One worker with both loops over one engine: what stays in it, whose its blocks are, and how it changes its role under load."""

from itertools import pairwise
from typing import Any

import anyio
import msgspec
import pytest

from pipeline.config import Both, Config
from pipeline.errors import OperatorError
from pipeline.limits import DRAIN_S
from pipeline.protocol import subjects
from pipeline.protocol.arrangement import Role
from pipeline.protocol.control import Order, Standing, standing_decoder
from pipeline.protocol.messages import Done, encode
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, Fleet, config_for, fleet, nothing_left, until

pytestmark = pytest.mark.anyio

BLOCK = 32


def config(url: str, *, max_model_len: int = 1024, **simulated: Any) -> Config:
    """Room for a few requests in each engine: 2 prefills of 32 blocks beside the replies."""
    made = config_for(url, **simulated)
    model = msgspec.structs.replace(made.model, max_model_len=max_model_len)
    return msgspec.structs.replace(made, model=model, both=Both(slots=16, prefill_slots=2))


async def turn(made: Fleet, worker: str, role: Role) -> Standing:
    asked = encode(Order("turn", role))
    return standing_decoder.decode(await made.bus.request(subjects.control(worker), asked, 5.0))


async def turned(made: Fleet, worker: str, role: Role) -> None:
    """Returns when all of the change is done."""
    standing = await turn(made, worker, role)
    assert not standing.refused, standing.refused
    await until(lambda: not made.workers[worker].loops.turning, within_s=20.0)


def sound(made: Fleet) -> None:
    """No block is promised twice or lost, and no decode was ever preempted."""
    for running in made.workers.values():
        assert running.engine.usage().preemptions == 0
        if (decode := running.loops.decode) is not None:
            decode.ledger.check()
            assert decode.ledger.disagreements == 0
            assert decode.ledger.blocks + decode.ledger.withheld == running.engine.info.kv_blocks


async def test_a_request_whose_halves_fall_on_one_worker_needs_no_transfer(broker: NatsServer) -> None:
    async with fleet(config(broker.url), prefill=0, decode=0, both=1) as made:
        reply = await made.ask(max_tokens=8)
        assert isinstance(reply.end, Done)
        usage = reply.end.usage
        assert (usage.prefill, usage.decode) == ("both-1", "both-1")
        assert (usage.prefill_generated_tokens, usage.cached_tokens) == (0, 0), (
            "one request to the engine, which reads it once"
        )
        again = (await made.ask(max_tokens=8)).end
        assert isinstance(again, Done)
        found = again.usage.prompt_tokens // BLOCK * BLOCK
        assert (again.usage.cached_tokens, again.usage.hbm_tokens) == (found, found)
        sound(made)


async def test_what_decode_has_read_in_its_own_engine_is_stored_for_all(broker: NatsServer) -> None:
    async with fleet(config(broker.url), prefill=0, decode=0, both=2) as made:
        first = (await made.ask(max_tokens=8)).end
        assert isinstance(first, Done)
        assert first.usage.prefill_generated_tokens == 0
        await turned(made, first.usage.decode, "decode")
        elsewhere = (await made.ask(max_tokens=8)).end
        assert isinstance(elsewhere, Done)
        assert elsewhere.usage.prefill != first.usage.prefill
        assert elsewhere.usage.cached_tokens == elsewhere.usage.prompt_tokens // BLOCK * BLOCK
        assert elsewhere.usage.hbm_tokens == 0


async def test_a_prompt_that_decode_reads_has_a_slot_until_it_is_read(broker: NatsServer) -> None:
    slow = config(broker.url, prefill_tokens_per_s=400.0, step_s=0.005)
    async with fleet(slow, prefill=0, decode=0, both=1) as made:
        prefill, decode = made.prefill("both-1"), made.decode("both-1")
        asked = await many(made, 6, max_tokens=60)
        most = 0
        while not all(caller.frames for caller in asked):
            most = max(most, sum(job.times.first_s is None for job in decode._jobs._jobs.values()))
            assert prefill.slots.busy <= 2
            await anyio.sleep(0.005)
        assert most == 2, "the others wait where any worker can take them"
        ends = await all_whole(asked)
        assert {end.usage.prefill_generated_tokens for end in ends} == {0}
        await until(lambda: prefill.slots.busy == 0 and prefill.queued_tokens == 0)
        sound(made)


async def test_a_prompt_that_nobody_wants_any_more_gives_its_slot_back_while_decode_reads_it(
    broker: NatsServer,
) -> None:
    slow = config(broker.url, prefill_tokens_per_s=50.0)
    async with fleet(slow, prefill=0, decode=0, both=1) as made:
        prefill = made.prefill("both-1")
        asked = await many(made, 2)
        await until(lambda: made.decode("both-1").under_way == 2 and prefill.under_way == 0)
        assert prefill.slots.busy == 2
        for caller in asked:
            caller.leave()
        await until(lambda: prefill.slots.busy == 0 and prefill.queued_tokens == 0)
        sound(made)


async def test_batch_is_read_by_prefill_in_pieces_also_where_it_stays(broker: NatsServer) -> None:
    async with fleet(config(broker.url), prefill=0, decode=0, both=1) as made:
        end = (await made.ask(klass="batch", max_tokens=8)).end
        assert isinstance(end, Done)
        assert end.usage.prefill == end.usage.decode
        assert end.usage.prefill_generated_tokens >= 1


async def test_a_request_stays_at_home_where_there_is_room_and_leaves_where_there_is_none(broker: NatsServer) -> None:
    async with fleet(config(broker.url, kv_blocks=160), prefill=0, decode=0, both=2) as made:
        asked = await many(made, 40, max_tokens=60)
        ends = await all_whole(asked)
        at_home = sum(end.usage.prefill == end.usage.decode for end in ends)
        assert at_home >= 10, "most that finds room"
        sound(made)


async def test_what_its_worker_has_just_ended_drives_no_request_away(broker: NatsServer) -> None:
    """What it said of itself a moment ago counts the blocks of the last one, which are free by now."""
    async with fleet(config(broker.url, kv_blocks=160), prefill=0, decode=0, both=2) as made:
        for number in range(12):
            long = [{"role": "user", "content": "Tell me about the sea. " * (10 + 40 * (number % 2))}]
            end = (await made.ask(messages=long, max_tokens=40)).end
            assert isinstance(end, Done)
            assert end.usage.prefill == end.usage.decode


async def test_prefills_have_their_own_share_of_the_blocks(broker: NatsServer) -> None:
    async with fleet(config(broker.url), prefill=0, decode=0, both=1) as made:
        ledger = made.decode("both-1").ledger
        assert (ledger.withheld, ledger.blocks) == (64, 448)
        await turned(made, "both-1", "decode")
        assert (ledger.withheld, ledger.blocks) == (0, 512)
        await turned(made, "both-1", "prefill")
        assert made.prefill("both-1").slots.capacity == 4
        await turned(made, "both-1", "both")
        assert (ledger.withheld, made.prefill("both-1").slots.capacity) == (64, 2)
        await all_whole(await many(made, 12))
        sound(made)


async def test_an_engine_that_has_no_room_for_both_does_not_start(broker: NatsServer) -> None:
    small = config(broker.url, kv_blocks=64)
    with pytest.RaisesGroup(OperatorError, flatten_subgroups=True):
        async with fleet(small, prefill=0, decode=0, both=1):
            pass


async def test_a_worker_built_for_one_role_refuses_another(broker: NatsServer) -> None:
    async with fleet(config(broker.url)) as made:
        assert "started for prefill alone" in (await turn(made, "prefill-1", "decode")).refused
        assert isinstance((await made.ask()).end, Done)


async def many(made: Fleet, count: int, **fields: Any) -> list[Caller]:
    asked = [Caller(made.bus, f"r{number}-{len(made.workers)}-{id(fields)}") for number in range(count)]
    for number, caller in enumerate(asked):
        await caller.listen()
        await caller.publish(f"creator-{number}", ignore_eos=True, **{"max_tokens": 20, **fields})
    return asked


async def all_whole(asked: list[Caller]) -> list[Done]:
    with anyio.fail_after(30.0):
        ends = [(await caller.reply()).end for caller in asked]
    whole = [end for end in ends if isinstance(end, Done)]
    assert len(whole) == len(asked), [end for end in ends if not isinstance(end, Done)]
    return whole


WAYS: list[list[Role]] = [
    ["prefill", "decode", "both"],
    ["decode", "prefill", "both"],
]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
async def test_a_change_of_role_under_load_loses_nothing(broker: NatsServer, way: list[Role]) -> None:
    timing: dict[str, Any] = {"step_s": 0.004, "prefill_overhead_s": 0.01, "kv_blocks": 200}
    async with fleet(config(broker.url, **timing), prefill=0, decode=0, both=3) as made:
        asked: list[Caller] = []

        async def load() -> None:
            for number in range(150):
                caller = Caller(made.bus, f"r{number}")
                await caller.listen()
                await caller.publish(f"creator-{number % 40}", max_tokens=25, ignore_eos=True)
                asked.append(caller)
                await anyio.sleep(0.015)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await until(lambda: len(asked) > 20)
            for before, role in pairwise(["both", *way]):
                assert before != role
                await turned(made, "both-1", role)
                await anyio.sleep(0.1)
        ends = await all_whole(asked)
        assert all(len(caller.receiver.ids) == 25 for caller in asked)
        assert {"both-2", "both-3"} <= {end.usage.decode for end in ends}
        await until(lambda: all(running.loops.under_way == 0 for running in made.workers.values()))
        await nothing_left(made.bus)
        sound(made)


async def test_the_only_worker_ends_what_it_has_read_before_it_goes(broker: NatsServer) -> None:
    """Nobody else would promise room for it, and it would wait until the bound of the drain."""
    slow = config(broker.url, prefill_overhead_s=0.2, step_s=0.01)
    async with fleet(slow, prefill=0, decode=0, both=1) as made, anyio.create_task_group() as tasks:
        asked = await many(made, 1, klass="batch")  # which prefill reads
        await until(lambda: made.prefill("both-1").under_way == 1)
        began_s = anyio.current_time()
        made.workers["both-1"].leave(tasks)
        await all_whole(asked)
        assert anyio.current_time() - began_s < DRAIN_S / 4
        await until(lambda: made.workers["both-1"].scope.cancel_called, within_s=DRAIN_S / 2)


async def test_who_has_become_something_else_says_nothing_of_its_former_loop(broker: NatsServer) -> None:
    async with fleet(config(broker.url), prefill=0, decode=1, both=1) as made:
        await turned(made, "both-1", "prefill")
        presences = made.prefill("both-1").presences
        now_s = made.prefill("both-1").clock
        await until(lambda: [peer.id for peer in presences.live("decode", now_s())] == ["decode-1"])
        (said,) = presences.live("prefill", now_s())
        assert (said.serves_as, said.built_for) == ("prefill", "both")
        end = (await made.ask()).end
        assert isinstance(end, Done)
        assert (end.usage.prefill, end.usage.decode) == ("both-1", "decode-1")
