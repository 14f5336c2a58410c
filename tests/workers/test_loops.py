"""The two loops together, on a real broker with simulated engines: the way of one request, and what may not happen on it."""

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any

import anyio
import msgspec
import pytest

from pipeline.bus.connection import Bus, Message
from pipeline.config import Decode, Requests
from pipeline.limits import PRESENCE_PERIOD_S
from pipeline.protocol import placement, subjects
from pipeline.protocol.credits import GrantState
from pipeline.protocol.messages import Audit, Done, Failed, account_decoder, encode
from pipeline.protocol.subjects import Shard
from tests.nats_server import NatsServer
from tests.workers.fleet import PROMPT, Caller, Fleet, backlog, config_for, fleet, unpack_ids, until
from workers.engines.simulated import SimulatedEngine
from workers.engines.simulated.mailbox import Mailbox
from workers.engines.simulated.model import Job

pytestmark = pytest.mark.anyio


async def at_rest(made: Fleet) -> None:
    """Nothing is left anywhere: no message, no slot, no block, no lease."""
    with anyio.fail_after(5.0):
        while await backlog(made.bus):
            await anyio.sleep(0.01)
    for name in made.workers:
        if name.startswith("decode"):
            book = made.decode(name).ledger
            await until(lambda book=book: book.free == book.blocks)
            book.check()
        else:
            slots = made.prefill(name).slots
            await until(lambda slots=slots: slots.busy == 0)


