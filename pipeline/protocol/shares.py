"""What one key, and one creator, may have of a gateway, so that nobody's flood takes the room of the others.

A request holds a **place** from its first byte to its end. It is counted three times: its bytes in all, its bytes and itself for
its key, and, once its body says whose it is, for its creator. A key has a rate as well, in a bucket that holds `KEY_BURST_S`
of it. What is over a bound is refused at once, and told when the next place, or the next turn, comes that nobody was promised.

From then on until its reply begins, its prompt is **queued**, and its tokens are counted in the same three places. They are
estimated (`lengths.py`), so a prompt that is more than a bound alone is let in all the same where nothing else is queued.

A key's bounds are of all gateways together. None of them leads: each says in its presence what the key uses there, and takes
of a bound what the others leave, or an equal part where that is more:

    mine = max(bound - what the others use, bound / gateways)

At rest that is exact: the parts of gateways that are asked for more than they may give add up to the bound, and one that is
asked for less leaves the rest to the others. When the same key jumps up at several gateways at once, they give too much until
each has heard of the other: of a rate R at most R × (`KEY_RATE_MEMORY_S` + a presence period) requests once, of a number in
flight one presence period's. A gateway that is alone is exact at all times. A creator's bounds are of one gateway; in all
of them together the queue itself bounds a creator (`max_msgs_per_subject`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from pipeline.errors import BodyTooLarge, CapacityError, CreatorBusy, KeyBusy, RateExceeded
from pipeline.limits import KEY_BURST_S, KEY_RATE_MEMORY_S, KEYS_SAID_MAX
from pipeline.protocol.admission import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S, DrainRate, Waits
from pipeline.protocol.keys import Key, KeyUse
from pipeline.protocol.lengths import Lengths
from pipeline.protocol.messages import Presence


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's. Bytes are of the bodies of requests in flight, tokens of the prompts of which no reply has begun."""

    bytes_max: int
    creator_requests_max: int
    creator_bytes_max: int
    tokens_max: float = math.inf
    creator_tokens_max: float = math.inf


class Others(msgspec.Struct, frozen=True):
    """What the keys use at other gateways, and how many gateways there are, with this one."""

    used: Mapping[str, KeyUse] = {}
    gateways: int = 1

    @classmethod
    def among(cls, live: Iterable[Presence], me: str) -> "Others":
        """What the live gateways say."""
        used: dict[str, KeyUse] = {}
        gateways = 1
        for peer in live:
            if peer.id == me:
                continue
            gateways += 1
            for name, use in peer.keys.items():
                known = used.get(name, KeyUse())
                used[name] = KeyUse(
                    known.rate + use.rate,
                    known.requests + use.requests,
                    known.bytes + use.bytes,
                    known.tokens + use.tokens,
                )
        return cls(used, gateways)

    def leave(self, bound: float, used: float) -> float:
        """What this gateway may give of a bound of all."""
        return max(bound - used, bound / self.gateways)


class Queue:
    """Prompt tokens that are queued, and how fast queued prompts come to their replies."""

    def __init__(self) -> None:
        self.tokens = 0
        self.waits = Waits()


class Share:
    """What one creator or one key has now."""

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0
        self.waits = Waits()
        self.queue = Queue()


class Bucket:
    """A key's turns at this gateway. `rate` may change from one look to the next, as other gateways use more or less of it."""

    def __init__(self) -> None:
        self.used = DrainRate(KEY_RATE_MEMORY_S)
        self._turns = math.inf
        self._looked_s = -math.inf
        self._promised_s = -math.inf

    def take(self, rate: float, depth: float, now_s: float) -> float | None:
        """Take a turn, and return None; or return how long to wait for the next one that nobody was promised."""
        earned = 0.0 if self._looked_s == -math.inf else rate * max(0.0, now_s - self._looked_s)
        self._turns, self._looked_s = min(depth, self._turns + earned), now_s
        if self._turns >= 1.0:
            self._turns -= 1.0
            self.used.freed(now_s)
            return None
        own_s = (1.0 - self._turns) / rate
        behind_s = max(0.0, self._promised_s - now_s)
        wait_s = max(own_s, min(behind_s + 1.0 / rate, RETRY_AFTER_MAX_S)) if behind_s else own_s
        self._promised_s = now_s + wait_s
        return max(wait_s, RETRY_AFTER_MIN_S)


