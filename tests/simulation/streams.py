"""What a stream stores: messages by sequence and subject, its limits, and the ids that it has seen.

Generic, as the server's: work queues, logs and key-value buckets differ by their configuration alone. File storage: what has been
stored survives the broker.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pipeline.protocol.subjects import matches, partition

MSG_ID: Final = "Nats-Msg-Id"
EXPECTED_LAST: Final = "Nats-Expected-Last-Subject-Sequence"

_MAPPING: Final = re.compile(r"\{\{(partition|wildcard)\(([\d,]+)\)\}\}")


class Stored(msgspec.Struct):
    """One message."""

    sequence: int
    subject: str
    data: bytes
    headers: Mapping[str, str] | None
    at_s: float


class Refused(Exception):
    """The stream does not take it. The server's code and number for the reason."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.body = {"code": code, "err_code": err_code, "description": description}


class Stream:
    """One stream. Times are Unix seconds by the broker's clock."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.name: str = config["name"]
        self.subjects: list[str] = list(config["subjects"])
        self.messages: dict[int, Stored] = {}
        self.last = 0
        self._transform: Mapping[str, str] | None = config.get("subject_transform")
        self._window_s = config.get("duplicate_window", 120_000_000_000) / 1e9
        self.age_s: float = config.get("max_age", 0) / 1e9
        self._per_subject: int = config.get("max_msgs_per_subject", -1)
        self._most: int = config.get("max_msgs", -1)
        self._by_subject: dict[str, list[int]] = {}
        self._ids: dict[str, tuple[int, float]] = {}

    def takes(self, subject: str) -> bool:
        """Whether it listens on `subject`."""
        return any(matches(pattern, subject) for pattern in self.subjects)

    def store(self, subject: str, data: bytes, headers: Mapping[str, str] | None, now_s: float) -> tuple[int, bool]:
        """The message's sequence, and whether it was here already. Raises `Refused`."""
        msg_id = (headers or {}).get(MSG_ID)
        if msg_id is not None and (known := self._ids.get(msg_id)) and now_s - known[1] < self._window_s:
            return known[0], True
        subject = self.stored_under(subject)
        self._check(subject, headers or {})
        self.last += 1
        self.messages[self.last] = Stored(self.last, subject, data, headers, now_s)
        self._by_subject.setdefault(subject, []).append(self.last)
        if msg_id is not None:
            self._ids[msg_id] = (self.last, now_s)
        return self.last, False

    def stored_under(self, subject: str) -> str:
        """The subject after the stream's transform."""
        if self._transform is None or not matches(self._transform["src"], subject):
            return subject
        source = self._transform["src"].split(".")
        wild = [have for want, have in zip(source, subject.split("."), strict=True) if want == "*"]
        return _MAPPING.sub(lambda found: _mapped(found[1], found[2], wild), self._transform["dest"])

    def remove(self, sequence: int) -> Stored | None:
        """Take a message out, wherever it stands."""
        stored = self.messages.pop(sequence, None)
        if stored is not None:
            here = self._by_subject[stored.subject]
            here.remove(sequence)
            if not here:
                del self._by_subject[stored.subject]
        return stored

    def put_back(self, stored: Stored) -> None:
        """A removal that the broker's death has undone."""
        self.messages[stored.sequence] = stored
        self.messages = dict(sorted(self.messages.items()))
        here = self._by_subject.setdefault(stored.subject, [])
        here.append(stored.sequence)
        here.sort()

    @property
    def first(self) -> int:
        """The sequence of the oldest message, or what the next one's will be."""
        return next(iter(self.messages), self.last + 1)

    def next_from(self, sequence: int, pattern: str) -> Stored | None:
        """The first message from there on whose subject falls under a pattern."""
        found = (stored for at, stored in self.messages.items() if at >= sequence and matches(pattern, stored.subject))
        return next(found, None)

    def last_of(self, subject: str) -> Stored | None:
        """The newest message of a subject."""
        here = self._by_subject.get(subject)
        return self.messages[here[-1]] if here else None

    def counts(self, pattern: str) -> dict[str, int]:
        """Messages by subject, of the subjects under `pattern`."""
        return {subject: len(here) for subject, here in self._by_subject.items() if matches(pattern, subject)}

    def expired(self, now_s: float) -> list[int]:
        """Messages that have passed `max_age`, leased or not."""
        if not self.age_s:
            return []
        return [sequence for sequence, stored in self.messages.items() if now_s - stored.at_s >= self.age_s]

    def _check(self, subject: str, headers: Mapping[str, str]) -> None:
        here = self._by_subject.get(subject, [])
        if (expected := headers.get(EXPECTED_LAST)) is not None:
            last = here[-1] if here else 0
            if int(expected) != last:
                raise Refused(400, 10071, f"wrong last sequence: {last}")
        if 0 <= self._per_subject <= len(here):
            if self.config.get("discard_new_per_subject"):  # without it, `discard: new` is of the whole stream alone
                raise Refused(503, 10077, "maximum messages per subject exceeded")
            self.remove(here[0])
        if 0 <= self._most <= len(self.messages):
            if self.config.get("discard") == "new":
                raise Refused(503, 10077, "maximum messages exceeded")
            self.remove(next(iter(self.messages)))


def _mapped(function: str, arguments: str, wild: list[str]) -> str:
    numbers = [int(number) for number in arguments.split(",")]
    if function == "wildcard":
        return wild[numbers[0] - 1]
    return str(partition("".join(wild[number - 1] for number in numbers[1:]), numbers[0]))
