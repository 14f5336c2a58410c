"""Who lives, as one process sees it: the last word of every other process, and when it came.

A process says that it lives every `PRESENCE_PERIOD_S`. It counts as live until `PRESENCE_SILENT_MAX_S` without a word. A newer
epoch replaces an older one at once; a word of an older epoch than the one known is a late message and changes nothing.
"""

import math
from collections.abc import Collection, Iterator
from typing import Final, Self

import msgspec

from pipeline.limits import PRESENCE_SILENT_MAX_S
from pipeline.protocol.messages import Presence

RECEIVERS_MAX: Final = 256
"""Receivers remembered that were never heard of: more lives of gateways than end while their requests may lie in the queue."""


class Receiver(msgspec.Struct, frozen=True):
    """Who waits for a reply: a gateway in one of its lives. In a request it is `<id>/<epoch>`."""

    id: str
    epoch: str

    @classmethod
    def parse(cls, said: str | None) -> Self | None:
        """None where nobody is named, or not so that we could know of its death."""
        name, _, epoch = (said or "").rpartition("/")
        return cls(name, epoch) if name else None


class Presences:
    """The last presence of each process, by role and id. Bounded by what really runs: the silent are forgotten."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[Presence, float]] = {}
        self._named: dict[Receiver, float] = {}

    def heard(self, presence: Presence, now_s: float) -> None:
        """A process has said that it lives. Epochs order as text: they begin with their start time."""
        key = (presence.role, presence.id)
        known = self._seen.get(key)
        if known is None:
            self.forget_silent(now_s)  # or a worker would remember every name that its fleet has ever had
        if known is None or presence.epoch >= known[0].epoch:
            self._seen[key] = (presence, now_s)

    def live(self, role: str, now_s: float) -> list[Presence]:
        """The live processes of a role, by id."""
        return sorted(self._live(role, now_s), key=lambda presence: presence.id)

    def ready(self, role: str, now_s: float) -> list[Presence]:
        """Those of them that take work: warmed up, neither draining nor paused."""
        return [presence for presence in self.live(role, now_s) if presence.takes]

    def get(self, role: str, process: str, now_s: float) -> Presence | None:
        """The presence of one process, while it lives."""
        known = self._seen.get((role, process))
        return known[0] if known and now_s - known[1] <= PRESENCE_SILENT_MAX_S else None

    def epochs(self, now_s: float) -> set[str]:
        """The lives that go on: of every role."""
        return {presence.epoch for presence, at_s in self._seen.values() if now_s - at_s <= PRESENCE_SILENT_MAX_S}

    def heard_of(self, roles: Collection[str]) -> Iterator[tuple[str, str, float]]:
        """(id, epoch, when it was last heard) of the processes of these roles."""
        for (role, process), (presence, at_s) in self._seen.items():
            if role in roles:
                yield process, presence.epoch, at_s

    def silent(self, now_s: float) -> list[tuple[Presence, float]]:
        """The last word of each that is remembered and does not live, and for how long it has said nothing since."""
        words = ((presence, now_s - at_s) for presence, at_s in self._seen.values())
        return [(presence, silence_s) for presence, silence_s in words if silence_s > PRESENCE_SILENT_MAX_S]

    def heard_s(self, role: str, process: str) -> float:
        """When a process was last heard. Of ourselves: until when at least our connection has carried anything."""
        known = self._seen.get((role, process))
        return known[1] if known is not None else -math.inf

    def silence_s(self, receiver: Receiver, since_s: float, now_s: float) -> float:
        """For how long nothing was heard of a receiver; for ever, where a newer life of it is known.

        It would have been heard from `since_s` until `now_s`, by a connection of our own that has lasted. Who was never heard of
        is waited for from when a request first named it. (No responders is no sign: a restarting broker has none for a moment.)
        """
        known = self._seen.get(("gateway", receiver.id))
        if known is not None and known[0].epoch > receiver.epoch:
            return math.inf
        heard_s = known[1] if known is not None and known[0].epoch == receiver.epoch else self._awaited(receiver, now_s)
        return now_s - max(heard_s, since_s)

    def _awaited(self, receiver: Receiver, now_s: float) -> float:
        """Since when a receiver is waited for that was never heard of."""
        since_s = self._named.pop(receiver, now_s)
        self._named[receiver] = since_s
        if len(self._named) > RECEIVERS_MAX:
            del self._named[next(iter(self._named))]
        return since_s

    def forget_silent(self, now_s: float, after_s: float = 60.0) -> None:
        """Drop what has been silent so long that nobody asks for it any more."""
        self._seen = {key: known for key, known in self._seen.items() if now_s - known[1] <= after_s}

    def _live(self, role: str, now_s: float) -> Iterator[Presence]:
        for (of_role, _), (presence, at_s) in self._seen.items():
            if of_role == role and now_s - at_s <= PRESENCE_SILENT_MAX_S:
                yield presence
