"""How many of each, by division and by what physics allows; and the settings that follow. All of it by hand, on paper."""

import math
from typing import Final

import msgspec

from pipeline.planning.models import BYTES
from pipeline.planning.question import Question

RESERVE: Final = 0.1
"""Of decode's blocks, never promised: the source's threshold, and `protocol/credits.py`'s."""

GRANTED_BEYOND: Final = 1.25
"""Of its sequences an engine is granted: they wait in it while others end."""

SPARE_SEQUENCES: Final = 1.2
"""Decode's `max_num_seqs` over the 99th percentile of what runs."""

SHARDS_PER_WORKER: Final = 16

Z_99: Final = 2.326
"""Standard deviations to the 99th percentile of a normal distribution."""

ENGINES_MAX: Final = 4096
"""Engines that a search goes up to."""


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """What no engine can beat on this hardware: every tensor core and every memory chip busy all the time. GPUs, milliseconds."""

    prefill_gpus: float
    prefill_gpus_cached: float
    decode_gpus: float
    decode_gpus_flops: float
    decode_gpus_bandwidth: float
    decode_gpus_memory: float
    ttft_ms: float
    itl_ms: float


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What to configure. Blocks are of `question.block_tokens`."""

    prefill_slots: int
    decode_slots: int
    blocks_per_request: int
    decode_blocks: int
    decode_blocks_reserve: int
    grants_per_decode: int
    kv_cache_bytes_prefill: int
    kv_cache_bytes_decode: int
    lmcache_bytes: int
    max_ack_pending: int
    shards: int
    max_num_batched_tokens: int
    max_model_len: int


def fill(prompt_tokens: int, chunk_tokens: int) -> float:
    """The share of its steps that a prompt alone fills: its last step takes as long as a full one, which others could share."""
    return prompt_tokens / (math.ceil(prompt_tokens / chunk_tokens) * chunk_tokens)


def prefill_rates(question: Question, tokens: int) -> tuple[float, float]:
    """Tokens/s of one engine: of whole prompts, one by one, and with chunked prefill."""
    rate, filled = question.rates.prefill_tokens_per_s, fill(max(1, tokens), question.chunk_tokens)
    return (rate * filled, rate) if question.rates.full_steps else (rate, rate / filled)


def engines(per_s: float, tokens: float, tokens_per_s: float) -> int:
    """At least so many: by division, with nothing to spare."""
    return max(1, math.ceil(per_s * tokens / tokens_per_s))


def decode_engines(question: Question) -> int:
    """At least so many: by the rate that was given, else those whose steps, memory and objective it fits."""
    load, rates = question.load, question.rates
    if math.isfinite(rates.decode_tokens_per_s):
        return engines(load.requests_per_s, load.output_tokens, rates.decode_tokens_per_s)
    return decode_for(question, load.requests_per_s) or ENGINES_MAX


def decode_for(question: Question, per_s: float) -> int | None:
    """The fewest decode engines that meet the objective between tokens at this rate; None: no number does."""
    low = max(1, math.ceil(per_s * question.load.output_tokens * question.rates.step_per_sequence_s))
    found = low
    while found <= ENGINES_MAX and not decodes(question, per_s, found):
        found = max(found + 1, found * 5 // 4)
    if found > ENGINES_MAX:
        return None
    while found > low and decodes(question, per_s, found - 1):
        found -= 1
    return found


def decodes(question: Question, per_s: float, count: int) -> bool:
    """Whether `count` engines give every token in time, and have room for all sequences."""
    if per_s * question.load.output_tokens / count > question.rates.decode_tokens_per_s:
        return False
    batch = running(question, per_s, count)
    return (
        math.isfinite(batch)
        and batch_p99(batch) <= batch_max(question)
        and question.rates.decode_step_s(batch_p99(batch)) <= question.objective.itl_ms / 1e3
    )


def running(question: Question, per_s: float, count: int) -> float:
    """Sequences that run in each of `count` engines, on average: Little's law, where the step grows with them."""
    tokens_per_s, rates = per_s * question.load.output_tokens / count, question.rates
    left = 1 - tokens_per_s * rates.step_per_sequence_s
    return tokens_per_s * rates.step_s / left if left > 0 else math.inf


def batch_p99(mean: float) -> float:
    """The 99th percentile of a Poisson number with this mean, by its normal approximation."""
    return mean + Z_99 * math.sqrt(mean) if math.isfinite(mean) else mean


