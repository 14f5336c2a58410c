"""Streams and consumers as files, against a strict server."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.bus import streams
from pipeline.bus.connection import Bus
from pipeline.config import Requests
from pipeline.errors import OperatorError
from pipeline.limits import ACK_WAIT_S, DELIVERIES_MAX, MESSAGE_BYTES_MAX
from pipeline.paths import JETSTREAM
from pipeline.protocol.subjects import CLASSES
from tests.bus.support import SHARDS, STREAM, api
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

DECLARED = streams.declared(JETSTREAM)


@pytest.fixture
async def empty(broker: NatsServer) -> AsyncIterator[Bus]:
    """A connection to a broker without streams."""
    async with await Bus.connect(broker.url, "test") as bus:
        yield bus


def changed(tmp_path: Path, file: str, **fields: Any) -> streams.Declared:
    """The project's declaration with some fields of one file changed."""
    folder = tmp_path / "jetstream"
    shutil.copytree(JETSTREAM, folder, dirs_exist_ok=True)
    tree = {**msgspec.json.decode((folder / file).read_bytes()), **fields}
    (folder / file).write_bytes(msgspec.json.encode(tree))
    return streams.declared(folder)


async def test_applying_twice_changes_nothing_the_second_time(empty: Bus) -> None:
    missing = await streams.diff(empty, DECLARED)
    created = await streams.apply(empty, DECLARED)
    assert (
        len(missing)
        == len(created)
        == len(DECLARED.items)
        == len(list(JETSTREAM.glob("*.stream.json"))) + 1 + 2 * SHARDS
    )
    assert "Stream DLQ is missing." in missing
    assert "Consumer REQUESTS_batch/s15 created." in created
    assert await streams.diff(empty, DECLARED) == []
    assert await streams.apply(empty, DECLARED) == []


async def test_a_strict_server_accepts_the_files_verbatim(empty: Bus) -> None:
    for path in sorted(JETSTREAM.glob("*.stream.json")):
        answer = await empty.request(f"$JS.API.STREAM.CREATE.{path.name.split('.')[0]}", path.read_bytes(), 5.0)
        assert b'"error"' not in answer
    for path in sorted(JETSTREAM.glob("*.consumer.json")):
        stream, config = path.name.split(".")[0], path.read_bytes()
        tree = msgspec.json.decode(config)
        subject = ".".join(filter(None, ("$JS.API.CONSUMER.CREATE", stream, tree["name"], tree.get("filter_subject"))))
        body = b'{"stream_name":"%b","action":"create","config":%b}' % (stream.encode(), config)
        assert b'"error"' not in await empty.request(subject, body, 5.0)
    assert len(await streams.diff(empty, DECLARED)) == 2 * (SHARDS - 1)


async def test_every_shard_has_a_consumer_after_the_pattern_of_shard_0(empty: Bus) -> None:
    await streams.apply(empty, DECLARED)
    for klass in CLASSES:
        for number in range(SHARDS):
            info = await api(empty, f"CONSUMER.INFO.REQUESTS_{klass}.s{number}")
            assert info["config"]["filter_subject"] == f"requests.shard.{number}.{klass}.>"
            assert info["config"]["durable_name"] == f"s{number}"
            assert info["config"]["description"].startswith(f"Shard {number} of the {klass} requests")


async def test_a_planted_difference_is_named_and_mended(empty: Bus) -> None:
    await streams.apply(empty, DECLARED)
    info = (await api(empty, f"STREAM.INFO.{STREAM}"))["config"]
    await api(empty, f"STREAM.UPDATE.{STREAM}", **{**info, "max_msgs_per_subject": 7})
    consumer = (await api(empty, f"CONSUMER.INFO.{STREAM}.s3"))["config"]
    subject = f"CONSUMER.CREATE.{STREAM}.s3.{consumer['filter_subject']}"
    await api(empty, subject, stream_name=STREAM, action="update", config={**consumer, "ack_wait": 5_000_000_000})
    assert await streams.diff(empty, DECLARED) == [
        f"Stream {STREAM}: max_msgs_per_subject is 7, declared is 256.",
        f"Consumer {STREAM}/s3: ack_wait is 5000000000, declared is 1000000000.",
    ]
    assert await streams.apply(empty, DECLARED) == [
        f"Stream {STREAM} updated: max_msgs_per_subject 7 → 256.",
        f"Consumer {STREAM}/s3 updated: ack_wait 5000000000 → 1000000000.",
    ]
    assert await streams.diff(empty, DECLARED) == []


