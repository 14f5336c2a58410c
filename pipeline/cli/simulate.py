"""`headrace simulate`: the pipeline in virtual time, with faults drawn from a seed, and checkers that never look away."""

import sys
from typing import Annotated

import typer

from pipeline.paths import CONFIGS, require


def simulate(
    *,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many.")] = 200,
    first: Annotated[int, typer.Option("--first", min=0, help="The first seed.")] = 0,
    trace: Annotated[int | None, typer.Option("--trace", min=0, help="Tell this seed's story instead.")] = None,
    processes: Annotated[int, typer.Option("--processes", min=1, max=256, help="To run on.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Run the real loops on a simulated broker through kills, pauses, lost messages, and a broker that dies.

    A seed is 20 to 50 requests and a fate; the same seed is the same run, to the last event.

    Example: headrace simulate --seeds 500
    """
    checkout = require(CONFIGS).parent
    require(checkout / "tests" / "simulation")
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    from tests.simulation import command

    raise typer.Exit(command.main(seeds, first, processes, as_json=as_json, traced=trace))
