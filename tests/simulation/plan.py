"""What a seed draws before anything runs: the fleet, the load, the faults and when they strike."""

import random
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from pipeline.config import Both, Config, Conversations, Decode, Engine, LMCache, Model, Requests, Simulated
from pipeline.protocol.arrangement import Role
from pipeline.protocol.messages import Encoding

SHARDS: Final = 2
CREATORS: Final = ("c0", "c1", "c2", "c3")
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
    "absence",
    "turn",
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
"""Faults and how often, in proportion. An absence is the fate of a whole world (`_fate`); workers for both turn (`_turning`)."""

Way = Literal["subscription", "kept", "arbiter"]
"""How a producer gets its reply: on a subscription alone, from the stream REPLIES, or with a claim subject of its own."""

WAYS: Final[tuple[Way, ...]] = ("subscription", "subscription", "kept", "arbiter")

PRODUCERS_SHARE: Final = 0.15

SAMPLINGS: Final[tuple[Mapping[str, Any], ...]] = (
    {"temperature": 0.8},
    {"temperature": 0, "seed": 7},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 0.8, "seed": 8, "top_p": 0.9},
    {"temperature": 0.8, "presence_penalty": 0.5},
    {"temperature": 0, "repetition_penalty": 1.2},
)
"""Of the first two a reply can be continued by another worker. Of the others it cannot: see `engine.is_stateful`."""

SAMPLED_SHARE: Final = 0.4

SEVERAL_SHARE: Final = 0.08
"""Requests for two replies or three. Most of them are cut short when a worker dies: see `resume.py`."""

WHOLE_SHARE: Final = 0.25
"""HTTP clients that do not stream. What was cut short is begun again for them, whatever it was."""

REFERRING_SHARE: Final = 0.2
"""Worlds with conversations, of which a prompt holds one exchange."""

REFERRED_SHARE: Final = 0.3
"""Requests there that name a persona and a conversation."""

TURNING_SHARE: Final = 0.25
"""Worlds with workers for both."""

PROMPT_SHARE: Final = 0.15
"""Worlds with a bound for first tokens."""

LARGEST_TOKENS: Final = 72
"""Of prompt and reply, in such a world. What its prefills may need is withheld from decode: nine blocks for each."""

KV_BLOCKS_BOTH: Final = 48
"""That leaves room for a request of three replies, beside two prefills and the reserve."""

POISON: Final = "poison"
"""A question that kills the worker that prefills it."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `leaves_s` after it was sent its client is gone. `bad` names a malformed field.

    It comes through a gateway, or in the `way` of a producer. `sampling` are further fields of the chat. `whole`: an HTTP client
    that wants its reply in one piece, and sees nothing of it before. `conversation`: by reference, it goes on with that one.
    """

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
    way: Way | None = None
    encoding: Encoding = "msgpack"
    sampling: Mapping[str, Any] = {}
    whole: bool = False
    conversation: str = ""

    @property
    def n(self) -> int:
        """Replies that it asks for."""
        return int(self.sampling.get("n", 1))

    @property
    def poison(self) -> bool:
        """Whether it kills workers."""
        return self.question == POISON

    @property
    def through(self) -> tuple[str, int]:
        """The process that asks."""
        return ("gateway", self.gateway) if self.way is None else ("producer", 0)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong. `of` is a process by role and number; `share` is a number in [0, 1) for what else is to draw."""

    at_s: float
    kind: Kind
    of: tuple[str, int]
    for_s: float
    share: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A seed's draw. Workers for `both` begin, in each of their lives, as what `begins` says."""

    seed: int
    prefill: int
    decode: int
    both: int = 0
    begins: Role = "both"
    gateways: int
    keepers: int = 1
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
    plan = Plan(
        seed=seed,
        prefill=prefill,
        decode=decode,
        gateways=gateways,
        config=_config(seed, chance),
        orders=[_order(number, gateways, chance) for number in range(chance.randint(20, 50))],
        faults=sorted((_fault(fleet, chance) for _ in range(count)), key=lambda fault: fault.at_s),
    )
    # Dice of their own: what came before them is drawn as it always was.
    others = random.Random(f"{seed}/producers")
    plan = _mixed(_fate(_peopled(plan, others), others), random.Random(f"{seed}/classes"))
    plan = _referring(_several(plan, random.Random(f"{seed}/choices")), random.Random(f"{seed}/references"))
    return _prompt(_turning(plan, random.Random(f"{seed}/roles")), random.Random(f"{seed}/promptness"))


