"""The DLQ keeper on a real broker: every request ends with a word to its receiver, and what is alive is left alone."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
import pytest

from pipeline.bus import acks, reading, streams
from pipeline.bus.connection import Bus, Message
from pipeline.bus.presence import Watcher
from pipeline.bus.puller import Delivery, Puller
from pipeline.bus.reading import Kept
from pipeline.cli import OPERATOR_EXIT
from pipeline.limits import EXPIRED_AFTER_S, KEEPER_ANSWER_S, KEEPER_ITEM_S
from pipeline.outside import monotonic_s
from pipeline.paths import JETSTREAM
from pipeline.protocol import dead_letters, subjects
from pipeline.protocol.dead_letters import Letter
from pipeline.protocol.intake import Rules
from pipeline.protocol.messages import Done, Failed, Fenced, Whole, encode
from pipeline.protocol.presence import Presences
from pipeline.protocol.records import Record, records_decoder
from pipeline.telemetry import metrics
from tests.bus.support import eventually, shard_of
from tests.nats_server import NatsServer
from tests.ports import free_port
from tests.workers.fleet import PROMPT, Caller, backlog, config_for, fleet
from workers import keeper as keeper_module
from workers.backlog import measure_backlog
from workers.identity import new_identity
from workers.keeper import Keeper

pytestmark = pytest.mark.anyio

STREAM = "REQUESTS_interactive"
RULES = Rules(reply_subjects=("_INBOX.>", "replies.>"), timeout_max_s={"interactive": 60.0, "batch": 600.0})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become tenths: what is proved is the order of things."""
    monkeypatch.setattr(dead_letters, "EXPIRED_AFTER_S", 0.5)
    monkeypatch.setattr(keeper_module, "SCAN_PERIOD_S", 0.1)
    monkeypatch.setattr(keeper_module, "KEEPER_ANSWER_S", 0.5)
    monkeypatch.setattr(keeper_module, "KEEPER_RETRY_S", 0.2)


def quick_streams(folder: Path) -> streams.Declared:
    """The project's declaration, but requests are delivered twice at most, and a dead keeper's items come back in a second."""
    shutil.copytree(JETSTREAM, folder)
    for file, fields in {
        f"{STREAM}.shards.consumer.json": {"max_deliver": 2, "ack_wait": 300_000_000},
        "ADVISORIES.keeper.consumer.json": {"ack_wait": 1_000_000_000},
    }.items():
        path = folder / file
        path.write_bytes(msgspec.json.encode({**msgspec.json.decode(path.read_bytes()), **fields}))
    return streams.declared(folder)


@pytest.fixture
async def bus(broker: NatsServer, tmp_path: Path) -> AsyncIterator[Bus]:
    """A connection to a broker with quick streams."""
    async with await Bus.connect(broker.url, "test") as bus:
        await streams.apply(bus, quick_streams(tmp_path / "jetstream"))
        yield bus


@asynccontextmanager
async def keeping(bus: Bus, name: str = "keeper-1") -> AsyncIterator[anyio.abc.TaskGroup]:
    """A keeper at work. Cancelling the group kills it."""
    presences = Presences()
    watcher = Watcher(bus, presences, monotonic_s)
    await watcher.start()
    async with anyio.create_task_group() as tasks:
        keeper = Keeper(bus, RULES, new_identity(name), presences)
        tasks.start_soon(keeper.run)
        await keeper.ready.wait()
        yield tasks
        tasks.cancel_scope.cancel()
    await watcher.stop()


async def asked(bus: Bus, request: str = "r-1", **fields: Any) -> Caller:
    """A request with a receiver that answers claims."""
    caller = Caller(bus, request)
    await caller.listen()
    await caller.publish("ada", **fields)
    return caller


async def told(caller: Caller, within_s: float = 5.0) -> Failed:
    """The error frame that ends it."""
    with anyio.fail_after(within_s):
        end = (await caller.reply()).end
    assert isinstance(end, Failed)
    return end


async def letters(bus: Bus) -> list[tuple[Letter, Kept]]:
    """What lies in the DLQ."""
    found, sequence = [], 1
    while kept := await reading.next_from(bus, "DLQ", sequence):
        found.append((dead_letters.read(kept.subject, kept.headers), kept))
        sequence = kept.sequence + 1
    return found


async def at_rest(bus: Bus, requests: int = 0) -> None:
    """No item is left, and so many requests."""
    with anyio.fail_after(5.0):
        while await backlog(bus, "ADVISORIES") or await backlog(bus) != requests:
            await anyio.sleep(0.02)


