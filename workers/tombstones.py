"""What is remembered for a while: requests that were cancelled, whose message may still be on its way to us, or were turned away,
and handoffs that were refused."""


class Tombstones:
    """The last `limit` ids of what has ended, though word of it may still come."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ids: dict[str, None] = {}

    def add(self, name: str) -> None:
        """Remember it, and forget the oldest beyond the limit."""
        self._ids.pop(name, None)
        self._ids[name] = None
        if len(self._ids) > self._limit:
            del self._ids[next(iter(self._ids))]

    def __contains__(self, name: str) -> bool:
        return name in self._ids


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
