"""`headrace plan`: what a fleet needs, what to expect of it, and whether to split it at all. Nothing is started.

The arithmetic is in `pipeline/planning`; this makes a question of the options.
"""

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from pipeline.errors import OperatorError
from pipeline.planning import data, hardware, models, presets, rates, report, sizing, transports, workload
from pipeline.planning.answer import answer
from pipeline.planning.emit import toml
from pipeline.planning.estimate import BATCH_MAX
from pipeline.planning.hardware import Group
from pipeline.planning.models import BYTES
from pipeline.planning.question import Numbers, Objective, Question, Trace, memory_of
from pipeline.planning.rates import Measured, Memory, Rates
from pipeline.planning.workload import Workload

GIB: Final = 2**30

KNOWN: Final = "A name (--known lists them)"


def _option(name: str, what: str, **more: Any) -> Any:
    return typer.Option(name, help=what, **more)


Preset = Annotated[
    str | None, _option("--preset", "A question with all its answers: seed, the source's.", show_default=False)
]
Own = Annotated[
    Path | None, _option("--trace", "A Mooncake trace (JSONL) instead of these numbers.", show_default=False)
]
MeasuredFile = Annotated[
    Path | None, _option("--measured", "Rates that `headrace calibrate` wrote.", show_default=False)
]
Emit = Annotated[Path | None, _option("--emit", "Write a configuration for this fleet.", show_default=False)]
Gpus = Annotated[int | None, _option("--gpus", "To compare on.", min=1, show_default=False)]
SIZE: Final = {"min": 1, "max": 64}


def plan(
    *,
    preset: Preset = None,
    model: Annotated[str, _option("--model", f"{KNOWN}, or a Hugging Face config.json.")] = "llama-3.1-8b",
    hardware_name: Annotated[str, _option("--hardware", f"{KNOWN}, or a TOML file of your own.")] = "h100",
    transport: Annotated[str, _option("--transport", f"{KNOWN}, or a TOML file: how KV moves.")] = "infiniband",
    prefill_tp: Annotated[int, _option("--prefill-tp", "GPUs of a prefill engine.", **SIZE)] = 1,
    decode_tp: Annotated[int, _option("--decode-tp", "GPUs of a decode engine.", **SIZE)] = 1,
    weights: Annotated[str, _option("--weights", "bf16, fp8 or fp4.")] = "bf16",
    kv: Annotated[str, _option("--kv", "bf16 or fp8.")] = "bf16",
    per_s: Annotated[float, _option("--requests-per-s", "At the peak.", min=0.001)] = 10.0,
    prefix: Annotated[int, _option("--prefix", "Tokens that a creator's requests share.", min=0)] = 1800,
    history: Annotated[int, _option("--history", "Tokens of history, on average.", min=0)] = 400,
    message: Annotated[int, _option("--message", "Tokens of the new message.", min=1)] = 10,
    output: Annotated[int, _option("--output", "Tokens of a reply.", min=1)] = 30,
    creators: Annotated[int, _option("--creators", "Zipf.", min=1)] = 2000,
    hot_share: Annotated[float, _option("--hot-share", "Of one more creator.", min=0, max=0.99)] = 0.0,
    turns: Annotated[int, _option("--turns", "Of a conversation.", min=1)] = 30,
    turn_gap_s: Annotated[float, _option("--turn-gap-s", "Between two of them.", min=0.001)] = 10.0,
    trace: Own = None,
    ttft_ms: Annotated[float, _option("--ttft-ms", "99 % of first tokens, at most.", min=0.1)] = 500.0,
    itl_ms: Annotated[float, _option("--itl-ms", "99 % of gaps between tokens, at most.", min=0.1)] = 50.0,
    chunk: Annotated[int, _option("--chunk", "Tokens of a prefill step.", min=32)] = 512,
    lmcache_gib: Annotated[float, _option("--lmcache-gib", "Of LMCache, all hosts together.", min=0.1)] = 512.0,
    measured: MeasuredFile = None,
    gpus: Gpus = None,
    known: Annotated[bool, _option("--known", "List models, hardware, transports and presets.")] = False,
    emit: Emit = None,
    as_json: Annotated[bool, _option("--json", "Print one JSON object.")] = False,
) -> None:
    """Size a fleet before there is one: GPUs, transfers, first tokens, settings, and whether to disaggregate at all.

    Beside each figure stands what physics allows. GPU counts are by division, what to expect is from a queue.

    Example: headrace plan --preset seed

    Example: headrace plan --model ./config.json --hardware l40s --transport ethernet --trace trace.jsonl --emit plan.toml
    """
    if known:
        print(listing())
        return
    load = Workload(
        requests_per_s=per_s, prefix_tokens=prefix, history_tokens=history, message_tokens=message, output_tokens=output,
        creators=creators, hot_share=hot_share, turns_mean=turns, turn_gap_s=turn_gap_s,
    )  # fmt: skip
    question = _preset(preset) if preset is not None else asked(
        model=models.known(model), load=load, trace=trace, transport=transport, chunk=chunk,
        sides=(_group(hardware_name, prefill_tp), _group(hardware_name, decode_tp)),
        values=(_type(weights, "--weights"), _type(kv, "--kv")), objective=Objective(ttft_ms=ttft_ms, itl_ms=itl_ms),
        lmcache_bytes=lmcache_gib * GIB, measured=rates.measured(measured) if measured else None,
    )  # fmt: skip
    print("putting the load through both ways of deploying …", file=sys.stderr, flush=True)
    found = answer(question, gpus)
    if emit:
        emit.write_text(toml(question, found), "utf-8")
    print(msgspec.json.encode(found).decode() if as_json else report.text(question, found))


