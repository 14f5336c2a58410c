"""A pipeline at one moment, made up: two gateways, three prefill workers, two decode workers, and requests in all states."""

from typing import Any

from pipeline.cli.shards import Row
from pipeline.protocol.messages import Account
from pipeline.protocol.recent import WantRecent, recent
from pipeline.protocol.records import Record
from pipeline.top.snapshot import Fare, Process, Silent, Snapshot, fare, ledgers

NOW_S = 1_790_000_000.0


def process(pool: Any, name: str, **fields: Any) -> Process:
    """One that is ready, a minute and a half old."""
    known: dict[str, Any] = {
        "state": "serving",
        "serves_as": "" if pool == "gateway" else pool,
        "load": 0.25,
        "up_s": 90.0,
        "slots": 0,
        "slots_free": 0,
        "blocks": 0,
        "blocks_free": 0,
    }
    known |= {"asks_waiting": 0, "warm": 0, "rate": 0.0, "model": "smollm2-135m-instruct", **fields}
    return Process(pool=pool, id=name, **known)


def account(worker: str, **fields: int) -> Account:
    """A ledger that adds up."""
    known = {"blocks": 512, "free": 412, "reserve": 51, "waiting": 0, "granted_now": 1, "granted_blocks": 10}
    known |= {"consumed_now": 9, "consumed_blocks": 90, "granted": 110, "released": 95, "returned": 4, "expired": 1}
    return Account(decode=worker, epoch="e", **(known | {"refused": 0, "seats": 10, "seats_max": 80} | fields))


def record(request: str, took_s: float, outcome: str = "whole", **facts: Any) -> Record:
    """One that decode spent three quarters of its time on."""
    return Record(
        process="gateway-1",
        role="gateway",
        request=request,
        outcome=outcome,
        began_unix_s=NOW_S - took_s - 1,
        took_s=took_s,
        stages={"accept": 0.0002, "queued": took_s / 8, "decode": 0.75 * took_s},
        creator="d0bf3e6ee1d6",
        facts={"klass": "interactive", "ttft_ms": 24.0, **facts},
    )


def fared() -> Fare:
    """Of two gateways, the one that answers."""
    whole = [
        record(
            f"{number:032x}",
            0.1 * number,
            prompt_tokens=9,
            completion_tokens=50,
            prefill="prefill-1",
            decode="decode-1",
        )
        for number in range(1, 41)
    ]
    asked = WantRecent(since_s=60, named=3)
    answer = recent(
        "gateway-1", asked, [*whole, record("f" * 32, 9.5, "failed")], 1, [record("e" * 32, 5.0, "")], NOW_S
    )
    return fare([answer], ["gateway-1", "gateway-2"])


def row(shard: int, **fields: Any) -> Row:
    """A shard that prefill-1 owns."""
    known: dict[str, Any] = {
        "klass": "interactive",
        "depth": 0,
        "in_work": 0,
        "owner": "prefill-1",
        "next": "prefill-2",
    }
    return Row(shard=shard, **(known | fields))


def snapshot(**fields: Any) -> Snapshot:
    """All of it."""
    processes = [
        process("gateway", "gateway-1", rate=7.25),
        process("gateway", "gateway-2", state="draining"),
        process("prefill", "prefill-1", slots=4, slots_free=1, warm=12),
        process("prefill", "prefill-2", slots=4, slots_free=4, state="starting", up_s=None),
        process("prefill", "prefill-3", slots=4, slots_free=4),
        process("decode", "decode-1", blocks=512, blocks_free=412, asks_waiting=3),
        process("decode", "decode-2", blocks=512, blocks_free=512),
    ]
    known: dict[str, Any] = {
        "unix_s": NOW_S,
        "nats": "127.0.0.1:4222",
        "connected": True,
        "processes": processes,
        "silent": [Silent(pool="decode", id="decode-3", silent_s=4.2)],
        "queues": [
            row(0, depth=7, in_work=2, served=40, spilled=10, hbm_tokens=300, lmcache_tokens=100, computed_tokens=600),
            row(1),
            row(2, served=3, computed_tokens=9, owner=""),
        ],
        "ledgers": ledgers(
            {"decode-1": account("decode-1"), "decode-2": None, "decode-4": account("decode-4", free=1)}
        ),
        "fare": fared(),
        "messages": 16,
    }
    return Snapshot(**(known | fields))
