"""TCP ports for servers that tests start, in any number of test processes at a time."""

import contextlib
import fcntl
import functools
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_FIRST: Final = 12_000
_EACH: Final = 500
_SLICES: Final = 16
"""Up to 20,000, where those begin that `headrace up` chooses from; Linux gives those above 32,768 to outgoing connections."""


def free_port() -> int:
    """A port that nobody listened on a moment ago, and that nobody else is given until 499 others have been."""
    for port in itertools.islice(_mine(), _EACH):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"{_EACH} ports from {_FIRST} on are all taken: what tests have started must end with them")


@functools.cache
def _mine() -> Iterator[int]:
    """The ports of this process, round and round. The lock on them ends with it."""
    for number in range(_SLICES):
        lock = os.open(
            Path(tempfile.gettempdir()) / f"headrace-ports-{os.getuid()}-{number}", os.O_RDWR | os.O_CREAT, 0o600
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return itertools.cycle(range(_FIRST + number * _EACH, _FIRST + (number + 1) * _EACH))
    raise AssertionError(f"{_SLICES} processes take ports for tests already: let one end")
