"""Our `partition()` and the server's are one function: a gateway may predict a shard."""

import anyio
import pytest

from pipeline.bus.connection import Bus
from pipeline.protocol.subjects import parse_stored, partition, request_in, token
from tests.bus.support import CLASS, SHARDS, STREAM, api, fresh

pytestmark = pytest.mark.anyio

CREATORS = [
    token(name) for number in range(500) for name in (f"c{number}", f"Ü{number}", f"a.b {number}", f"{number}~1")
]


async def test_two_thousand_creators_lie_in_the_shards_that_we_predict(queue: Bus) -> None:
    async def publish(part: int) -> None:
        for creator in CREATORS[part::20]:
            await queue.store(request_in(CLASS, creator, creator), b"", msg_id=fresh(), timeout_s=5.0)

    async with anyio.create_task_group() as tasks:
        for part in range(20):
            tasks.start_soon(publish, part)
    info = await api(queue, f"STREAM.INFO.{STREAM}", subjects_filter=">")
    places = [parse_stored(subject) for subject in info["state"]["subjects"]]
    assert len(places) == len(set(CREATORS)) == 2000
    assert all(place.shard.number == partition(place.affinity, SHARDS) for place in places)
    assert {place.shard.number for place in places} == set(range(SHARDS))
