"""The command line of `headrace bench`."""

import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from pipeline.errors import OperatorError

Requests = Annotated[
    int | None, typer.Option("--requests", min=1, help="How many are measured. Default: 20.", show_default=False)
]
Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", min=1, max=1024, help="Closed loop: at a time. Default: 4.", show_default=False),
]
Rate = Annotated[
    float | None, typer.Option("--rate", min=0.01, help="Open loop: requests a second.", show_default=False)
]
Arrivals = Annotated[Literal["poisson", "constant"], typer.Option("--arrivals", help="Of an open loop.")]
Duration = Annotated[
    float | None,
    typer.Option("--duration", min=1.0, help="Seconds measured. Default: until --requests.", show_default=False),
]
WarmUp = Annotated[float, typer.Option("--warm-up", min=0.0, help="Seconds before them, not measured.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that a reply may take.")]
Creators = Annotated[
    int | None,
    typer.Option("--creators", min=1, help="Personas that the requests share. Default: 4.", show_default=False),
]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", min=1, help="Of each prompt, about.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Of each reply.")]
SloTtft = Annotated[
    float | None,
    typer.Option("--slo-ttft-ms", min=0.0, help="Goodput: first token within so long.", show_default=False),
]
SloItl = Annotated[
    float | None,
    typer.Option("--slo-itl-ms", min=0.0, help="Goodput: 99 % of a reply's gaps within so long.", show_default=False),
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", help="Replay this trace, in Mooncake's format (headrace record).", show_default=False),
]
Speed = Annotated[float, typer.Option("--speed", min=0.001, help="Of a replay: so many times as fast.")]
Warm = Annotated[bool, typer.Option("--warm", help="The same prompts in every run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Scenario = Annotated[
    str | None,
    typer.Option(
        "--scenario",
        help="seed: the source's workload, with --url or --rate on a gateway; else in virtual time, as is scale.",
        show_default=False,
    ),
]
Profile = Annotated[
    Literal["overhead"] | None,
    typer.Option(
        "--profile",
        help="overhead: what the pipeline itself costs, beside its engines, on a fleet of its own; three minutes.",
        show_default=False,
    ),
]
Engine = Annotated[
    str | None, typer.Option("--engine", help="simulated: a scenario in virtual time.", show_default=False)
]
Seed = Annotated[int, typer.Option("--seed", help="Of arrivals, and of a scenario.")]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a gateway. None: not given."""

    requests: int | None = None
    concurrency: int | None = None
    rate: float | None = None
    arrivals: Literal["poisson", "constant"] = "poisson"
    duration: float | None = None
    warm_up: float = 0.0
    timeout: float = 120.0
    creators: int | None = None
    prompt_tokens: int = 200
    max_tokens: int = 32
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None
    trace: Path | None = None
    speed: float = 1.0
    warm: bool = False
    scenario: str | None = None
    seed: int = 1

    @property
    def run(self) -> str:
        """What all texts are drawn from: something else each time, unless the same prompts are wanted."""
        return "warm" if self.warm else f"{time.time_ns():x}"

    def check(self) -> None:
        """Raises `OperatorError` for options that contradict each other."""
        if self.rate is not None and self.concurrency is not None:
            raise OperatorError("--rate is an open loop and --concurrency a closed one.", "Give one of them.")
        if self.trace is not None and self.scenario is not None:
            raise OperatorError("--trace and --scenario both say what to send.", "Give one of them.")
        if self.trace is not None and self.rate is not None:
            raise OperatorError("A trace has its own times, so --rate has no meaning.", "Use --speed.")
        if self.trace is None and self.speed != 1.0:
            raise OperatorError("--speed is of a replay.", "Give a --trace, or --rate instead.")
        if self.scenario not in (None, "seed"):
            raise OperatorError(f"No scenario {self.scenario!r} runs on a gateway.", "Use --scenario seed.")