def asked(
    *,
    model: models.Model,
    load: Workload,
    trace: Path | None,
    sides: tuple[Group, Group],
    transport: str,
    values: tuple[str, str],
    objective: Objective,
    chunk: int,
    lmcache_bytes: float,
    measured: Measured | None,
) -> Question:
    """The question. Raises `OperatorError` where the weights do not fit an engine."""
    (prefill, decode), (weights, kv) = sides, values
    lines = workload.read_trace(trace) if trace else None
    load = workload.mean_of(lines) if lines else load
    memory = memory_of(model, prefill, decode, weights, kv, lmcache_bytes)
    if measured is None:
        _fits(model, weights, prefill, decode, memory)
    ways = transports.all_known()
    way = ways.setdefault(transport, transports.known(transport))

    def of_hardware(batch: float) -> Rates:
        return rates.of_hardware(model, prefill, decode, way, weights, kv, load.prompt_tokens, batch)

    question = Question(
        name="own",
        model=model,
        load=load,
        source=Trace(lines) if lines else Numbers(load),
        rates=measured.rates if measured else of_hardware(1.0),
        memory=memory if measured is None else measured.memory(lmcache_bytes / model.kv_bytes_per_token(BYTES[kv])),
        objective=objective,
        transports=ways,
        transport=transport,
        prefill=None if measured else prefill,
        decode=None if measured else decode,
        weights=weights,
        kv=kv,
        chunk_tokens=chunk,
        prefill_slots=(measured.prefill_slots,) if measured and measured.prefill_slots else (4, 2, 1),
    )
    if measured or not model.experts:
        return question
    count = sizing.decode_for(question, load.requests_per_s) or 1
    batch = sizing.running(question, load.requests_per_s, count)
    return msgspec.structs.replace(question, rates=of_hardware(min(batch, BATCH_MAX)))


def _fits(model: models.Model, weights: str, prefill: Group, decode: Group, memory: Memory) -> None:
    for role, group, room in (("prefill", prefill, memory.prefill_tokens), ("decode", decode, memory.decode_tokens)):
        if not room:
            size = model.params * BYTES[weights] / 1e9
            raise OperatorError(
                f"The weights of {model.name} in {weights}, {size:,.0f} GB, leave no room for KV on {group.size} of these GPUs "
                f"({group.size * group.gpu.memory_bytes / 1e9:,.0f} GB).",
                f"Give a larger --{role}-tp, or smaller --weights.",
            )


def _group(name: str, size: int) -> Group:
    return Group(gpu=hardware.known(name), size=size)


def _type(name: str, option: str) -> str:
    if name not in BYTES:
        raise OperatorError(f"{option} is {name!r}.", f"Give one of {', '.join(BYTES)}.")
    return name


def _preset(name: str) -> Question:
    if name not in presets.PRESETS:
        raise OperatorError(f"There is no preset {name!r}.", f"Give one of {', '.join(presets.PRESETS)}.")
    return presets.PRESETS[name]()


def listing() -> str:
    """What plan knows by name."""
    rows = {kind: data.names(f"{kind}.toml") for kind in ("models", "hardware", "transports")}
    return "\n".join(
        f"{kind:11} {', '.join(names)}" for kind, names in (rows | {"presets": list(presets.PRESETS)}).items()
    )
