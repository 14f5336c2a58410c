"""`headrace doctor` beside a running fleet, sound and with faults planted in it."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from typer.testing import CliRunner

from pipeline import outside
from pipeline.bus import presence as announcing
from pipeline.bus import streams
from pipeline.bus.connection import Bus
from pipeline.bus.presence import Announcer
from pipeline.cli.main import program
from pipeline.config import Config, Nats
from pipeline.doctor import look
from pipeline.paths import JETSTREAM
from pipeline.protocol.intake import Rules
from pipeline.protocol.messages import Presence
from pipeline.protocol.presence import Presences
from tests.nats_server import NatsServer
from tests.ports import free_port
from tests.workers.fleet import Fleet, config_for, fleet
from workers.identity import new_identity
from workers.keeper import Keeper

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def written(folder: Path, text: str) -> Path:
    path = folder / "headrace.toml"
    path.write_text(text, "utf-8")
    return path


def changed(config: Path, old: str, new: str) -> None:
    config.write_text(config.read_text().replace(old, new))


@pytest.fixture
async def config(broker: NatsServer, tmp_path: Path) -> AsyncIterator[Path]:
    """Its gateway is a door that says 200 to everybody."""
    port = free_port()
    path = written(tmp_path, f'engine = "simulated"\n[nats]\nurl = "{broker.url}"\n[gateway]\nport = {port}\n')

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port):
        yield path


async def examined(config: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The command's exit status, and what is not as it should be, by name."""
    command = ["doctor", "--json", *arguments, "--config", str(config)]
    result = await anyio.to_thread.run_sync(lambda: CliRunner().invoke(program(), command))
    found = json.loads(result.stdout.splitlines()[-1])
    return result.exit_code, {finding["what"]: finding for finding in found if finding["level"] != "ok"}


@asynccontextmanager
async def pipeline(url: str, prefill: int, decode: int) -> AsyncIterator[Fleet]:
    """Workers and a keeper."""
    async with fleet(config_for(url), prefill=prefill, decode=decode) as made:
        rules = Rules(reply_subjects=("_INBOX.>",), timeout_max_s={"interactive": 60.0, "batch": 600.0})
        keeper = Keeper(made.bus, rules, new_identity("keeper"), Presences())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keeper.run)
            yield made
            tasks.cancel_scope.cancel()


async def test_a_sound_pipeline_passes(broker: NatsServer, config: Path) -> None:
    async with pipeline(broker.url, prefill=2, decode=1) as made:
        await made.ask()
        assert await examined(config) == (0, {})


async def test_people_get_a_page_with_a_mark_for_each_look(broker: NatsServer, config: Path) -> None:
    async with pipeline(broker.url, prefill=1, decode=1):
        command = ["doctor", "--config", str(config)]
        result = await anyio.to_thread.run_sync(lambda: CliRunner().invoke(program(), command))
    assert "✓ prefill    1 prefill worker: prefill-1." in result.stdout
    assert result.stdout.endswith("Nothing is wrong.\n")


async def test_no_broker(config: Path, broker: NatsServer) -> None:
    broker.kill9()
    status, found = await examined(config)
    assert status == 1
    assert set(found) == {"nats"}
    assert "Cannot reach NATS" in found["nats"]["said"]


