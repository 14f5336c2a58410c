"""An answer as a configuration: TOML that `pipeline.config.load` takes, with what it cannot say as comments."""

import json

from pipeline.planning.answer import Answer
from pipeline.planning.question import Question


def toml(question: Question, answer: Answer) -> str:
    """The whole file. What is not in it keeps the defaults of `configs/local.toml`."""
    of, rates = answer.settings, answer.rates
    prefill, decode = (answer.fleet.prefill, answer.fleet.decode) if answer.fleet else (1, 1)
    block_tokens = 32
    lines = [
        f"# By `headrace plan`: {answer.requests_per_s:g} requests/s of {answer.prompt_tokens} + {answer.output_tokens} tokens, "
        f"{answer.model}.",
        f"# {answer.verdict.sentence}",
        *(f"# {note}" for note in answer.notes),
        "#",
        f"# Beside this file: configs/jetstream needs max_ack_pending {of.max_ack_pending} or more in its consumers, and",
        f"# {of.shards} shards, there and in requests.shards.",
        "",
        "[requests]",
        f"default_max_tokens = {max(1, 2 * answer.output_tokens)}",
        "",
        "[model]",
        f"source = {json.dumps(answer.model)}        # a local folder, or the hub's id",
        f"served_name = {json.dumps(answer.model)}",
        f"max_model_len = {of.max_model_len}",
        "",
        *_engine(
            "prefill", of.prefill_slots, of.kv_cache_bytes_prefill, of.max_num_batched_tokens, question.gpus_per_prefill
        ),
        *_engine(
            "decode", of.decode_slots, of.kv_cache_bytes_decode, of.max_num_batched_tokens, question.gpus_per_decode
        ),
        "[lmcache]",
        f"l1_bytes = {of.lmcache_bytes}",
        "",
        "# The same fleet without hardware: headrace up --engine simulated --config THIS",
        "[simulated]",
        f"prefill_tokens_per_s = {rates.prefill_tokens_per_s:.1f}",
        f"prefill_overhead_s = {rates.prefill_overhead_s:.6f}",
        f"step_s = {rates.step_s:.6f}",
        f"step_per_sequence_s = {rates.step_per_sequence_s:.9f}",
        f"kv_blocks = {max(1, of.decode_blocks * question.block_tokens // block_tokens)}",
        f"lmcache_blocks_per_s = {min(rates.load_tokens_per_s, 1e9) / block_tokens:.1f}",
        "",
        "[up]",
        f"prefill = {prefill}",
        f"decode = {decode}",
    ]
    return "\n".join(lines) + "\n"


def _engine(role: str, slots: int, kv_cache_bytes: int, batched: int, gpus: int) -> list[str]:
    split = [f"[{role}.extra]", f"tensor_parallel_size = {gpus}", ""] if gpus > 1 else []
    return [
        f"[{role}]",
        f"slots = {slots}",
        f"kv_cache_bytes = {kv_cache_bytes}",
        f"max_num_batched_tokens = {max(batched, slots)}",
        "",
        *split,
    ]