class Place:
    """What one request holds. `leave` gives all of it back, once."""

    def __init__(self, shares: "Shares", key: Key | None, share: Share | None, others: Others) -> None:
        self._shares, self._key, self._share, self._others = shares, key, share, others
        self._creator: str | None = None
        self._bytes = 0
        self._tokens = 0
        self._referred = False

    def grow(self, size: int, now_s: float) -> None:
        """So many bytes more. Raises `CapacityError` where they are too many in all, `KeyBusy` where they are for the key."""
        shares, key, share = self._shares, self._key, self._share
        _check_bytes(self._bytes + size, shares.bounds.bytes_max)
        if shares.bytes + size > shares.bounds.bytes_max:
            raise CapacityError(
                "This gateway holds as many bytes as it may (gateway.in_flight_bytes_max).",
                retry_after_s=shares.waits.wait_s(now_s),
            )
        if key is not None and share is not None and key.in_flight_bytes_max is not None:
            _check_bytes(self._bytes + size, key.in_flight_bytes_max)
            used = self._others.used.get(key.name, KeyUse()).bytes
            if share.bytes + size > self._others.leave(key.in_flight_bytes_max, used):
                raise KeyBusy(
                    f"The key {key.name!r} has as many bytes in flight as it may (its in_flight_bytes_max).",
                    retry_after_s=share.waits.wait_s(now_s),
                )
        self._bytes += size
        shares.bytes += size
        if share is not None:
            share.bytes += size

    def enter(self, creator: str, now_s: float, *, referred: bool = False) -> None:
        """It is this creator's (a subject token), and its prompt is queued from now on. `referred`: see `Lengths`.

        Raises `CreatorBusy` where that creator has all that one may have, `KeyBusy` and `CapacityError` for too many tokens.
        """
        assert self._creator is None
        bounds, shares = self._shares.bounds, self._shares
        _check_bytes(self._bytes, bounds.creator_bytes_max)
        share = shares.creators.get(creator)
        if share is None:
            share = shares.creators[creator] = Share()
        elif share.requests >= bounds.creator_requests_max or share.bytes + self._bytes > bounds.creator_bytes_max:
            raise CreatorBusy(
                f"This creator has {share.requests} requests of {share.bytes} bytes in flight here, as much as one may have "
                "(gateway.creator_in_flight_max, gateway.creator_in_flight_bytes_max).",
                retry_after_s=share.waits.wait_s(now_s),
            )
        tokens = shares.lengths.tokens(self._bytes, referred=referred)
        try:
            self._check_tokens(share.queue, tokens, now_s)
        except CapacityError:
            if not share.requests:
                del shares.creators[creator]
            raise
        share.requests += 1
        share.bytes += self._bytes
        self._creator, self._referred = creator, referred
        self._queue(tokens)

    def begun(self, now_s: float) -> None:
        """Its reply has begun: the prompt is not queued any more."""
        if not self._tokens:
            return
        for queue in self._queues():
            queue.waits.freed(now_s)
        self._queue(-self._tokens)

    def leave(self, now_s: float, *, drained: bool = False, prompt_tokens: int | None = None) -> None:
        """It has ended. `drained`: it had reached the queue, so its end says how fast places become free.

        `prompt_tokens` is what its prompt has come to, where its reply says so.
        """
        shares, share, creator = self._shares, self._share, self._creator
        if prompt_tokens is not None:
            shares.lengths.learn(self._bytes, prompt_tokens, referred=self._referred)
        self._queue(-self._tokens)
        shares.bytes -= self._bytes
        held = [shares.waits]
        if share is not None:
            share.requests -= 1
            share.bytes -= self._bytes
            held.append(share.waits)
        if creator is not None:
            of_creator = shares.creators[creator]
            of_creator.requests -= 1
            of_creator.bytes -= self._bytes
            held.append(of_creator.waits)
            if not of_creator.requests:
                del shares.creators[creator]
        for waits in held if drained else ():
            waits.freed(now_s)

    def _queues(self) -> Iterator[Queue]:
        """Where its prompt is counted."""
        yield self._shares.queue
        if self._share is not None:
            yield self._share.queue
        if self._creator is not None:
            yield self._shares.creators[self._creator].queue

    def _queue(self, tokens: int) -> None:
        """So many more are queued, or fewer."""
        self._tokens += tokens
        for queue in self._queues():
            queue.tokens += tokens

    def _check_tokens(self, of_creator: Queue, tokens: int, now_s: float) -> None:
        """Raise where the prompts that are queued, with this one, are too long. First for whom the fewest others are refused."""
        shares, key, share = self._shares, self._key, self._share
        if _too_many(of_creator.tokens, tokens, shares.bounds.creator_tokens_max):
            raise CreatorBusy(
                f"This creator has about {of_creator.tokens} prompt tokens queued here, and this request about {tokens}: "
                f"one may have {shares.bounds.creator_tokens_max} (gateway.creator_queued_tokens_max).",
                retry_after_s=of_creator.waits.wait_s(now_s),
            )
        if key is not None and share is not None and key.queued_tokens_max is not None:
            used = self._others.used.get(key.name, KeyUse()).tokens
            if _too_many(share.queue.tokens, tokens, self._others.leave(key.queued_tokens_max, used)):
                raise KeyBusy(
                    f"The key {key.name!r} has about {share.queue.tokens + used} prompt tokens queued, and this request about "
                    f"{tokens}: it may have {key.queued_tokens_max} (its queued_tokens_max).",
                    retry_after_s=share.queue.waits.wait_s(now_s),
                )
        if _too_many(shares.queue.tokens, tokens, shares.bounds.tokens_max):
            raise CapacityError(
                f"About {shares.queue.tokens} prompt tokens are queued by this gateway, and this request has about {tokens}: "
                f"it takes {shares.bounds.tokens_max} (gateway.queued_tokens_max).",
                retry_after_s=shares.queue.waits.wait_s(now_s),
            )


