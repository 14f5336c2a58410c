"""What `headrace plan` is asked: model, hardware, transport, workload, objective; and the three ways to put a workload."""

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Final, Protocol

import msgspec

from pipeline.planning import hits, source, workload
from pipeline.planning.hardware import Group
from pipeline.planning.models import BYTES, Model
from pipeline.planning.queueing import Pool
from pipeline.planning.rates import Memory, Rates
from pipeline.planning.transports import Transport
from pipeline.planning.workload import Asked, Line, Workload

REQUESTS: Final = 10_000
"""Put through the queue for each estimate: 100 beyond the 99th percentile, in 0.2 s."""

SEED: Final = 1


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """What 99 of 100 must meet: the first token, and the time between two tokens."""

    ttft_ms: Annotated[float, msgspec.Meta(gt=0)]
    itl_ms: Annotated[float, msgspec.Meta(gt=0)]


class Source(Protocol):
    """Where requests come from."""

    def requests(self, per_s: float, memory: Memory, engines: int, count: int = REQUESTS) -> Sequence[Asked]:
        """At most `count`, at this rate, with what the caches of so many engines would have of each."""


class Numbers:
    """From a workload in numbers."""

    def __init__(self, load: Workload) -> None:
        self._load = load

    def requests(self, per_s: float, memory: Memory, engines: int, count: int = REQUESTS) -> Sequence[Asked]:
        """Drawn with a seed: as many conversations, of which each turns faster or slower."""
        scale = self._load.requests_per_s / per_s
        load = msgspec.structs.replace(self._load, requests_per_s=per_s, turn_gap_s=self._load.turn_gap_s * scale)
        hbm = hits.expect(load, engines * memory.prefill_tokens / source.BLOCK_TOKENS, engines)
        lmcache = hits.expect(load, memory.lmcache_tokens / source.BLOCK_TOKENS)
        return list(islice(hits.draw(load, hbm, lmcache, SEED), count))


class Trace:
    """From a recorded trace, as it came or faster."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._per_s = workload.mean_of(lines).requests_per_s

    def requests(self, per_s: float, memory: Memory, engines: int, count: int = REQUESTS) -> Sequence[Asked]:
        """The trace's own requests, and its bursts, at another pace."""
        asked = workload.replay(self._lines, engines * memory.prefill_tokens, memory.lmcache_tokens)
        return [one._replace(at_s=one.at_s * self._per_s / per_s) for one in asked[:count]]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Everything. `prefill` and `decode` are the hardware of one engine each; None where only rates are known."""

    name: str
    model: Model
    load: Workload
    source: Source
    rates: Rates
    memory: Memory
    objective: Objective
    transports: dict[str, Transport]
    transport: str
    prefill: Group | None = None
    decode: Group | None = None
    weights: str = "bf16"
    kv: str = "bf16"
    chunk_tokens: int = 512
    block_tokens: int = 16
    prefill_slots: tuple[int, ...] = (4, 2, 1)
    """To choose from: with few, a request waits for another engine rather than behind its owner's others."""

    @property
    def kv_bytes_per_token(self) -> float:
        """Of one token."""
        return self.model.kv_bytes_per_token(BYTES[self.kv])

    @property
    def kv_transfer_bytes(self) -> float:
        """Of the mean prompt."""
        return self.model.kv_bytes(self.load.prompt_tokens, BYTES[self.kv])

    @property
    def context_tokens(self) -> float:
        """Of a sequence in decode, on average over its reply."""
        return self.load.prompt_tokens + self.load.output_tokens / 2

    @property
    def gpus_per_prefill(self) -> int:
        """Of one prefill engine."""
        return self.prefill.size if self.prefill else 1

    @property
    def gpus_per_decode(self) -> int:
        """Of one decode engine."""
        return self.decode.size if self.decode else 1

    def pool(self, engines: int, slots: int) -> Pool:
        """So many prefill engines."""
        return Pool(engines=engines, slots=slots, lmcache_tokens_per_s=self.memory.lmcache_tokens_per_s)


def memory_of(model: Model, prefill: Group, decode: Group, weights: str, kv: str, lmcache_bytes: float) -> Memory:
    """What the hardware leaves beside weights and activations; nothing where the weights alone are too much."""
    weight_bytes, per_token = model.params * BYTES[weights], model.kv_bytes_per_token(BYTES[kv])
    return Memory(
        prefill_tokens=max(0.0, prefill.kv_room_bytes(weight_bytes)) / per_token,
        decode_tokens=max(0.0, decode.kv_room_bytes(weight_bytes)) / per_token,
        lmcache_tokens=lmcache_bytes / per_token,
    )
