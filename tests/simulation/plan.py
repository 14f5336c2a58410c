"""What a seed draws before anything runs: the fleet, the load, the faults and when they strike."""

import random
from typing import Final, Literal

import msgspec

from pipeline.config import Config, Engine, LMCache, Requests, Simulated

SHARDS: Final = 2
LOAD_S: Final = 1.6
"""All requests come within this time, and most faults strike then."""

TIMEOUT_S: Final = 20.0
"""Of a request that is not meant to run out of time: no fault of ours lasts that long."""

Kind = Literal[
    "kill",
    "freeze",
    "drain",
    "cut",
    "stall",
    "broker",
    "weather",
    "engine_fails",
    "engine_dies",
    "engine_stalls",
    "cache_lost",
]

KINDS: Final[tuple[tuple[Kind, int], ...]] = (
    ("kill", 6),
    ("freeze", 5),
    ("broker", 4),
    ("weather", 4),
    ("cut", 3),
    ("stall", 3),
    ("drain", 2),
    ("engine_fails", 2),
    ("engine_dies", 1),
    ("engine_stalls", 2),
    ("cache_lost", 1),
)
"""Faults and how often, in proportion."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `leaves_s` after it was sent its client is gone. `fault` names a malformed field."""

    number: int
    id: str
    at_s: float
    klass: str
    creator: str
    question: str
    max_tokens: int
    timeout_s: float
    leaves_s: float | None = None
    bad: str | None = None
    gateway: int = 0


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong. `of` is a process by role and number; `share` is a number in [0, 1) for what else is to draw."""

    at_s: float
    kind: Kind
    of: tuple[str, int]
    for_s: float
    share: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A seed's draw."""

    seed: int
    prefill: int
    decode: int
    gateways: int
    config: Config
    orders: list[Order]
    faults: list[Fault]


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    chance = random.Random(f"{seed}/plan")
    prefill, decode = chance.choice((1, 2, 2, 3)), chance.choice((1, 1, 2, 2, 3))
    gateways = chance.choice((1, 1, 2))
    fleet = [("prefill", n) for n in range(prefill)] + [("decode", n) for n in range(decode)]
    fleet += [("gateway", n) for n in range(gateways)]
    count = chance.choice((0, 1, 1, 2, 2, 3, 4, 6))
    return Plan(
        seed=seed,
        prefill=prefill,
        decode=decode,
        gateways=gateways,
        config=_config(seed, chance),
        orders=[_order(number, gateways, chance) for number in range(chance.randint(20, 50))],
        faults=sorted((_fault(fleet, chance) for _ in range(count)), key=lambda fault: fault.at_s),
    )


def _config(seed: int, chance: random.Random) -> Config:
    return Config(
        engine="simulated",
        lmcache=LMCache(chunk_size=8, block_size=8, shm_name=f"simulation-{seed}"),
        prefill=Engine(slots=chance.choice((1, 2, 3, 4))),
        decode=Engine(slots=16),
        requests=Requests(shards=SHARDS, starts_max=20),
        simulated=Simulated(
            seed=seed,
            prefill_tokens_per_s=chance.choice((2_000.0, 5_000.0, 20_000.0)),
            prefill_overhead_s=0.004,
            step_s=chance.choice((0.01, 0.02, 0.04)),
            step_per_sequence_s=0.0005,
            kv_blocks=chance.choice((24, 48, 200)),
            lmcache_blocks=chance.choice((64, 4096)),
            lmcache_blocks_per_s=10_000.0,
        ),
    )


def _order(number: int, gateways: int, chance: random.Random) -> Order:
    drawn = chance.random()
    return Order(
        number=number,
        id=f"r{number:02d}",
        at_s=chance.uniform(0.0, LOAD_S),
        klass="batch" if chance.random() < 0.1 else "interactive",
        creator=f"c{chance.randrange(4)}",
        question=" ".join(chance.choices(_WORDS, k=chance.randint(1, 8))),
        max_tokens=chance.choice((1, 3, 5, 8)),
        timeout_s=chance.uniform(0.05, 1.5) if 0.06 < drawn < 0.12 else TIMEOUT_S,
        leaves_s=chance.uniform(0.0, 0.6) if drawn < 0.06 else None,
        bad=chance.choice(("model", "max_tokens", "temperature")) if drawn > 0.98 else None,
        gateway=chance.randrange(gateways),
    )


def _fault(fleet: list[tuple[str, int]], chance: random.Random) -> Fault:
    kinds, weights = zip(*KINDS, strict=True)
    kind: Kind = chance.choices(kinds, weights)[0]
    workers = [process for process in fleet if process[0] != "gateway"]
    decoders = [process for process in fleet if process[0] == "decode"]
    able = {"kill": fleet, "cut": fleet, "stall": fleet, "freeze": fleet, "engine_stalls": decoders}
    longest_s = {"freeze": 3.5, "broker": 0.8, "kill": 1.0, "drain": 0.5, "engine_dies": 0.5}
    return Fault(
        at_s=chance.uniform(0.0, LOAD_S),
        kind=kind,
        of=chance.choice(able.get(kind, workers)),
        for_s=chance.uniform(0.02, longest_s.get(kind, 1.5)),
        share=chance.random(),
    )


_WORDS: Final = ("river", "stone", "market", "winter", "garden", "letter", "bridge", "window", "island", "summer")
