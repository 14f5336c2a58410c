"""A pipeline at one moment, as `headrace top` sees it: from what processes say unasked, and what they answered.

What was not asked for is None. Nothing here asks: `gather.py` does.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from pipeline.cli.control import state_of
from pipeline.cli.credits import problems
from pipeline.cli.shards import Row
from pipeline.protocol.messages import Account, Presence
from pipeline.protocol.presence import Presences
from pipeline.protocol.recent import Counts, Recent, mean_s, quantile_s, together
from pipeline.protocol.records import Record
from pipeline.protocol.stages import STAGES

Part = Literal["queues", "served", "ledgers", "recent"]
"""What is asked for: of the broker, of every prefill worker, of every decode worker, of every gateway."""

Pool = Literal["gateway", "prefill", "decode"]

POOLS: Final[tuple[Pool, ...]] = ("gateway", "prefill", "decode")

EVERYTHING: Final[frozenset[Part]] = frozenset(("queues", "served", "ledgers", "recent"))

RECENT_S: Final = 60.0
"""Latencies are those of requests that ended within the last minute."""

NAMED: Final = 16
"""Slowest requests, and oldest under way, that each gateway is asked for."""

SILENT_TOLD_S: Final = 30.0
"""Who fell silent is told of for so long."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One live process. `load` is 0…1; blocks are a decode worker's, slots and `warm` creators a prefill worker's."""

    pool: Pool
    id: str
    state: str
    """Serving, starting, paused or draining."""
    serves_as: str
    """What a worker for both is, in all, or is becoming; empty at a gateway."""
    load: float
    up_s: float | None
    slots: int
    slots_free: int
    blocks: int
    blocks_free: int
    asks_waiting: int
    warm: int
    rate: float
    """A gateway's: requests a second."""
    model: str


class Silent(msgspec.Struct, frozen=True, kw_only=True):
    """One that lived, and has said nothing for `silent_s`."""

    pool: Pool
    id: str
    silent_s: float


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """A decode worker's account, None where it did not answer, and what does not add up in it."""

    decode: str
    account: Account | None
    problems: list[str]


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """Of so many durations, within 5 %."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


class Fare(msgspec.Struct, frozen=True, kw_only=True):
    """How requests fare at the gateways that answered; `missing` did not. Delays are those of whole replies.

    `over_s` is the shortest time that an answer covers, `per_s` what ends a second; `requests` are the slowest and the oldest.
    """

    over_s: float
    per_s: float
    outcomes: dict[str, int]
    under_way: int
    took: Delays | None
    ttft: Delays | None
    stages: dict[str, Delays]
    requests: list[Record]
    missing: list[str]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The whole. `messages` is what it took: questions and answers, by way of the broker."""

    unix_s: float
    nats: str
    connected: bool
    processes: list[Process]
    silent: list[Silent]
    queues: list[Row] | None = None
    ledgers: list[Ledger] | None = None
    fare: Fare | None = None
    errors: list[str] = []
    messages: int = 0

    def pool(self, name: Pool) -> list[Process]:
        """Its live processes."""
        return [process for process in self.processes if process.pool == name]


def processes(presences: Presences, now_s: float, unix_s: float) -> list[Process]:
    """Who lives, by pool and name."""
    return [_process(presence, unix_s) for pool in POOLS for presence in presences.live(pool, now_s)]


def silent(presences: Presences, now_s: float) -> list[Silent]:
    """Who lived until a moment ago, and did not say that it leaves: by draining, or by serving in another pool instead."""
    live = {presence.id for pool in POOLS for presence in presences.live(pool, now_s)}
    found = (
        Silent(pool=said.role, id=said.id, silent_s=silent_s)
        for said, silent_s in presences.silent(now_s)
        if silent_s <= SILENT_TOLD_S and not said.draining and said.id not in live
    )
    return sorted(found, key=lambda one: one.silent_s)


def ledgers(accounts: Mapping[str, Account | None]) -> list[Ledger]:
    """Accounts, looked at."""
    return [
        Ledger(decode=worker, account=account, problems=[] if account is None else problems(account))
        for worker, account in accounts.items()
    ]


def fare(answers: Sequence[Recent], gateways: Collection[str]) -> Fare:
    """What all gateways have answered, as one."""
    outcomes: dict[str, int] = {}
    for answer in answers:
        for outcome, count in answer.outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
    stages = {stage: delays(answer.stages.get(stage, {}) for answer in answers) for stage in STAGES}
    named = [record for answer in answers for record in (*answer.oldest, *answer.slowest)]
    return Fare(
        over_s=min((answer.over_s for answer in answers), default=RECENT_S),
        per_s=sum(sum(one.outcomes.values()) / one.over_s for one in answers if one.over_s > 0),
        outcomes=outcomes,
        under_way=sum(answer.under_way for answer in answers),
        took=delays(answer.took for answer in answers),
        ttft=delays(answer.ttft for answer in answers),
        stages={stage: known for stage, known in stages.items() if known is not None},
        requests=sorted(named, key=lambda record: -record.took_s),
        missing=sorted(set(gateways) - {answer.process for answer in answers}),
    )


def delays(spreads: Iterable[Counts]) -> Delays | None:
    """None where nothing was counted."""
    counts = together(spreads)
    mean, p50, p90, p99 = mean_s(counts), *(quantile_s(counts, share) for share in (0.5, 0.9, 0.99))
    if mean is None or p50 is None or p90 is None or p99 is None:
        return None
    return Delays(count=sum(counts.values()), mean_s=mean, p50_s=p50, p90_s=p90, p99_s=p99)


def _process(presence: Presence, unix_s: float) -> Process:
    began_ms = presence.epoch.partition("-")[0]
    return Process(
        pool=presence.role,
        id=presence.id,
        state=state_of(presence),
        serves_as=presence.serves_as,
        load=presence.load,
        up_s=max(0.0, unix_s - int(began_ms) / 1e3) if began_ms.isdecimal() else None,
        slots=presence.slots,
        slots_free=presence.slots_free,
        blocks=presence.blocks,
        blocks_free=presence.blocks_free,
        asks_waiting=presence.asks_waiting,
        warm=presence.warm,
        rate=presence.rate,
        model=presence.model,
    )
