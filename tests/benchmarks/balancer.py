"""A load that turns from prefill to decode, with the balancer or without: `python -m tests.benchmarks.balancer [--off]`.

Four workers for both, of which three begin as prefill and one as decode, a gateway and a nats-server, each a process of its own,
with slow simulated engines. First come long prompts with short replies, which three can prefill and one can decode; then short
prompts with long replies, for which one that decodes is too few. Clients wait for ten seconds. Printed are, for each part of the
load, how many replies were whole and how long they took, the roles at its end, and whether anything was lost.
"""

import asyncio
import random
import sys
import time
from typing import Annotated, Final

import msgspec
import typer
import uvloop

from pipeline.cli import client
from pipeline.cli.tables import table
from tests.chaos import load, verdict
from tests.chaos.load import Order, Outcome
from tests.chaos.rest import rest
from tests.chaos.run import asking, stack
from tests.chaos.stack import ROLES, Settings, Stack
from tests.chaos.verdict import Report
from tests.percentiles import percentile_ms
from tests.words import WORDS

TIMEOUT_S: Final = 10.0
RATE: Final = 5.0

FLEET: Final = Settings(
    prefill=0,
    decode=0,
    both=4,
    gateways=1,
    begin_as=("prefill", "prefill", "prefill", "decode"),
    step_s=0.02,
    decode_slots=4,
    more={
        "SIMULATED__PREFILL_TOKENS_PER_S": 2000,
        "BALANCER__PATIENCE_S": 2.0,
        "BALANCER__SETTLE_S": 4.0,
    },
)
"""A worker prefills 2,000 tokens a second, and decodes 4 replies at a time, 50 tokens a second each."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the load: `words` of each prompt, `tokens` of each reply, for so long."""

    name: str
    words: int
    tokens: int
    for_s: float


PARTS: Final = (
    Part(name="long prompts, short replies", words=600, tokens=4, for_s=6.0),
    Part(name="short prompts, long replies", words=20, tokens=100, for_s=25.0),
)


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one part. Latencies are of whole replies; `second_half` are those asked for in its second half."""

    part: str
    requests: int
    whole: int
    p50_ms: float | None
    p99_ms: float | None
    second_half_whole_ratio: float
    second_half_p50_ms: float | None
    roles: dict[str, str]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    balancer: bool
    parts: list[Served]
    report: Report


def run(parts: tuple[Part, ...], *, balancer: bool) -> Figures:
    """One fleet under all parts of the load."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(parts, balancer=balancer))


async def _run(parts: tuple[Part, ...], *, balancer: bool) -> Figures:
    fleet = msgspec.structs.replace(FLEET, more={**FLEET.more, "BALANCER__ENABLED": str(balancer).lower()})
    began_s, served, all_outcomes = time.monotonic(), list[Served](), list[Outcome]()
    async with stack(fleet, None) as running:
        for part in parts:
            outcomes: list[Outcome] = []
            await load.open_loop(_orders(part), RATE, asking(running, outcomes, 1000))
            served.append(_served(part, outcomes, roles(running)))
            all_outcomes += outcomes
        report = verdict.judge(
            all_outcomes,
            rest=await rest(running),
            kills=[],
            gateway_deaths=[],
            unasked=running.unasked,
            duration_s=time.monotonic() - began_s,
        )
    return Figures(balancer=balancer, parts=served, report=report)


def _orders(part: Part) -> list[Order]:
    """No two prompts share anything: each is of another creator."""
    made = []
    for number in range(round(RATE * part.for_s)):
        text = " ".join(random.Random(f"{part.name}/{number}").choices(WORDS, k=part.words))
        body = client.chat_body(text, system=None, max_tokens=part.tokens, ignore_eos=True)
        made.append(Order(number=number, creator=f"{part.words}-{number}", body=body, timeout_s=TIMEOUT_S))
    return made


def _served(part: Part, outcomes: list[Outcome], now: dict[str, str]) -> Served:
    whole = [outcome.latency_s for outcome in outcomes if outcome.ending == "whole"]
    later = [outcome for outcome in outcomes if outcome.order.number >= RATE * part.for_s / 2]
    later_whole = [outcome.latency_s for outcome in later if outcome.ending == "whole"]
    return Served(
        part=part.name,
        requests=len(outcomes),
        whole=len(whole),
        p50_ms=percentile_ms(whole, 50),
        p99_ms=percentile_ms(whole, 99),
        second_half_whole_ratio=round(len(later_whole) / max(1, len(later)), 3),
        second_half_p50_ms=percentile_ms(later_whole, 50),
        roles=now,
    )


def roles(running: Stack) -> dict[str, str]:
    """What each worker serves as now."""
    names = [worker.name for worker in running.workers()]
    said = {name: [role for role in ROLES if running.takes(role, name)] for name in names}
    return {name: "both" if len(roles) == 2 else "".join(roles) for name, roles in said.items()}


def main(
    balancer: Annotated[bool, typer.Option("--on/--off", help="With the balancer, or without.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Turn the load from prefill to decode. Exits with 1 where anything is lost, said twice, or left behind."""
    found = run(PARTS, balancer=balancer)
    print(msgspec.json.encode(found).decode() if as_json else _page(found))
    sys.exit(1 if found.report.failed else 0)


def _page(found: Figures) -> str:
    head = ("LOAD", "REQUESTS", "WHOLE", "P50 MS", "P99 MS", "2ND HALF WHOLE", "ITS P50 MS", "ROLES AT ITS END")
    rows = [
        [
            part.part,
            part.requests,
            part.whole,
            part.p50_ms or "",
            part.p99_ms or "",
            f"{part.second_half_whole_ratio:.0%}",
            part.second_half_p50_ms or "",
            " ".join(part.roles.values()),
        ]
        for part in found.parts
    ]
    report = found.report
    return (
        f"Balancer {'on' if found.balancer else 'off'}.\n\n{table(head, rows)}\n\n"
        f"{report.lost} lost, {report.duplicate_tokens} tokens twice, {report.missing_tokens} missing, "
        f"{report.leaked_blocks} blocks and {report.leaked_slots} slots left behind; errors: {report.error_codes or 'none'}."
    )


if __name__ == "__main__":
    typer.run(main)
