"""Publishing personas: a version for each that says something new."""

from typing import NamedTuple

from pipeline.bus import reading
from pipeline.bus.connection import Bus
from pipeline.bus.kv import Bucket
from pipeline.protocol import personas
from pipeline.protocol.personas import BUCKET, Persona


class Published(NamedTuple):
    """The version that says it, and whether it is a new one."""

    version: int
    new: bool


async def put(bus: Bus, persona: Persona) -> Published:
    """Publish a version; one that says the same as the last is none.

    Raises `InvalidField` where it is too large, `ApiError` where another was published meanwhile, and `BusError`.
    """
    data, key = personas.write(persona), personas.key_of(persona.creator, persona.tenant)
    bucket = Bucket(bus, BUCKET)
    last = await bucket.read(key)
    if last is not None and last.value == data:
        return Published(last.revision, new=False)
    return Published(await bucket.write(key, data, last.revision if last else await _mark(bus, key)), new=True)


async def get(bus: Bus, creator: str, tenant: str) -> tuple[Persona, int] | None:
    """The last version of a creator's (a subject token), and its number. Raises `InvalidField` and `BusError`."""
    entry = await Bucket(bus, BUCKET).read(personas.key_of(creator, tenant))
    return (personas.read(entry.value), entry.revision) if entry is not None else None


async def _mark(bus: Bus, key: str) -> int:
    """The revision of what NATS's own tools leave of a key that they delete."""
    kept = await reading.last_of(bus, f"KV_{BUCKET}", f"$KV.{BUCKET}.{key}")
    return kept.sequence if kept is not None else 0
