"""What `headrace plan` answers: every figure once, in the form that `--json` prints."""

import math
from typing import Final

import msgspec

from pipeline.planning import sizing
from pipeline.planning.estimate import Estimate, split
from pipeline.planning.question import Question
from pipeline.planning.rates import Memory, Rates
from pipeline.planning.sizing import Floor, Settings
from pipeline.planning.verdict import Verdict, smallest, verdict

CACHED_SHORT: Final = 0.95
"""Of what can be found: below it, caches thrash."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of the mean prompt over one transport."""

    ms: float
    floor_ms: float


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """GPU counts `…_gpus` are by division, with nothing to spare: cold, whole prompts or chunked; of what is behind the prefix.

    `fleet` is the smallest split that meets the objective by the queue; null where none does.
    """

    plan: str
    model: str
    params: int
    params_active: int
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    rates: Rates
    kv_bytes_per_token: int
    kv_transfer_mib: float
    transfers: dict[str, Transfer]
    transfer_nvlink_ms: float | None
    transfer_infiniband_ms: float | None
    block_hit_rate: float
    prefill_gpus: int
    prefill_gpus_chunked: int
    prefill_gpus_prefix_hits: int
    prefill_gpus_prefix_hits_chunked: int
    decode_gpus: int
    prefill_to_decode: str
    floor: Floor | None
    fleet: Estimate | None
    settings: Settings
    verdict: Verdict
    notes: list[str]


def answer(question: Question, gpus: int | None = None) -> Answer:
    """All of it. The verdict is on `gpus`, else on those of the smallest fleet, else on those counted by division."""
    load = question.load
    whole, chunked = _prefill_gpus(question, load.prompt_tokens)
    behind = load.prompt_tokens - load.prefix_tokens
    hits_whole, hits_chunked = _prefill_gpus(question, behind)
    decode = sizing.decode_engines(question) * question.gpus_per_decode
    found = smallest(question)
    fleet = split(question, load.requests_per_s, *found) if found else None
    floor = sizing.floor(question, load.prefix_tokens)
    transfers = {
        name: Transfer(
            ms=_ms(transport.transfer_s(question.kv_transfer_bytes)),
            floor_ms=_ms(transport.floor_s(question.kv_transfer_bytes)),
        )
        for name, transport in question.transports.items()
    }
    prefill_engines, decode_engines = found or (
        chunked // question.gpus_per_prefill,
        decode // question.gpus_per_decode,
    )
    return Answer(
        plan=question.name,
        model=question.model.name,
        params=question.model.params,
        params_active=question.model.active,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        requests_per_s=load.requests_per_s,
        rates=question.rates,
        kv_bytes_per_token=int(question.kv_bytes_per_token),
        kv_transfer_mib=round(question.kv_transfer_bytes / 2**20, 1),
        transfers=transfers,
        transfer_nvlink_ms=transfers["nvlink"].ms if "nvlink" in transfers else None,
        transfer_infiniband_ms=transfers["infiniband"].ms if "infiniband" in transfers else None,
        block_hit_rate=round(load.block_hit_rate(question.block_tokens), 4),
        prefill_gpus=whole,
        prefill_gpus_chunked=chunked,
        prefill_gpus_prefix_hits=hits_whole,
        prefill_gpus_prefix_hits_chunked=hits_chunked,
        decode_gpus=decode,
        prefill_to_decode=ratio(chunked, decode),
        floor=floor,
        fleet=fleet,
        settings=sizing.settings(
            question, prefill_engines, decode_engines, fleet.slots if fleet else question.prefill_slots[0]
        ),
        verdict=verdict(question, gpus or (fleet.gpus if fleet else chunked + decode)),
        notes=_notes(question, floor, chunked, hits_chunked, decode, fleet),
    )


def _prefill_gpus(question: Question, tokens: int) -> tuple[int, int]:
    """GPUs for whole prompts of so many tokens, and in chunks."""
    rates = sizing.prefill_rates(question, tokens)
    whole, chunked = (sizing.engines(question.load.requests_per_s, tokens, rate) for rate in rates)
    return whole * question.gpus_per_prefill, chunked * question.gpus_per_prefill


def ratio(prefill: int, decode: int) -> str:
    """As `4 : 1`."""
    common = math.gcd(prefill, decode)
    return f"{prefill // common} : {decode // common}"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _notes(
    question: Question, floor: Floor | None, cold: int, behind_prefix: int, decode: int, fleet: Estimate | None
) -> list[str]:
    """What a reader must know to believe these figures, or not to."""
    notes: list[str] = []
    if floor is None:
        notes.append("Without --hardware there is no physical floor to hold these rates against.")
    else:
        notes += _beyond_physics("Prefill, cold", cold, floor.prefill_gpus, "tensor cores compute")
        notes += _beyond_physics(
            "Prefill behind the prefix", behind_prefix, floor.prefill_gpus_cached, "tensor cores compute"
        )
        why = {
            floor.decode_gpus_flops: "tensor cores compute",
            floor.decode_gpus_bandwidth: "memory can be read",
            floor.decode_gpus_memory: "weights and KV fit",
        }
        notes += _beyond_physics("Decode", decode, floor.decode_gpus, why[floor.decode_gpus])
    if question.rates.origin == "data sheets":
        notes.append(
            "Rates are data sheets times assumed shares (planning/hardware.py): measure with `headrace calibrate`."
        )
    if any(group.window for group in question.model.attention):
        notes.append(
            "KV of layers with a window is counted to the window; a connector that moves all of it moves more."
        )
    if fleet and fleet.cached < CACHED_SHORT * _findable(question):
        notes.append(
            "Caches are too small for what is asked again: near that edge every spilled request takes room as well, and less is "
            "found than is expected here. Take more memory, or expect a lower highest rate."
        )
    if fleet is None:
        notes.append("No split meets the objective at this rate: relax --ttft-ms or --itl-ms, or take other hardware.")
    return notes


def _findable(question: Question) -> float:
    """Tokens of a prompt that caches without bound have, on average."""
    memory = Memory(prefill_tokens=math.inf, decode_tokens=None, lmcache_tokens=math.inf)
    asked = question.source.requests(question.load.requests_per_s, memory, 1)
    return sum(one.hbm for one in asked) / len(asked)


def _beyond_physics(what: str, gpus: int, floor_gpus: float, how: str) -> list[str]:
    if gpus >= floor_gpus:
        return []
    return [
        f"{what}: {gpus} GPUs cannot be. At the peak of the data sheet {how} only with {math.ceil(floor_gpus):,}: "
        f"the rate that was given is {floor_gpus / gpus:,.0f} times too high for this model on this hardware."
    ]
