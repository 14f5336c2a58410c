"""Streams and consumers as files: read them, compare them with the broker, declare them.

A file holds what the JetStream API itself takes, so the `nats` CLI reads it, too. Durations are in nanoseconds.

    <stream>.stream.json               a stream
    <stream>.<consumer>.consumer.json  one of its consumers, literally
    <stream>.shards.consumer.json      shard 0's consumer; shards 1 to S-1 follow its pattern, and S is the number in the
                                       stream's transform, `partition(S,1)`

How many copies there are of each is the cluster's matter, not the files': `nats.replicas` says it.

Only fields that a file names are compared: what an operator adds beyond them is left alone. What the broker cannot change in
place is never deleted and made anew here, because that loses requests: it is said, with what to do.
"""

import asyncio
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from pipeline import outside
from pipeline.bus.connection import Bus
from pipeline.bus.errors import ApiError, BusError, Disconnected, Unanswered
from pipeline.errors import OperatorError

Config = Mapping[str, Any]

Difference = str
"""One sentence: what differs, and what to do where `apply` cannot mend it."""
Change = str
"""One sentence: what was done."""

_API_TIMEOUT_S: Final = 5.0

_ELECTED_S: Final = 15.0
"""In a cluster that has lost a server nobody may lead for the 9 s that an election takes: asked again for so long."""

_ASK_AGAIN_S: Final = 0.2

_SETTLING: Final = frozenset({10005, 10008, 10126})
"""The server's numbers for that, for too few servers (one may be about to join again), and for a consumer whose stream is about
to have more copies."""

_NOT_FOUND: Final = frozenset({10059, 10014})
"""The server's numbers for a stream and a consumer that are not there."""

FIXED: Final[Mapping[str, frozenset[str]]] = {
    "stream": frozenset({"storage", "retention"}),
    "consumer": frozenset(
        {
            "deliver_policy",
            "ack_policy",
            "replay_policy",
            "max_waiting",
            "mem_storage",
            "priority_policy",
            "durable_name",
        }
    ),
}
"""Fields that a living stream or consumer keeps."""

_PARTITION: Final = re.compile(r"\{\{partition\((\d+),")
_SHARD_0: Final = ".shard.0."


class Item(msgspec.Struct, frozen=True):
    """One declared stream, or one declared consumer of it."""

    kind: Literal["stream", "consumer"]
    stream: str
    name: str
    config: Config

    def __str__(self) -> str:
        return f"Stream {self.name}" if self.kind == "stream" else f"Consumer {self.stream}/{self.name}"


class Declared(msgspec.Struct, frozen=True):
    """What a folder declares. Streams come before consumers."""

    items: tuple[Item, ...]

    def stream(self, name: str) -> Config:
        """The configuration of one stream. Raises `OperatorError` where there is none."""
        for item in self.items:
            if item.kind == "stream" and item.name == name:
                return item.config
        raise OperatorError(f"No stream {name} is declared.", f"Add {name}.stream.json to configs/jetstream.")


def declared(folder: Path, replicas: int | None = None) -> Declared:
    """Read a folder. `replicas`, where given, is of all of them. Raises `OperatorError` naming the file that is wrong."""
    streams = {path: _read(path) for path in sorted(folder.glob("*.stream.json"))}
    if not streams:
        raise OperatorError(f"No *.stream.json in {folder}.", "Give the folder configs/jetstream of the project.")
    by_name = {_named(path, config, path.name.split(".")[0]): config for path, config in streams.items()}
    consumers = [
        item for path in sorted(folder.glob("*.consumer.json")) for item in _consumers(path, _read(path), by_name)
    ]
    items = (*(Item("stream", name, name, config) for name, config in by_name.items()), *consumers)
    return Declared(items if replicas is None else tuple(_copied(item, replicas) for item in items))


def shards_of(declaration: Declared, klass: str) -> int:
    """The number of shards of a class. Raises `OperatorError` where its stream is not declared or has no partitions."""
    name = f"REQUESTS_{klass}"
    return partitions(name, declaration.stream(name))


