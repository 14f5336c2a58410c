"""What a seed does to a stack, and when.

The acts are drawn before the run begins: same seed, same acts. What they meet is not the same, since real processes keep no time.
An act waits until somebody else of its victim's role serves: a role without a single worker is no fault to survive, but a fleet
that is switched off.
"""

import random
import sys
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Final, Literal

import anyio
import anyio.abc
import msgspec

from tests.chaos.stack import PROBE_S, ROLES, Part, Role, Stack

Kind = Literal["prefill", "decode", "pause", "nats", "gateway", "stall"]
KINDS: Final[tuple[Kind, ...]] = ("prefill", "decode", "pause", "nats", "gateway", "stall")
"""Killed is a worker, the broker or a gateway; `pause` stops a worker for a while, and `stall` a gateway or the broker."""

WEIGHTS: Final[dict[Kind, int]] = {"prefill": 4, "decode": 4, "pause": 3, "nats": 1, "gateway": 1, "stall": 1}
"""How often a kind is drawn, beyond the once that each gets where there are acts enough."""

FIRST, LAST = 0.05, 0.92
"""Acts lie between these shares of the load: what is hurt has work, and the last reply is not the first after a death."""

PAUSE_S: Final = (1.2, 2.4)
"""Beyond `ACK_WAIT_S`: the message is another's when its holder wakes."""


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One deed: at this share of the load, to the victim that `roll` in [0, 1) chooses."""

    at: float
    kind: Kind
    roll: float
    pause_s: float = 0.0


def drawn(seed: int, kinds: Sequence[Kind], count: int) -> list[Act]:
    """`count` acts in order of time; each kind at least once where there are acts enough."""
    if not kinds:
        return []
    dice = random.Random(seed)
    chosen = [*dice.sample(kinds, k=min(count, len(kinds)))]
    chosen += dice.choices(kinds, weights=[WEIGHTS[kind] for kind in kinds], k=count - len(chosen))
    dice.shuffle(chosen)
    times = sorted(dice.uniform(FIRST, LAST) for _ in chosen)
    return [
        Act(at=at, kind=kind, roll=dice.random(), pause_s=dice.uniform(*PAUSE_S))
        for at, kind in zip(times, chosen, strict=True)
    ]


class Mischief:
    """Carries acts out. `done` are those that really happened."""

    def __init__(self, stack: Stack, tell: Callable[[str], None]) -> None:
        self._stack = stack
        self._tell = tell
        self.done: list[Kind] = []

    async def run(self, acts: Sequence[Act], duration_s: float, over: anyio.Event) -> None:
        """All acts over `duration_s`; none begins once the load is `over`. Returns when the paused have been resumed."""
        began_s = time.monotonic()
        async with anyio.create_task_group() as pauses:
            for act in acts:
                await anyio.sleep(max(0.0, began_s + act.at * duration_s - time.monotonic()))
                victim = await self._victim(act, over)
                if victim is None:
                    return
                self._do(act, victim, pauses)

    async def roll_over(self, workers: Sequence[Part]) -> None:
        """SIGTERM to each worker in turn, the next once the one before serves again. Raises where one does not end well."""
        for worker in workers:
            status = await self._stack.restart(worker)
            self._tell(f"{worker.name} restarted, status {status}")
            if status != 0:
                self._stack.unasked.append(f"{worker.name} (drain, status {status})")
            self.done.append("prefill" if worker.role == "prefill" else "decode")

    def _do(self, act: Act, victim: Part, pauses: anyio.abc.TaskGroup) -> None:
        self.done.append(act.kind)
        if act.kind in ("pause", "stall"):
            self._tell(f"{victim.name} paused for {act.pause_s:.1f} s")
            pauses.start_soon(self._stack.pause, victim, act.pause_s)
            return
        self._tell(f"{victim.name} killed")
        self._stack.kill(victim)

    async def _victim(self, act: Act, over: anyio.Event) -> Part | None:
        """Whom to hurt. Waits for somebody who may be; None once the load is over."""
        while not over.is_set():
            candidates = self._candidates(act.kind)
            if candidates:
                return candidates[int(act.roll * len(candidates))]
            await anyio.sleep(PROBE_S)
        return None

    def _candidates(self, kind: Kind) -> list[Part]:
        nats = self._stack.parts["nats"]
        brokers = [nats] if nats.process is not None and not nats.paused else []
        gateways = self._stack.gateways_up()
        others = gateways if len(gateways) > 1 or self._stack.settings.gateways == 1 else []
        match kind:
            case "nats":
                return brokers
            case "gateway":
                return others
            case "stall":
                return brokers + others
            case "pause":
                roles: Collection[Role] = ROLES
            case _:
                roles = [role for role in ROLES if role == kind]
        serving = [self._stack.up(role) for role in roles]
        return [part for parts in serving if len(parts) > 1 for part in parts]


def progress(line: str) -> None:
    """To stderr, with the time, by which it is found in the processes' logs."""
    sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S.%f} {line}\n")
    sys.stderr.flush()
