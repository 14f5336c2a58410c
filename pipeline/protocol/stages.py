"""Where the time of one request went: a duration for each stage, and together they are its end-to-end time.

    gateway    accept, publish ─┐ queued, lost                                                              ┌─ relay
    prefill                     └─ start, render, wait, prefill, store, credit, claim ─┐ handoff            │
    decode                                     takeover, load, first_step, decode, finish ──────────────────┘

Each process measures its own stages by its own monotonic clock, and they travel with the request, in whole microseconds: at
prefill's end in the `Handoff`, at decode's in `Done`. No clock is ever compared with another one's. What lies *between* two
processes the gateway finds on its own clock, from messages that it gets anyway: each worker claims the request there. A worker
that sent its claim `asked` after it began, and had the answer `answered` later, began (on the gateway's clock) within

    heard - asked - answered  …  heard - asked

and not before the request was published, nor so late that it could not be done with it when the next one began. Of what these
bounds leave the middle is taken, so queueing, hand-over and the way back are known to half of the claims' round trips, and all
stages follow each other without gap and overlap: together they are the end-to-end time. Where the bounds contradict each
other, because something was measured twice or a clock ran wrong, the sum misses it, and `unexplained_s` says by how much.

Stages follow each other; what runs beside another counts only where it exceeds it. Credit is asked for while the prompt is
computed, so `credit` is the wait that remains once the KV is stored; so is `claim`.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from pipeline.protocol.request import Event

STAGES: Final[Mapping[str, str]] = {
    "accept": "The gateway reads, checks and admits it",
    "publish": "On its way into the queue, until the stream has it",
    "queued": "In the queue, until the worker had it that served it",
    "lost": "In attempts before that one, which did not come to an end",
    "start": "Delivered again: claimed, and its start recorded, before anything is done",
    "render": "Persona and history fetched, template applied, tokenised",
    "wait": "In the prefill engine, for a place and for KV that it loads",
    "prefill": "The prompt is computed",
    "store": "Its KV is stored, as far as the engine tells that apart",
    "credit": "For blocks at decode, beyond the storing of the KV",
    "claim": "For the receiver's word, beyond all that",
    "handoff": "From prefill to decode, refused and repeated offers included",
    "takeover": "Decode takes the claim over",
    "load": "KV is loaded, and a seat in the decode engine waited for",
    "first_step": "The rest of the prompt is computed, and decode's first token",
    "decode": "From the first token to the last",
    "finish": "What waits is sent, the exchange written down",
    "relay": "From decode to the gateway, and out to the client",
    "work": "At workers that did not say: the request did not end whole",
}
"""Every stage, in order, and what happens in it."""

AT_GATEWAY: Final = frozenset(("accept", "publish", "queued", "lost", "handoff", "relay", "work"))
"""What the gateway finds; the others are their worker's own."""

AT_WORKERS: Final = frozenset(STAGES) - AT_GATEWAY

_US: Final = 1e6


