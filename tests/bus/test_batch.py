"""All messages of a subject, with one question."""

import pytest

from pipeline.bus import batch
from pipeline.bus.batch import Item
from pipeline.bus.connection import Bus
from pipeline.bus.errors import ApiError, NoResponders
from tests.bus.support import api, fresh

pytestmark = pytest.mark.anyio


@pytest.fixture
async def turns(queue: Bus) -> Bus:
    await api(queue, "STREAM.PURGE.TURNS")
    return queue


async def stored(bus: Bus, subject: str, data: bytes) -> int:
    return await bus.store(subject, data, msg_id=fresh(), timeout_s=2.0)


async def test_the_messages_of_one_subject_come_in_order_and_no_others(turns: Bus) -> None:
    expected = []
    for number in range(5):
        data = b"%d" % number
        expected.append(Item(await stored(turns, "turns.ada.c1", data), data))
        await stored(turns, "turns.ada.c2", b"other")
    assert await batch.messages_of(turns, "TURNS", "turns.ada.c1", 64) == expected
    assert await batch.messages_of(turns, "TURNS", "turns.ada.c1", 3) == expected[:3]
    assert await batch.messages_of(turns, "TURNS", "turns.eve.c1", 64) == []


async def test_of_a_subject_no_more_is_kept_than_is_read(turns: Bus) -> None:
    last = [await stored(turns, "turns.ada.c1", b"x") for _ in range(70)][-1]
    found = await batch.messages_of(turns, "TURNS", "turns.ada.c1", 64)
    assert (len(found), found[-1].sequence) == (64, last)


async def test_what_does_not_come_at_once_is_asked_for_again(turns: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(64):
        await stored(turns, "turns.ada.c1", b"%02d" % number * 150_000)
    asked, once = list[int](), batch._batch

    async def counted(bus: Bus, stream: str, what: dict[str, object]) -> tuple[list[Item], int]:
        found, pending = await once(bus, stream, what)
        asked.append(len(found))
        return found, pending

    monkeypatch.setattr(batch, "_batch", counted)
    found = await batch.messages_of(turns, "TURNS", "turns.ada.c1", 64)
    assert [int(item.data[:2]) for item in found] == list(range(64))
    assert sum(asked) == 64


async def test_a_stream_that_is_not_there_and_a_question_that_is_none_are_errors(turns: Bus) -> None:
    with pytest.raises(NoResponders):
        await batch.messages_of(turns, "NOWHERE", "turns.ada.c1", 64)
    with pytest.raises(ApiError):
        await batch._batch(turns, "TURNS", {"batch": "many"})