async def test_a_broker_without_jetstream(config: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.conf"
    plain.write_text("max_payload: 1MB\n")
    server = NatsServer(tmp_path / "plain", plain).start()
    try:
        changed(config, "url = ", f'url = "{server.url}" # ')
        status, found = await examined(config)
    finally:
        server.kill9()
    assert (status, set(found)) == (1, {"jetstream", "prefill", "decode", "keeper"})


async def test_an_empty_broker_and_nobody_there(config: Path) -> None:
    status, found = await examined(config)
    assert status == 1
    assert set(found) == {"streams", "prefill", "decode", "keeper"}
    assert "Stream ADVISORIES is missing." in found["streams"]["said"]


async def test_a_stream_that_somebody_has_changed(broker: NatsServer, config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "jetstream"
    shutil.copytree(JETSTREAM, folder)
    file = folder / "REQUESTS_batch.stream.json"
    file.write_text(file.read_text().replace('"max_msgs": 200000', '"max_msgs": 77'))
    async with pipeline(broker.url, prefill=1, decode=1) as made:
        await streams.apply(made.bus, streams.declared(folder))
        status, found = await examined(config)
    assert (status, set(found)) == (1, {"streams"})
    assert "max_msgs is 77" in found["streams"]["said"]


async def test_a_configuration_with_other_shards_than_the_broker(broker: NatsServer, config: Path) -> None:
    changed(config, "[gateway]", "[requests]\nshards = 8\n[gateway]")
    async with pipeline(broker.url, prefill=1, decode=1):
        status, found = await examined(config)
    assert (status, set(found)) == (1, {"shards"})
    assert "requests.shards = 16" in found["shards"]["remedy"]


async def test_a_pool_that_has_died_and_one_of_another_model(broker: NatsServer, config: Path) -> None:
    async with pipeline(broker.url, prefill=1, decode=1) as made:
        made.kill("decode-1")
        stranger = Presence(role="decode", id="stranger", epoch="1", ready=False, model="another", fingerprint="x")
        announcer = Announcer(made.bus, lambda: stranger)
        await announcer.start()
        status, found = await examined(config)
        await announcer.stop()
    assert status == 1
    assert set(found) >= {"decode", "model", "fingerprint", "ledger"}
    assert "stranger" in found["fingerprint"]["said"]


async def test_a_clock_that_is_wrong(broker: NatsServer, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pipeline(broker.url, prefill=1, decode=1) as made:
        stranger = msgspec.structs.replace(made.prefill().presence(), role="gateway", id="late")

        class Late:
            def __getattr__(self, name: str) -> Any:
                return getattr(outside, name)

            @staticmethod
            def unix_s() -> float:
                return outside.unix_s() - 5.0

        announcer = Announcer(made.bus, lambda: stranger)
        monkeypatch.setattr(announcing, "outside", Late())
        await announcer.start()
        status, found = await examined(config)
        await announcer.stop()
    assert (status, set(found)) == (1, {"clock"})
    assert "5.0 s behind" in found["clock"]["said"]


async def test_nobody_at_the_gateways_port_and_no_keeper(broker: NatsServer, config: Path) -> None:
    changed(config, "port = ", f"port = {free_port()} # ")
    async with fleet(config_for(broker.url), prefill=1, decode=1):
        status, found = await examined(config)
    assert (status, set(found)) == (1, {"gateway", "keeper"})


async def test_lmcache_that_does_not_run(broker: NatsServer, config: Path) -> None:
    changed(config, 'engine = "simulated"', 'engine = "vllm"')
    changed(config, "[gateway]", f"[lmcache]\nhttp_port = {free_port()}\n[gateway]")
    async with pipeline(broker.url, prefill=1, decode=1):
        status, found = await examined(config)
    assert (status, set(found)) == (1, {"lmcache"})


async def test_a_dead_letter_is_worth_a_word_and_no_failure(broker: NatsServer, config: Path) -> None:
    async with pipeline(broker.url, prefill=1, decode=1), await Bus.connect(broker.url, "test") as bus:
        await bus.store("dlq.malformed.interactive", b"{}", msg_id="x", timeout_s=2.0)
        status, found = await examined(config)
    assert (status, set(found)) == (0, {"dlq"})


async def test_a_stream_without_shards_is_a_difference_and_no_missing_broker(broker: NatsServer) -> None:
    declared = streams.declared(JETSTREAM)
    async with await Bus.connect(broker.url, "test") as bus:
        await streams.apply(bus, declared)
        await bus.request("$JS.API.STREAM.DELETE.REQUESTS_batch", b"", 2.0)
        plain = {"name": "REQUESTS_batch", "subjects": ["requests.in.batch.*.*"]}
        await bus.request("$JS.API.STREAM.CREATE.REQUESTS_batch", msgspec.json.encode(plain), 2.0)
        facts = await look.look(Config(engine="simulated", nats=Nats(url=broker.url)), declared)
    assert facts.nats_error == ""
    assert any("subject_transform" in one for one in facts.differences or ())
    assert set(facts.shards or ()) == {"interactive"}


async def test_a_broker_that_dies_under_the_look_is_a_fact_too(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = streams.declared(JETSTREAM)
    async with await Bus.connect(broker.url, "test") as bus:
        await streams.apply(bus, declared)

    async def dies(*_: object) -> list[object]:
        broker.kill9()
        return []

    monkeypatch.setattr(look, "_listen", dies)
    facts = await look.look(Config(engine="simulated", nats=Nats(url=broker.url)), declared)
    assert facts.server is not None
    assert facts.server.jetstream_error
