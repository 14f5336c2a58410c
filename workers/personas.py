"""Personas as a prefill worker knows them: read once, followed for changes, and prefilled by their owner ahead of their requests.

A version never changes, so what is kept under its revision stays true. Which version is a creator's last may change at any
moment: whoever writes it is heard at once, and what was not heard is found by a look at the bucket, after a reconnect and now
and then.

A new version is warmed up by the worker that owns its creator: it renders the persona before two different messages, and
prefills what both prompts begin with, when its load allows. What fails costs the first request a cold prefill, and nothing else.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import msgspec

from pipeline.bus import reading
from pipeline.bus.connection import Bus
from pipeline.bus.errors import BusError
from pipeline.bus.kv import Bucket
from pipeline.errors import InvalidField, ReplyError
from pipeline.limits import (
    PERSONA_WARM_PERIOD_S,
    PERSONA_WARM_TRIES_MAX,
    PERSONAS_CACHED_MAX,
    PERSONAS_RELOAD_S,
    PERSONAS_WARMING_MAX,
)
from pipeline.protocol import personas, prefixes
from pipeline.protocol.budget import cache_salt
from pipeline.protocol.messages import pack_ids
from pipeline.protocol.personas import BUCKET, Persona
from pipeline.protocol.routes import Route
from pipeline.protocol.turns import assembled
from pipeline.protocol.warm_messages import Prefix, WarmedUp, WarmUp
from pipeline.telemetry import logs
from workers.engines.port import Engine

log: Final = logs.get("personas")

_PROBES: Final = ("a", "the other one")
"""Two messages that begin with different tokens: what their prompts share is the persona's."""


class Personas:
    """The last versions that were asked for, and where they are to be found. `changed` is told of each key that is written."""

    def __init__(self, bus: Bus) -> None:
        self.changed: Callable[[str], None] = lambda key: None
        self._bus = bus
        self._bucket = Bucket(bus, BUCKET)
        self._last: OrderedDict[str, int] = OrderedDict()
        self._texts: OrderedDict[int, tuple[str, Persona]] = OrderedDict()
        self._writes = 0
        self._version = 0

    async def listen(self) -> None:
        """Follow the bucket from now on."""
        self._bus.on_reconnect(self._doubt)
        await self._bucket.follow(self._heard)

    async def run(self) -> None:
        """Look now and then for what was not heard, until cancelled."""
        while True:
            await anyio.sleep(PERSONAS_RELOAD_S)
            try:
                version = await self._bucket.version()
            except BusError as error:
                log.warning("personas unread", error=str(error))
                continue
            if version < self._version:  # the bucket was declared anew, and its revisions begin again
                self._texts.clear()
            if version != self._version:
                self._version = version
                self._doubt()

    async def last(self, key: str) -> int:
        """The revision of a creator's last version; 0 where there is none. Raises `BusError`."""
        if (known := self._last.get(key)) is not None:
            self._last.move_to_end(key)
            return known
        writes, entry = self._writes, await self._bucket.read(key)
        if entry is None:
            return 0
        self._keep(key, entry.revision, entry.value)
        if writes == self._writes:  # else it may be old already
            self._last[key] = entry.revision
            if len(self._last) > PERSONAS_CACHED_MAX:
                self._last.popitem(last=False)
        return entry.revision

    async def at(self, key: str, revision: int) -> Persona | None:
        """A version of this creator's, while the bucket holds it. Raises `BusError`."""
        if revision not in self._texts:
            kept = await reading.get(self._bus, f"KV_{BUCKET}", revision)
            if kept is not None:
                self._keep(kept.subject.removeprefix(f"$KV.{BUCKET}."), revision, kept.data)
        owner, persona = self._texts.get(revision, ("", None))
        return persona if owner == key else None  # the number came from outside, and may be of another's

    def _keep(self, key: str, revision: int, data: bytes) -> None:
        try:
            self._texts[revision] = (key, personas.read(data))
        except InvalidField as error:
            log.warning("persona unreadable", revision=revision, error=str(error))
            return
        self._texts.move_to_end(revision)
        if len(self._texts) > PERSONAS_CACHED_MAX:
            self._texts.popitem(last=False)

    def _heard(self, key: str) -> None:
        self._writes += 1
        self._last.pop(key, None)
        self.changed(key)

    def _doubt(self) -> None:
        self._writes += 1
        self._last.clear()


class PersonaWarmer:
    """New versions, prefilled by their owner. `owns` says whether an affinity is ours, `warm` prefills when there is time."""

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        known: Personas,
        salt_scope: str,
        owns: Callable[[str], bool],
        warm: Callable[[WarmUp], Awaitable[WarmedUp]],
    ) -> None:
        self._routes = Bucket(bus, "routes")
        self._engine, self._known, self._salt_scope = engine, known, salt_scope
        self._owns, self._warm = owns, warm
        self._tries: dict[str, int] = {}
        self._wake = anyio.Event()
        known.changed = self._put

    async def run(self) -> None:
        """Warm up what is published, until cancelled."""
        while True:
            if not self._tries:
                self._wake = anyio.Event()
                await self._wake.wait()
            for key in list(self._tries):
                self._tries[key] += 1
                tries, done = self._tries[key], await self._done(key)
                if self._tries[key] == tries and (done or tries >= PERSONA_WARM_TRIES_MAX):  # else there is a newer one
                    del self._tries[key]
            if self._tries:
                await anyio.sleep(PERSONA_WARM_PERIOD_S)

    def _put(self, key: str) -> None:
        if key in self._tries or len(self._tries) < PERSONAS_WARMING_MAX:
            self._tries[key] = 0
            self._wake.set()

    async def _done(self, key: str) -> bool:
        """Whether nothing is left to be done for the last version of a creator."""
        try:
            persona = await self._known.at(key, await self._known.last(key))
            if persona is None or not await self._is_ours(persona.creator):
                return True
            done = await self._warm(await self._warm_up(persona))
        except BusError:
            return False
        except ReplyError as error:
            log.warning("persona not warmed up", creator=key, error=str(error))
            return True
        except Exception:  # what a template makes of its arguments must not end the worker
            log.exception("persona not warmed up", creator=key)
            return True
        if done.state != "busy":
            log.info("persona warmed up", creator=key, state=done.state, cached=done.cached_tokens)
        return done.state != "busy"

    async def _is_ours(self, creator: str) -> bool:
        """Whether requests of this creator are meant for this worker, by the hash or by an exception to it."""
        entry = await self._routes.read(creator)
        affinities = [creator]
        if entry is not None:
            try:
                route = msgspec.json.decode(entry.value, type=Route)
                affinities = [f"{creator}~{variant}" for variant in route.variants]
            except msgspec.MsgspecError:
                pass  # as for a gateway: the hash serves as well
        return any(self._owns(affinity) for affinity in affinities)

    async def _warm_up(self, persona: Persona) -> WarmUp:
        """Raises `ReplyError` where the persona does not fit the model."""
        prompts = [await self._engine.render(_probe(persona, text)) for text in _PROBES]
        shared = prefixes.shared(*(pack_ids(prompt.token_ids) for prompt in prompts))
        salt = cache_salt(persona.creator, persona.tenant, self._salt_scope, self._engine.info.fingerprint)
        return WarmUp(creator=persona.creator, prefix=Prefix(salt, shared))


def _probe(persona: Persona, text: str) -> dict[str, object]:
    return assembled({}, persona, (), {"role": "user", "content": text}, "")
