"""What the prompts of a creator have in common: the persona that it pays to have in a cache before they come.

Nobody says where a persona ends, but two prompts show it: it is what they share from the start. A prompt that shares little with
what was known (a new persona, or another template) begins anew.
"""

from collections import OrderedDict

from pipeline.limits import PREFIX_TOKENS_MAX, PREFIXES_BYTES_MAX, PREFIXES_MAX
from pipeline.protocol.warm_messages import Prefix

_TOKEN_BYTES = 4


class Prefixes:
    """The shared prefixes of the creators seen last, as packed token ids: `limit` of them, within `bytes_max`."""

    def __init__(self, limit: int = PREFIXES_MAX, bytes_max: int = PREFIXES_BYTES_MAX) -> None:
        self._limit, self._bytes_max = limit, bytes_max
        self._known: OrderedDict[str, Prefix] = OrderedDict()
        self._bytes = 0

    def seen(self, creator: str, salt: str, ids: bytes) -> None:
        """A prompt of this creator (a subject token) has been rendered. Of a very long one its beginning counts."""
        ids = ids[: _TOKEN_BYTES * PREFIX_TOKENS_MAX]
        known = self._known.pop(creator, None)
        if known is None or known.salt != salt:
            shared = ids
        else:
            length = _common(known.ids, ids)
            shared = known.ids[:length] if 2 * length >= len(known.ids) else ids
        self._known[creator] = Prefix(salt, shared)
        self._bytes += len(shared) - (len(known.ids) if known is not None else 0)
        while len(self._known) > 1 and (len(self._known) > self._limit or self._bytes > self._bytes_max):
            _, forgotten = self._known.popitem(last=False)
            self._bytes -= len(forgotten.ids)

    def of(self, creator: str) -> Prefix:
        """An empty one where nothing is known."""
        return self._known.get(creator, Prefix())


def shared(one: bytes, other: bytes) -> bytes:
    """What two prompts (packed token ids) begin with."""
    return one[: _common(one, other)]


def _common(one: bytes, other: bytes) -> int:
    """The length of what both begin with, in bytes of whole tokens."""
    if other.startswith(one):
        return len(one)
    low, high = 0, min(len(one), len(other)) // _TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * _TOKEN_BYTES] == other[: middle * _TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * _TOKEN_BYTES
