"""Where one process of a loaded fleet spends its time: `python -m tests.benchmarks.flames gateway-1 [--rate 100] [--out FILE]`.

The fleet and the load are those of `headrace bench --profile overhead`; the processes are `gateway-1`, `prefill-1`, `decode-1`.
py-spy looks on, 500 times a second, and has to be there: `pip install py-spy`. Printed are the functions, by the share of samples
in which the process ran Python: in the function itself, and in all that it calls. FILE gets the stacks, one to a line with its
count, as flame graph viewers read them. Time outside Python (the kernel, waits) is not seen: compare with the profile's CPU.
"""

import asyncio
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Final

import typer
import uvloop

from pipeline.cli.tables import table
from pipeline.errors import OperatorError
from tests.benchmarks import overhead

SAMPLES_PER_S: Final = 500
BEGINS_S: Final = 1.0
"""After the load: its first second is not looked at."""

ROWS: Final = 25


async def stacks(part: str, rate: float, seconds: float) -> list[str]:
    """What py-spy has seen of that process. Raises `OperatorError` where there is no such process, or no py-spy."""
    spy = shutil.which("py-spy")
    if spy is None:
        raise OperatorError("py-spy is not on the PATH.", "Run pip install py-spy.")
    async with overhead._stack() as (stack, folder):
        pids = overhead._pids(stack)
        if part not in pids:
            raise OperatorError(f"There is no process {part!r}.", f"Name one of {', '.join(pids)}.")
        await overhead._shoot(stack, rate, 2.0, "warm")
        load = asyncio.create_task(overhead._shoot(stack, rate, seconds + 2 * BEGINS_S, "flames"))
        await asyncio.sleep(BEGINS_S)
        out = folder / "stacks"
        watched = ("--pid", str(pids[part]), "--duration", str(round(seconds)), "--rate", str(SAMPLES_PER_S))
        looking = await asyncio.create_subprocess_exec(
            spy, "record", *watched, "--gil", "--format", "raw", "--output", str(out), stdout=asyncio.subprocess.DEVNULL
        )
        status = await looking.wait()
        await load
        if status:
            raise OperatorError(f"py-spy has ended with status {status}.", "It must be allowed to trace: try as root.")
        return out.read_text().splitlines()


def shares(lines: list[str]) -> list[tuple[str, float, float]]:
    """Function, its own share, and that of all it calls, both of 1: the largest own share first."""
    own, inclusive = Counter[str](), Counter[str]()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        frames = [f"{frame.rpartition(':')[0]})" for frame in stack.split(";")]
        own[frames[-1]] += int(count)
        for frame in set(frames):
            inclusive[frame] += int(count)
    total = max(1, own.total())
    return [(name, count / total, inclusive[name] / total) for name, count in own.most_common()]


def main(
    part: Annotated[str, typer.Argument(help="The process.")],
    rate: Annotated[float, typer.Option(min=1.0, help="Requests a second.")] = 100.0,
    seconds: Annotated[float, typer.Option(min=1.0, max=120.0, help="To look on.")] = 10.0,
    out: Annotated[Path | None, typer.Option(help="A file for the stacks.")] = None,
) -> None:
    """Profile one process under load."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            lines = runner.run(stacks(part, rate, seconds))
    except OperatorError as error:
        sys.exit(str(error))
    if out is not None:
        out.write_text("\n".join(lines) + "\n")
    rows = [(name, f"{own:.1%}", f"{whole:.1%}") for name, own, whole in shares(lines)[:ROWS]]
    print(table(("function", "own", "with what it calls"), rows))


if __name__ == "__main__":
    typer.run(main)