@asynccontextmanager
async def hopeless(bus: Bus) -> AsyncIterator[list[Delivery]]:
    """A worker that takes every request, and finishes none."""
    taken: list[Delivery] = []
    puller = Puller(bus, taken.append, lambda shard, count: puller.offer(shard, count, 0))
    await puller.start()
    puller.offer(shard_of("ada"), 8, 0)
    yield taken
    await puller.stop()


async def test_a_request_that_is_out_of_deliveries_is_answered_and_kept(bus: Bus) -> None:
    async with keeping(bus), hopeless(bus) as taken:
        caller = await asked(bus)
        end = await told(caller)
        assert (end.error.code, end.error.retryable) == ("reply_lost", True)
        assert "delivered 2 times" in end.error.message
        assert len(taken) == 2
        await at_rest(bus)
    ((letter, kept),) = await letters(bus)
    assert kept.subject == "dlq.exhausted.interactive"
    assert (letter.reason, letter.stream, letter.sequence, letter.deliveries) == ("exhausted", STREAM, 1, 2)
    assert letter.request is not None
    assert (letter.request.creator, letter.request.affinity) == ("ada", "ada")
    assert msgspec.msgpack.decode(kept.data)["id"] == "r-1"


async def test_what_aged_out_with_no_worker_alive_is_answered_and_kept(bus: Bus) -> None:
    async with keeping(bus):
        caller = await asked(bus, timeout_ms=300)
        end = await told(caller, within_s=0.3 + 0.5 + 1.5)
        assert (end.error.code, end.error.status) == ("deadline", 504)
        await at_rest(bus)
    ((letter, kept),) = await letters(bus)
    assert (kept.subject, letter.code) == ("dlq.expired.interactive", "deadline")


async def test_a_producer_without_claims_gets_its_error_in_its_own_encoding(bus: Bus) -> None:
    async with keeping(bus):
        heard = await json_listener(bus, "inbox-1")
        await eventually(lambda: len(heard()) == 1)
        assert (heard()[0]["kind"], heard()[0]["error"]["code"]) == ("error", "deadline")
        await at_rest(bus)


async def test_what_cannot_be_read_ages_out_with_its_class(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    await bus.store("requests.in.interactive.ada.ada", b"not json", msg_id="m", timeout_s=2.0)
    impatient = Rules(reply_subjects=RULES.reply_subjects, timeout_max_s={"interactive": 0.2, "batch": 600.0})
    monkeypatch.setattr(sys.modules[__name__], "RULES", impatient)
    async with keeping(bus):
        await eventually_async(lambda: backlog(bus, "DLQ"), 1)
        await at_rest(bus)
    ((letter, kept),) = await letters(bus)
    assert (letter.reason, kept.data) == ("expired", b"not json")


async def test_nothing_that_is_in_progress_or_in_time_is_touched(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, step_s=0.02)) as made, keeping(made.bus):
        whole = []

        async def one(number: int) -> None:
            whole.append(await made.ask(creator=f"c{number}", max_tokens=60, ignore_eos=True, timeout_ms=8000))

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(one, number)
        assert all(isinstance(reply.end, Done) and len(reply.ids) == 60 for reply in whole)
        await made.bus.store("requests.in.batch.zoe.zoe", encode({"messages": PROMPT}), msg_id="b", timeout_s=2.0)
        await at_rest(made.bus)
        assert await letters(made.bus) == [] or [letter.reason for letter, _ in await letters(made.bus)] == [
            "malformed"
        ]


async def test_a_worker_that_answers_for_its_own_deadline_is_not_disturbed(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url, step_s=0.05)) as made, keeping(made.bus):
        reply = await made.ask(max_tokens=500, ignore_eos=True, timeout_ms=700)
        assert isinstance(reply.end, Failed)
        assert reply.end.error.code == "deadline"
        assert reply.end.claim.startswith("decode-1")
        await at_rest(made.bus)
        assert await letters(made.bus) == []


STEPS = ("_claimed", "keep", "_told", "delete")