async def test_a_request_is_prefilled_handed_over_decoded_and_acked(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        reply = await made.ask(max_tokens=10, ignore_eos=True)
        assert isinstance(reply.end, Done)
        usage = reply.end.usage
        assert (usage.completion_tokens, len(reply.ids), reply.end.finish_reason) == (10, 10, "length")
        assert (usage.prefill, usage.decode, usage.prefill_generated_tokens) == ("prefill-1", "decode-1", 1)
        full = usage.prompt_tokens // 32 * 32
        assert usage.decode_cached_tokens == (usage.prompt_tokens - 1 if full == usage.prompt_tokens else full)
        assert reply.text
        await at_rest(made)


async def test_the_second_request_of_a_creator_finds_its_prefix_cached(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        first, second = await made.ask(max_tokens=4), await made.ask(max_tokens=4)
        other = await made.ask(creator="bob", max_tokens=4)
        assert isinstance(first.end, Done)
        assert isinstance(second.end, Done)
        assert isinstance(other.end, Done)
        assert first.end.usage.cached_tokens == 0
        assert second.end.usage.cached_tokens >= 64
        assert other.end.usage.cached_tokens == 0, "another creator shares nothing"


async def test_many_requests_of_many_creators_all_end_whole_and_leave_nothing(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, slots=3), prefill=2, decode=2) as made:
        replies = []

        async def one(number: int) -> None:
            replies.append(await made.ask(creator=f"c{number % 7}", max_tokens=8, ignore_eos=True))

        async with anyio.create_task_group() as tasks:
            for number in range(60):
                tasks.start_soon(one, number)
        assert all(isinstance(reply.end, Done) and len(reply.ids) == 8 for reply in replies)
        await at_rest(made)


async def test_ranks_are_found_anew_only_when_somebody_comes_or_goes(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a large fleet that is tens of milliseconds, in which the loop stands still."""
    found: list[str] = []
    ranks = placement.ranks

    def counted(me: str, shards: Iterable[Shard], workers: Mapping[str, float]) -> dict[Shard, int]:
        found.append(me)
        return ranks(me, shards, workers)

    monkeypatch.setattr(placement, "ranks", counted)
    async with fleet(config_for(broker.url)) as made:
        await until(lambda: len(made.prefill()._ranks) == 32)
        await anyio.sleep(4 * PRESENCE_PERIOD_S)
        assert found == ["prefill-1"]
        await made.add("prefill", "prefill-2")
        await until(lambda: 0 < sum(rank == 0 for rank in made.prefill()._ranks.values()) < 32)
        assert found.count("prefill-1") == 2


async def test_without_max_tokens_the_default_applies(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, default_max_tokens=5)) as made:
        assert len((await made.ask(ignore_eos=True)).ids) == 5


async def test_a_full_decode_worker_makes_requests_wait_and_loses_none(broker: NatsServer) -> None:
    # 30 blocks, a reserve of 3, about 6 blocks a request: four at a time.
    async with fleet(config_for(broker.url, kv_blocks=30, slots=8)) as made:

        async def one(number: int) -> None:
            assert isinstance((await made.ask(creator=f"c{number}", max_tokens=20, ignore_eos=True)).end, Done)

        async with anyio.create_task_group() as tasks:
            for number in range(24):
                tasks.start_soon(one, number)
        assert made.workers["decode-1"].engine.usage().preemptions == 0
        await at_rest(made)


class Counting(SimulatedEngine):
    """Remembers the most sequences that it has had at a time, running and queued."""

    most = 0

    def _submit(self, *jobs: Job) -> Mailbox:
        mailbox = super()._submit(*jobs)
        self.most = max(self.most, len(self._mailboxes))
        return mailbox


async def test_no_more_sequences_queue_inside_decode_than_its_seats_and_a_quarter(broker: NatsServer) -> None:
    config = msgspec.structs.replace(config_for(broker.url, slots=16, step_s=0.002), decode=Decode(slots=8))
    async with fleet(config, prefill=2, engine=Counting) as made:

        async def one(number: int) -> None:
            reply = await made.ask(creator=f"c{number}", n=4, max_tokens=20, ignore_eos=True)
            assert isinstance(reply.end, Done)
            assert [len(unpack_ids(choice.ids)) for choice in reply.end.choices] == [20] * 4

        async with anyio.create_task_group() as tasks:
            for number in range(24):
                tasks.start_soon(one, number)
        decode = made.workers["decode-1"].engine
        assert isinstance(decode, Counting)
        assert decode.most == 8, "two requests of four fit, and a third would queue"
        await at_rest(made)


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"messages": []}, "messages", 400),
        ({"model": "gpt-5"}, "model", 404),
        ({"max_tokens": 100_000}, "max_tokens", 400),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages", 400),
        ({"temperature": -1}, "temperature", 400),
    ],
)
async def test_a_bad_request_gets_an_error_that_names_the_field_and_a_copy_is_kept(
    broker: NatsServer, fields: dict[str, Any], param: str, status: int
) -> None:
    async with fleet(config_for(broker.url)) as made:
        reply = await made.ask(**fields)
        assert isinstance(reply.end, Failed)
        assert (reply.end.error.param, reply.end.error.status) == (param, status)
        assert await backlog(made.bus, "DLQ") == 1
        await at_rest(made)


async def test_an_expired_request_costs_no_prefill(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url), prefill=0) as made:
        caller = Caller(made.bus, "late")
        await caller.listen()
        await caller.publish("alice", timeout_ms=1)
        await anyio.sleep(0.01)
        worker = await made.add("prefill", "prefill-1")
        worker.engine.die("An expired request reached the engine.")
        reply = await caller.reply()
        assert isinstance(reply.end, Failed)
        assert reply.end.error.code == "deadline"
        await at_rest(made)


async def test_a_failing_prefill_is_told_to_the_receiver(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        made.workers["prefill-1"].engine.fail_next("prefill")
        reply = await made.ask()
        assert isinstance(reply.end, Failed)
        assert (reply.end.error.code, reply.end.error.retryable) == ("engine_failed", True)
        await at_rest(made)


async def test_a_producer_with_json_and_no_claim_subject_gets_json_frames(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made, await Bus.connect(broker.url, "producer") as producer:
        frames: list[dict[str, object]] = []

        def got(message: Message) -> None:
            frames.append(json.loads(message.data))

        inbox = producer.inbox()
        await producer.subscribe(inbox, got)
        body = {"messages": PROMPT, "max_tokens": 6, "ignore_eos": True}
        await producer.store(
            "requests.in.interactive.alice.alice",
            msgspec.json.encode(body),
            msg_id="m1",
            timeout_s=2.0,
            headers={"Reply-To": inbox},
        )
        await until(lambda: bool(frames) and frames[-1]["kind"] == "done")
        assert [frame["kind"] for frame in frames] == ["tokens"] * 6 + ["done"]
        assert "".join(str(frame["text"]) for frame in frames[:-1]) == frames[-1]["text"]
        assert frames[0]["request"] == "REQUESTS_interactive-1"
        await at_rest(made)


async def test_a_malformed_message_without_an_address_is_kept_and_not_delivered_again(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        await made.bus.store("requests.in.interactive.alice.alice", b"not json", msg_id="m", timeout_s=2.0)
        await at_rest(made)
        assert await backlog(made.bus, "DLQ") == 1


async def test_a_drained_worker_finishes_what_runs_and_leaves_the_rest_to_others(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, slots=2, step_s=0.005), prefill=2) as made:
        replies = []

        async def one(number: int) -> None:
            replies.append(await made.ask(creator=f"c{number}", max_tokens=20, ignore_eos=True))

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(one, number)
            await until(lambda: made.prefill("prefill-1").slots.busy > 0)
            with anyio.fail_after(5.0):
                await made.prefill("prefill-1").drain()
            assert made.prefill("prefill-1").slots.busy == 0
        assert all(isinstance(reply.end, Done) for reply in replies)
        await at_rest(made)


@pytest.mark.parametrize("creator", ["a", "b", "c"])
async def test_a_reply_continues_after_the_last_token_delivered_when_its_decode_worker_dies(
    broker: NatsServer, creator: str
) -> None:
    async with fleet(config_for(broker.url, step_s=0.01), decode=1) as made:
        whole = await made.ask(creator=creator, max_tokens=40, ignore_eos=True)
        caller = Caller(made.bus, "survivor")
        await caller.listen()
        await caller.publish(creator, max_tokens=40, ignore_eos=True)
        await until(lambda: len(caller.receiver.ids) >= 7)
        delivered = len(caller.receiver.ids)
        made.kill("decode-1")
        await made.add("decode", "decode-2")
        with anyio.fail_after(10.0):
            reply = await caller.reply()
        assert isinstance(reply.end, Done)
        assert isinstance(whole.end, Done)
        assert (reply.ids, reply.text) == (whole.ids, whole.text)
        assert (reply.end.text, reply.end.usage.prompt_tokens) == (whole.end.text, whole.end.usage.prompt_tokens)
        assert reply.end.usage.completion_tokens == 40
        assert reply.frames < 80, f"the first {delivered} tokens were not made again"
        assert len(caller.holders) >= 4
        await at_rest(made)


async def test_a_seeded_reply_that_was_cut_ends_with_an_error_that_says_so(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, step_s=0.01), decode=1) as made:
        caller = Caller(made.bus, "seeded")
        await caller.listen()
        await caller.publish("a", max_tokens=40, ignore_eos=True, seed=7, temperature=0.5)
        await until(lambda: len(caller.receiver.ids) >= 3)
        made.kill("decode-1")
        await made.add("decode", "decode-2")
        with anyio.fail_after(10.0):
            reply = await caller.reply()
        assert isinstance(reply.end, Failed)
        assert (reply.end.error.code, reply.end.error.param) == ("reply_lost", "seed")
        await at_rest(made)


async def test_a_reply_for_the_replies_stream_is_stored_whole_and_once(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        body = {"messages": PROMPT, "max_tokens": 6, "ignore_eos": True, "reply_to": "replies.crm.r-1"}
        await made.bus.store("requests.in.interactive.a.a", msgspec.json.encode(body), msg_id="m1", timeout_s=2.0)
        await at_rest(made)
        assert await backlog(made.bus, "REPLIES") == 1
        asked = msgspec.json.encode({"last_by_subj": "replies.crm.r-1"})
        stored = msgspec.json.decode(await made.bus.request("$JS.API.STREAM.MSG.GET.REPLIES", asked, 2.0))
        frame = msgspec.json.decode(base64.b64decode(stored["message"]["data"]))
        assert (frame["kind"], len(frame["ids"]), frame["finish_reason"]) == ("done", 6, "length")


async def test_a_request_that_kills_its_workers_is_poison_and_is_kept(broker: NatsServer) -> None:
    config = msgspec.structs.replace(
        config_for(broker.url), requests=Requests(default_max_tokens=12, starts_max=2, reply_subjects=("_INBOX.>",))
    )
    async with fleet(config, prefill=0) as made:
        caller = Caller(made.bus, "poison")
        await caller.listen()
        await caller.publish("alice")
        for number in range(3):
            worker = await made.add("prefill", f"victim-{number}")
            worker.engine.pause()
            await until(lambda n=number: len(caller.holders) > n)
            await until(lambda w=worker: w.engine.usage().running + w.engine.usage().waiting > 0)
            made.kill(f"victim-{number}")
        await made.add("prefill", "prefill-1")
        with anyio.fail_after(10.0):
            reply = await caller.reply()
        assert isinstance(reply.end, Failed)
        assert reply.end.error.code == "poison"
        assert await backlog(made.bus, "DLQ") == 1
        await at_rest(made)
        assert await backlog(made.bus, "KV_starts") == 2, "those of the dead; the living have taken theirs back"


async def test_the_requests_of_a_gateway_that_is_gone_are_dropped(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, step_s=0.02)) as made:
        caller = Caller(made.bus, "orphan")
        await caller.listen()
        await caller.publish("alice", max_tokens=2000, ignore_eos=True, receiver="gateway-x/1")
        await until(lambda: caller.frames > 2)
        await until(lambda: made.decode().ledger.count(GrantState.CONSUMED) == 0, within_s=4.0)
        await at_rest(made)


async def test_a_decode_worker_opens_its_books(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        await made.ask(max_tokens=4)
        account = account_decoder.decode(await made.bus.request(subjects.credit("decode-1"), encode(Audit()), 1.0))
        assert (account.granted, account.disagreements, account.preemptions) == (1, 0, 0)
        assert account.decode == "decode-1"
        await at_rest(made)