def _prompt(plan: Plan, chance: random.Random) -> Plan:
    """In some worlds a reply must begin in time."""
    if chance.random() >= PROMPT_SHARE:
        return plan
    requests = msgspec.structs.replace(plan.config.requests, first_token_s=chance.choice((0.3, 0.6, 1.5)))
    return msgspec.structs.replace(plan, config=msgspec.structs.replace(plan.config, requests=requests))


def _referring(plan: Plan, chance: random.Random) -> Plan:
    """In some worlds there are conversations, one for each creator, and requests that go on with them."""
    if chance.random() >= REFERRING_SHARE:
        return plan

    def drawn(order: Order) -> Order:
        if chance.random() >= REFERRED_SHARE or order.bad or order.poison:
            return order
        question = " ".join(order.question.split()[:3])  # a prompt with a turn before it is as long as others
        sampling = {name: value for name, value in order.sampling.items() if name != "n"}
        return msgspec.structs.replace(order, question=question, sampling=sampling, conversation="talk")

    window = Conversations(window_turns=1, step_turns=1)
    config = msgspec.structs.replace(plan.config, conversations=window)
    return msgspec.structs.replace(plan, orders=[drawn(order) for order in plan.orders], config=config)


def _mixed(plan: Plan, chance: random.Random) -> Plan:
    """In a third of the worlds half the requests are batch, whose prompts take several steps of the engine."""
    if chance.random() > 1 / 3:
        return plan
    orders = [
        msgspec.structs.replace(order, klass="batch") if chance.random() < 0.5 else order for order in plan.orders
    ]
    prefill = msgspec.structs.replace(plan.config.prefill, max_num_batched_tokens=chance.choice((16, 32)))
    return msgspec.structs.replace(plan, orders=orders, config=msgspec.structs.replace(plan.config, prefill=prefill))


def _several(plan: Plan, chance: random.Random) -> Plan:
    """Some requests want several replies, and some clients all at once.

    Of three replies, the longest need more than the smallest engine may promise.
    """
    most = 3 if plan.config.simulated.kv_blocks >= KV_BLOCKS_BOTH else 2

    def drawn(order: Order) -> Order:
        whole = order.way is None and chance.random() < WHOLE_SHARE
        order = msgspec.structs.replace(order, whole=whole)
        if chance.random() >= SEVERAL_SHARE or order.bad or order.poison:
            return order
        return msgspec.structs.replace(order, sampling={**order.sampling, "n": min(most, chance.choice((2, 2, 3)))})

    return msgspec.structs.replace(plan, orders=[drawn(order) for order in plan.orders])


def _turning(plan: Plan, chance: random.Random) -> Plan:
    """In some worlds there are workers for both, beside the others or alone, and they change their roles."""
    if chance.random() >= TURNING_SHARE:
        return plan
    both, alone = chance.choice((1, 1, 2, 2, 3)), chance.random() < 0.5
    begins: Role = "both" if alone else chance.choice(("both", "both", "prefill", "decode"))
    turns = [
        Fault(
            at_s=chance.uniform(0.0, LOAD_S),
            kind="turn",
            of=("both", chance.randrange(both)),
            for_s=chance.uniform(0.05, 1.5),
            share=chance.random(),
        )
        for _ in range(chance.choice((0, 1, 2, 2, 3, 4)))
    ]

    def struck(fault: Fault) -> Fault:
        worker = fault.of[0] in ("prefill", "decode") and fault.kind != "absence"
        theirs = worker and (chance.random() < 0.5 or alone)
        return msgspec.structs.replace(fault, of=("both", fault.of[1] % both)) if theirs else fault

    simulated = msgspec.structs.replace(
        plan.config.simulated, kv_blocks=max(KV_BLOCKS_BOTH, plan.config.simulated.kv_blocks)
    )
    config = msgspec.structs.replace(
        plan.config,
        model=Model(max_model_len=LARGEST_TOKENS),
        both=Both(slots=16, prefill_slots=chance.choice((1, 2))),
        simulated=simulated,
    )
    return msgspec.structs.replace(
        plan,
        prefill=0 if alone else plan.prefill,
        decode=0 if alone else plan.decode,
        both=both,
        begins=begins,
        config=config,
        faults=sorted([*map(struck, plan.faults), *turns], key=lambda fault: fault.at_s),
    )


