"""`headrace credits`: every decode worker's books, and whether they add up.

A decode worker is asked for its account on `credit.<id>`; who lives is heard from the presences.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from pipeline.cli.listening import listening
from pipeline.cli.options import ConfigOption, configuration
from pipeline.cli.tables import table
from pipeline.errors import OperatorError

if TYPE_CHECKING:
    from pipeline.bus.connection import Bus
    from pipeline.config import Config
    from pipeline.protocol.messages import Account
    from pipeline.protocol.presence import Presences

ANSWER_S: Final = 1.0
"""A worker that does not open its books within this has a loop that stands still."""

WATCH_PERIOD_S: Final = 1.0

HEAD: Final = (
    "DECODE", "TOTAL", "FREE", "RESERVE", "GRANTED", "CONSUMED", "WAITING", "SEATS", "ENGINE", "PREEMPTED", "BOOKS",
)  # fmt: skip

LEGEND: Final = (
    "Blocks; in GRANTED and CONSUMED the requests before them. SEATS: sequences promised, and how many may be. "
    "BOOKS: granted = released + returned + expired + outstanding, since the worker began."
)


def show(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead: a line each time.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second, until Ctrl-C.")] = False,
    config: ConfigOption = None,
) -> None:
    """Show the books of every decode worker.

    The KV blocks that it has promised, and whether its ledger adds up: exits with 1 where one does not.

    Example: headrace credits --watch
    """
    sound = asyncio.run(_show(configuration(config), as_json=as_json, watch=watch))
    raise typer.Exit(0 if sound else 1)


async def _show(config: "Config", *, as_json: bool, watch: bool) -> bool:
    async with listening(config, "headrace-credits") as (bus, presences):
        while True:
            books = await audit(bus, presences)
            print(_line(books) if as_json else _page(books, clear=watch and sys.stdout.isatty()), flush=True)
            if not watch:
                return all(account is not None and not problems(account) for account in books.values())
            await asyncio.sleep(WATCH_PERIOD_S)


async def audit(bus: "Bus", presences: "Presences") -> "dict[str, Account | None]":
    """The account of each live decode worker, by id; None where it did not answer. Raises `OperatorError` where none lives."""
    from pipeline import outside

    workers = [presence.id for presence in presences.live("decode", outside.monotonic_s())]
    if not workers:
        raise OperatorError(
            "No decode worker says that it lives.", "Start one with `headrace worker decode`, or correct nats.url."
        )
    accounts = await asyncio.gather(*(account_of(bus, worker) for worker in workers))
    return dict(zip(workers, accounts, strict=True))


async def account_of(bus: "Bus", worker: str) -> "Account | None":
    """The account of one decode worker; None where it does not answer."""
    from pipeline.bus.errors import BusError
    from pipeline.protocol import subjects
    from pipeline.protocol.messages import Audit, account_decoder, encode

    try:
        return account_decoder.decode(await bus.request(subjects.credit(worker), encode(Audit()), ANSWER_S))
    except BusError:
        return None


# --------------------------------------------------------------------------------------------------------------
# What an account says


def problems(account: "Account") -> list[str]:
    """What does not add up in a ledger. In a sound one, nothing."""
    outstanding = account.granted_now + account.consumed_now
    ended = account.released + account.returned + account.expired
    held = account.granted_blocks + account.consumed_blocks
    found = []
    if account.granted != ended + outstanding:
        found.append(f"granted {account.granted} ≠ ended {ended} + outstanding {outstanding}")
    if account.free + held != account.blocks:
        found.append(f"free {account.free} + held {held} ≠ {account.blocks} blocks")
    if not 0 <= account.free <= account.blocks:
        found.append(f"free {account.free} is not within 0 and {account.blocks}")
    if account.seats_max is not None and account.seats > account.seats_max:
        found.append(f"{account.seats} seats are promised, of {account.seats_max}")
    if account.preemptions:
        found.append(f"the engine has preempted {account.preemptions} times")
    return found


def _line(books: "dict[str, Account | None]") -> str:
    tree: list[dict[str, Any]] = [
        {"decode": worker, "answered": False}
        if account is None
        else {**msgspec.structs.asdict(account), "answered": True, "problems": problems(account)}
        for worker, account in books.items()
    ]
    return msgspec.json.encode(tree).decode()


def _page(books: "dict[str, Account | None]", *, clear: bool) -> str:
    page = f"{table(HEAD, [_row(worker, account) for worker, account in books.items()])}\n\n{LEGEND}"
    return f"\033[2J\033[H{page}" if clear else page


def _row(worker: str, account: "Account | None") -> Sequence[str | int]:
    if account is None:
        return (worker, *("",) * (len(HEAD) - 2), "no answer")
    sum_up = f"{account.granted} = {account.released} + {account.returned} + {account.expired} + " + str(
        account.granted_now + account.consumed_now
    )
    wrong = problems(account)
    return (
        worker,
        account.blocks,
        account.free,
        account.reserve,
        f"{account.granted_now}: {account.granted_blocks}",
        f"{account.consumed_now}: {account.consumed_blocks}",
        account.waiting,
        f"{account.seats}/{account.seats_max or '∞'}",
        account.engine_blocks,
        account.preemptions,
        f"✗ {'; '.join(wrong)}" if wrong else f"✓ {sum_up}",
    )
