"""What the prompts of a creator have in common: the persona that it pays to have in a cache before they come.

Nobody says where a persona ends, but two prompts show it: it is what they share from the start. A prompt that shares little with
what was known (a new persona, or another template) begins anew.
"""

from collections import OrderedDict

from pipeline.limits import PREFIXES_MAX
from pipeline.protocol.warm_messages import Prefix

_TOKEN_BYTES = 4


class Prefixes:
    """The shared prefixes of the creators seen last, as packed token ids: 7 KB each, `PREFIXES_MAX` of them."""

    def __init__(self, limit: int = PREFIXES_MAX) -> None:
        self._limit = limit
        self._known: OrderedDict[str, Prefix] = OrderedDict()

    def seen(self, creator: str, salt: str, ids: bytes) -> None:
        """A prompt of this creator (a subject token) has been rendered."""
        known = self._known.get(creator)
        if known is None or known.salt != salt:
            shared = ids
        else:
            length = _common(known.ids, ids)
            shared = known.ids[:length] if 2 * length >= len(known.ids) else ids
        self._known[creator] = Prefix(salt, shared)
        self._known.move_to_end(creator)
        if len(self._known) > self._limit:
            self._known.popitem(last=False)

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