def max_age_s(declaration: Declared, klass: str) -> float:
    """How long the stream of a class keeps a request, in seconds; for ever where it sets no bound. Raises `OperatorError`."""
    age_ns = declaration.stream(f"REQUESTS_{klass}").get("max_age", 0)
    return age_ns / 1e9 if age_ns else math.inf


async def diff(bus: Bus, declaration: Declared) -> list[Difference]:
    """What the broker lacks or has otherwise. Raises `OperatorError` where JetStream does not answer."""
    return [text for item in declaration.items for text in _say(item, await _have(bus, item))]


async def apply(bus: Bus, declaration: Declared) -> list[Change]:
    """Create what is missing, update what differs, and say what was done.

    Raises `OperatorError`, and changes nothing, where something differs that cannot be updated; and with the server's own words
    where it refuses.
    """
    have = [(item, await _have(bus, item)) for item in declaration.items]
    fixed = [text for item, config in have if config is not None for text in _unmendable(item, config)]
    if fixed:
        raise OperatorError("\n".join(fixed), "Nothing was changed.")
    return [await _mend(bus, item, config) for item, config in have if _say(item, config)]


# --------------------------------------------------------------------------------------------------------------
# Files


def _read(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise OperatorError(f"{path} cannot be read: {error}.", "It must hold one JSON object.") from None


def _copied(item: Item, replicas: int) -> Item:
    return msgspec.structs.replace(item, config={**item.config, "num_replicas": replicas})


def _named(path: Path, config: Config, name: str) -> str:
    if config.get("name") != name:
        raise OperatorError(f"{path} is of {name}, but its name is {config.get('name')!r}.", "Make them agree.")
    return name


def _consumers(path: Path, config: Config, streams: Mapping[str, Config]) -> Iterator[Item]:
    stream, label = path.name.split(".")[:2]
    if stream not in streams:
        raise OperatorError(f"{path} is of a stream that no file declares.", f"Add {stream}.stream.json.")
    if label != "shards":
        yield Item("consumer", stream, _named(path, config, label), config)
        return
    _named(path, config, "s0")
    if _SHARD_0 not in config.get("filter_subject", ""):
        raise OperatorError(f"{path} has no filter_subject for shard 0.", "Set it to requests.shard.0.<class>.>.")
    for number in range(partitions(stream, streams[stream])):
        yield Item("consumer", stream, f"s{number}", _shard(config, number))


def _shard(config: Config, number: int) -> Config:
    names = dict.fromkeys(config.keys() & {"name", "durable_name"}, f"s{number}")
    about = str(config.get("description", "")).replace("Shard 0", f"Shard {number}")
    filter_subject = config["filter_subject"].replace(_SHARD_0, f".shard.{number}.")
    return {**config, **names, "description": about, "filter_subject": filter_subject}


def partitions(name: str, config: Config) -> int:
    """Shards of a stream, by its transform. Raises `OperatorError` where it has none."""
    found = _PARTITION.search(str(config.get("subject_transform", {}).get("dest", "")))
    if found is None or int(found[1]) < 1:
        raise OperatorError(
            f"Stream {name} has no shards.", "Its subject_transform must hold {{partition(<shards>,1)}}."
        )
    return int(found[1])


# --------------------------------------------------------------------------------------------------------------
# Differences


def _say(item: Item, have: Config | None) -> list[Difference]:
    if have is None:
        return [f"{item} is missing."]
    fixed = _unmendable(item, have)
    return fixed + [
        f"{item}: {field} is {_short(now)}, declared is {_short(want)}."
        for field, now, want in _fields(item.config, have)
        if not _keeps(item, field, now, want)
    ]


def _unmendable(item: Item, have: Config) -> list[Difference]:
    rm = f"nats {item.kind} rm {item.stream}" + (f" {item.name}" if item.kind == "consumer" else "")
    return [
        f"{item}: {field} is {_short(now)}, declared is {_short(want)}, and that cannot be updated. "
        f"Stop the workers, let the stream run empty, delete it ({rm}), and apply again; or declare {field} as it is."
        for field, now, want in _fields(item.config, have)
        if _keeps(item, field, now, want)
    ]


def _fields(want: Config, have: Config, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Fields of `want` that `have` holds otherwise, down into tables. The server leaves out what is false, 0 or empty."""
    for name, value in want.items():
        now = have.get(name)
        if isinstance(value, Mapping):
            yield from _fields(value, now if isinstance(now, Mapping) else {}, f"{place}{name}.")
        elif now != value and (now or value):
            yield f"{place}{name}", now, value


def _keeps(item: Item, field: str, now: Any, want: Any) -> bool:
    if field in FIXED[item.kind]:
        return True
    if field != "subject_transform.dest":
        return False
    before, after = _PARTITION.search(str(now)), _PARTITION.search(str(want))
    return before is not None and after is not None and int(after[1]) < int(before[1])  # shards that nobody would pull


def _short(value: Any) -> str:
    return "not set" if value is None else msgspec.json.encode(value).decode()


# --------------------------------------------------------------------------------------------------------------
# The API


class _Problem(msgspec.Struct):
    code: int
    err_code: int = 0
    description: str = ""


class _Answer(msgspec.Struct):
    config: dict[str, Any] = {}
    error: _Problem | None = None


async def _have(bus: Bus, item: Item) -> Config | None:
    """The configuration at the broker, or None."""
    place = item.stream if item.kind == "stream" else f"{item.stream}.{item.name}"
    try:
        return await _call(bus, f"{item.kind.upper()}.INFO.{place}", None)
    except ApiError as error:
        if error.err_code in _NOT_FOUND:
            return None
        raise _refused(item, error) from None


async def _mend(bus: Bus, item: Item, have: Config | None) -> Change:
    config = dict(item.config) if have is None else _merged(have, item.config)
    action = "create" if have is None else "update"
    if item.kind == "stream":
        subject, body = f"STREAM.{action.upper()}.{item.name}", config
    else:
        subject = ".".join(
            part for part in ("CONSUMER.CREATE", item.stream, item.name, config.get("filter_subject")) if part
        )
        body = {"stream_name": item.stream, "action": action, "config": config}
    try:
        await _call(bus, subject, body)
    except ApiError as error:
        raise _refused(item, error) from None
    if have is None:
        return f"{item} created."
    changed = ", ".join(f"{field} {_short(now)} → {_short(want)}" for field, now, want in _fields(item.config, have))
    return f"{item} updated: {changed}."


def _merged(have: Config, want: Config) -> dict[str, Any]:
    """What the broker has, with what is declared laid over it: an update replaces everything."""
    return {
        **have,
        **{
            name: _merged(have.get(name) or {}, value) if isinstance(value, Mapping) else value
            for name, value in want.items()
        },
    }


async def _call(bus: Bus, subject: str, body: Config | None) -> Config:
    data = b"" if body is None else msgspec.json.encode(body)
    until_s = outside.monotonic_s() + _ELECTED_S
    while True:
        patient = outside.monotonic_s() < until_s
        try:
            read = msgspec.json.decode(await bus.request(f"$JS.API.{subject}", data, _API_TIMEOUT_S), type=_Answer)
        except BusError as error:
            if isinstance(error, Unanswered | Disconnected) and patient:
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            raise OperatorError(
                f"JetStream does not answer: {error}", "Start nats-server with JetStream enabled."
            ) from None
        if read.error is None:
            return read.config
        if read.error.err_code not in _SETTLING or not patient:
            raise ApiError(read.error.code, read.error.err_code, read.error.description)
        await asyncio.sleep(_ASK_AGAIN_S)


def _refused(item: Item, error: ApiError) -> OperatorError:
    return OperatorError(f"NATS refuses {item}: {error}.", "Correct its file, or the server's limits.")
