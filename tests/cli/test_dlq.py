"""`headrace dlq` on a real broker: what lies there is shown, replayed exactly once, or dropped."""

import asyncio
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
import pytest
from typer.testing import CliRunner, Result

from pipeline.bus import reading, streams
from pipeline.bus.connection import Bus
from pipeline.bus.reading import Kept
from pipeline.cli import tables
from pipeline.cli.main import program
from pipeline.errors import InvalidField, OperatorError, Poisoned, ReplyError
from pipeline.limits import MESSAGE_BYTES_MAX
from pipeline.paths import JETSTREAM
from pipeline.protocol import dead_letters
from pipeline.protocol.dead_letters import Letter
from pipeline.protocol.messages import encode
from pipeline.protocol.subjects import AckSubject
from tests.nats_server import NatsServer
from tests.workers.fleet import PROMPT, backlog, config_for, fleet
from workers.dead_letters import keep

T = TypeVar("T")
STREAM = "REQUESTS_interactive"
BODY = {"messages": PROMPT, "max_tokens": 4, "reply_to": "_INBOX.gone", "claim_at": "_INBOX.gone", "receiver": "g/1"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats")).start()
    yield server
    server.kill9()


class Dlq:
    """A broker with streams, and the command line on it."""

    def __init__(self, url: str, config: Path) -> None:
        self.url, self._config = url, config
        config.write_text(f'[nats]\nurl = "{url}"\n', "utf-8")
        self._sequence = 0

    def on_bus(self, act: Callable[[Bus], Awaitable[T]]) -> T:
        async def connected() -> T:
            async with await Bus.connect(self.url, "test") as bus:
                return await act(bus)

        return asyncio.run(connected())

    async def empty(self, bus: Bus) -> None:
        await streams.apply(bus, streams.declared(JETSTREAM))
        for stream in ("DLQ", STREAM):
            await bus.request(f"$JS.API.STREAM.PURGE.{stream}", b"", 2.0)

    def put(
        self,
        data: bytes = encode(BODY),
        *,
        reason: str = "malformed",
        creator: str = "ada",
        error: ReplyError | None = None,
        headers: dict[str, str] | None = None,
    ) -> int:
        """A dead letter of a request of its own; its sequence in the DLQ."""
        letter = self.letter(reason, creator, error or InvalidField("It is wrong.", param="messages"))

        async def put(bus: Bus) -> int:
            await keep(bus, letter, data, headers)
            return (await reading.state(bus, "DLQ")).last

        return self.on_bus(put)

    def letter(self, reason: str, creator: str, error: ReplyError) -> Letter:
        self._sequence += 1
        ack = AckSubject(STREAM, "s1", 3, self._sequence, 1_750_000_000.0 + secrets.randbelow(10**6), 0)
        return dead_letters.write(reason, f"requests.shard.1.interactive.{creator}~0.{creator}", ack, error)

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(program(), ["dlq", *arguments, "--config", str(self._config)])

    def said(self, *arguments: str) -> Any:
        """What it prints in JSON."""
        return json.loads(self.run(*arguments, "--json").stdout)

    def requests(self) -> list[Kept]:
        """What lies in the class's stream."""

        async def all_of_them(bus: Bus) -> list[Kept]:
            found, sequence = [], 1
            while kept := await reading.next_from(bus, STREAM, sequence):
                found.append(kept)
                sequence = kept.sequence + 1
            return found

        return self.on_bus(all_of_them)


@pytest.fixture
def dlq(server: NatsServer, tmp_path: Path) -> Dlq:
    made = Dlq(server.url, tmp_path / "headrace.toml")
    made.on_bus(made.empty)
    return made


def test_the_list_says_what_died_of_what(dlq: Dlq) -> None:
    first, second = dlq.put(), dlq.put(reason="poison", creator="bob", error=Poisoned("3 workers have died with it."))
    shown = dlq.run("list")
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["SEQUENCE", "REASON", "CLASS", "CREATOR", "AGE", "BYTES", "WHY"]
    assert lines[1].split()[:4] == [str(first), "malformed", "interactive", "ada"]
    assert lines[2].endswith("3 workers have died with it.")
    (row,) = dlq.said("list", "--reason", "poison")
    assert (row["sequence"], row["creator"], row["affinity"], row["code"]) == (second, "bob", "bob~0", "poison")
    assert (row["stream"], row["deliveries"], row["body"], row["bytes"]) == (STREAM, 3, "whole", len(encode(BODY)))
    assert dlq.said("list", "--reason", "expired") == []


def test_a_long_list_says_how_much_more_there_is(dlq: Dlq) -> None:
    for _ in range(3):
        dlq.put()
    assert len(dlq.said("list", "--limit", "2")) == 2
    assert "The DLQ holds 3" in dlq.run("list", "--limit", "2").stdout


def test_a_request_is_shown_with_its_headers_and_readable(dlq: Dlq) -> None:
    sequence = dlq.put(headers={"traceparent": "00-1"})
    shown = dlq.run("show", str(sequence)).stdout
    assert "Subject: dlq.malformed.interactive\n" in shown
    assert "Headrace-Why: It is wrong.\n" in shown
    assert "traceparent: 00-1\n" in shown
    assert '"max_tokens": 4' in shown
    assert dlq.said("show", str(sequence))["body"] == BODY


def test_what_is_no_map_is_shown_as_text_and_cut_for_people(dlq: Dlq) -> None:
    sequence = dlq.put(b"\xff" + b"x" * 30_000)
    assert "characters more" in dlq.run("show", str(sequence)).stdout
    assert dlq.said("show", str(sequence))["body"].startswith("\\xffxxx")


def test_what_is_not_there_is_said(dlq: Dlq) -> None:
    assert isinstance(dlq.run("show", "999999").exception, OperatorError)
    done = dlq.run("replay", "999999")
    assert (done.exit_code, done.stdout.splitlines()[0]) == (1, "999999: not replayed: The DLQ does not hold it.")


def test_a_replay_is_stored_again_though_its_own_id_is_remembered(dlq: Dlq) -> None:
    async def publish_and_finish(bus: Bus) -> None:
        sequence = await bus.store("requests.in.interactive.ada~0.ada", encode(BODY), "the-same", 2.0)
        await reading.delete(bus, STREAM, sequence)

    dlq.on_bus(publish_and_finish)
    sequence = dlq.put(headers={"Nats-Msg-Id": "the-same", "Reply-To": "_INBOX.gone"})
    (outcome,) = dlq.said("replay", str(sequence))
    (request,) = dlq.requests()
    assert outcome == {"sequence": sequence, "replayed": True, "replayed_as": request.sequence}
    assert request.subject.endswith(".interactive.ada~0.ada")
    assert request.data == encode(BODY)
    assert {name for name in request.headers if not name.startswith("Nats-")} == {"Reply-To"}
    assert dlq.said("list") == []


def test_a_replay_that_was_cut_off_is_not_published_twice(dlq: Dlq, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = dlq.put()
    real = reading.delete

    async def cut_off(*_: Any) -> bool:
        raise OperatorError("Cut off.", "Again.")

    monkeypatch.setattr(reading, "delete", cut_off)
    assert isinstance(dlq.run("replay", str(sequence)).exception, OperatorError)
    assert len(dlq.said("list")) == 1
    monkeypatch.setattr(reading, "delete", real)
    assert dlq.said("replay", str(sequence)) == [{"sequence": sequence, "replayed": True, "replayed_as": None}]
    assert len(dlq.requests()) == 1
    assert dlq.said("list") == []


def test_all_of_one_reason_are_replayed_and_the_others_stay(dlq: Dlq) -> None:
    for reason in ("expired", "malformed", "expired"):
        dlq.put(reason=reason)
    done = dlq.run("replay", "--all", "--reason", "expired")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "2 replayed of 2.")
    assert [row["reason"] for row in dlq.said("list")] == ["malformed"]
    assert len(dlq.requests()) == 2


def test_replies_can_be_sent_elsewhere(dlq: Dlq) -> None:
    sequence = dlq.put(headers={"Claim-At": "_INBOX.gone"})
    assert dlq.run("replay", str(sequence), "--reply-to", "replies.operator.1").exit_code == 0
    (request,) = dlq.requests()
    assert msgspec.msgpack.decode(request.data) == {
        "messages": PROMPT,
        "max_tokens": 4,
        "reply_to": "replies.operator.1",
    }
    assert "Claim-At" not in request.headers


def test_replies_go_only_where_workers_publish(dlq: Dlq) -> None:
    sequence = dlq.put()
    error = dlq.run("replay", str(sequence), "--reply-to", "$JS.API.STREAM.DELETE.DLQ").exception
    assert isinstance(error, OperatorError)
    assert "under _INBOX.>, replies.>" in str(error)
    assert len(dlq.said("list")) == 1


def test_dropped_is_gone_and_not_published(dlq: Dlq) -> None:
    first, second, third = dlq.put(), dlq.put(), dlq.put()
    done = dlq.run("drop", str(first), str(third))
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "2 dropped of 2.")
    assert [row["sequence"] for row in dlq.said("list")] == [second]
    assert dlq.said("drop", "--all") == [{"sequence": second, "dropped": True}]
    assert dlq.requests() == []


