"""The rates of one engine of each pool, wherever they come from: data sheets, a measurement, or somebody's word.

The first token that decode makes takes

    wait for a slot + overhead + loaded tokens / load rate + computed tokens / (prefill rate, store rate)     in prefill
    + handover + tokens that decode has not / handover rate + one decode step                                 behind it

and a decode step of B sequences `step_s + B × step_per_sequence_s`. That is a reply's first token where the reply hangs on more
than its tokens (a seed, a grammar, tools), and that is what plans count. A plain one begins with a token of prefill, sooner by
all that is behind it, and has that time between its first token and its second.
"""

import math
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from pipeline.errors import OperatorError
from pipeline.planning.hardware import BANDWIDTH_REACHED, FLOPS_REACHED, STEP_OVERHEAD_S, Group
from pipeline.planning.models import BYTES, Model
from pipeline.planning.transports import Transport

Seconds = Annotated[float, msgspec.Meta(ge=0)]
PerSecond = Annotated[float, msgspec.Meta(gt=0)]

Origin = Literal["data sheets", "measured", "given"]

PREFILL_OVERHEAD_S: Final = 0.002
"""A request's own share of steps, sampling and the store, where nobody has measured it."""

HANDOVER_S: Final = 0.002
"""From the end of prefill until decode has the request, without its KV: the source's figure within a node."""


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One prefill engine and one decode engine. Tokens of KV that move count as tokens, too. What is not said has no limit."""

    origin: Origin
    prefill_tokens_per_s: PerSecond
    """Computed."""
    prefill_overhead_s: Seconds
    load_tokens_per_s: PerSecond = math.inf
    """Found in LMCache, loaded by prefill."""
    store_tokens_per_s: PerSecond = math.inf
    """Computed, and written to LMCache before the hand-over."""
    way_s: Seconds = 0.0
    """Of a first token that prefill sends, beside what its engine does: into the queue, and out to the client."""
    handover_s: Seconds = HANDOVER_S
    handover_tokens_per_s: PerSecond = math.inf
    """From LMCache, or from prefill itself, into decode."""
    step_s: Seconds
    step_per_sequence_s: Seconds
    decode_tokens_per_s: PerSecond = math.inf
    """What decode gives at most, where somebody says so; else it follows from the steps."""
    full_steps: bool = True
    """Whether the prefill rate is that of full steps, as with chunked prefill; else of whole prompts. See `sizing.fill`."""
    in_order: bool = True
    """Whether prefill computes prompts one after the other, as vLLM does in chunks; else what runs shares the engine evenly."""
    overlaps: bool = False
    """Whether computing a chunk and reading weights for decode overlap in one step, as on a GPU."""

    def decode_step_s(self, batch: float) -> float:
        """One token of each of `batch` sequences."""
        return self.step_s + batch * self.step_per_sequence_s

    def behind_prefill_s(self, moved_tokens: float, batch: float) -> float:
        """From the end of prefill to the first token of decode, which loads `moved_tokens`."""
        return self.handover_s + moved_tokens / self.handover_tokens_per_s + self.decode_step_s(batch)


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Room for KV, in tokens: of one prefill engine, of one decode engine (None: as much as it takes), of LMCache; and what
    LMCache moves for all engines together."""

    prefill_tokens: float
    decode_tokens: float | None
    lmcache_tokens: float
    lmcache_tokens_per_s: float = math.inf


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What `headrace calibrate` writes: rates, and the samples they come from, so that one can see how well they fit."""

    model: str
    rates: Rates
    prefill_slots: int | None = None
    notes: list[str] = []
    step_ms_by_batch: dict[str, float] = {}
    ttft_ms: dict[str, float] = {}
    prefill_kv_tokens: float = math.inf
    """Room for KV in prefill, and in decode, where it is known."""
    decode_kv_tokens: float | None = None

    def memory(self, lmcache_tokens: float) -> Memory:
        """Room for KV, with so much in LMCache."""
        return Memory(
            prefill_tokens=self.prefill_kv_tokens, decode_tokens=self.decode_kv_tokens, lmcache_tokens=lmcache_tokens
        )


def of_hardware(
    model: Model,
    prefill: Group,
    decode: Group,
    transport: Transport,
    weights: str,
    kv: str,
    context: float,
    batch: float,
) -> Rates:
    """What data sheets let expect, with the shares that `hardware.py` assumes, of sequences of about `context` tokens.

    `batch` of them in decode: of a mixture of experts it says how many are read.
    """
    flops_per_token = model.prefill_flops(context) / context
    per_token = model.kv_bytes(context, BYTES[kv]) / context
    bytes_per_s = decode.peak_bytes_per_s * BANDWIDTH_REACHED * decode.split_reached
    return Rates(
        origin="data sheets",
        prefill_tokens_per_s=prefill.peak_flops(weights) * FLOPS_REACHED * prefill.split_reached / flops_per_token,
        prefill_overhead_s=PREFILL_OVERHEAD_S,
        load_tokens_per_s=transport.reached_bytes_per_s / per_token,
        store_tokens_per_s=transport.reached_bytes_per_s / per_token,
        handover_s=HANDOVER_S + transport.latency_s,
        handover_tokens_per_s=transport.reached_bytes_per_s / per_token,
        step_s=STEP_OVERHEAD_S + model.weight_bytes_read(batch, BYTES[weights]) / bytes_per_s,
        step_per_sequence_s=model.kv_bytes(context, BYTES[kv]) / bytes_per_s,
        overlaps=True,
    )


def measured(path: Path) -> Measured:
    """The file that `headrace calibrate` wrote. Raises `OperatorError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except OSError as error:
        raise OperatorError(f"Cannot read {path}: {error.strerror}.", "Write it with `headrace calibrate`.") from None
    except msgspec.DecodeError as error:
        raise OperatorError(f"{path}: {error}.", "Write it anew with `headrace calibrate`.") from None
