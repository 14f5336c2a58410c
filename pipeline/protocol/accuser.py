"""When a receiver may give a message back in the name of a worker that it takes for dead.

A dead worker's message comes back by itself after `ACK_WAIT_S`; a NAK on its behalf brings it back at once. A NAK for a living
one would restart healthy work, and a paused or overloaded accuser sees everybody dead. So an accusation is right only if

* the accuser trusts itself: it is connected, and its own loop has run on time for as long as the silence has lasted;
* the worker, in the life that claimed, has been heard neither by presence nor by frames nor by claims for as long as patience
  with it lasts, or has begun a new life, or the broker says that nobody listens there any more;
* it names the claim that is the last one, and names it once, unless its holder has spoken since and goes on with it.

Patience begins at `ACCUSE_SILENT_S`. A worker that speaks again in the life for which it was accused was only slow, as
everything is on an overloaded machine, where restarting its work would add to the load: patience with it doubles, up to where the
broker brings the message back anyway. So long it lasts from the start where an accusation would lose what it means to save: a
reply that has been seen and that nobody else can continue, from a worker that still listens.

The kernel closes the connections of a process that dies, and with them its subscriptions: a broker that finds no responders
shows a death before silence does. A worker that has only lost its connection comes back within a moment, so the absence has to
last: a quarter of the patience, or all of it where an accusation would lose the reply. It shows nothing of a worker that was not
heard since we trust ourselves: after a broker's restart it may come back later than we.
"""

import math
from collections import OrderedDict
from typing import Final

import msgspec

from pipeline.limits import ABSENT_RATIO, ACCUSE_SILENT_MAX_S, ACCUSE_SILENT_S, ASK_BROKER_SILENT_S, PRESENCE_PERIOD_S
from pipeline.protocol.messages import Claim

ACCUSED_REMEMBERED: Final = 4096
"""Claims that have been accused: more than a gateway has open."""


class _Known(msgspec.Struct):
    epoch: str
    heard_s: float
    patience_s: float = ACCUSE_SILENT_S
    accused: bool = False
    absent_from_s: float = -math.inf
    absent_until_s: float = -math.inf
    """When the broker was first and last asked for it in vain, since it was last heard."""


class Accuser:
    """One receiver's judgement. Times are seconds, monotonic; `worker` is what claims call their holder."""

    def __init__(self, now_s: float) -> None:
        self._trusted_from_s = now_s
        self._known: dict[str, _Known] = {}
        self._accused: OrderedDict[str, None] = OrderedDict()

    def distrust_myself(self, now_s: float) -> None:
        """I was away, or my connection was: what I have not heard until now proves nothing."""
        self._trusted_from_s = now_s

    def woke(self, late_s: float, now_s: float) -> None:
        """My own loop has woken, `late_s` after it should have."""
        if late_s >= PRESENCE_PERIOD_S:
            self.distrust_myself(now_s)

    def heard(self, worker: str, epoch: str, at_s: float) -> None:
        """The worker has said something, in this life."""
        known = self._known.get(worker)
        if known is None or epoch > known.epoch:
            self._known[worker] = _Known(epoch, at_s)
        elif epoch == known.epoch and at_s > known.heard_s:
            known.heard_s = at_s
            if known.accused:
                known.accused = False
                known.patience_s = min(2 * known.patience_s, ACCUSE_SILENT_MAX_S)

    def wonders(self, claim: Claim, now_s: float) -> bool:
        """Whether to ask the broker for the claim's holder: its next word is due, and the answer would prove something."""
        known = self._known.get(claim.holder)
        if known is None or claim.claim in self._accused:
            return False
        return known.heard_s > self._trusted_from_s and now_s - known.heard_s > ASK_BROKER_SILENT_S

    def absent(self, worker: str, asked_s: float) -> None:
        """The broker, asked at that time, knows nobody who listens there."""
        known = self._known.get(worker)
        if known is None or asked_s <= known.heard_s:
            return
        if known.absent_from_s <= known.heard_s:
            known.absent_from_s = asked_s
        known.absent_until_s = asked_s

    def accuses(self, claim: Claim, until_s: float, *, loses: bool = False) -> bool:
        """Whether to NAK this claim's message, where the worker would have been heard until `until_s`. True once a claim.

        `loses`: the reply cannot be continued, and ends with an error where its holder lives.
        """
        if claim.claim in self._accused or not self._is_dead(claim, until_s, loses=loses):
            return False
        self._accused[claim.claim] = None
        if len(self._accused) > ACCUSED_REMEMBERED:
            self._accused.popitem(last=False)
        return True

    def forgive(self, claim: Claim) -> None:
        """Its holder goes on with it: should that one die, it may be accused again."""
        self._accused.pop(claim.claim, None)

    def lives(self, claim: Claim) -> bool:
        """Whether the claim's holder has been heard since it was taken for dead, in the life that claimed."""
        known = self._known.get(claim.holder)
        return known is not None and known.epoch == claim.epoch and not known.accused

    def _is_dead(self, claim: Claim, until_s: float, *, loses: bool) -> bool:
        known = self._known.setdefault(claim.holder, _Known(claim.epoch, self._trusted_from_s))
        if known.epoch > claim.epoch:
            return True
        absence_s = known.absent_until_s - known.absent_from_s if self._tells(known) else -math.inf
        dead = (
            until_s - max(known.heard_s, self._trusted_from_s) > (ACCUSE_SILENT_MAX_S if loses else known.patience_s)
            or absence_s >= (1.0 if loses else ABSENT_RATIO) * known.patience_s
        )
        known.accused |= dead
        return dead

    def _tells(self, known: _Known) -> bool:
        """Whether that nobody listens there says anything of a worker."""
        return known.absent_from_s > known.heard_s > self._trusted_from_s
