"""The HBM prefix cache: a fixed number of KV blocks, named by what they hold.

A block is in one of four places, and their sum is the total:

    named and held    a full block that sequences use; it may serve several
    private           a block of one sequence that is not full yet, so it has no name
    idle              a full block nobody uses: it can be found again, or evicted, least recently used first
    empty             never used, or evicted

A name is a chained hash: it stands for the block's tokens and all before them, and for the salt.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b


def root_of(salt: str) -> int:
    """The name before the first block."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little")


def names_of(packed: bytes | memoryview, block_size: int, root: int) -> list[int]:
    """The names of the full blocks of `packed` token ids (u32 each), of which the one before is `root`: about 1 µs each."""
    size = 4 * block_size
    names = []
    name = root.to_bytes(8, "little")
    for at in range(0, len(packed) - size + 1, size):
        name = blake2b(packed[at : at + size], key=name, digest_size=8).digest()
        names.append(int.from_bytes(name, "little"))
    return names


class BlockPool:
    """`total` blocks. Who takes blocks remembers which, and releases them exactly once. `evicted` is told of names that go."""

    def __init__(self, total: int, evicted: Callable[[int], None] | None = None) -> None:
        self.total = total
        self._evicted = evicted
        self._holders: dict[int, int] = {}
        self._private = 0
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Blocks that cannot be had."""
        return len(self._holders) + self._private

    @property
    def idle(self) -> int:
        """Blocks that hold cache only."""
        return len(self._idle)

    def match(self, names: Iterable[int]) -> int:
        """How many of `names`, from the first on, are here."""
        count = 0
        for name in names:
            if name not in self._holders and name not in self._idle:
                break
            count += 1
        return count

    def take(self, names: Sequence[int], private: int) -> bool:
        """Hold the blocks `names`, which are here, and `private` new ones; False, and nothing changed, where there is no room."""
        revived = sum(1 for name in names if name not in self._holders)
        if self.used + revived + private > self.total:
            return False
        for name in names:
            self._hold(name)
        self._private += private
        while self.used + len(self._idle) > self.total:
            name, _ = self._idle.popitem(last=False)
            if self._evicted is not None:
                self._evicted(name)
        return True

    def name(self, name: int) -> bool:
        """A private block is full and gets its name. False where that name is here already: then the two become one."""
        assert self._private > 0, "only a private block can be named"
        new = name not in self._holders and name not in self._idle
        self._private -= 1
        self._hold(name)
        return new

    def release(self, names: Sequence[int], private: int) -> None:
        """Give back. Named blocks stay as cache, the end of a prompt first in line to be evicted."""
        self._private -= private
        assert self._private >= 0, "released more private blocks than were taken"
        for name in reversed(names):
            left = self._holders[name] - 1
            if left:
                self._holders[name] = left
            else:
                del self._holders[name]
                self._idle[name] = None

    def _hold(self, name: int) -> None:
        holders = self._holders.get(name, 0)
        self._holders[name] = holders + 1
        if not holders:
            self._idle.pop(name, None)
