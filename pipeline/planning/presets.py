"""Questions ready to ask: that of the source article, with its own rates and its own rounding."""

from typing import Final

from pipeline.planning import hardware, models, source
from pipeline.planning.hardware import Group
from pipeline.planning.question import Numbers, Objective, Question
from pipeline.planning.rates import Memory, Rates
from pipeline.planning.transports import Transport
from pipeline.planning.workload import Workload

DECODE_TOKENS_PER_S: Final = 35_000.0
"""Of one GPU, by the source."""

SOURCE_TRANSPORTS: Final = {
    "nvlink": Transport(bytes_per_s=900 * 2**30),
    "infiniband": Transport(bytes_per_s=50 * 2**30),
}
"""As the source divides: MiB / 1,024 by GB/s of the line, NVLink's in both directions. `transports.toml` has one direction."""


def seed() -> Question:
    """70B in fp8 on H100, 1,000 requests/s of 2,210 tokens, with the rates that the source says a GPU has."""
    load = Workload(
        requests_per_s=source.REQUESTS_PER_S,
        prefix_tokens=source.PERSONA_TOKENS,
        history_tokens=400,
        message_tokens=source.MESSAGE_TOKENS,
        output_tokens=source.REPLY_TOKENS,
        creators=source.CREATORS,
        turns_mean=source.TURNS_MEAN,
        turn_gap_s=source.TURN_GAP_S,
    )
    link = source.LINK_BLOCKS_PER_S * source.BLOCK_TOKENS
    gpu = Group(gpu=hardware.known("h100"), size=1)
    return Question(
        name="seed",
        model=models.known("llama-3.1-70b"),
        load=load,
        source=Numbers(load),
        rates=Rates(
            origin="given",
            prefill_tokens_per_s=source.PREFILL_TOKENS_PER_S,
            prefill_overhead_s=source.PREFILL_OVERHEAD_S,
            load_tokens_per_s=link,
            store_tokens_per_s=link,
            handover_s=source.HANDOVER_S,
            step_s=source.DECODE_STEP_S,
            step_per_sequence_s=0.0,
            decode_tokens_per_s=DECODE_TOKENS_PER_S,
            full_steps=False,
            in_order=False,
            overlaps=True,
        ),
        memory=Memory(
            prefill_tokens=source.HBM_BLOCKS * source.BLOCK_TOKENS,
            decode_tokens=None,
            lmcache_tokens=source.LMCACHE_BLOCKS * source.BLOCK_TOKENS,
            lmcache_tokens_per_s=source.LMCACHE_BLOCKS_PER_S * source.BLOCK_TOKENS,
        ),
        objective=Objective(ttft_ms=source.BUDGET_TTFT_MS, itl_ms=50.0),
        transports=SOURCE_TRANSPORTS,
        transport="infiniband",
        prefill=gpu,
        decode=gpu,
        weights="fp8",
        kv="fp8",
        block_tokens=source.BLOCK_TOKENS,
        prefill_slots=(source.PREFILL_SLOTS,),
    )


PRESETS: Final = {"seed": seed}
