"""Which worker should take another role now: the fleet follows its measured bottleneck, one step at a time.

Two pressures are measured, 0…1, each over all workers that do this part:

    prefill   the share of the last seconds in which an engine had a prompt to read. Full slots would come too late: an engine
              reads prompts one after the other, and has no more to give long before all its slots are taken
    decode    how much of blocks and seats was promised over the last half second, and 1 while asks waited, whatever for

A part is the **bottleneck** while its pressure is high and the other's is not: then a worker of the other part takes a step
towards it, and only then. Where both are high the fleet is full, and no role helps; but where workers for both do all of one
part, beside others that do nothing but the other, that part is the bottleneck as soon as its own pressure is high: who does
both is late with both, however much room the others have.

    prefill ◄──► both ◄──► decode

There is one step at a time: the bottleneck has to last for `patience_s`, and after a step the fleet is left alone for
`settle_s`, so that what it did is seen before the next one. Between `low` and `high` nothing begins: a load that hovers there
moves nobody to and fro. Some workers of each part always stay.

There are loads that no arrangement serves without a bottleneck: two workers for 1.0 workers' worth of prefill and 0.6 of decode
lack one or the other in turn. So a step that the next one takes back is remembered, and not taken again from the same
arrangement for `remember_s`: the fleet comes to rest, and tries again when the load may be another. It does not rest where a part
is left to workers for both: a step that would take one back, and leave a part to them, is not taken.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from pipeline.protocol.arrangement import Role, takes

Part = Literal["prefill", "decode"]

STEPS: Final[dict[tuple[Role, Part], Role]] = {
    ("prefill", "decode"): "both",
    ("both", "decode"): "decode",
    ("decode", "prefill"): "both",
    ("both", "prefill"): "prefill",
}
"""A worker's next role on the way towards a part."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's. Pressures are 0…1; so many workers at least do each part."""

    high: float = 0.85
    low: float = 0.6
    patience_s: float = 3.0
    settle_s: float = 10.0
    remember_s: float = 600.0
    prefill_min: int = 1
    decode_min: int = 1


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as its presences tell of it. What it does not do is 0. `blocks_free` may be promised; ratios: see `Presence`."""

    worker: str
    role: Role
    built_for: Role
    slots: int = 0
    slots_free: int = 0
    reads_ratio: float = 0.0
    blocks: int = 0
    blocks_free: int = 0
    full_ratio: float = 0.0


class Pressure(msgspec.Struct, frozen=True):
    """Of both parts; 0 where nobody does one, for nothing can be measured there."""

    prefill: float
    decode: float


class Turn(msgspec.Struct, frozen=True):
    """This worker is to take this role, because of that bottleneck."""

    worker: str
    role: Role
    bottleneck: Part


Arrangement = tuple[tuple[Role, int], ...]
"""How many workers have each role."""


class _Taken(msgspec.Struct, frozen=True):
    """A step: from where, towards what, when."""

    before: Arrangement
    towards: Part
    at_s: float


def arrangement(members: Sequence[Member]) -> Arrangement:
    """How many workers have each role now."""
    return tuple(sorted(Counter(member.role for member in members).items()))


def pressure(members: Sequence[Member]) -> Pressure:
    """What is measured now."""
    return Pressure(
        prefill=_mean([member.reads_ratio for member in members if member.slots]),
        decode=_mean([member.full_ratio for member in members if member.blocks]),
    )


def _mean(ratios: Sequence[float]) -> float:
    return sum(ratios) / len(ratios) if ratios else 0.0


def bottleneck(now: Pressure, rules: Rules, members: Sequence[Member]) -> Part | None:
    """The part that holds up the other, if one does."""
    left = left_to_both(arrangement(members))
    if now.decode >= rules.high and (now.prefill < rules.low or left == "decode"):
        return "decode"
    if now.prefill >= rules.high and (now.decode < rules.low or left == "prefill"):
        return "prefill"
    return None


def left_to_both(fleet: Arrangement) -> Part | None:
    """The part that only workers for both do, where others do nothing but the other part."""
    roles = {role for role, _ in fleet}
    if roles == {"both", "prefill"}:
        return "decode"
    return "prefill" if roles == {"both", "decode"} else None


def after(turn: Turn, members: Sequence[Member]) -> Arrangement:
    """How many workers have each role once it is taken."""
    return arrangement(
        [
            msgspec.structs.replace(member, role=turn.role) if member.worker == turn.worker else member
            for member in members
        ]
    )


class Balancer:
    """The memory of whoever decides. All times are seconds, monotonic."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.pressure = Pressure(0.0, 0.0)
        self._bottleneck: Part | None = None
        self._since_s = -math.inf
        self._settled_s = -math.inf
        self._last: _Taken | None = None
        self._in_vain: dict[tuple[Arrangement, Part], float] = {}
        """Steps that were taken back, and until when they are not taken again. No more than `remember_s` holds of them."""

    def step(self, now_s: float, members: Sequence[Member]) -> Turn | None:
        """What to do now, about once a second. A turn is taken for done; where it was refused, the next comes after a while."""
        self.pressure = pressure(members)
        found = bottleneck(self.pressure, self.rules, members)
        if found != self._bottleneck:
            self._bottleneck, self._since_s = found, now_s
        if found is None or now_s - self._since_s < self.rules.patience_s or now_s < self._settled_s:
            return None
        turn = choose(members, found, self.rules)
        if turn is None:
            return None
        now = arrangement(members)
        self._learn(found, now, after(turn, members), now_s)
        if (now, found) in self._in_vain:
            return None
        self._settled_s = now_s + self.rules.settle_s
        self._since_s = now_s
        self._last = _Taken(now, found, now_s)
        return turn

    def _learn(self, found: Part, now: Arrangement, then: Arrangement, now_s: float) -> None:
        """Where the last step has only moved the bottleneck to the other part, it was in vain. So is the one that takes it back,
        if it would leave to workers for both what they share with all others now.
        """
        self._in_vain = {step: until_s for step, until_s in self._in_vain.items() if until_s > now_s}
        last = self._last
        if last is None or last.towards == found or now_s - last.at_s >= self.rules.remember_s:
            return
        self._in_vain[last.before, last.towards] = last.at_s + self.rules.remember_s
        if then == last.before and left_to_both(then) is not None and left_to_both(now) is None:
            self._in_vain[now, found] = last.at_s + self.rules.remember_s


def choose(members: Sequence[Member], towards: Part, rules: Rules) -> Turn | None:
    """Who takes a step: of those that can, one that does nothing of this part yet, and of these the one with the least to do."""
    other: Part = "prefill" if towards == "decode" else "decode"
    doing = sum(takes(member.role, other) for member in members)
    least = rules.prefill_min if other == "prefill" else rules.decode_min
    able = [
        member
        for member in members
        if member.built_for == "both" and member.role != towards and (member.role == other or doing > least)
    ]
    if not able:
        return None
    chosen = min(able, key=lambda member: (member.role != other, _busy(member), member.worker))
    return Turn(chosen.worker, STEPS[chosen.role, towards], towards)


def _busy(member: Member) -> float:
    """How much of what it has is in use, over both parts."""
    slots = 1.0 - member.slots_free / member.slots if member.slots else 0.0
    blocks = 1.0 - member.blocks_free / member.blocks if member.blocks else 0.0
    return slots + blocks
