"""The LMCache tier: which chunks of KV a host has, shared by its engines.

Contents are only names (64-bit chained hashes, see `blocks.py`), so a tier is a set with least-recently-used eviction.
`LocalTier` is that set, within a process. `SharedTier` is the same set in several processes, over a file.

The file is a ring of the names last used, in order. An LRU cache *is* the newest distinct names of such a log, so every
process replays what the others have written into a `LocalTier` of its own, and all agree. Why so, and neither SQLite nor a
service: a reader takes no lock and makes no system call, and nothing has to be started. A writer's lock is the kernel's, which
ends with a killed process; names are written before the head that announces them, so half a write does not exist; the file
has a fixed size. A lock that cannot be had at once (its holder is stopped) loses the store, as a cache may.
"""

import fcntl
import mmap
import os
import struct
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final, Protocol

from pipeline.errors import OperatorError

LOG_PER_CHUNK: Final = 4
"""Uses logged per chunk of capacity. Who joins late learns the newest `capacity` names, unless a few hot ones filled the log."""

LOCK_WAIT_S: Final = 0.005
"""A writer holds the lock for some microseconds. Longer, and its holder is stopped: better to lose a store than to stop too."""

_MAGIC: Final = 0x48454144_52414345
_HEADER: Final = struct.Struct("<4Q")
_HEAD, _EPOCH = 2, 3
"""Words of the header: magic, capacity, uses logged so far, times emptied."""
_HEADER_WORDS: Final = 4


class Tier(Protocol):
    """A set of chunk names."""

    def match(self, names: Sequence[int]) -> int:
        """How many of `names`, from the first on, are here."""

    def put(self, names: Iterable[int]) -> None:
        """`names` are here now, and used last."""

    def clear(self) -> None:
        """All chunks are lost, as when the server restarts."""

    def close(self) -> None:
        """Let go of the tier; others keep it."""


class LocalTier:
    """At most `capacity` chunks, least recently used out first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._names: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def match(self, names: Sequence[int]) -> int:
        """How many of `names`, from the first on, are here."""
        here = self._names
        for count, name in enumerate(names):
            if name not in here:
                return count
        return len(names)

    def put(self, names: Iterable[int]) -> None:
        """`names` are here now, and used last."""
        here = self._names
        for name in names:
            here[name] = None
            here.move_to_end(name)
        while len(here) > self.capacity:
            here.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._names.clear()

    def close(self) -> None:
        """Nothing to let go of."""


class ProcessTier(LocalTier):
    """The tier called `name` of this process: one set for all that open it, until the last of them closes it."""

    _open: ClassVar[dict[tuple[str, int], tuple[int, OrderedDict[int, None]]]] = {}

    def __init__(self, name: str, capacity: int) -> None:
        super().__init__(capacity)
        self._key = (name, capacity)
        users, self._names = self._open.get(self._key, (0, self._names))
        self._open[self._key] = (users + 1, self._names)

    def close(self) -> None:
        """Let go; call it once."""
        users, names = self._open.pop(self._key)
        if users > 1:
            self._open[self._key] = (users - 1, names)


class SharedTier:
    """A tier of `capacity` chunks in the file `path`, which is made where it is missing. Who starts the processes removes it.

    Raises `OperatorError` where the file cannot be used, or is of another capacity.
    """

    def __init__(self, path: str, capacity: int) -> None:
        self._local = LocalTier(capacity)
        self._size = LOG_PER_CHUNK * capacity
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OperatorError(
                f"Cannot open the simulated LMCache {path}: {error.strerror}.", "Name a file that can be written."
            ) from None
        try:
            self._map = self._mapped(path, capacity)
        except BaseException:
            os.close(self._file)
            raise
        self._words = memoryview(self._map).cast("Q")
        self._ring = self._words[_HEADER_WORDS:]
        self._head = 0
        self._epoch = self._words[_EPOCH]
        self._catch_up()

    def match(self, names: Sequence[int]) -> int:
        """How many of `names`, from the first on, are here."""
        self._catch_up()
        return self._local.match(names)

    def put(self, names: Iterable[int]) -> None:
        """`names` are here now, and used last; or lost, where the lock could not be had."""
        if not self._locked():
            return
        try:
            new = array("Q", names)[-self._size :]
            head = self._words[_HEAD]
            start = head % self._size
            first = min(len(new), self._size - start)
            self._ring[start : start + first] = memoryview(new)[:first]
            self._ring[: len(new) - first] = memoryview(new)[first:]
            self._words[_HEAD] = head + len(new)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._catch_up()

    def clear(self) -> None:
        """Forget all, in every process."""
        if not self._locked():
            return
        try:
            # Others read meanwhile, without the lock: first nothing is left to find, then the head, then the word to forget.
            self._map[8 * _HEADER_WORDS :] = bytes(8 * self._size)
            self._words[_HEAD] += self._size
            self._words[_EPOCH] += 1
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._catch_up()

    def close(self) -> None:
        """Let go of the file."""
        self._ring.release()
        self._words.release()
        self._map.close()
        os.close(self._file)

    def _mapped(self, path: str, capacity: int) -> mmap.mmap:
        """The file, whole and ours. The first one here writes the header, while the others wait for the lock."""
        wanted = 8 * (_HEADER_WORDS + self._size)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            if os.fstat(self._file).st_size == 0:
                os.ftruncate(self._file, wanted)
                os.pwrite(self._file, _HEADER.pack(_MAGIC, capacity, 0, 0), 0)
            found = os.pread(self._file, _HEADER.size, 0)
            same_size = os.fstat(self._file).st_size == wanted
            if not same_size or _HEADER.unpack(found)[:2] != (_MAGIC, capacity):
                raise OperatorError(
                    f"{path} is no simulated LMCache of {capacity} chunks.",
                    "Remove it, or give all workers one configuration.",
                )
            return mmap.mmap(self._file, wanted)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _catch_up(self) -> None:
        """Replay what has been logged since the last look."""
        if self._words[_EPOCH] != self._epoch:
            self._epoch = self._words[_EPOCH]
            self._local.clear()
        head = self._words[_HEAD]
        first = max(self._head, head - self._size)
        self._head = head
        if first < head:
            start, stop = first % self._size, head % self._size
            ring = self._ring
            new = ring[start:stop].tolist() if start < stop else ring[start:].tolist() + ring[:stop].tolist()
            self._local.put(name for name in new if name)

    def _locked(self) -> bool:
        give_up_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    return False
            else:
                return True
