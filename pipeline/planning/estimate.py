"""What a deployment would do: two pools, or replicas that do both. Percentiles, and whether they meet the objective.

Split: first tokens by the prefill pool's queue, then hand-over and one decode step; tokens by a step of those that run.

Aggregated: every engine step by step, `replicas.py`. The chunk is the largest that keeps the objective between tokens, the best
that an operator could choose.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Final, Literal

import msgspec

from pipeline.planning import queueing, replicas, sizing
from pipeline.planning.question import Question
from pipeline.planning.replicas import Replica
from pipeline.planning.workload import Asked

CHUNKS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)

BUSY_MAX: Final = 0.98
"""An engine that is busier has a queue that grows for longer than any sample shows."""

REPLICA_REQUESTS: Final = 2500
"""Put through aggregated engines, whose every step is looked at."""

BATCH_MAX: Final = 1e6
"""Sequences in an engine: more than any has."""

Kind = Literal["split", "aggregated"]


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles, in milliseconds."""

    p50: float
    p90: float
    p99: float


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment under a load. `busy` is the share of time that engines compute prompts, `decode_batch` the sequences that one
    runs, `cached` the tokens of a prompt that need not be computed, `hbm` those in the engine's own cache: all on average.

    `slots` are those of a prefill worker. Where the queue would only grow, there are no times.
    """

    kind: Kind
    requests_per_s: float
    prefill: int
    decode: int
    gpus: int
    slots: int
    busy: float
    decode_batch: float
    cached: float
    hbm: float
    chunk_tokens: int
    ttft_ms: Times | None
    itl_ms: Times | None
    meets: bool


def split(question: Question, per_s: float, prefill: int, decode: int) -> Estimate:
    """`prefill` and `decode` engines, with the slots that let 99 % of first tokens come soonest."""
    asked = question.source.requests(per_s, question.memory, prefill)
    batch = sizing.running(question, per_s, decode)
    ttft, slots = None, question.prefill_slots[0]
    busy = per_s * queueing.mean_work_s(asked, question.rates) / prefill
    if busy < BUSY_MAX and math.isfinite(batch):
        tried = {
            slots: _first_tokens(question, asked, batch, (prefill, decode, slots)) for slots in question.prefill_slots
        }
        slots, ttft = min(tried.items(), key=lambda one: one[1].p99)
    itl = _steps(question, batch)
    return Estimate(
        kind="split",
        requests_per_s=per_s,
        prefill=prefill,
        decode=decode,
        gpus=prefill * question.gpus_per_prefill + decode * question.gpus_per_decode,
        slots=slots,
        busy=busy,
        decode_batch=batch,
        cached=_mean(asked, lambda one: one.hbm + one.lmcache),
        hbm=_mean(asked, lambda one: one.hbm),
        chunk_tokens=question.chunk_tokens,
        ttft_ms=ttft,
        itl_ms=itl,
        meets=_meets(question, ttft, itl) and sizing.decodes(question, per_s, decode),
    )


def _first_tokens(question: Question, asked: Sequence[Asked], batch: float, fleet: tuple[int, int, int]) -> Times:
    prefill, decode, slots = fleet
    done = queueing.evaluate(asked, question.rates, question.pool(prefill, slots)).prefilled
    return times(one.took_s + question.rates.behind_prefill_s(_moved(one.asked, decode), batch) for one in done)


def aggregated(question: Question, per_s: float, count: int) -> Estimate:
    """`count` engines that do both, of the decode engines' size, with the largest chunk that meets the objective."""
    batch = sizing.running(question, per_s, count)
    first = _chunk(question, sizing.batch_p99(batch))
    estimate = _aggregated(question, per_s, count, first)
    for chunk in reversed([chunk for chunk in CHUNKS if 2 * batch <= chunk < first]):
        if estimate.meets or estimate.itl_ms is None or estimate.itl_ms.p99 <= question.objective.itl_ms:
            break
        estimate = _aggregated(question, per_s, count, chunk)
    return estimate