@pytest.mark.parametrize(
    "arguments", [("replay",), ("drop",), ("drop", "1", "--all"), ("drop", "1", "--reason", "poison")]
)
def test_which_are_meant_must_be_clear(dlq: Dlq, arguments: tuple[str, ...]) -> None:
    assert dlq.run(*arguments).exit_code == 2


@pytest.mark.parametrize("compressible", [True, False])
def test_a_request_of_the_largest_size_is_kept(dlq: Dlq, *, compressible: bool) -> None:
    body = encode({**BODY, "messages": [{"role": "user", "content": "x" * 999_000}]})
    data = body.ljust(MESSAGE_BYTES_MAX - 60, b" ") if compressible else os.urandom(MESSAGE_BYTES_MAX - 60)
    sequence = dlq.put(data)
    (row,) = dlq.said("list")
    outcome = dlq.run("replay", str(sequence))
    if compressible:
        assert (row["body"], row["bytes"] < 10_000, outcome.exit_code) == ("deflated", True, 0)
        assert dlq.requests()[0].data == data
    else:
        assert (row["body"], row["bytes"], outcome.exit_code) == ("missing", 0, 1)
        assert "Its body was not kept." in outcome.stdout
        assert "Its body was not kept." in dlq.run("show", str(sequence)).stdout
        assert len(dlq.said("list")) == 1