class AtPrefill(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request's stages at its prefill worker, in µs. Its claim was sent `asked` after it began; the answer took `answered`."""

    asked: int = 0
    answered: int = 0
    start: int = 0
    render: int = 0
    wait: int = 0
    prefill: int = 0
    store: int = 0
    credit: int = 0
    claim: int = 0
    handoff: int = 0
    """Offers that were not taken: from when all was ready to the offer that was."""


class AtDecode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's stages at its decode worker, in µs; `asked` and `answered` as at prefill."""

    asked: int = 0
    answered: int = 0
    takeover: int = 0
    load: int = 0
    first_step: int = 0
    decode: int = 0
    finish: int = 0


class Stages(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What both workers have measured of a whole reply."""

    prefill: AtPrefill
    decode: AtDecode


class Prefilling(msgspec.Struct, kw_only=True):
    """When what became true of a request at prefill, in seconds of one clock; a time that has not come is None.

    `wait_s` and `store_s` are the engine's own words; `offered_s` is when it was first offered to decode.
    """

    began_s: float
    asked_s: float | None = None
    answered_s: float | None = None
    begun_s: float | None = None
    rendered_s: float | None = None
    stored_s: float | None = None
    granted_s: float | None = None
    claimed_s: float | None = None
    wait_s: float = 0.0
    store_s: float = 0.0
    offered_s: float | None = None

    def happened(self, event: Event, now_s: float) -> None:
        """The last time counts, up to the first offer: what comes after it belongs to the hand-off."""
        if event is Event.DELIVERED:
            self.begun_s = self.began_s
        elif event in _AT_PREFILL and self.offered_s is None:
            setattr(self, _AT_PREFILL[event], now_s)


_AT_PREFILL: Final = {
    Event.COUNTED: "begun_s",
    Event.RENDERED: "rendered_s",
    Event.STORED: "stored_s",
    Event.GRANTED: "granted_s",
    Event.GO: "claimed_s",
}


def at_prefill(times: Prefilling, now_s: float) -> AtPrefill:
    """The stages up to now. What has not begun takes no time yet, and what is under way counts up to now."""
    begun_s = _or(times.begun_s, now_s)
    rendered_s = _or(times.rendered_s, now_s)
    have_s = _or(times.stored_s, now_s)
    granted_s = max(have_s, _or(times.granted_s, now_s))
    claimed_s = max(granted_s, _or(times.claimed_s, now_s))
    store_s = min(times.store_s, have_s - rendered_s)
    wait_s = min(times.wait_s, have_s - rendered_s - store_s)
    asked_s = _or(times.asked_s, times.began_s)
    return AtPrefill(
        asked=_us(asked_s - times.began_s),
        answered=_us(_or(times.answered_s, asked_s) - asked_s),
        start=_us(begun_s - times.began_s),
        render=_us(rendered_s - begun_s),
        wait=_us(wait_s),
        prefill=_us(have_s - rendered_s - wait_s - store_s),
        store=_us(store_s),
        credit=_us(granted_s - have_s),
        claim=_us(claimed_s - granted_s),
        handoff=_us(now_s - claimed_s),
    )


class Decoding(msgspec.Struct, kw_only=True):
    """When what happened to a request at decode, in seconds of one clock; a time that has not come is None."""

    began_s: float
    asked_s: float | None = None
    answered_s: float | None = None
    accepted_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    load_s: float = 0.0

    def happened(self, event: Event, now_s: float) -> None:
        """The claim is asked for again where it is in doubt: the first answer counts."""
        if event is Event.GO and self.accepted_s is None:
            self.accepted_s = now_s
        elif event is Event.GENERATED:
            self.last_s = now_s


def at_decode(times: Decoding, now_s: float) -> AtDecode:
    """The stages up to now, as at prefill."""
    accepted_s = _or(times.accepted_s, now_s)
    first_s = _or(times.first_s, now_s)
    last_s = _or(times.last_s, now_s)
    load_s = min(times.load_s, first_s - accepted_s)
    asked_s = _or(times.asked_s, times.began_s)
    return AtDecode(
        asked=_us(asked_s - times.began_s),
        answered=_us(_or(times.answered_s, asked_s) - asked_s),
        takeover=_us(accepted_s - times.began_s),
        load=_us(load_s),
        first_step=_us(first_s - accepted_s - load_s),
        decode=_us(last_s - first_s),
        finish=_us(now_s - last_s),
    )


def seconds(at: AtPrefill | AtDecode) -> dict[str, float]:
    """The stages of one worker by name, without how its claim went."""
    return {name: getattr(at, name) / _US for name in at.__struct_fields__[2:]}


def named(stages: Stages) -> dict[str, float]:
    """The stages of both workers by name, in seconds."""
    return seconds(stages.prefill) | seconds(stages.decode)


class _Heard(msgspec.Struct, frozen=True):
    """A claim, and when it was last heard. It can only follow one that was heard before."""

    at_s: float
    follows: str | None


class AtGateway:
    """One request as its gateway sees it, from `asked_s` on. All times are seconds of the gateway's clock."""

    __slots__ = ("_claims", "asked_s", "attempts", "ended_s", "first_of", "first_s", "sent_s", "stored_s")

    def __init__(self, asked_s: float) -> None:
        self.asked_s = asked_s
        self.sent_s: float | None = None
        """When its publishing began."""
        self.stored_s: float | None = None
        """When the stream had it."""
        self.first_s: float | None = None
        """When the first of the reply came, …"""
        self.first_of = ""
        """… and who sent it: prefill, or decode, before which all its stages up to `first_step` lie."""
        self.ended_s: float | None = None
        """When the last of it did."""
        self.attempts = 0
        """Deliveries whose claim has come. The consumer bounds them, and so what is remembered here."""
        self._claims: dict[str, _Heard] = {}

    def claimed(self, claim: str, follows: str | None, now_s: float) -> None:
        """A worker claims it. Repeated, the last time counts: that is the one whose answer the worker will have had."""
        known = self._claims.get(claim)
        if known is None:
            self.attempts += follows is None
        self._claims[claim] = _Heard(now_s, follows if known is None else known.follows)

    def begins(self, claim_follows: str | None, now_s: float) -> None:
        """The first of the reply has come, under a claim that follows another one where decode has taken it over."""
        self.first_s, self.first_of = now_s, "prefill" if claim_follows is None else "decode"

    def stages(self, now_s: float, claim: str | None = None, said: Stages | None = None) -> dict[str, float]:
        """Every stage in seconds, up to now. `said` under `claim` is what the workers measured; without it, `work` is theirs."""
        sent_s = _or(self.sent_s, now_s)
        found = self._placed(claim, said, now_s) if said is not None else None
        times = {"accept": sent_s - self.asked_s}
        if said is None or found is None:
            heard = min((heard.at_s for heard in self._claims.values()), default=now_s)
            stored_s = heard if self.stored_s is None else min(self.stored_s, heard)
            return times | {"publish": stored_s - sent_s, "queued": heard - stored_s, "work": now_s - heard}
        prefill_s, decode_s, lost_s = found
        stored_s = prefill_s if self.stored_s is None else min(self.stored_s, prefill_s)
        at_prefill, at_decode = seconds(said.prefill), seconds(said.decode)
        times |= {"publish": _positive(stored_s - sent_s), "queued": _positive(prefill_s - lost_s - stored_s)}
        times |= {"lost": min(lost_s, _positive(prefill_s - stored_s))} | at_prefill
        times["handoff"] += _positive(decode_s - prefill_s - sum(at_prefill.values()))
        times |= at_decode
        times["relay"] = _positive(now_s - decode_s - sum(at_decode.values()))
        return times

    def _placed(self, claim: str | None, said: Stages, now_s: float) -> tuple[float, float, float] | None:
        """When prefill and decode began, and what was lost to attempts before. None where a claim was not heard."""
        decode = self._claims.get(claim or "")
        prefill = None if decode is None else self._claims.get(decode.follows or "")
        if decode is None or prefill is None:
            return None
        root = prefill
        while root.follows in self._claims:
            root = self._claims[root.follows]
        first_s = min((heard.at_s for heard in self._claims.values() if heard.follows is None), default=root.at_s)
        prefill_took_s, decode_took_s = (sum(seconds(at).values()) for at in (said.prefill, said.decode))
        latest_s = min(_latest_s(decode, said.decode), _or(self.ended_s, now_s) - decode_took_s)
        prefill_s = _between(prefill, said.prefill, _or(self.sent_s, self.asked_s), latest_s - prefill_took_s)
        decode_s = _between(decode, said.decode, prefill_s + prefill_took_s, latest_s)
        return prefill_s, decode_s, root.at_s - first_s


def unexplained_s(times: Mapping[str, float], took_s: float) -> float:
    """By how much the stages miss the end-to-end time: 0 but for how exactly claims could be placed."""
    return took_s - sum(times.values())


def _latest_s(heard: _Heard, at: AtPrefill | AtDecode) -> float:
    """A worker began then at the latest: its claim took no time to be heard."""
    return heard.at_s - at.asked / _US


def _between(heard: _Heard, at: AtPrefill | AtDecode, earliest_s: float, latest_s: float) -> float:
    """When a worker began: in the middle of what is left between these and its own bounds."""
    from_s = max(_latest_s(heard, at) - at.answered / _US, earliest_s)
    return (from_s + max(from_s, min(_latest_s(heard, at), latest_s))) / 2


def _or(time_s: float | None, otherwise_s: float) -> float:
    return otherwise_s if time_s is None else time_s


def _us(duration_s: float) -> int:
    return max(0, round(duration_s * _US))


def _positive(duration_s: float) -> float:
    return max(0.0, duration_s)
