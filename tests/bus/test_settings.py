"""Following the bucket of live settings: at once, after a restart, and whatever lies in it."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from pipeline.bus.background import Background
from pipeline.bus.connection import Bus
from pipeline.bus.kv import Bucket
from pipeline.bus.settings import Settings
from pipeline.config import Config, Engine, Placement
from pipeline.protocol.settings import Live
from tests.bus.support import api, eventually

pytestmark = pytest.mark.anyio

STARTED = Config(prefill=Engine(slots=2))


@pytest.fixture
async def bucket(queue: Bus) -> Bucket:
    await api(queue, "STREAM.PURGE.KV_settings")
    return Bucket(queue, "settings")


@pytest.fixture
async def followed(other: Bus, bucket: Bucket) -> AsyncIterator[Settings]:
    settings = Settings(other, STARTED)
    await settings.start()
    await other.barrier()
    running = Background(settings.run(), "settings")
    yield settings
    await running.stop()


def value(number: float) -> bytes:
    return msgspec.json.encode(Live(value=number))


async def test_a_change_reaches_who_follows_and_goes_when_it_is_unset(bucket: Bucket, followed: Settings) -> None:
    seen: list[int] = []
    followed.apply_to(lambda config: seen.append(config.prefill.slots))
    revision = await bucket.write("prefill.slots", value(7))
    await eventually(lambda: followed.version >= revision)
    await bucket.delete("prefill.slots", revision)
    await eventually(lambda: followed.now.prefill.slots == 2)
    assert seen == [2, 7, 2]


async def test_a_process_that_starts_later_has_it_from_the_start(bucket: Bucket, other: Bus) -> None:
    await bucket.write("placement.spill_load", value(0.5))
    await bucket.write("placement.spill_back_load", value(0.4))
    settings = Settings(other, STARTED)
    await settings.start()
    assert settings.now.placement == Placement(spill_load=0.5, spill_back_load=0.4)
    assert settings.now.prefill == STARTED.prefill


async def test_what_makes_no_sense_here_changes_nothing_and_hinders_nothing(bucket: Bucket, followed: Settings) -> None:
    await bucket.write("prefill.slots", value(-1))
    await bucket.write("model.source", value(3))
    await bucket.write("requests.starts_max", value(9))
    await eventually(lambda: followed.now.requests.starts_max == 9)
    assert followed.now.prefill.slots == 2


@pytest.mark.parametrize(("back", "spill"), [(0.3, 0.5), (0.9, 0.95)])
async def test_two_that_only_agree_with_each_other_come_together(
    bucket: Bucket, followed: Settings, back: float, spill: float
) -> None:
    """In whichever order they lie in the bucket; and when one of them is unset, the other goes as well."""
    await bucket.write("placement.spill_load", value(spill))
    revision = await bucket.write("placement.spill_back_load", value(back))
    await eventually(lambda: followed.version >= revision)
    assert followed.now.placement == Placement(spill_load=spill, spill_back_load=back)
    await bucket.delete("placement.spill_load" if back == 0.9 else "placement.spill_back_load", await at(bucket, back))
    await eventually(lambda: followed.now.placement == STARTED.placement)


async def at(bucket: Bucket, back: float) -> int:
    entry = await bucket.read("placement.spill_load" if back == 0.9 else "placement.spill_back_load")
    assert entry is not None
    return entry.revision


async def test_without_a_bucket_all_is_as_it_was_started(queue: Bus, other: Bus) -> None:
    await api(queue, "STREAM.DELETE.KV_settings")
    settings = Settings(other, STARTED)
    await settings.start()
    assert (settings.now, settings.version) == (STARTED, 0)