def batch_max(question: Question) -> float:
    """Sequences that one decode engine has room for, beside the reserve."""
    if question.memory.decode_tokens is None:
        return math.inf
    return question.memory.decode_tokens * (1 - RESERVE) / (blocks(question) * question.block_tokens)


def blocks(question: Question) -> int:
    """KV blocks promised to a request: as `protocol/credits.py` counts."""
    return math.ceil((question.load.prompt_tokens + question.load.output_tokens) / question.block_tokens) + 1


def floor(question: Question, cached: int) -> Floor | None:
    """The physical floor. None where the hardware is not known."""
    if question.prefill is None or question.decode is None:
        return None
    load, model, gpu = question.load, question.model, question.decode.gpu
    weight_bytes = model.params * BYTES[question.weights]
    flops, bytes_per_s = gpu.flops(question.weights), gpu.memory_bytes_per_s
    prompt = model.prefill_flops(load.prompt_tokens), model.prefill_flops(load.prompt_tokens, cached)
    per_gpu = question.prefill.gpu.flops(question.weights)
    tokens_per_s, kv = (
        load.requests_per_s * load.output_tokens,
        model.kv_bytes(question.context_tokens, BYTES[question.kv]),
    )
    by_flops = tokens_per_s * model.decode_flops(question.context_tokens) / flops
    by_bandwidth = tokens_per_s * kv / bytes_per_s
    by_memory = _by_memory(weight_bytes, tokens_per_s * weight_bytes / bytes_per_s * kv, gpu.memory_bytes)
    transport = question.transports[question.transport]
    moved_s = transport.floor_s(question.kv_transfer_bytes)
    itl_s = model.weight_bytes_read(1, BYTES[question.weights]) / question.decode.peak_bytes_per_s
    return Floor(
        prefill_gpus=load.requests_per_s * prompt[0] / per_gpu,
        prefill_gpus_cached=load.requests_per_s * prompt[1] / per_gpu,
        decode_gpus=max(by_flops, by_bandwidth, by_memory),
        decode_gpus_flops=by_flops,
        decode_gpus_bandwidth=by_bandwidth,
        decode_gpus_memory=by_memory,
        ttft_ms=1e3 * (prompt[1] / question.prefill.peak_flops(question.weights) + moved_s + itl_s),
        itl_ms=1e3 * itl_s,
    )


def _by_memory(weight_bytes: float, kv_bytes_gpus: float, memory_bytes: float) -> float:
    """GPUs n whose memory holds the weights, and the KV of all that runs: with n of them a step takes an n-th of the time, so
    `kv_bytes_gpus` / n bytes. n × memory = weights + kv / n."""
    return (weight_bytes + math.sqrt(weight_bytes**2 + 4 * memory_bytes * kv_bytes_gpus)) / (2 * memory_bytes)


def settings(question: Question, prefill: int, decode: int, slots: int) -> Settings:
    """For a fleet of so many engines of each role, with so many slots in each for prefill."""
    load, per_token = question.load, question.kv_bytes_per_token
    mean = running(question, load.requests_per_s, decode)
    sequences = max(1, math.ceil(SPARE_SEQUENCES * batch_p99(mean))) if math.isfinite(mean) else 1
    need = blocks(question)
    wanted = math.ceil(sequences * need / (1 - RESERVE))
    have = question.memory.decode_tokens
    decode_blocks = wanted if have is None else int(have // question.block_tokens)
    block_bytes = per_token * question.block_tokens
    context = 2 ** math.ceil(math.log2(max(2, 2 * (load.prompt_tokens + load.output_tokens))))
    largest = context * per_token
    prefill_tokens = min(question.memory.prefill_tokens, 64 * context)
    warm = min(load.creators * load.prefix_tokens * per_token, question.memory.lmcache_tokens * per_token)
    return Settings(
        prefill_slots=slots,
        decode_slots=sequences,
        blocks_per_request=need,
        decode_blocks=decode_blocks,
        decode_blocks_reserve=math.ceil(RESERVE * decode_blocks),
        grants_per_decode=min(math.floor(GRANTED_BEYOND * sequences), int(decode_blocks * (1 - RESERVE)) // need),
        kv_cache_bytes_prefill=max(1, int(prefill_tokens * per_token)),
        kv_cache_bytes_decode=max(1, int(decode_blocks * block_bytes)),
        lmcache_bytes=int(2 * slots * prefill * largest + warm),
        max_ack_pending=2 * (slots * prefill + sequences * decode),
        shards=SHARDS_PER_WORKER * prefill,
        max_num_batched_tokens=question.chunk_tokens,
        max_model_len=min(context, question.model.context_max or context),
    )
