"""How one worker serves, with its prefill loop, its decode loop, or both over one engine; and how it comes from one to another.

    role       prefill loop           decode loop
    prefill    all its slots          closed
    both       a few slots            open; of the blocks, what those slots may need is withheld
    decode     closed                 open, with all blocks

A decode may never be preempted, so what prefills may use is no block of the ledger: a slot holds the largest prompt, until its
prefill is computed. A finished one holds none, since its KV is evictable cache, and in LMCache. When the role changes, the loop
that ends takes nothing new, and its requests end where they are. The one that begins opens as soon as it has room: decode at
once, as what running prefills hold is withheld from it; prefill when enough blocks have come back. `moves` says what to do
next, as often as it is asked, until all is as the role wants it.
"""

from typing import Literal

import msgspec

Role = Literal["prefill", "decode", "both"]


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """`blocks` of the engine, of which the `largest` prompt takes so many; prefill `slots` without decode, and `beside` it."""

    blocks: int
    largest: int
    slots: int
    beside: int


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """How the loops stand: open or closed, prefills under way, blocks `withheld` from the ledger, whether it owes nothing."""

    prefill: bool
    busy: int
    decode: bool
    idle: bool
    withheld: int


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """What the loops are to be now. `done`: nothing is left to wait for."""

    prefill: bool
    slots: int
    decode: bool
    withhold: int
    done: bool


def takes(role: Role, loop: Role) -> bool:
    """Whether a worker of this role runs that loop."""
    return role in (loop, "both")


def moves(role: Role, now: Now, sizes: Sizes) -> Moves:
    """The next moves of a worker that is to be of this role."""
    prefills, decodes = takes(role, "prefill"), takes(role, "decode")
    alone = not decodes and now.idle
    slots = sizes.slots if alone else sizes.beside
    hold = max(now.busy, slots if prefills else 0)
    withhold = min(hold * sizes.largest, sizes.blocks)
    room = now.withheld >= withhold or alone
    prefill = prefills and (now.prefill or room)
    done = room and (prefills or not now.busy) and (decodes or now.idle) and (alone or now.busy <= slots)
    return Moves(prefill=prefill, slots=slots, decode=decodes, withhold=withhold, done=done)
