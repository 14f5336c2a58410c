"""What the declared streams promise, on a strict server: nothing is lost with a broker, misplaced, or swallowed."""

from pathlib import Path

import anyio
import msgspec
import pytest

from gateway.chat import PUBLISH_TIMEOUT_S
from pipeline.bus import streams
from pipeline.bus.connection import Bus
from pipeline.cli.dlq import STORE_TIMEOUT_S
from pipeline.config import Config
from pipeline.limits import EXPIRED_AFTER_S, LEASE_SPARE_S, PERSONA_BYTES_MAX, TURNS_KEPT_MAX
from pipeline.paths import JETSTREAM
from pipeline.protocol.conversations import Slot
from pipeline.protocol.subjects import CLASSES, Shard, parse_stored, partition, request_in
from tests.bus.support import SHARDS, api, fresh
from tests.nats_server import NatsServer
from workers.conversations import Conversations
from workers.jobs import TELLING_GRACE_S

pytestmark = pytest.mark.anyio

DECLARED = streams.declared(JETSTREAM)
STREAMS = [item.name for item in DECLARED.items if item.kind == "stream"]
CONSUMERS = sorted(JETSTREAM.glob("*.consumer.json"))


def something_for(name: str) -> str:
    """A subject that a stream stores. Its last one: those of the broker's own advisories come before ours."""
    pattern: str = DECLARED.stream(name)["subjects"][-1]
    return pattern.replace("*", "x").replace(">", "x")


@pytest.mark.parametrize("name", STREAMS)
def test_every_stream_lies_in_files(name: str) -> None:
    assert DECLARED.stream(name)["storage"] == "file"


@pytest.mark.parametrize("path", CONSUMERS, ids=lambda path: path.name)
def test_no_consumer_keeps_its_state_in_memory_or_waits_longer_with_every_delivery(path: Path) -> None:
    config = msgspec.json.decode(path.read_bytes())
    assert not config.get("mem_storage")
    assert "backoff" not in config, "it would replace ack_wait, and a bare NAK ignores it"


async def test_what_every_stream_holds_is_there_after_its_broker_was_killed(broker: NatsServer) -> None:
    async with await Bus.connect(broker.url, "test") as bus:
        await streams.apply(bus, DECLARED)
        for name in STREAMS:
            await bus.store(something_for(name), b"kept", msg_id=fresh(), timeout_s=2.0)
    broker.restart()
    async with await Bus.connect(broker.url, "test") as bus:
        held = {name: (await api(bus, f"STREAM.INFO.{name}"))["state"]["messages"] for name in STREAMS}
        assert held == dict.fromkeys(STREAMS, 1)
        assert await streams.diff(bus, DECLARED) == [], "consumers and all"


@pytest.mark.parametrize("klass", CLASSES)
async def test_the_affinity_picks_the_shard_and_creator_and_affinity_keep_their_places(queue: Bus, klass: str) -> None:
    spread = [f"ada~{number}" for number in range(4)]
    assert len({partition(affinity, SHARDS) for affinity in spread}) > 1
    await api(queue, f"STREAM.PURGE.REQUESTS_{klass}")
    for affinity in spread:
        await queue.store(request_in(klass, affinity, "ada"), b"", msg_id=fresh(), timeout_s=2.0)
    info = await api(queue, f"STREAM.INFO.REQUESTS_{klass}", subjects_filter=">")
    places = {(at.shard, at.affinity, at.creator) for at in map(parse_stored, info["state"]["subjects"])}
    assert places == {(Shard(klass, partition(affinity, SHARDS)), affinity, "ada") for affinity in spread}


@pytest.mark.parametrize("klass", CLASSES)
def test_each_creator_has_a_share_of_its_own_of_a_classs_queue(klass: str) -> None:
    config = DECLARED.stream(f"REQUESTS_{klass}")
    assert (config["discard"], config["discard_new_per_subject"]) == ("new", True)
    assert 1 <= config["max_msgs_per_subject"] <= config["max_msgs"] / 100


@pytest.mark.parametrize("klass", CLASSES)
def test_a_publish_that_is_repeated_is_recognised_for_as_long_as_anybody_repeats_it(klass: str) -> None:
    horizon_s = max(PUBLISH_TIMEOUT_S, STORE_TIMEOUT_S)
    assert DECLARED.stream(f"REQUESTS_{klass}")["duplicate_window"] / 1e9 >= 2 * horizon_s


@pytest.mark.parametrize("klass", CLASSES)
def test_a_kept_reply_is_recognised_for_as_long_as_its_request_may_be_delivered(klass: str) -> None:
    longest_s = Config().requests.timeout_max_s[klass] + TELLING_GRACE_S + LEASE_SPARE_S + EXPIRED_AFTER_S
    assert DECLARED.stream("REPLIES")["duplicate_window"] / 1e9 >= longest_s


@pytest.mark.parametrize("klass", CLASSES)
def test_an_exchange_is_recognised_for_as_long_as_its_request_may_be_delivered(klass: str) -> None:
    longest_s = Config().requests.timeout_max_s[klass] + TELLING_GRACE_S + LEASE_SPARE_S + EXPIRED_AFTER_S
    assert DECLARED.stream("TURNS")["duplicate_window"] / 1e9 >= longest_s


def test_what_a_worker_reads_of_a_conversation_is_all_that_is_kept() -> None:
    assert DECLARED.stream("TURNS")["max_msgs_per_subject"] == TURNS_KEPT_MAX
    assert DECLARED.stream("SENT")["max_msgs_per_subject"] == TURNS_KEPT_MAX
    assert DECLARED.stream("KV_personas")["max_msg_size"] > PERSONA_BYTES_MAX


async def test_a_slot_ends_by_itself_and_what_is_deleted_leaves_nothing(queue: Bus) -> None:
    bucket = Conversations(queue)
    await bucket._write("ada.c1", Slot(holder="r", by="x", until_s=0.0), 0)
    assert (await bucket._read("ada.c1"))[0] is not None
    with anyio.fail_after(4.0):
        while (await api(queue, "STREAM.INFO.KV_conversations"))["state"]["messages"]:
            await anyio.sleep(0.1)


@pytest.mark.parametrize("klass", CLASSES)
def test_a_shard_may_have_all_that_a_large_fleet_holds_in_flight(klass: str) -> None:
    """Messages stay unacked through decode, and at its bound a consumer delivers nothing to anybody."""
    shard = next(item.config for item in DECLARED.items if item.kind == "consumer" and item.stream.endswith(klass))
    config = Config()
    assert shard["max_ack_pending"] >= 2 * 64 * (config.prefill.slots + config.decode.slots)
