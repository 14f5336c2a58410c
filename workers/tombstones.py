"""Requests that were cancelled, remembered for a while: their message may still be on its way to us."""


class Tombstones:
    """The last `limit` cancelled request ids."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ids: dict[str, None] = {}

    def add(self, request: str) -> None:
        """Remember it, and forget the oldest beyond the limit."""
        self._ids[request] = None
        if len(self._ids) > self._limit:
            del self._ids[next(iter(self._ids))]

    def __contains__(self, request: str) -> bool:
        return request in self._ids
