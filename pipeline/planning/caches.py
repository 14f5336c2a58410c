"""A cache of KV blocks with least-recently-used eviction: a worker's HBM, or LMCache."""

from collections import OrderedDict

from pipeline.planning.traffic import Request


class Cache:
    """At most `capacity` blocks, kept as runs (see `traffic.py`).

    That is the same as an LRU of single blocks that evicts the end of a run before its beginning, as vLLM does: the blocks of a
    run are used together. Of one request, the persona counts as used last, since it comes first. Blocks in use are not guarded:
    they are the youngest of thousands.
    """

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.used = 0
        self._runs: OrderedDict[str | int, int] = OrderedDict()

    def match(self, request: Request) -> int:
        """How many blocks of the prompt, from the first on, are here. They count as used."""
        runs = self._runs
        persona = runs.get(request.creator, 0)
        if not persona:
            return 0
        history = runs.get(request.history, 0) if persona == request.persona else 0
        if history:
            runs.move_to_end(request.history)
        runs.move_to_end(request.creator)
        return min(persona + history, request.blocks)

    def put(self, request: Request) -> None:
        """All full blocks of the prompt are here now."""
        runs, history = self._runs, request.blocks - request.persona
        self._grow(request.history, history)
        self._grow(request.creator, request.persona)
        while self.used > self.capacity:
            oldest, blocks = next(iter(runs.items()))
            over = self.used - int(self.capacity)
            if blocks > over:
                runs[oldest] = blocks - over
            else:
                del runs[oldest]
            self.used -= min(blocks, over)

    def persona(self, creator: str) -> int:
        """Blocks of a creator's persona that are here."""
        return self._runs.get(creator, 0)

    def put_persona(self, creator: str, blocks: int) -> None:
        """So many blocks of a persona are here now, if no more were."""
        self._grow(creator, blocks)

    def _grow(self, run: str | int, blocks: int) -> None:
        known = self._runs.get(run, 0)
        if blocks > known:
            self.used += blocks - known
            self._runs[run] = blocks
        if run in self._runs:
            self._runs.move_to_end(run)