class Shares:
    """All places of one gateway. Bounded by the requests in flight, and by the keys that there are."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.lengths = Lengths()
        self.bytes = 0
        self.waits = Waits()
        self.queue = Queue()
        self.creators: dict[str, Share] = {}
        self.keys: dict[str, Share] = {}
        self._buckets: dict[str, Bucket] = {}

    def arrive(self, key: Key | None, others: Others, now_s: float) -> Place:
        """A place for a request whose head has come. Raises `RateExceeded`, and `KeyBusy` for one too many of its key's."""
        if key is None:
            return Place(self, None, None, others)
        share = self.keys.setdefault(key.name, Share())
        used = others.used.get(key.name, KeyUse())
        if key.in_flight_max is not None and share.requests >= max(
            1, int(others.leave(key.in_flight_max, used.requests))
        ):
            raise KeyBusy(
                f"The key {key.name!r} has {share.requests} requests in flight here, as many as it may (its in_flight_max).",
                retry_after_s=share.waits.wait_s(now_s),
            )
        self._take_turn(key, others, used, now_s)
        share.requests += 1
        return Place(self, key, share, others)

    def keep(self, keys: Iterable[Key]) -> None:
        """Forget the turns of keys that are not good any more, and what they have once it has ended."""
        names = {key.name for key in keys}
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if name in names}
        self.keys = {name: share for name, share in self.keys.items() if name in names or share.requests}

    def used(self, now_s: float) -> dict[str, KeyUse]:
        """What the busiest keys use here: for our presence."""
        uses = {name: self._use(name, share, now_s) for name, share in self.keys.items()}
        busy = sorted(
            (name for name, use in uses.items() if use != KeyUse()), key=lambda name: uses[name], reverse=True
        )
        return {name: uses[name] for name in busy[:KEYS_SAID_MAX]}

    def _use(self, name: str, share: Share, now_s: float) -> KeyUse:
        bucket = self._buckets.get(name)
        rate = round(bucket.used.per_s(now_s), 2) if bucket is not None and bucket.used.measured else 0.0
        return KeyUse(rate, share.requests, share.bytes, share.queue.tokens)

    def _take_turn(self, key: Key, others: Others, used: KeyUse, now_s: float) -> None:
        if key.requests_per_s is None:
            return
        rate = others.leave(key.requests_per_s, used.rate)
        depth = max(1.0, KEY_BURST_S * key.requests_per_s / others.gateways)
        wait_s = self._buckets.setdefault(key.name, Bucket()).take(rate, depth, now_s)
        if wait_s is not None:
            raise RateExceeded(
                f"The key {key.name!r} may ask {key.requests_per_s:g} times a second (its requests_per_s).",
                retry_after_s=wait_s,
                in_vain=wait_s > RETRY_AFTER_MAX_S,
            )


def _too_many(queued: int, tokens: int, tokens_max: float) -> bool:
    """Whether they are more than may be. Alone any may: what it has is only an estimate, and it would never come in."""
    return queued > 0 and queued + tokens > tokens_max


def _check_bytes(size: int, bytes_max: int) -> None:
    """A body that is over a bound alone never fits: a retry cannot help."""
    if size > bytes_max:
        raise BodyTooLarge(f"The body is larger than {bytes_max} bytes.")
