"""vLLM's cache events: its words put into ours, and its sockets read. The real engine's part is in `tests/e2e/test_warmth.py`."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
import zmq

from pipeline.errors import EngineFailed
from pipeline.protocol.messages import pack_ids
from pipeline.protocol.warmth import Batch, Cleared, Removed, Stored
from workers.engines import vllm_events
from workers.engines.vllm_events import END, VllmCacheEvents, batch_of

SIZE = 4
IDS = list(range(100, 112))


def stored(**fields: Any) -> dict[str, Any]:
    """As vLLM 0.32 writes it; fields that we do not read are among them."""
    return {
        "type": "BlockStored", "block_hashes": [11, 12, 13], "parent_block_hash": None, "token_ids": IDS, "block_size": SIZE,
        "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [["5a17"], None, None], "group_idx": 0,
        "kv_cache_spec_kind": "full_attention", **fields,
    }  # fmt: skip


def removed(**fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [12], "medium": "GPU", "group_idx": 0, **fields}


def payload(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


def read(*events: dict[str, Any]) -> list[Any]:
    return list(batch_of((7).to_bytes(8, "big"), payload(*events), SIZE).events)


def test_a_batch_has_its_number_and_its_events_in_order() -> None:
    batch = batch_of((7).to_bytes(8, "big"), payload(stored(), removed(), {"type": "AllBlocksCleared"}), SIZE)
    assert batch == Batch(7, [Stored([11, 12, 13], None, pack_ids(IDS), "5a17"), Removed([12]), Cleared()])


def test_what_follows_a_block_needs_no_salt() -> None:
    assert read(stored(parent_block_hash=9, extra_keys=None)) == [Stored([11, 12, 13], 9, pack_ids(IDS))]


def test_a_block_with_keys_of_its_own_begins_another_run() -> None:
    first, second = read(stored(extra_keys=[["5a17"], None, ["image", 3]]))
    assert first == Stored([11, 12], None, pack_ids(IDS[:8]), "5a17")
    assert second == Stored([13], 12, pack_ids(IDS[8:]), "image\x003")


def test_hashes_as_bytes_are_the_same_as_their_last_eight() -> None:
    whole = bytes(range(32))
    assert read(removed(block_hashes=[whole])) == [Removed([int.from_bytes(whole[-8:], "big")])]


@pytest.mark.parametrize(
    "event",
    [
        stored(medium="CPU"),
        removed(medium="STORAGE"),
        stored(group_idx=1),
        stored(block_size=16),
        stored(token_ids=IDS[:9]),
    ],
    ids=["LMCache's", "of storage", "of other layers", "of another size", "with holes"],
)
def test_what_is_not_of_the_engines_own_cache_leaves_an_empty_batch(event: dict[str, Any]) -> None:
    assert batch_of((3).to_bytes(8, "big"), payload(event), SIZE) == Batch(3, [])


# --------------------------------------------------------------------------------------------------------------
# Sockets


class Publisher:
    """vLLM's side: a thread that publishes what it is told, keeps it, and repeats it when asked."""

    def __init__(self, folder: Path) -> None:
        self.events, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.answers = True
        self._context = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._pub.bind(self.events)
        self._router.bind(self.replay)
        self._kept: list[bytes] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def publish(self, *numbers: int) -> None:
        """Batches of these numbers, each with one event; the numbers left out are only kept."""
        while len(self._kept) <= max(numbers):
            self._kept.append(payload(removed(block_hashes=[len(self._kept)])))
        for number in numbers:
            self._pub.send_multipart((b"", number.to_bytes(8, "big"), self._kept[number]))

    def _serve(self) -> None:
        while not self._over.is_set():
            if self._router.poll(10) and self.answers:
                client, _, start = self._router.recv_multipart()
                for number in range(int.from_bytes(start, "big"), len(self._kept)):
                    self._router.send_multipart((client, b"", b"", number.to_bytes(8, "big"), self._kept[number]))
                self._router.send_multipart((client, b"", b"", END, b""))

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.fixture
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publisher]:
    made = Publisher(tmp_path_factory.mktemp("zmq"))
    yield made
    made.close()


async def listening(publisher: Publisher) -> VllmCacheEvents:
    """A reader that its publisher knows of: what is published before that, nobody hears."""
    reader = VllmCacheEvents(publisher.events, publisher.replay, SIZE)
    with anyio.fail_after(5.0):
        while True:
            publisher.publish(0)
            with anyio.move_on_after(0.05):
                await reader.read()
                return reader


@pytest.mark.anyio
async def test_batches_are_read_as_they_come_and_repeated_when_asked(publisher: Publisher) -> None:
    reader = await listening(publisher)
    publisher.publish(1, 4)
    assert (await reader.read()).number == 1
    assert await reader.read() == Batch(4, [Removed([4])])
    assert [batch.number for batch in await reader.replay(2)] == [2, 3, 4]
    assert await reader.replay(5) == []
    with anyio.move_on_after(0.02):
        await reader.read()
    publisher.publish(5)
    assert (await reader.read()).number == 5, "a reader that gave up has lost nothing"
    reader.close()
    reader.close()


@pytest.mark.anyio
async def test_an_engine_that_does_not_repeat_is_not_waited_for(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_events, "CACHE_REPLAY_TIMEOUT_S", 0.05)
    reader = await listening(publisher)
    publisher.answers = False
    with pytest.raises(EngineFailed):
        await reader.replay(0)
    publisher.answers = True
    monkeypatch.undo()
    assert [batch.number for batch in await reader.replay(0)] == [0], "the late answer is not taken for this one"
    reader.close()


@pytest.mark.anyio
async def test_a_flood_of_batches_leaves_the_loop_its_turns(publisher: Publisher) -> None:
    reader = await listening(publisher)
    publisher.publish(*range(1, 500))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(others)
        while (await reader.read()).number < 499:
            pass
        tasks.cancel_scope.cancel()
    assert turns >= 400
    reader.close()
