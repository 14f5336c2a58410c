"""`headrace drain`, `pause`, `resume` and `role`: orders to running workers, and `headrace workers`: how they stand.

Each worker answers for itself on `control.worker.<id>`; who lives, and with which loops, is heard from the presences.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from pipeline.cli.listening import listening
from pipeline.cli.options import ConfigOption, configuration
from pipeline.cli.tables import table
from pipeline.errors import OperatorError
from pipeline.limits import DRAIN_S

if TYPE_CHECKING:
    from pipeline.bus.connection import Bus
    from pipeline.protocol.arrangement import Role
    from pipeline.protocol.control import Action, Standing
    from pipeline.protocol.messages import Presence
    from pipeline.protocol.presence import Presences

ANSWER_S: Final = 5.0
"""A worker stops its pulls before it answers. One that takes longer has a loop that stands still."""

LOOK_PERIOD_S: Final = 0.25

LEAVES_WITHIN_S: Final = DRAIN_S + 10.0
"""A drain ends within its bound; then an engine is closed, which takes vLLM some seconds."""

POOLS: "Final[tuple[Role, ...]]" = ("prefill", "decode")

HEAD: Final = ("WORKER", "LOOP", "SERVES AS", "STATE", "LOAD", "SLOTS FREE", "BLOCKS FREE", "MODEL")

Target = Annotated[
    str,
    typer.Argument(
        metavar="WORKER|POOL", help="A worker's name; or prefill, decode or both for all.", show_default=False
    ),
]


def drain(
    target: Target,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until it has left.")] = True,
    config: ConfigOption = None,
) -> None:
    """Have workers finish what they have, and leave.

    A worker takes nothing new from then on. What is not finished after 20 s goes back to the queue, and others serve it.

    Example: headrace drain prefill-2
    """
    _run(config, target, "drain", _until_left if wait else None)


def pause(target: Target, config: ConfigOption = None) -> None:
    """Have workers take nothing new, and live on. What they have is finished.

    Example: headrace pause prefill
    """
    _run(config, target, "pause")


def resume(target: Target, config: ConfigOption = None) -> None:
    """Have paused workers take requests again.

    Example: headrace resume prefill-2
    """
    _run(config, target, "resume")


def role(
    target: Target,
    as_what: Annotated[
        Literal["prefill", "decode", "both"],
        typer.Argument(metavar="ROLE", help="prefill, decode or both.", show_default=False),
    ],
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until all of it is done.")] = True,
    anyway: Annotated[bool, typer.Option("--anyway", help="Also where nobody would be left for a part.")] = False,
    config: ConfigOption = None,
) -> None:
    """Have workers take another role, while their engines stay up. Nothing is lost: what they have ends where it is.

    Only a worker that was started as `headrace worker both` can: other engines are built for one role.

    Example: headrace role both-1 decode
    """
    _run(config, target, "turn", _until_turned if wait else None, as_what, None if anyway else check_parts)


def workers(config: ConfigOption = None) -> None:
    """Show the workers: their role, how they stand, and what they have free."""
    print(asyncio.run(_page(config)))


async def _page(path: Path | None) -> str:
    async with listening(configuration(path), "headrace-workers") as (_, presences):
        loops = [loop for pool in POOLS for loop in _live(presences, pool)]
        return table(HEAD, [_row(loop) for loop in sorted(loops, key=lambda loop: (loop.id, loop.role))])


def _row(said: "Presence") -> Sequence[str | int]:
    slots = f"{said.slots_free} of {said.slots}" if said.slots else ""
    blocks = f"{said.blocks_free:,} of {said.blocks:,}" if said.blocks else ""
    return (said.id, said.role, said.serves_as, state_of(said), f"{said.load:.0%}", slots, blocks, said.model)


def state_of(said: "Presence") -> str:
    """How a process stands, in a word."""
    if said.draining:
        return "draining"
    if said.paused:
        return "paused"
    return "serving" if said.ready else "starting"


# --------------------------------------------------------------------------------------------------------------
# Orders

Then = Callable[["Bus", "Standing"], Awaitable[bool]]
"""What follows an order that a worker has obeyed; whether it went well."""


def _run(
    path: Path | None,
    target: str,
    action: "Action",
    then: Then | None = None,
    role: "Role | None" = None,
    check: "Callable[[list[str], Role, Presences], None] | None" = None,
) -> None:
    """Order all that are meant; exits with 1 where one did not obey."""

    async def order() -> bool:
        async with listening(configuration(path), f"headrace-{action}") as (bus, presences):
            names = meant(target, presences)
            if check is not None and role is not None:
                check(names, role, presences)
            return all(await asyncio.gather(*(_order(bus, name, action, then, role) for name in names)))

    raise typer.Exit(0 if asyncio.run(order()) else 1)


def meant(target: str, presences: "Presences") -> list[str]:
    """The workers that a name or a pool stands for. Raises `OperatorError` where none lives."""
    pools: dict[str, list[str]] = {pool: [worker.id for worker in _live(presences, pool)] for pool in POOLS}
    names = sorted({name for pool in pools.values() for name in pool})
    pools["both"] = sorted(set(pools["prefill"]) & set(pools["decode"]))
    if target in names:
        return [target]
    if pools.get(target):
        return pools[target]
    raise OperatorError(
        f"No worker or pool {target!r} says that it lives.",
        f"Name one of {', '.join(names)}." if names else "None does: start some, or correct nats.url.",
    )


def check_parts(names: list[str], role: "Role", presences: "Presences") -> None:
    """Raise `OperatorError` where nobody would be left to prefill, or to decode, once these have that role."""
    from pipeline.protocol.arrangement import takes

    for part in POOLS:
        others = [worker.id for worker in _live(presences, part) if worker.takes and worker.id not in names]
        if not (others or takes(role, part)):
            raise OperatorError(
                f"Not changed: nobody would be left to {part}.", "Turn another one first, or say --anyway."
            )


def _live(presences: "Presences", pool: str) -> "list[Presence]":
    from pipeline import outside

    return presences.live(pool, outside.monotonic_s())


async def _order(bus: "Bus", worker: str, action: "Action", then: Then | None, role: "Role | None") -> bool:
    from pipeline.bus.errors import BusError

    try:
        standing = await ask(bus, worker, action, role)
    except BusError as error:
        print(f"{worker}: no answer: {error}")
        return False
    print(sentence(standing))
    return not standing.refused and (then is None or await then(bus, standing))


async def ask(bus: "Bus", worker: str, action: "Action", role: "Role | None" = None) -> "Standing":
    """Order a worker; how it stands then. Raises `BusError`."""
    from pipeline.protocol import subjects
    from pipeline.protocol.control import Order, standing_decoder
    from pipeline.protocol.messages import encode

    return standing_decoder.decode(await bus.request(subjects.control(worker), encode(Order(action, role)), ANSWER_S))


def sentence(standing: "Standing") -> str:
    """What a worker has answered, for people."""
    if standing.refused:
        return f"{standing.worker}: refused, because {standing.refused}."
    requests = "1 request" if standing.under_way == 1 else f"{standing.under_way} requests"
    state = f"becoming {standing.role}" if standing.state == "turning" else f"{standing.state} as {standing.role}"
    return f"{standing.worker}: {state}, {requests} under way."


async def _until_turned(bus: "Bus", first: "Standing") -> bool:
    """Follow a change of role to its end."""
    worker, began_s = first.worker, time.monotonic()
    while time.monotonic() - began_s < LEAVES_WITHIN_S:
        standing = await ask(bus, worker, "look")
        if standing.state != "turning":
            print(f"{sentence(standing)} That took {time.monotonic() - began_s:.1f} s.")
            return True
        await asyncio.sleep(LOOK_PERIOD_S / 5)
    print(f"{worker}: not done after {LEAVES_WITHIN_S:g} s. Its log says why.")
    return False


async def _until_left(bus: "Bus", first: "Standing") -> bool:
    """Follow a drain to its end. Who does not answer any more has left."""
    from pipeline.bus.errors import BusError

    worker, began_s, said = first.worker, time.monotonic(), first.under_way
    while time.monotonic() - began_s < LEAVES_WITHIN_S:
        try:
            standing = await ask(bus, worker, "look")
        except BusError:
            print(f"{worker}: has left, after {time.monotonic() - began_s:.1f} s.")
            return True
        if standing.under_way != said:
            said = standing.under_way
            print(sentence(standing))
        await asyncio.sleep(LOOK_PERIOD_S)
    print(f"{worker}: still there after {LEAVES_WITHIN_S:g} s. Its log says why; a second SIGTERM ends it at once.")
    return False
