"""An answer for people: the floor beside every figure, reasons in words."""

from pipeline.planning.answer import Answer
from pipeline.planning.estimate import Estimate, Times
from pipeline.planning.question import Question


def text(question: Question, answer: Answer) -> str:
    """Some forty lines."""
    return "\n".join(
        [
            *_head(question, answer),
            "",
            *_kv(answer),
            "",
            *_gpus(question, answer),
            "",
            *_fleet(question, answer),
            "",
            *_settings(answer),
            "",
            answer.verdict.sentence,
            *(f"  - {reason}" for reason in answer.verdict.reasons),
            *(f"Note: {note}" for note in answer.notes),
        ]
    )


def _head(question: Question, answer: Answer) -> list[str]:
    load, rates, objective = question.load, answer.rates, question.objective
    parts = (
        f"{load.prefix_tokens:,} shared by a creator, {load.history_tokens:,} history, {load.message_tokens:,} message"
    )
    return [
        f"model      {answer.model}, {answer.params / 1e9:,.1f} B parameters, {answer.params_active / 1e9:,.1f} B active",
        f"load       {answer.requests_per_s:,.1f} requests/s of {answer.prompt_tokens:,} tokens ({parts}), "
        f"{answer.output_tokens:,} out",
        f"objective  99 % of first tokens within {objective.ttft_ms:g} ms, of gaps between tokens in {objective.itl_ms:g} ms",
        f"rates      {rates.origin}: prefill {rates.prefill_tokens_per_s:,.0f} tokens/s, {rates.prefill_overhead_s * 1e3:.1f} ms "
        f"a request; decode step {rates.step_s * 1e3:.2f} ms and {rates.step_per_sequence_s * 1e3:.4f} for each sequence",
    ]


def _kv(answer: Answer) -> list[str]:
    over = [
        f"  {name:14} {transfer.ms:10,.2f} ms   floor {transfer.floor_ms:,.2f}"
        for name, transfer in answer.transfers.items()
    ]
    return [
        f"KV         {answer.kv_bytes_per_token:,} bytes a token, {answer.kv_transfer_mib:,.1f} MiB a prompt; to move it:",
        *over,
    ]


def _gpus(question: Question, answer: Answer) -> list[str]:
    floor = answer.floor
    cold, cached, decode = (
        (f"   floor {gpus:,.2f}" for gpus in (floor.prefill_gpus, floor.prefill_gpus_cached, floor.decode_gpus))
        if floor
        else ("", "", "")
    )
    return [
        f"GPUs       by division; {question.gpus_per_prefill} in a prefill engine, {question.gpus_per_decode} in one for decode",
        f"  prefill, cold             {answer.prefill_gpus:6,}, chunked {answer.prefill_gpus_chunked:6,}{cold}",
        f"  prefill, prefix cached    {answer.prefill_gpus_prefix_hits:6,}, chunked "
        f"{answer.prefill_gpus_prefix_hits_chunked:6,}{cached}",
        f"  decode                    {answer.decode_gpus:6,}                {decode}",
        f"  P : D {answer.prefill_to_decode}; blocks of a prompt that are there already: {answer.block_hit_rate:.1%}",
    ]


def _fleet(question: Question, answer: Answer) -> list[str]:
    floor = answer.floor
    floors = f"   floor: first token {floor.ttft_ms:,.1f} ms, gap {floor.itl_ms:,.2f} ms" if floor else ""
    lines = [f"expected{floors}"]
    if answer.fleet:
        lines += _estimate("smallest split that meets the objective", answer.fleet)
    if answer.verdict.split and answer.verdict.split != answer.fleet:
        lines += _estimate("split of the GPUs compared", answer.verdict.split)
    return lines + _estimate("the same GPUs aggregated", answer.verdict.aggregated)


def _estimate(what: str, of: Estimate) -> list[str]:
    engines = (
        f"{of.prefill} + {of.decode} engines"
        if of.kind == "split"
        else f"{of.prefill} engines, chunk {of.chunk_tokens:,}"
    )
    return [
        f"  {what}: {engines}, {of.gpus:,} GPUs{'' if of.meets else ', does not meet it'}",
        f"    first token {_times(of.ttft_ms)}   gap {_times(of.itl_ms)}",
        f"    {min(of.busy, 1):.0%} of time with prompts, {of.decode_batch:,.0f} sequences in decode, "
        f"{of.cached:,.0f} prompt tokens cached",
    ]


def _times(of: Times | None) -> str:
    return f"p50 {of.p50:,.1f}, p90 {of.p90:,.1f}, p99 {of.p99:,.1f} ms" if of else "grows without end"


def _settings(answer: Answer) -> list[str]:
    of = answer.settings
    return [
        "settings   (--emit writes them)",
        f"  prefill.slots {of.prefill_slots}, decode.slots {of.decode_slots}, "
        f"max_num_batched_tokens {of.max_num_batched_tokens}",
        f"  credits: {of.blocks_per_request} blocks a request, {of.decode_blocks:,} in a decode worker, "
        f"{of.decode_blocks_reserve:,} kept back, so {of.grants_per_decode:,} grants at a time",
        f"  lmcache.l1_bytes {of.lmcache_bytes:,}, max_ack_pending of consumers {of.max_ack_pending:,} at least, "
        f"shards {of.shards:,}",
    ]