def test_a_full_queue_leaves_the_rest_where_it_is(dlq: Dlq) -> None:
    async def fill(bus: Bus) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(256):
                subject, fresh = "requests.in.interactive.busy~0.busy", secrets.token_hex(8)
                tasks.start_soon(bus.store, subject, b"x", fresh, 5.0)

    dlq.on_bus(fill)
    dlq.put(creator="busy")
    dlq.put(creator="calm")
    done = dlq.run("replay", "--all")
    assert done.exit_code == 1
    assert "is full" in done.stdout
    assert [row["creator"] for row in dlq.said("list")] == ["busy"]


def test_without_streams_the_operator_is_told(broker: NatsServer, tmp_path: Path) -> None:
    error = Dlq(broker.url, tmp_path / "headrace.toml").run("list").exception
    assert isinstance(error, OperatorError)
    assert "headrace streams apply" in str(error)


def test_a_replayed_request_is_served(broker: NatsServer, tmp_path: Path) -> None:
    made = Dlq(broker.url, tmp_path / "headrace.toml")

    async def serve() -> None:
        async with fleet(config_for(broker.url)) as running:
            await keep(running.bus, made.letter("expired", "ada", InvalidField("It was late.")), encode(BODY), None)
            done = await anyio.to_thread.run_sync(made.run, "replay", "1", "--reply-to", "replies.operator.1")
            assert done.exit_code == 0
            with anyio.fail_after(5.0):
                while await backlog(running.bus, "REPLIES") == 0:
                    await anyio.sleep(0.02)
            reply = await reading.next_from(running.bus, "REPLIES", 1)
            assert reply is not None
            assert b"done" in reply.data
            assert await backlog(running.bus, "DLQ") == 0

    anyio.run(serve)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[NatsServer]:
    broker = NatsServer(tmp_path / "nats").start()
    yield broker
    broker.kill9()


def test_columns_are_as_wide_as_their_content() -> None:
    assert tables.table(("A", "LONG"), [("x", 1), ("yyy", 12_345)]) == "A      LONG\nx         1\nyyy  12,345"
    assert tables.table(("A",), []) == "A"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_ages_are_for_people(seconds: float, text: str) -> None:
    assert tables.age(seconds) == text
