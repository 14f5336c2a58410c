"""A handoff into silence: the claim is taken back, or it has been taken over; either way the reply is made once."""

import pytest

from pipeline.bus.connection import Message
from pipeline.protocol import subjects
from pipeline.protocol.messages import Done, handoff_answer_decoder
from pipeline.protocol.subjects import parse_ack
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, Fleet, Reply, config_for, fleet, until
from workers import decode_job
from workers.decode import DecodeWorker
from workers.decode_job import DecodeJob

pytestmark = pytest.mark.anyio


class Doom:
    """Kills the first decode worker that comes to it."""

    def __init__(self) -> None:
        self.fleet: Fleet | None = None
        self.victim = ""

    def takes(self, worker: str) -> bool:
        """Whether this worker has just been killed."""
        if self.victim:
            return worker == self.victim
        assert self.fleet is not None
        self.victim = worker
        self.fleet.kill(worker)
        return True


async def served_by_two(url: str, doom: Doom) -> tuple[Caller, Reply]:
    async with fleet(config_for(url), decode=2) as doom.fleet:
        caller = Caller(doom.fleet.bus, "r1")
        await caller.listen()
        await caller.publish("alice")
        return caller, await caller.reply()


def delivered(caller: Caller) -> int:
    last = caller.receiver.arbiter.last
    assert last is not None
    return parse_ack(last.ack).delivered


async def test_what_a_decode_worker_had_not_taken_over_goes_to_another_without_a_new_delivery(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, doom = DecodeWorker._handoff, Doom()

    def handoff(self: DecodeWorker, message: Message) -> None:
        if not doom.takes(self.me.id):
            handle(self, message)

    monkeypatch.setattr(DecodeWorker, "_handoff", handoff)
    caller, reply = await served_by_two(broker.url, doom)
    assert isinstance(reply.end, Done)
    survivor = "decode-2" if doom.victim == "decode-1" else "decode-1"
    assert caller.holders == ["holder.prefill-1", "holder.prefill-1", f"holder.{survivor}"]
    assert delivered(caller) == 1


async def test_what_it_had_taken_over_comes_back_to_the_queue(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, doom = DecodeJob._accept, Doom()

    async def accepted(self: DecodeJob) -> None:
        if not doom.takes(self.desk.me.id):
            await accept(self)

    monkeypatch.setattr(DecodeJob, "_accept", accepted)
    caller, reply = await served_by_two(broker.url, doom)
    assert isinstance(reply.end, Done)
    assert caller.holders[:3] == ["holder.prefill-1", f"holder.{doom.victim}", "holder.prefill-1"]
    assert delivered(caller) == 2


async def test_a_takeover_that_nobody_answers_gives_its_blocks_back_when_its_offer_has_ended(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not at the deadline: a producer that says nothing of its life may have died with ten minutes left."""
    monkeypatch.setattr(decode_job, "HANDOFF_PATIENCE_S", 0.3)
    async with fleet(config_for(broker.url)) as made:
        caller = Caller(made.bus, "r1")
        caller.hears_takeovers = False
        await caller.listen()
        await caller.publish("alice")
        ledger = made.decode().ledger
        await until(lambda: not ledger.idle)
        await until(lambda: ledger.totals.released == 1)
        assert caller.takeovers_unheard
        caller.hears_takeovers = True
        assert isinstance((await caller.reply()).end, Done)


async def test_a_handoff_that_was_refused_is_refused_again_when_it_is_repeated(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first refusal may have been lost: taken for accepted, nobody would work on it until its lease has ended."""
    monkeypatch.setattr(decode_job, "HANDOFF_PATIENCE_S", 0.3)
    async with fleet(config_for(broker.url)) as made:
        offers: list[Message] = []
        await made.bus.subscribe(subjects.handoff("decode-1"), offers.append)
        caller = Caller(made.bus, "r1")
        caller.hears_takeovers = False
        await caller.listen()
        await caller.publish("alice")
        await until(lambda: made.decode().ledger.totals.released == 1)
        answer = await made.bus.request(subjects.handoff("decode-1"), offers[0].data, 1.0)
        assert handoff_answer_decoder.decode(answer).state == "refused"
