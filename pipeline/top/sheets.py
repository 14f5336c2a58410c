"""A snapshot as tables: which columns there are, what is in them, and how they are ordered. Pure; `frames.py` draws them."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from rich.cells import cell_len

from pipeline.protocol.messages import Account
from pipeline.protocol.records import Record
from pipeline.protocol.stages import STAGES
from pipeline.top import cells
from pipeline.top.snapshot import Delays, Fare, Ledger, Part, Process, Snapshot

Value = str | int | float | None
Line = tuple[Value, ...]

LOUD: Final = frozenset(("no answer", "failed"))
QUIET: Final = frozenset(("draining", "paused", "starting", "rejected", "expired", "cancelled"))


GAP: Final = 2
"""Between two columns."""


class Column(msgspec.Struct, frozen=True):
    """`form` writes a value. Where there is no room for all, those with the largest `spare` are left out; 0 always stays.

    `room` is to how many characters a text may be cut; 0: not at all.
    """

    title: str
    form: Callable[[Any], str] = cells.text
    spare: int = 0
    room: int = 0

    @property
    def right(self) -> bool:
        """Numbers stand to the right."""
        return self.form not in (cells.text, _load)


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """A table. `descending` orders begin with the largest. `empty` is said in place of no lines, `note` under them."""

    title: str
    columns: tuple[Column, ...]
    lines: list[Line]
    empty: str
    note: str = ""


class View(msgspec.Struct, frozen=True):
    """What one key shows: the parts of a snapshot that it needs, and how they become a table; None: the summary."""

    name: str
    parts: frozenset[Part]
    columns: tuple[Column, ...] = ()
    sheet: Callable[[Snapshot], Sheet] | None = None


def fitting(sheet: Sheet, lines: Sequence[Line], width: int) -> dict[int, int]:
    """The columns for which there is room, with their widths: some are left out first, then texts are cut to their `room`."""
    wide = {at: _wide(column, [line[at] for line in lines]) for at, column in enumerate(sheet.columns)}
    least = {at: min(wide[at], column.room or wide[at]) for at, column in enumerate(sheet.columns)}
    while sum(least.values()) + GAP * (len(least) - 1) > width:
        most = max(least, key=lambda at: (sheet.columns[at].spare, at))
        if not sheet.columns[most].spare:
            break
        del least[most]
    over = sum(wide[at] for at in least) + GAP * (len(least) - 1) - width
    for at in sorted(least, key=lambda at: least[at] - wide[at]):
        cut = max(0, min(over, wide[at] - least[at]))
        least[at], over = wide[at] - cut, over - cut
    return least


def _wide(column: Column, values: Sequence[Value]) -> int:
    return max(cell_len(column.title), *(cell_len(column.form(value)) for value in values), 0)


def ordered(sheet: Sheet, column: int | None, *, reverse: bool = False) -> list[Line]:
    """The lines by a column: numbers with the largest first, names from A on, what is unknown last. None: as they come."""
    if column is None:
        return sheet.lines[::-1] if reverse else sheet.lines
    known = [line for line in sheet.lines if line[column] is not None]
    unknown = [line for line in sheet.lines if line[column] is None]
    largest_first = any(not isinstance(line[column], str) for line in known)
    return sorted(known, key=lambda line: _key(line[column]), reverse=largest_first != reverse) + unknown


def _key(value: Value) -> tuple[float, str]:
    return (0.0, value) if isinstance(value, str) else (float(value or 0), "")


# --------------------------------------------------------------------------------------------------------------
# Pools


def _load(part: float | None) -> str:
    return "" if part is None else f"{cells.bar(part, 8)} {cells.share(part):>5}"


_POOLS: Final = (
    Column("POOL"),
    Column("NAME", room=12),
    Column("STATE"),
    Column("LOAD", _load),
    Column("FIGURES", spare=1),
    Column("SERVES AS", spare=3),
    Column("ASKS", cells.count, 4),
    Column("WARM", cells.count, 5),
    Column("UP", cells.duration, 2),
    Column("MODEL", spare=6),
)


def pools(now: Snapshot) -> Sheet:
    """Every process that lives, and those that fell silent."""
    lines: list[Line] = [_process(one) for one in now.processes]
    lines += [(one.pool, one.id, f"silent {cells.duration(one.silent_s)}", *(None,) * 7) for one in now.silent]
    return Sheet(
        title="Pools",
        columns=_POOLS,
        lines=lines,
        empty="Nobody lives.",
        note="Free blocks: beyond the reserve. ASKS wait for some. WARM: creators cached.",
    )


def _process(one: Process) -> Line:
    prefill, decode = one.pool == "prefill", one.pool == "decode"
    figures = f"{one.rate:.1f} requests/s"
    if prefill:
        figures = f"{one.slots - one.slots_free} of {one.slots} slots busy"
    elif decode:
        figures = f"{one.blocks_free:,} of {one.blocks:,} blocks free"
    asks, warm = one.asks_waiting if decode else None, one.warm if prefill else None
    return (one.pool, one.id, one.state, one.load, figures, one.serves_as, asks, warm, one.up_s, one.model)


# --------------------------------------------------------------------------------------------------------------
# Shards

_SHARDS: Final = (
    Column("SHARD"),
    Column("WAITING", cells.count),
    Column("IN WORK", cells.count),
    Column("OWNER", room=10),
    Column("NEXT", spare=6, room=10),
    Column("SERVED", cells.count),
    Column("SPILLED", cells.share, 3),
    Column("HBM", cells.share, 4),
    Column("LMCACHE", cells.share, 4),
    Column("COMPUTED", cells.share, 4),
)


def shards(now: Snapshot) -> Sheet:
    """Every shard that has had a request."""
    rows = [row for row in now.queues or [] if not row.idle]
    return Sheet(
        title="Shards",
        columns=_SHARDS,
        lines=[
            (
                f"{row.klass} {row.shard}",
                row.depth,
                row.in_work,
                row.owner or "nobody",
                row.next,
                row.served,
                cells.of(row.spilled, row.served),
                *(
                    cells.of(part, row.hbm_tokens + row.lmcache_tokens + row.computed_tokens)
                    for part in (row.hbm_tokens, row.lmcache_tokens, row.computed_tokens)
                ),
            )
            for row in rows
        ],
        empty=ASKED if now.queues is None else "No shard has had a request since the workers began.",
        note="Since the workers began. SPILLED: by another than the owner. HBM …: prompt tokens.",
    )


# --------------------------------------------------------------------------------------------------------------
# Credits

_CREDITS: Final = (
    Column("DECODE", room=10),
    Column("HELD", _load),
    Column("FREE", cells.count),
    Column("TOTAL", cells.count, 2),
    Column("GRANTED", spare=4),
    Column("CONSUMED", spare=4),
    Column("WAITING", cells.count),
    Column("SEATS", spare=6),
    Column("PREEMPTED", cells.count, 7),
    Column("BOOKS", room=14),
)


def books(now: Snapshot) -> Sheet:
    """Every decode worker's ledger."""
    return Sheet(
        title="Credits",
        columns=_CREDITS,
        lines=[_ledger(one) for one in now.ledgers or []],
        empty=ASKED if now.ledgers is None else "No decode worker lives.",
        note="Blocks; GRANTED and CONSUMED with their requests before them. BOOKS: it adds up.",
    )


