"""Time and chance: all that the pipeline takes from the world beside its messages.

Everything that waits, expires or draws asks here, so that a simulation may own both and replay a run from its seed.
"""

import random
import secrets
import time
from typing import Protocol


class Source(Protocol):
    """Where time and chance come from."""

    def monotonic_s(self) -> float:
        """Seconds, never going back; their zero means nothing."""

    def unix_s(self) -> float:
        """Seconds since 1970, as this machine believes."""

    def token(self, length_bytes: int) -> str:
        """Hex that nobody else has drawn."""

    def roll(self) -> float:
        """A number in [0, 1)."""


class _World:
    """The real thing."""

    monotonic_s = staticmethod(time.monotonic)
    unix_s = staticmethod(time.time)
    token = staticmethod(secrets.token_hex)
    roll = staticmethod(random.random)


_source: Source = _World()


def use(source: Source | None) -> None:
    """Take time and chance from `source`; from the real world again where it is None."""
    global _source  # noqa: PLW0603
    _source = source or _World()


def monotonic_s() -> float:
    """Seconds, never going back; their zero means nothing."""
    return _source.monotonic_s()


def unix_s() -> float:
    """Seconds since 1970, as this machine believes."""
    return _source.unix_s()


def token(length_bytes: int = 8) -> str:
    """Hex that nobody else has drawn."""
    return _source.token(length_bytes)


def roll() -> float:
    """A number in [0, 1)."""
    return _source.roll()
