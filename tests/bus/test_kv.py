"""A bucket: read whole, followed, and written by compare-and-set."""

import pytest

from pipeline.bus.connection import Bus
from pipeline.bus.errors import ApiError
from pipeline.bus.kv import Bucket, Entry
from tests.bus.support import api, eventually

pytestmark = pytest.mark.anyio


@pytest.fixture
async def bucket(queue: Bus) -> Bucket:
    await api(queue, "STREAM.PURGE.KV_routes")
    return Bucket(queue, "routes")


async def test_what_is_written_is_read_alone_and_with_all_others(bucket: Bucket) -> None:
    first = await bucket.write("ada", b"1")
    second = await bucket.write("bob", b"2")
    assert await bucket.read("ada") == Entry(b"1", first)
    assert await bucket.load() == {"ada": Entry(b"1", first), "bob": Entry(b"2", second)}
    assert await bucket.version() == second
    assert await bucket.read("eve") is None


async def test_a_writer_that_has_not_seen_the_last_word_is_refused(bucket: Bucket) -> None:
    revision = await bucket.write("ada", b"1")
    with pytest.raises(ApiError):
        await bucket.write("ada", b"2")
    later = await bucket.write("ada", b"2", revision)
    with pytest.raises(ApiError):
        await bucket.delete("ada", revision)
    assert await bucket.read("ada") == Entry(b"2", later)


async def test_what_is_deleted_is_gone_and_leaves_nothing_behind(bucket: Bucket, queue: Bus) -> None:
    revision = await bucket.write("ada", b"1")
    await bucket.delete("ada", revision)
    assert await bucket.read("ada") is None
    assert await bucket.load() == {}
    assert (await api(queue, "STREAM.INFO.KV_routes"))["state"]["messages"] == 0
    assert await bucket.write("ada", b"2") > revision


async def test_followers_hear_of_each_change(bucket: Bucket, other: Bus) -> None:
    heard: list[str] = []
    following = await Bucket(other, "routes").follow(heard.append)
    await other.barrier()
    revision = await bucket.write("ada", b"1")
    await bucket.delete("ada", revision)
    await eventually(lambda: heard == ["ada", "ada"])
    await following.unsubscribe()