def _ledger(one: Ledger) -> Line:
    account = one.account
    if account is None:
        return (one.decode, *(None,) * (len(_CREDITS) - 2), "no answer")
    return (
        one.decode,
        cells.of(account.blocks - account.free, account.blocks),
        account.free,
        account.blocks,
        f"{account.granted_now}: {account.granted_blocks:,}",
        f"{account.consumed_now}: {account.consumed_blocks:,}",
        account.waiting,
        _seats(account),
        account.preemptions,
        "✗ " + "; ".join(one.problems) if one.problems else "✓",
    )


def _seats(account: Account) -> str:
    return f"{account.seats}/{account.seats_max or '∞'}"


# --------------------------------------------------------------------------------------------------------------
# Latencies

_STAGES: Final = (
    Column("STAGE"),
    Column("P50", cells.duration),
    Column("P90", cells.duration),
    Column("P99", cells.duration),
    Column("SHARE", _load),
    Column("REQUESTS", cells.count, 4),
    Column("WHAT HAPPENS IN IT", spare=6),
)

WHOLE: Final = "whole reply"
FIRST: Final = "first token"


def latencies(now: Snapshot) -> Sheet:
    """Every stage, in order, under the two that a client sees."""
    known = now.fare
    lines: list[Line] = []
    if known is not None and known.took is not None:
        lines = [_delays(WHOLE, known.took, None, "From the request's first byte to the reply's last")]
        lines += [_delays(FIRST, known.ttft, None, "To the first of the reply")] if known.ttft else []
        total_s = known.took.mean_s * known.took.count
        lines += [
            _delays(stage, one, min(1.0, one.mean_s * one.count / total_s), STAGES[stage])
            for stage, one in known.stages.items()
        ]
    return Sheet(
        title="Latencies",
        columns=_STAGES,
        lines=lines,
        empty=unserved(now),
        note=f"Whole replies of {_over(known)}, within 5 %. SHARE of all their time.",
    )