async def test_what_an_operator_adds_beyond_the_files_is_left_alone(empty: Bus, tmp_path: Path) -> None:
    await streams.apply(empty, DECLARED)
    info = (await api(empty, f"STREAM.INFO.{STREAM}"))["config"]
    await api(empty, f"STREAM.UPDATE.{STREAM}", **{**info, "metadata": {**info["metadata"], "team": "inference"}})
    assert await streams.diff(empty, DECLARED) == []
    await streams.apply(empty, changed(tmp_path, f"{STREAM}.stream.json", max_msgs=1000))
    after = (await api(empty, f"STREAM.INFO.{STREAM}"))["config"]
    assert (after["max_msgs"], after["metadata"]["team"]) == (1000, "inference")


@pytest.mark.parametrize(
    ("file", "fields", "named"),
    [
        (f"{STREAM}.stream.json", {"storage": "memory"}, "storage"),
        (f"{STREAM}.stream.json", {"retention": "limits"}, "retention"),
        (f"{STREAM}.shards.consumer.json", {"max_waiting": 100}, "max_waiting"),
    ],
)
async def test_what_cannot_be_updated_is_said_with_the_remedy_and_nothing_is_changed(
    empty: Bus, tmp_path: Path, file: str, fields: dict[str, Any], named: str
) -> None:
    await streams.apply(empty, DECLARED)
    other = changed(tmp_path, file, **fields)
    differences = await streams.diff(empty, other)
    assert f": {named} is " in differences[0]
    assert "nats " in differences[0]
    assert " rm " in differences[0]
    with pytest.raises(OperatorError, match=named):
        await streams.apply(empty, other)
    assert await streams.diff(empty, DECLARED) == []


async def test_shards_grow_in_place_and_do_not_shrink(empty: Bus, tmp_path: Path) -> None:
    def transform(shards: int) -> dict[str, str]:
        last = "interactive.{{wildcard(1)}}.{{wildcard(2)}}"
        return {"src": "requests.in.interactive.*.*", "dest": f"requests.shard.{{{{partition({shards},1)}}}}.{last}"}

    await streams.apply(empty, DECLARED)
    more = changed(tmp_path, f"{STREAM}.stream.json", subject_transform=transform(20))
    assert streams.shards_of(more, "interactive") == 20
    assert len(await streams.apply(empty, more)) == 1 + 4
    with pytest.raises(OperatorError, match="partition"):
        await streams.apply(empty, DECLARED)


async def test_the_servers_own_words_explain_a_refusal(empty: Bus, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match='unknown field "max_mesages"'):
        await streams.apply(empty, changed(tmp_path, "DLQ.stream.json", max_mesages=1))


async def test_a_server_without_jetstream_is_an_operators_error(tmp_path: Path) -> None:
    config = tmp_path / "plain.conf"
    config.write_text("listen: 127.0.0.1:4222\n")
    plain = NatsServer(tmp_path / "plain", config).start()
    try:
        async with await Bus.connect(plain.url, "test") as bus:
            with pytest.raises(OperatorError, match="JetStream"):
                await streams.diff(bus, DECLARED)
    finally:
        plain.kill9()


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("A.stream.json", "{", "cannot be read"),
        ("A.stream.json", '{"name":"B"}', "Make them agree"),
        ("A.s1.consumer.json", '{"name":"s1"}', "no file declares"),
        (f"{STREAM}.shards.consumer.json", '{"name":"s0"}', "filter_subject"),
        ("DLQ.shards.consumer.json", '{"name":"s0","filter_subject":"requests.shard.0.x.>"}', "no shards"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, file: str, text: str, said: str) -> None:
    folder = tmp_path / "jetstream"
    shutil.copytree(JETSTREAM, folder)
    (folder / file).write_text(text)
    with pytest.raises(OperatorError, match=said):
        streams.declared(folder)


def test_how_many_copies_there_are_is_said_once_for_all() -> None:
    assert {item.config["num_replicas"] for item in streams.declared(JETSTREAM, 3).items} == {3}
    assert streams.declared(JETSTREAM, 1) == DECLARED


def test_a_folder_without_streams_is_an_operators_error(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="configs/jetstream"):
        streams.declared(tmp_path)
    with pytest.raises(OperatorError, match="No stream REQUESTS_none"):
        streams.shards_of(DECLARED, "none")


@pytest.mark.parametrize("klass", CLASSES)
def test_the_files_agree_with_the_limits_and_the_configuration(klass: str) -> None:
    stream = DECLARED.stream(f"REQUESTS_{klass}")
    shard = next(item for item in DECLARED.items if item.kind == "consumer" and item.stream == stream["name"]).config
    assert streams.shards_of(DECLARED, klass) == Requests().shards
    assert stream["max_age"] / 1e9 >= Requests().timeout_max_s[klass] + 30
    assert stream["duplicate_window"] <= stream["max_age"]
    assert stream["max_msg_size"] == MESSAGE_BYTES_MAX
    assert stream["max_consumers"] >= Requests().shards
    assert shard["ack_wait"] / 1e9 == ACK_WAIT_S
    assert shard["max_deliver"] == DELIVERIES_MAX
    assert "backoff" not in shard