def _peopled(plan: Plan, chance: random.Random) -> Plan:
    """Beside what is drawn above: producers, keepers, requests that sample, and what goes wrong with them."""
    others = [("keeper", 0), ("producer", 0)]
    kinds: dict[str, tuple[Kind, ...]] = {"keeper": ("kill", "freeze", "cut"), "producer": ("freeze", "cut", "stall")}
    struck = [of for of in others if chance.random() < 0.2]
    faults = [
        Fault(
            at_s=chance.uniform(0.0, LOAD_S),
            kind=chance.choice(kinds[of[0]]),
            of=of,
            for_s=chance.uniform(0.02, 1.5),
            share=chance.random(),
        )
        for of in struck
    ]
    return msgspec.structs.replace(
        plan,
        keepers=chance.choice((1, 1, 1, 1, 2)),
        orders=[_sampled(_produced(order, PRODUCERS_SHARE, chance), chance) for order in plan.orders],
        faults=sorted([*plan.faults, *faults], key=lambda fault: fault.at_s),
    )


def _produced(order: Order, share: float, chance: random.Random) -> Order:
    """A producer does not leave: there is nothing by which anybody would know."""
    if chance.random() >= share:
        return order
    way, encoding = chance.choice(WAYS), chance.choice(_ENCODINGS)
    if way == "arbiter":
        encoding = "msgpack"
    return msgspec.structs.replace(order, way=way, encoding=encoding, leaves_s=None)


def _sampled(order: Order, chance: random.Random) -> Order:
    if chance.random() >= SAMPLED_SHARE or order.bad:
        return order
    # Long enough to be cut short.
    return msgspec.structs.replace(order, sampling=chance.choice(SAMPLINGS), max_tokens=8)


def _fate(plan: Plan, chance: random.Random) -> Plan:
    """In few worlds something happens that would drown what else there is to see."""
    drawn = chance.random()
    if drawn < 0.05:
        return _poisoned(plan, chance)
    return _left_alone(plan, chance) if drawn < 0.09 else plan


def _poisoned(plan: Plan, chance: random.Random) -> Plan:
    """One request kills who prefills it. Two more faults at most: a third death would be counted, too."""
    number = chance.randrange(len(plan.orders))
    poison = msgspec.structs.replace(
        plan.orders[number],
        question=POISON,
        timeout_s=TIMEOUT_S,
        leaves_s=None,
        bad=None,
        way=None,
        encoding="msgpack",
        sampling={},
    )
    config = msgspec.structs.replace(
        plan.config,
        requests=msgspec.structs.replace(plan.config.requests, starts_max=3),
    )
    orders = [poison if order.number == number else order for order in plan.orders]
    return msgspec.structs.replace(plan, config=config, orders=orders, faults=plan.faults[:2])


def _left_alone(plan: Plan, chance: random.Random) -> Plan:
    """All prefill workers go, for longer than many a request can wait. More of those have no gateway that counts for them."""
    orders = []
    for order in plan.orders:
        made = order if order.way else _produced(order, 0.3, chance)
        hurried = made.way is not None and chance.random() < 0.7
        orders.append(msgspec.structs.replace(made, timeout_s=chance.uniform(0.05, 1.5)) if hurried else made)
    absence = Fault(
        at_s=chance.uniform(0.1, 0.8),
        kind="absence",
        of=("prefill", 0),
        for_s=chance.uniform(15.5, 17.0),
        share=chance.random(),
    )
    faults = [absence, *(fault for fault in plan.faults if fault.of[0] != "prefill")]
    return msgspec.structs.replace(plan, orders=orders, faults=sorted(faults[:3], key=lambda fault: fault.at_s))


def _config(seed: int, chance: random.Random) -> Config:
    return Config(
        engine="simulated",
        lmcache=LMCache(chunk_size=8, block_size=8, shm_name=f"simulation-{seed}"),
        prefill=Engine(slots=chance.choice((1, 2, 3, 4))),
        decode=Decode(slots=16),
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
        creator=CREATORS[chance.randrange(len(CREATORS))],
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


_ENCODINGS: Final[tuple[Encoding, ...]] = ("json", "msgpack")

_WORDS: Final = ("river", "stone", "market", "winter", "garden", "letter", "bridge", "window", "island", "summer")
