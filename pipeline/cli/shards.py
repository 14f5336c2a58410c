"""`headrace shards`: where requests lie, who serves them, and where their KV comes from.

Depths are the consumers' own; what was served is asked of every live prefill worker on `prefill.<id>`.
"""

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from pipeline.cli.listening import listening
from pipeline.cli.options import ConfigOption, configuration
from pipeline.cli.tables import table
from pipeline.errors import OperatorError

if TYPE_CHECKING:
    from pipeline.bus.connection import Bus
    from pipeline.config import Config
    from pipeline.protocol.presence import Presences
    from pipeline.protocol.served import ShardsServed

ANSWER_S: Final = 1.0
WATCH_PERIOD_S: Final = 1.0

HEAD: Final = ("SHARD", "DEPTH", "IN WORK", "OWNER", "NEXT", "SERVED", "SPILLED", "HBM", "LMCACHE", "COMPUTED")

LEGEND: Final = (
    "DEPTH waits in the queue, IN WORK is leased. SERVED, SPILLED (by another than the owner) and where prompt tokens came from\n"
    "(the engine's own cache, LMCache, or computed): since the workers began. --all shows shards without requests, too."
)


class Row(msgspec.Struct, kw_only=True):
    """One shard of one class. Tokens are prompt tokens; `owner` and `next` are workers, empty where there is none."""

    klass: str
    shard: int
    depth: int
    in_work: int
    owner: str
    next: str
    served: int = 0
    spilled: int = 0
    hbm_tokens: int = 0
    lmcache_tokens: int = 0
    computed_tokens: int = 0

    @property
    def idle(self) -> bool:
        """Nothing has happened here."""
        return not (self.depth or self.in_work or self.served)


class Report(msgspec.Struct, kw_only=True):
    """All shards, and how many creators each prefill worker is warm for; None where it did not answer."""

    warm_creators: dict[str, int | None]
    shards: list[Row]


def shards(
    *,
    everything: Annotated[bool, typer.Option("--all", help="Shards without requests as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead: a line each time.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second, until Ctrl-C.")] = False,
    config: ConfigOption = None,
) -> None:
    """Show every shard: its backlog, its owner, spill, and hits by source.

    Example: headrace shards --watch
    """
    asyncio.run(_show(configuration(config), everything=everything, as_json=as_json, watch=watch))


async def _show(config: "Config", *, everything: bool, as_json: bool, watch: bool) -> None:
    async with listening(config, "headrace-shards") as (bus, presences):
        while True:
            report = await survey(bus, presences, config.requests.shards)
            print(msgspec.json.encode(report).decode() if as_json else _page(report, everything, watch), flush=True)
            if not watch:
                return
            await asyncio.sleep(WATCH_PERIOD_S)


async def survey(bus: "Bus", presences: "Presences", count: int, *, served: bool = True) -> Report:
    """Ask the broker and, where `served`, every live prefill worker. Raises `OperatorError` where JetStream does not answer."""
    from pipeline import outside
    from pipeline.protocol import placement
    from pipeline.protocol.subjects import CLASSES

    weights = {peer.id: float(peer.slots) for peer in presences.ready("prefill", outside.monotonic_s())}
    accounts = await asyncio.gather(*(_served(bus, worker) for worker in weights if served))
    depths = {klass: await _depths(bus, klass) for klass in CLASSES}
    first = placement.first_of(count, weights, 2)
    rows = [_row(klass, number, depths[klass], first[number]) for klass in CLASSES for number in range(count)]
    _add(rows, [account for account in accounts if account is not None])
    answers = zip(weights, accounts, strict=served)
    warm = {worker: None if account is None else account.warm_creators for worker, account in answers}
    return Report(warm_creators=warm, shards=rows)


def _row(klass: str, number: int, depths: Mapping[str, tuple[int, int]], first: Sequence[str]) -> Row:
    from pipeline.protocol.subjects import Shard

    depth, in_work = depths.get(Shard(klass, number).consumer, (0, 0))
    owner, following, *_ = [*first, "", ""]
    return Row(klass=klass, shard=number, depth=depth, in_work=in_work, owner=owner, next=following)


def _add(rows: Iterable[Row], accounts: Iterable["ShardsServed"]) -> None:
    """What the workers have served, to the rows."""
    by_shard = {(row.klass, row.shard): row for row in rows}
    for account in accounts:
        for part in account.shards:
            if (row := by_shard.get((part.klass, part.shard))) is not None:
                row.served += part.owned + part.spilled
                row.spilled += part.spilled
                row.hbm_tokens += part.hbm_tokens
                row.lmcache_tokens += part.lmcache_tokens
                row.computed_tokens += part.computed_tokens


async def _served(bus: "Bus", worker: str) -> "ShardsServed | None":
    from pipeline.bus.errors import BusError
    from pipeline.protocol import subjects
    from pipeline.protocol.messages import encode
    from pipeline.protocol.served import shards_served_decoder
    from pipeline.protocol.warm_messages import WantShards

    try:
        return shards_served_decoder.decode(await bus.request(subjects.prefill(worker), encode(WantShards()), ANSWER_S))
    except BusError:
        return None


async def _depths(bus: "Bus", klass: str) -> dict[str, tuple[int, int]]:
    """(waiting, leased) of each consumer of a class."""
    from pipeline.bus import reading
    from pipeline.bus.errors import BusError
    from pipeline.protocol.subjects import Shard

    stream = Shard(klass, 0).stream
    try:
        consumers = await reading.consumers(bus, stream)
    except BusError as error:
        raise OperatorError(
            f"JetStream does not list the consumers of {stream}: {error}.", "Declare them: headrace streams apply."
        ) from None
    return {info["name"]: (info["num_pending"], info["num_ack_pending"]) for info in consumers}


# --------------------------------------------------------------------------------------------------------------
# For people


def _page(report: Report, everything: bool, watch: bool) -> str:
    shown = [row for row in report.shards if everything or not row.idle]
    warm = ", ".join(
        f"{worker} {'no answer' if count is None else count}" for worker, count in report.warm_creators.items()
    )
    page = (
        f"{table(HEAD, [_cells(row) for row in shown])}\n\nWarm creators: {warm or 'no prefill worker lives'}\n{LEGEND}"
    )
    return f"\033[2J\033[H{page}" if watch and sys.stdout.isatty() else page


def _cells(row: Row) -> Sequence[str | int]:
    tokens = row.hbm_tokens + row.lmcache_tokens + row.computed_tokens
    return (
        f"{row.klass} {row.shard}",
        row.depth,
        row.in_work,
        row.owner,
        row.next,
        row.served,
        _share(row.spilled, row.served),
        _share(row.hbm_tokens, tokens),
        _share(row.lmcache_tokens, tokens),
        _share(row.computed_tokens, tokens),
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""
