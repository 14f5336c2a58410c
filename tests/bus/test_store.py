"""Publishing to a stream: what is confirmed is stored once, and each refusal has its name."""

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from pipeline.bus.connection import Bus
from pipeline.bus.errors import Disconnected, Duplicate
from pipeline.errors import BodyTooLarge, BrokerUnavailable, CapacityError, CreatorBusy
from tests.bus.support import api, eventually, fresh, stored, subject_of
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return ("asyncio", {"use_uvloop": request.param})


@pytest.fixture
async def small(bus: Bus) -> AsyncIterator[Bus]:
    """A stream SMALL of three messages of at most 1 kB, in memory."""
    limits = {"max_msgs": 3, "max_msg_size": 1000, "discard": "new"}
    await api(bus, "STREAM.CREATE.SMALL", name="SMALL", subjects=["small.*"], storage="memory", **limits)
    yield bus
    await api(bus, "STREAM.DELETE.SMALL")


async def test_a_stored_message_has_a_sequence_and_its_headers(queue: Bus) -> None:
    headers = {"Trace": "1"}
    first = await queue.store(subject_of("a"), b"one", msg_id=fresh(), timeout_s=2.0, headers=headers)
    second = await queue.store(subject_of("a"), b"two", msg_id=fresh(), timeout_s=2.0)
    assert second == first + 1
    assert headers == {"Trace": "1"}
    assert await stored(queue) == 2


async def test_a_duplicate_of_somebody_elses_message_is_an_error(queue: Bus, other: Bus) -> None:
    taken = fresh()
    await queue.store(subject_of("a"), b"mine", msg_id=taken, timeout_s=2.0)
    with pytest.raises(Duplicate, match=taken):
        await other.store(subject_of("a"), b"another", msg_id=taken, timeout_s=2.0)
    assert await stored(queue) == 1


async def test_a_repetition_of_ones_own_message_is_no_error(queue: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    request, asked = queue.request, []

    async def loses_the_first_answer(*args: Any) -> bytes:
        asked.append(args)
        answer = await request(*args)
        if len(asked) == 1:
            raise Disconnected("after it was stored")
        return answer

    monkeypatch.setattr(queue, "request", loses_the_first_answer)
    sequence = await queue.store(subject_of("a"), b"once", msg_id=fresh(), timeout_s=2.0)
    monkeypatch.undo()
    assert len(asked) == 2
    assert await stored(queue) == 1
    assert (await api(queue, "STREAM.INFO.REQUESTS_interactive"))["state"]["last_seq"] == sequence


async def test_one_creator_fills_only_its_own_share(queue: Bus) -> None:
    for _ in range(256):
        await queue.store(subject_of("busy"), b"x", msg_id=fresh(), timeout_s=2.0)
    with pytest.raises(CreatorBusy) as refused:
        await queue.store(subject_of("busy"), b"x", msg_id=fresh(), timeout_s=2.0)
    assert (refused.value.status, refused.value.retryable) == (429, True)
    await queue.store(subject_of("calm"), b"x", msg_id=fresh(), timeout_s=2.0)


async def test_a_full_stream_is_a_lack_of_capacity(small: Bus) -> None:
    for number in range(3):
        await small.store(f"small.{number}", b"x", msg_id=fresh(), timeout_s=2.0)
    with pytest.raises(CapacityError) as refused:
        await small.store("small.3", b"x", msg_id=fresh(), timeout_s=2.0)
    assert type(refused.value) is CapacityError
    assert refused.value.status == 503


async def test_a_message_larger_than_the_stream_takes_is_too_large(small: Bus) -> None:
    with pytest.raises(BodyTooLarge):
        await small.store("small.1", b"x" * 1001, msg_id="large", timeout_s=2.0)


async def test_a_subject_without_a_stream_is_said_in_time(bus: Bus) -> None:
    with pytest.raises(BrokerUnavailable, match="Is the stream declared"):
        await bus.store("no.stream", b"x", msg_id="nowhere", timeout_s=0.2)


async def test_something_that_is_no_stream_does_not_confirm(bus: Bus, other: Bus) -> None:
    await other.subscribe("fake.stream", lambda message: other.post(message.reply, b"thanks"))
    await other.barrier()
    with pytest.raises(BrokerUnavailable, match="no stream"):
        await bus.store("fake.stream", b"x", msg_id="fake", timeout_s=1.0)


async def test_a_broker_that_is_away_is_said_in_time(broker: NatsServer) -> None:
    async with await Bus.connect(broker.url, "test") as bus:
        broker.kill9()
        with pytest.raises(BrokerUnavailable):
            await bus.store("any", b"x", msg_id="away", timeout_s=0.2)


async def test_over_a_killed_broker_every_confirmed_message_is_stored_exactly_once(broker: NatsServer) -> None:
    confirmed: list[int] = []

    async def publish(bus: Bus, part: int) -> None:
        for number in range(100):
            name = f"kept-{part}-{number}"
            confirmed.append(await bus.store(f"kept.{part}", b"x" * 500, msg_id=name, timeout_s=10.0))

    async with await Bus.connect(broker.url, "test") as bus:
        await api(bus, "STREAM.CREATE.KEPT", name="KEPT", subjects=["kept.*"], storage="file")
        async with anyio.create_task_group() as tasks:
            for part in range(8):
                tasks.start_soon(publish, bus, part)
            for reached in (200, 500):
                await eventually(lambda reached=reached: len(confirmed) >= reached)  # type: ignore[misc]
                broker.restart()
        assert len(confirmed) == len(set(confirmed)) == 800
        assert await stored(bus, "KEPT") == 800
