"""Our rates against NVIDIA's `aiconfigurator`: `python -m tests.benchmarks.aiconfigurator [--out FILE] [--json]`.

It predicts from kernels that were timed on the hardware; `headrace plan` from data sheets and two shares. Three models, each cold
prefill of 8 prompts of 2,210 tokens (what of it a GPU computes in a second) and a decode step of 8 sequences behind them.

aiconfigurator comes from the package index into a virtual environment of its own, once, below the state folder. Its model
configurations and timings are part of the package: every estimate then runs without a network, which `unshare -rn` enforces where
there is one.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from pipeline.cli.tables import table
from pipeline.planning import hardware, models, rates, transports
from pipeline.planning.hardware import Group

VERSION: Final = "0.12.0"
INSTALL_S: Final = 600.0
ESTIMATE_S: Final = 120.0

PROMPT_TOKENS: Final = 2210
REPLY_TOKENS: Final = 30
BATCH: Final = 8

RESULTS: Final = Path(__file__).parent / "results" / "aiconfigurator.json"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one kind of hardware, under our names and theirs, and why the two differ as they do."""

    model: str
    hardware: str
    tp: int
    weights: str
    kv: str
    their_model: str
    their_system: str
    their_flags: tuple[str, ...] = ()
    reason: str


CASES: Final = (
    Case(
        model="llama-3.1-8b", hardware="h100", tp=1, weights="bf16", kv="bf16",
        their_model="meta-llama/Meta-Llama-3.1-8B", their_system="h100_sxm",
        reason="Dense and bf16, on one GPU: timed GEMMs of this size reach more of the peak in prefill than the 55 % we take; "
        "a decode step is weights and KV over 75 % of the bandwidth for both.",
    ),
    Case(
        model="llama-3.1-70b", hardware="h100", tp=4, weights="fp8", kv="fp8",
        their_model="nvidia/Llama-3.1-70B-Instruct-FP8", their_system="h100_sxm", their_flags=("--kvcache-quant-mode", "fp8"),
        reason="Attention and norms stay in bf16, and all-reduces are timed one by one: of the fp8 peak, of which we take "
        "55 %, less is left; a decode step has 160 all-reduces, of which each waits for the slowest GPU.",
    ),
    Case(
        model="qwen3-30b-a3b", hardware="h100", tp=1, weights="bf16", kv="bf16",
        their_model="Qwen/Qwen3-30B-A3B", their_system="h100_sxm",
        their_flags=("--moe-tp-size", "1", "--moe-ep-size", "1"),
        reason="A mixture of 128 small experts: grouped GEMMs of few rows reach far less of the peak than dense ones, and "
        "48 layers of small kernels have launches and routing to pay for. We count FLOPs and bytes of the chosen experts alone.",
    ),
)  # fmt: skip


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill tokens/s of one GPU, and milliseconds of a decode step."""

    model: str
    hardware: str
    gpus: int
    prefill_tokens_per_s_per_gpu: float
    prefill_tokens_per_s_per_gpu_theirs: float
    prefill_ratio: float
    decode_step_ms: float
    decode_step_ms_theirs: float
    decode_ratio: float
    reason: str


def run(program: Path) -> list[Row]:
    """All cases. Raises `RuntimeError` with what aiconfigurator said, where it gives no figure."""
    rows: list[Row] = []
    for case in CASES:
        sys.stderr.write(f"{case.model}\n")
        rows.append(
            _row(case, theirs(program, case, "static_ctx", "TTFT"), theirs(program, case, "static_gen", "TPOT"))
        )
    return rows


def _row(case: Case, context_ms: float, step_ms: float) -> Row:
    ours = _ours(case)
    mine = ours.prefill_tokens_per_s / case.tp
    other = BATCH * PROMPT_TOKENS / (context_ms / 1e3) / case.tp
    step = ours.decode_step_s(BATCH) * 1e3
    return Row(
        model=case.model,
        hardware=case.hardware,
        gpus=case.tp,
        prefill_tokens_per_s_per_gpu=round(mine),
        prefill_tokens_per_s_per_gpu_theirs=round(other),
        prefill_ratio=round(mine / other, 2),
        decode_step_ms=round(step, 2),
        decode_step_ms_theirs=step_ms,
        decode_ratio=round(step / step_ms, 2),
        reason=case.reason,
    )


def _ours(case: Case) -> rates.Rates:
    group = Group(gpu=hardware.known(case.hardware), size=case.tp)
    return rates.of_hardware(
        models.known(case.model), group, group, transports.known("nvlink"), case.weights, case.kv, PROMPT_TOKENS, BATCH
    )


def theirs(program: Path, case: Case, mode: str, figure: str) -> float:
    """One figure in milliseconds. Raises `RuntimeError`."""
    command = [
        *_without_network(), str(program), "cli", "estimate", "--backend", "vllm", "--no-color", "--log-level", "ERROR",
        "--model-path", case.their_model, "--system", case.their_system, "--estimate-mode", mode,
        "--isl", str(PROMPT_TOKENS), "--osl", str(REPLY_TOKENS), "--batch-size", str(BATCH), "--tp-size", str(case.tp),
        *case.their_flags,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=ESTIMATE_S, check=False)
    return parsed(done.stdout + done.stderr, figure)


def parsed(said: str, figure: str) -> float:
    """The line `TTFT: 91.744 ms`. Raises `RuntimeError` with all that was said, where there is none."""
    found = re.search(rf"(?m)^\s*{figure}:\s+([\d.,]+) ms$", said)
    if found is None:
        raise RuntimeError(f"aiconfigurator gave no {figure}: {said[-2000:]}")
    return float(found[1].replace(",", ""))


def _without_network() -> list[str]:
    probe = ["unshare", "-rn", "true"]
    can = shutil.which("unshare") and subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return ["unshare", "-rn"] if can else []


def installed() -> Path:
    """The program, installed where it is not yet."""
    state = Path(os.environ.get("HEADRACE_STATE_DIR", "~/.cache/headrace")).expanduser()
    folder = state / f"aiconfigurator-{VERSION}"
    program = folder / "bin" / "aiconfigurator"
    if not program.exists():
        sys.stderr.write(f"installing aiconfigurator {VERSION} into {folder}\n")
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", f"aiconfigurator=={VERSION}"]
        subprocess.run(pip, check=True, capture_output=True, timeout=INSTALL_S)
    return program


def text(rows: list[Row]) -> str:
    """The table for people, and the reasons."""
    head = ("model", "GPUs", "prefill tokens/s/GPU", "theirs", "ratio", "decode step ms", "theirs", "ratio")
    lines = [
        (
            row.model, f"{row.gpus} × {row.hardware}", row.prefill_tokens_per_s_per_gpu,
            row.prefill_tokens_per_s_per_gpu_theirs, row.prefill_ratio, row.decode_step_ms, row.decode_step_ms_theirs,
            row.decode_ratio,
        )
        for row in rows
    ]  # fmt: skip
    return "\n".join([table(head, lines), *(f"{row.model}: {row.reason}" for row in rows)])


def main(
    out: Annotated[Path, typer.Option("--out", help="Where the figures are kept.")] = RESULTS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare rates of three models with aiconfigurator's."""
    rows = run(installed())
    report = {"aiconfigurator": VERSION, "prompt_tokens": PROMPT_TOKENS, "batch": BATCH, "rows": rows}
    encoded = msgspec.json.encode(report)
    out.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
    sys.stdout.write((encoded.decode() if as_json else text(rows)) + "\n")


if __name__ == "__main__":
    typer.run(main)
