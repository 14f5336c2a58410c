"""Personas are read once and followed; what was not heard is found, and no number from outside gets at another's."""

from typing import Any

import anyio
import pytest

from pipeline.bus import streams
from pipeline.bus.connection import Bus
from pipeline.bus.kv import Bucket
from pipeline.paths import JETSTREAM
from pipeline.protocol import personas as protocol
from pipeline.protocol.personas import BUCKET, Persona
from tests.nats_server import NatsServer
from workers import personas
from workers.personas import Personas

pytestmark = pytest.mark.anyio


async def put(bus: Bus, system: str, creator: str = "ada", revision: int = 0) -> int:
    data = protocol.write(Persona(creator=creator, system=system))
    return await Bucket(bus, BUCKET).write(creator, data, revision)


async def connected(broker: NatsServer) -> Bus:
    bus = await Bus.connect(broker.url, "test")
    await streams.apply(bus, streams.declared(JETSTREAM))
    return bus


async def eventually(bus: Bus, known: Personas, revision: int) -> None:
    with anyio.fail_after(5.0):
        while await known.last("ada") != revision:
            await anyio.sleep(0.01)


async def test_a_persona_is_read_once_and_again_when_it_has_changed(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = list[str](), Bucket.read

    async def counted(self: Bucket, key: str) -> Any:
        reads.append(key)
        return await read(self, key)

    monkeypatch.setattr(Bucket, "read", counted)
    async with await connected(broker) as bus:
        known = Personas(bus)
        await known.listen()
        await bus.barrier()
        assert await known.last("ada") == 0
        first = await put(bus, "One.")
        await eventually(bus, known, first)
        count = len(reads)
        assert [await known.last("ada") for _ in range(5)] == [first] * 5
        assert len(reads) == count
        second = await put(bus, "Two.", revision=first)
        await eventually(bus, known, second)
        for revision, system in ((first, "One."), (second, "Two.")):
            persona = await known.at("ada", revision)
            assert persona is not None
            assert persona.system == system


async def test_a_version_of_another_creator_is_nobodys(broker: NatsServer) -> None:
    async with await connected(broker) as bus:
        known, secret = Personas(bus), await put(bus, "Secret.", "eve")
        assert await known.at("ada", secret) is None
        assert await known.at("eve", secret) is not None
        assert await known.at("ada", secret) is None, "also once it is known"
        assert await known.at("ada", 99) is None


async def test_what_was_not_heard_is_found(broker: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(personas, "PERSONAS_RELOAD_S", 0.05)
    async with await connected(broker) as bus, anyio.create_task_group() as tasks:
        known = Personas(bus)  # which does not listen
        tasks.start_soon(known.run)
        first = await put(bus, "One.")
        await eventually(bus, known, first)
        await eventually(bus, known, await put(bus, "Two.", revision=first))
        await bus.request(f"$JS.API.STREAM.DELETE.KV_{BUCKET}", b"", 2.0)
        await anyio.sleep(0.1)
        await streams.apply(bus, streams.declared(JETSTREAM))
        await put(bus, "Anew.")
        await eventually(bus, known, 1)
        with anyio.fail_after(5.0):
            while (persona := await known.at("ada", 1)) is None or persona.system != "Anew.":
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()


async def test_after_a_lost_connection_everything_is_looked_at_again(broker: NatsServer) -> None:
    async with await connected(broker) as bus:
        known = Personas(bus)
        await known.listen()
        first = await put(bus, "One.")
        await eventually(bus, known, first)
        broker.restart()
        await bus.wait_connected(5.0)
        async with await Bus.connect(broker.url, "other") as other:
            with anyio.fail_after(5.0):
                second = await put(other, "Two.", revision=first)
        await eventually(bus, known, second)


async def test_no_more_is_kept_than_the_bound(broker: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(personas, "PERSONAS_CACHED_MAX", 3)
    async with await connected(broker) as bus:
        known = Personas(bus)
        for number in range(6):
            await put(bus, "One.", f"c{number}")
            assert await known.last(f"c{number}")
        assert len(known._last) == len(known._texts) == 3
        assert await known.last("c0"), "and read again where it is asked for"


async def test_what_is_no_persona_is_none(broker: NatsServer) -> None:
    async with await connected(broker) as bus:
        known, revision = Personas(bus), await Bucket(bus, BUCKET).write("ada", b"no persona")
        assert await known.last("ada") == revision
        assert await known.at("ada", revision) is None