@pytest.mark.parametrize("step", STEPS)
async def test_a_keeper_that_dies_between_two_steps_loses_nothing(
    broker: NatsServer, bus: Bus, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """It dies right after the step: before its word of it could count."""
    died = anyio.Event()
    place: Any = {"keep": keeper_module, "delete": reading}.get(step, Keeper)
    real = getattr(place, step)

    async def dying(*args: Any) -> Any:
        await real(*args)
        died.set()
        await anyio.sleep_forever()

    caller = await asked(bus, timeout_ms=1)
    monkeypatch.setattr(place, step, dying)
    async with await Bus.connect(broker.url, "first") as first, keeping(first, "first") as tasks:
        with anyio.fail_after(5.0):
            await died.wait()
        tasks.cancel_scope.cancel()
    monkeypatch.setattr(place, step, real)
    async with keeping(bus, "second"):
        assert (await told(caller)).error.code == "deadline"
        await at_rest(bus)
    assert [letter.reason for letter, _ in await letters(bus)] == ["expired"]
    assert len(caller.holders) <= 2


async def test_two_keepers_act_once(broker: NatsServer, bus: Bus) -> None:
    async with await Bus.connect(broker.url, "other") as other, keeping(bus), keeping(other, "keeper-2"):
        listeners = [await json_listener(bus, f"p{number}") for number in range(30)]
        await eventually(lambda: all(heard() for heard in listeners))
        await at_rest(bus)
        await bus.barrier()
        await other.barrier()
    assert [len(heard()) for heard in listeners] == [1] * 30
    assert len(await letters(bus)) == 30


async def test_a_request_that_somebody_else_claims_is_left_alone_until_it_has_ended(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "KEEPER_ANSWER_S", 5.0)  # on busy cores an answer may take a while
    answers: list[Fenced | Whole] = [Fenced()]
    claims: list[bytes] = []

    def claimed(message: Message) -> None:
        claims.append(message.data)
        bus.post(message.reply, encode(answers[-1]))

    inbox = bus.inbox()
    await bus.subscribe(inbox, claimed)
    body = {"messages": PROMPT, "reply_to": inbox, "claim_at": inbox, "timeout_ms": 1}
    await bus.store("requests.in.interactive.ada.ada", encode(body), msg_id="m", timeout_s=2.0)
    async with keeping(bus):
        await eventually(lambda: len(claims) >= 3)
        assert await backlog(bus) == 1
        answers.append(Whole())
        await at_rest(bus)
    assert await letters(bus) == []


async def test_a_receiver_that_never_answers_is_given_up_after_some_tries(bus: Bus) -> None:
    heard: list[bytes] = []
    inbox = bus.inbox()
    await bus.subscribe(inbox, lambda message: heard.append(message.data))
    body = {"messages": PROMPT, "reply_to": inbox, "claim_at": inbox, "timeout_ms": 1}
    await bus.store("requests.in.interactive.ada.ada", encode(body), msg_id="m", timeout_s=2.0)
    async with keeping(bus):
        await eventually_async(lambda: backlog(bus, "DLQ"), 1)
        await at_rest(bus)
    assert len(heard) >= dead_letters.UNANSWERED_TRIES


async def test_the_requests_of_a_dead_gateway_are_kept_without_asking_it(bus: Bus) -> None:
    async with keeping(bus):
        await anyio.sleep(2.1)  # nobody is taken for gone before we could have heard of it
        await asked(bus, timeout_ms=1, receiver="gateway-x/1")
        await eventually_async(lambda: backlog(bus, "DLQ"), 1, within_s=1.5)
        await at_rest(bus)


async def test_of_a_terminated_request_its_place_is_kept(bus: Bus) -> None:
    async with keeping(bus), hopeless(bus) as taken:
        await asked(bus)
        await eventually(lambda: bool(taken))
        await acks.term(bus, taken[0].ack, "by hand")
        await eventually_async(lambda: backlog(bus, "DLQ"), 1)
        await at_rest(bus)
    ((letter, kept),) = await letters(bus)
    assert (kept.subject, letter.body, kept.data) == ("dlq.terminated.interactive", "missing", b"")
    assert (letter.sequence, "by hand" in letter.why) == (1, True)


async def test_an_item_of_a_stream_that_was_made_anew_hits_no_other_request(bus: Bus) -> None:
    await bus.store(dead_letters.expired_subject(STREAM, 1), b"", msg_id="stale", timeout_s=2.0)
    caller = await asked(bus)
    async with keeping(bus):
        await at_rest(bus, requests=1)
    assert caller.holders == []


async def test_accusing_a_keeper_restarts_nothing(bus: Bus) -> None:
    """A gateway may take a keeper for a dead worker: its claim names no delivery, so a NAK on it hits none."""
    async with hopeless(bus) as taken:
        await asked(bus)
        await eventually(lambda: len(taken) == 1)
        kept = await reading.get(bus, STREAM, 1)
        assert kept is not None
        bus.post(taken[0].ack, b"+WPI")
        for _ in range(5):
            bus.post(keeper_module._subject_of(keeper_module._as_delivered(STREAM, kept, 2)), b"-NAK")
        await bus.barrier()
        await anyio.sleep(0.1)
        assert len(taken) == 1


async def test_what_is_no_item_is_put_aside(bus: Bus) -> None:
    await bus.store("keeper.expired.REQUESTS_interactive.first", b"", msg_id="odd", timeout_s=2.0)
    async with keeping(bus):
        await at_rest(bus)


async def test_a_broker_that_restarts_costs_the_keeper_nothing(broker: NatsServer, bus: Bus) -> None:
    async with keeping(bus):
        caller = await asked(bus, timeout_ms=400)
        broker.restart()
        assert (await told(caller, within_s=8.0)).error.code == "deadline"
        with anyio.fail_after(8.0):
            await at_rest(bus)
    assert len(await letters(bus)) == 1


def test_a_keeper_is_a_process_that_starts_serves_and_ends(broker: NatsServer) -> None:
    environment = {**os.environ, "HEADRACE__NATS__URL": broker.url}

    def headrace(*arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "pipeline.cli", *arguments]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    early = headrace("keeper")
    assert "Run `headrace streams apply`." in early.communicate(timeout=30)[1]
    assert early.returncode == OPERATOR_EXIT
    assert headrace("streams", "apply").communicate(timeout=30)[1] == ""
    process = headrace("keeper", "--id", "k1", "--metrics-port", str(free_port()))
    assert process.stderr is not None
    assert any("keeping" in line for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_an_item_is_given_back_before_another_keeper_can_have_it() -> None:
    consumer = msgspec.json.decode((JETSTREAM / "ADVISORIES.keeper.consumer.json").read_bytes())
    assert 2 * KEEPER_ANSWER_S < KEEPER_ITEM_S < consumer["ack_wait"] / 1e9


@pytest.mark.parametrize("klass", subjects.CLASSES)
def test_what_aged_out_is_answered_before_the_broker_drops_it(klass: str) -> None:
    stream = msgspec.json.decode((JETSTREAM / f"REQUESTS_{klass}.stream.json").read_bytes())
    assert RULES.timeout_max_s[klass] + 30.0 <= stream["max_age"] / 1e9
    assert EXPIRED_AFTER_S + 3 * (KEEPER_ANSWER_S + 2.0) < 30.0


async def json_listener(bus: Bus, name: str) -> Callable[[], list[dict[str, Any]]]:
    """A producer that is only a subscription, with a request that no worker will take. What it has heard."""
    frames: list[dict[str, Any]] = []
    inbox = bus.inbox()
    await bus.subscribe(inbox, lambda message: frames.append(msgspec.json.decode(message.data)))
    body = msgspec.json.encode({"messages": PROMPT, "timeout_ms": 1, "id": name})
    subject = subjects.request_in("interactive", name, name)
    await bus.store(subject, body, msg_id=secrets.token_hex(8), timeout_s=2.0, headers={"Reply-To": inbox})
    return lambda: frames


async def eventually_async(value: Callable[[], Any], wanted: object, within_s: float = 5.0) -> None:
    """Poll an asynchronous value, within a bound."""
    with anyio.fail_after(within_s):
        while await value() != wanted:
            await anyio.sleep(0.02)


async def test_what_it_has_ended_can_be_traced_and_what_waits_is_measured(bus: Bus) -> None:
    records: list[Record] = []
    inbox = bus.inbox()
    await bus.subscribe(inbox, lambda message: records.extend(records_decoder.decode(message.data)))
    requests, tokens, oldest = (
        metric.labels(klass="interactive")
        for metric in (metrics.QUEUE_REQUESTS, metrics.QUEUE_TOKENS, metrics.QUEUE_OLDEST_SECONDS)
    )
    async with keeping(bus):
        caller = await asked(bus, "r-9", timeout_ms=300, request_id="mine")
        await eventually(lambda: requests._value.get() == 1 and oldest._value.get() > 0.1)
        assert tokens._value.get() > 100
        await told(caller)
        await at_rest(bus)
        await eventually(lambda: requests._value.get() == oldest._value.get() == 0)
        await bus.publish(subjects.trace("mine"), b"mine", inbox)
        await eventually(lambda: bool(records))
    [record] = records
    assert (record.role, record.process, record.request, record.outcome) == ("keeper", "keeper-1", "r-9", "expired")
    assert record.facts["reason"] == "expired"
    assert record.took_s > 0.3


async def test_shards_are_counted_by_whether_anybody_would_take_what_waits(bus: Bus) -> None:
    def shards() -> tuple[float, ...]:
        states = ("pulled", "quiet", "starved")
        return tuple(metrics.SHARDS.labels(klass="interactive", state=state)._value.get() for state in states)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(measure_backlog, bus, 0.1)
        await eventually(lambda: shards() == (0, 16, 0))
        await asked(bus, "r-1")
        await eventually(lambda: shards() == (0, 15, 1))
        assert metrics.QUEUE_WAITING.labels(klass="interactive")._value.get() == 1
        puller = Puller(bus, lambda _: None, lambda *_: None)
        await puller.start()
        puller.offer(shard_of("ada"), 2, 0)
        await eventually(lambda: shards() == (1, 15, 0))
        assert metrics.QUEUE_WAITING.labels(klass="interactive")._value.get() == 0
        await puller.stop()
        tasks.cancel_scope.cancel()
