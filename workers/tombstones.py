"""Requests remembered for a while: cancelled ones, whose message may still be on its way to us, and those turned away."""


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


class FirstSeen:
    """When a request was first seen, of the last `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._since_s: dict[str, float] = {}

    def since_s(self, request: str, now_s: float) -> float:
        """The time of its first look: now, where it was not seen before. Beyond the limit the oldest is forgotten."""
        since_s = self._since_s.setdefault(request, now_s)
        if len(self._since_s) > self._limit:
            del self._since_s[next(iter(self._since_s))]
        return since_s