def _aggregated(question: Question, per_s: float, count: int, chunk: int) -> Estimate:
    """KV of what decodes leaves so much less room for prefixes."""
    load, rates, memory = question.load, question.rates, question.memory
    batch = sizing.running(question, per_s, count)
    room = memory.prefill_tokens - min(batch, BATCH_MAX) * question.context_tokens
    memory = msgspec.structs.replace(memory, prefill_tokens=max(0.0, room))
    asked = question.source.requests(per_s, memory, count, REPLICA_REQUESTS)
    rate = sizing.prefill_rates(question, chunk)[1]
    busy = (
        per_s / count * (_mean(asked, queueing.computed) / rate + rates.prefill_overhead_s + _decode_s(question, batch))
    )
    ttft = itl = outcome = None
    if per_s * load.output_tokens / count <= rates.decode_tokens_per_s and math.isfinite(batch) and busy < BUSY_MAX:
        of = Replica(
            rates=rates,
            prefill_tokens_per_s=rate,
            chunk_tokens=chunk,
            sequences_max=max(1.0, sizing.batch_max(question)),
        )
        outcome = replicas.serve(asked, of, count)
        ttft, itl = times(outcome.ttfts_s), _weighted(outcome.steps)
    return Estimate(
        kind="aggregated",
        requests_per_s=per_s,
        prefill=count,
        decode=count,
        gpus=count * question.gpus_per_decode,
        slots=0,
        busy=outcome.mixed if outcome else busy,
        decode_batch=outcome.batch if outcome else batch,
        cached=_mean(asked, lambda one: one.hbm + one.lmcache),
        hbm=_mean(asked, lambda one: one.hbm),
        chunk_tokens=chunk,
        ttft_ms=ttft,
        itl_ms=itl,
        meets=_meets(question, ttft, itl),
    )


def _chunk(question: Question, batch: float) -> int:
    """The largest chunk whose step keeps the objective between tokens, but room for two of each sequence that runs."""
    rates, batch = question.rates, min(batch, BATCH_MAX)
    rate = sizing.prefill_rates(question, question.chunk_tokens)[1]

    def keeps(chunk: int) -> bool:
        first = max(chunk / rate, rates.step_s) if rates.overlaps else chunk / rate + rates.step_s
        return first + batch * rates.step_per_sequence_s <= question.objective.itl_ms / 1e3

    kept = [chunk for chunk in CHUNKS if keeps(chunk)] or [CHUNKS[0]]
    return max(kept[-1], next((chunk for chunk in CHUNKS if chunk >= 2 * batch), CHUNKS[-1]))


def _decode_s(question: Question, batch: float) -> float:
    """An engine's own time for the tokens of one reply, beside what overlaps with prompts."""
    rates, tokens = question.rates, question.load.output_tokens
    alone = 0.0 if rates.overlaps else rates.step_s / max(1.0, batch)
    return tokens * (rates.step_per_sequence_s + alone)


def _weighted(steps: Sequence[tuple[float, int]]) -> Times | None:
    """Percentiles between two tokens: a step counts once for each sequence that waits for it. None of nothing."""
    ordered, total = sorted(steps), sum(waiting for _, waiting in steps)
    if not total:
        return None

    def at(percent: float) -> float:
        seen = accumulate(waiting for _, waiting in ordered)
        return (
            next(step_s for (step_s, _), so_far in zip(ordered, seen, strict=True) if so_far * 100 >= percent * total)
            * 1e3
        )

    return Times(p50=at(50), p90=at(90), p99=at(99))


def _moved(asked: Asked, decode: int) -> int:
    """Tokens that decode loads: what is in prefill's own cache is in that of decode, too, where there is only one."""
    return asked.prompt - asked.hbm if decode == 1 else asked.prompt


def _steps(question: Question, batch: float) -> Times | None:
    """Between two tokens of a decode engine that runs `batch` sequences on average, Poisson."""
    if not math.isfinite(batch):
        return None
    p50, p90, p99 = (
        1e3 * question.rates.decode_step_s(batch + z * math.sqrt(batch)) for z in (0.0, 1.282, sizing.Z_99)
    )
    return Times(p50=p50, p90=p90, p99=p99)


def times(seconds: Iterable[float]) -> Times:
    """Nearest-rank percentiles."""
    ordered = sorted(seconds)

    def at(percent: float) -> float:
        return ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1] * 1e3

    return Times(p50=at(50), p90=at(90), p99=at(99))


def _mean(asked: Sequence[Asked], what: Callable[[Asked], float]) -> float:
    return sum(map(what, asked)) / len(asked)


def _meets(question: Question, ttft: Times | None, itl: Times | None) -> bool:
    if ttft is None or itl is None:
        return False
    return ttft.p99 <= question.objective.ttft_ms and itl.p99 <= question.objective.itl_ms