def _delays(name: str, one: Delays, part: float | None, what: str) -> Line:
    return (name, one.p50_s, one.p90_s, one.p99_s, part, one.count, what)


def _over(known: Fare | None) -> str:
    return "the last minute" if known is None else f"the last {cells.duration(known.over_s)}"


# --------------------------------------------------------------------------------------------------------------
# Requests

_SLOWEST: Final = (
    Column("TOOK", cells.duration),
    Column("STATE"),
    Column("REQUEST", room=32),
    Column("MOST OF IT", spare=3),
    Column("PROMPT", cells.count, 6),
    Column("REPLY", cells.count, 6),
    Column("CLASS", spare=8),
    Column("PREFILL", spare=5),
    Column("DECODE", spare=5),
    Column("CREATOR", spare=9),
)


def slowest(now: Snapshot) -> Sheet:
    """The slowest of the last minute, and those longest under way."""
    return Sheet(
        title="Slowest requests",
        columns=_SLOWEST,
        lines=[_request(record) for record in (now.fare.requests if now.fare else [])],
        empty=unserved(now),
        note=f"Ended in {_over(now.fare)}, or under way. headrace trace REQUEST tells more.",
    )


def _request(record: Record) -> Line:
    facts = record.facts
    return (
        record.took_s,
        record.outcome or "under way",
        record.request,
        _most(record),
        facts.get("prompt_tokens"),
        facts.get("completion_tokens"),
        facts.get("klass", ""),
        facts.get("prefill", ""),
        facts.get("decode", ""),
        record.creator,
    )


def _most(record: Record) -> str:
    stage, took_s = max(record.stages.items(), key=lambda item: item[1], default=("", 0.0))
    return f"{stage} {cells.share(min(1.0, took_s / record.took_s))}" if took_s > 0 and record.took_s > 0 else ""


def unserved(now: Snapshot) -> str:
    """Why nothing is known of any request."""
    if now.fare is None:
        return ASKED
    if not now.pool("gateway"):
        return "No gateway lives, and it is gateways that know how requests fare."
    if now.fare.missing:
        return "No gateway answers."
    return (
        f"No request has ended whole in {_over(now.fare)}."
        if now.fare.outcomes
        else f"No request in {_over(now.fare)}."
    )


ASKED: Final = "Asking…"

VIEWS: Final[Sequence[View]] = (
    View("fleet", frozenset(("queues", "recent"))),
    View("pools", frozenset(), _POOLS, pools),
    View("shards", frozenset(("queues", "served")), _SHARDS, shards),
    View("credits", frozenset(("ledgers",)), _CREDITS, books),
    View("latencies", frozenset(("recent",)), _STAGES, latencies),
    View("slowest", frozenset(("recent",)), _SLOWEST, slowest),
)
