"""Routes: every gateway follows them, one writes them, and new owners are warm before they get requests."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from gateway.explain import explain
from gateway.routing import Routing
from gateway.warm import Warm
from pipeline.bus import streams
from pipeline.bus.background import Background
from pipeline.bus.connection import Bus, Message
from pipeline.bus.kv import Bucket
from pipeline.paths import JETSTREAM
from pipeline.protocol import subjects
from pipeline.protocol.messages import Presence, encode, pack_ids
from pipeline.protocol.presence import Presences
from pipeline.protocol.routes import Balancer, Change, Route, Worker
from pipeline.protocol.warm_messages import Prefix, WantPrefix, WarmedUp, WarmUp, prefill_decoder
from tests.bus.support import api, eventually
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

SHARDS = 16
HOT = Route(variants=(3, 8), reason="hot")
PERSONA = Prefix("ab", pack_ids([1, 2, 3]))


class Wants(Balancer):
    """Wants these changes, once; remembers what it was told."""

    def __init__(self, *changes: Change) -> None:
        super().__init__()
        self.changes = list(changes)
        self.rates: Mapping[str, float] = {}
        self.total = 0.0

    def step(
        self,
        now_s: float,
        rates: Mapping[str, float],
        total: float,
        routes: Mapping[str, Route],
        workers: Mapping[str, Worker],
        shards: int,
    ) -> list[Change]:
        self.rates, self.total = rates, total
        changes, self.changes = self.changes, []
        return changes


def gateway(name: str, **said: object) -> Presence:
    return Presence(role="gateway", id=name, epoch="1", ready=True, **said)  # type: ignore[arg-type]


def prefill(name: str, load: float = 0.1, slots_free: int = 3) -> Presence:
    return Presence(role="prefill", id=name, epoch="1", ready=True, slots=4, slots_free=slots_free, load=load)


@asynccontextmanager
async def routing(url: str, name: str, wants: Wants | None = None) -> AsyncIterator[Routing]:
    """The routing of one gateway; two of them live, and two prefill workers."""
    presences = Presences()
    for peer in (gateway("g1", rate=5.0, rates={"ada": 4.0}), gateway("g2"), prefill("p1"), prefill("p2")):
        presences.heard(peer, time.monotonic() + 60)
    async with await Bus.connect(url, name) as bus:
        made = Routing(bus, presences, Warm(bus, presences, time.monotonic), name, SHARDS, time.monotonic)
        made.balancer = wants or Wants()
        await made.start()
        work = Background(made.run(), name)
        try:
            yield made
        finally:
            await work.stop()


@pytest.fixture
async def url(broker: NatsServer) -> str:
    async with await Bus.connect(broker.url, "test") as bus:
        await streams.apply(bus, streams.declared(JETSTREAM))
        await api(bus, "STREAM.PURGE.KV_routes")
    return broker.url


async def test_without_a_route_the_creator_is_its_own_affinity(url: str) -> None:
    async with routing(url, "g1") as one:
        assert one.affinity("ada", "c1") == "ada"
        assert one.heaviest().keys() == {"ada"}


async def test_one_gateway_writes_and_all_follow(url: str) -> None:
    wants, vain = Wants(Change("ada", HOT, ())), Wants(Change("bob", HOT, ()))
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(routing(url, "g1", wants))
        two = await stack.enter_async_context(routing(url, "g2", vain))
        await eventually(lambda: one.routes == two.routes == {"ada": HOT})
        assert {two.affinity("ada", f"c{number}") for number in range(50)} == {"ada~3", "ada~8"}
        assert two.affinity("ada", "c1") == one.affinity("ada", "c1")
        assert vain.changes, "it was never asked"
        wants.changes = [Change("ada", None, ())]
        await eventually(lambda: one.routes == two.routes == {})


async def test_who_writes_knows_what_all_gateways_are_asked(url: str) -> None:
    wants = Wants()
    async with routing(url, "g1", wants) as one:
        one._presences.heard(gateway("g2", rate=5.0, rates={"ada": 4.0, "bob": 1.0}), time.monotonic() + 60)
        await eventually(lambda: wants.total >= 5.0)
        assert wants.rates == {"ada": 4.0, "bob": 1.0}


async def test_a_gateway_that_starts_or_was_away_routes_as_the_others(url: str) -> None:
    async with await Bus.connect(url, "writer") as bus:
        revision = await Bucket(bus, "routes").write("ada", encode_route(HOT))
        async with routing(url, "g2") as late:
            assert late.routes == {"ada": HOT}
            with_none_heard = late._bucket
            assert with_none_heard is not None
            await late._bus.client.force_reconnect()
            await Bucket(bus, "routes").delete("ada", revision)
            await eventually(lambda: late.routes == {})


async def test_a_route_that_cannot_be_read_leaves_its_creator_to_the_hash(url: str) -> None:
    async with await Bus.connect(url, "writer") as bus, routing(url, "g2") as one:
        await Bucket(bus, "routes").write("ada", b"{")
        await Bucket(bus, "routes").write("bob", encode_route(HOT))
        await eventually(lambda: "bob" in one.routes)
        assert one.affinity("ada", "c") == "ada"


async def test_a_route_written_by_another_meanwhile_is_read_and_not_overwritten(url: str) -> None:
    wants = Wants()
    async with await Bus.connect(url, "writer") as bus, routing(url, "g1", wants) as one:
        theirs = Route(variants=(5,), reason="moved")
        await Bucket(bus, "routes").write("ada", encode_route(theirs))
        await eventually(lambda: one.routes == {"ada": theirs})
        one._revisions["ada"] = 1_000_000
        wants.changes = [Change("ada", HOT, ())]
        await eventually(lambda: not wants.changes and one._revisions.get("ada") != 1_000_000)
        assert one.routes == {"ada": theirs}


async def test_new_owners_are_warm_before_the_route_is_there(url: str) -> None:
    said: list[str] = []
    wants = Wants()
    async with await Bus.connect(url, "workers") as bus, routing(url, "g1", wants) as one:

        def answered(message: Message) -> None:
            asked, worker = prefill_decoder.decode(message.data), message.subject.rpartition(".")[2]
            said.append(f"{worker} {type(asked).__name__} {'ada' in one.routes}")
            answer: object = WarmedUp("warm", 2)
            if isinstance(asked, WantPrefix):
                answer = PERSONA
            elif isinstance(asked, WarmUp):
                assert asked.prefix == PERSONA
            bus.post(message.reply, encode(answer))

        for worker in ("p1", "p2"):
            await bus.subscribe(subjects.prefill(worker), answered)
        await bus.barrier()
        owner = one.owners("ada")[0]
        wants.changes = [Change("ada", HOT, ("p1", "p2"))]
        await eventually(lambda: one.routes == {"ada": HOT})
        assert said[0] == f"{owner} WantPrefix False"
        assert sorted(said[1:]) == ["p1 WarmUp False", "p2 WarmUp False"]


async def test_a_route_does_not_wait_for_workers_that_do_not_answer(url: str) -> None:
    async with routing(url, "g1", Wants(Change("ada", HOT, ("p1", "p2")))) as one:
        await eventually(lambda: one.routes == {"ada": HOT})


@pytest.mark.parametrize("knows", [False, True])
async def test_a_worker_whose_words_cannot_be_read_keeps_no_route_from_being_written(url: str, knows: bool) -> None:
    wants = Wants()
    async with await Bus.connect(url, "workers") as bus, routing(url, "g1", wants) as one:

        def answered(message: Message) -> None:
            asked = prefill_decoder.decode(message.data)
            bus.post(message.reply, encode(PERSONA) if knows and isinstance(asked, WantPrefix) else b"\xc1")

        await bus.subscribe(subjects.prefill("*"), answered)
        await bus.barrier()
        wants.changes = [Change("ada", HOT, ("p1", "p2"))]
        await eventually(lambda: one.routes == {"ada": HOT})


async def test_a_broker_without_the_bucket_leaves_all_to_the_hash(broker: NatsServer) -> None:
    async with routing(broker.url, "g1", Wants(Change("ada", HOT, ()))) as one:
        assert one.affinity("ada", "c") == "ada"


async def test_a_moved_creator_that_is_evicted_where_it_was_moved_to_goes_back_to_its_hash(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, warm = Route(variants=(5,), reason="moved"), [False]
    async with routing(url, "g1", Wants(Change("ada", moved, ()), Change("bob", HOT, ()))) as one:
        monkeypatch.setattr(one.warm, "is_warm", lambda creator, worker: warm[0])
        await eventually(lambda: one.routes == {"ada": moved, "bob": HOT})
        assert one._evicted() == [], "it has not come there yet"
        warm[0] = True
        assert one._evicted() == []
        warm[0] = False
        await eventually(lambda: one.routes == {"bob": HOT})


async def test_an_explanation_says_who_owns_the_shard_and_who_would_serve_in_its_place(url: str) -> None:
    async with routing(url, "g1") as one:
        plain = explain("ada", one, one._presences, time.monotonic)
        assert (plain.route, len(plain.ways), plain.ways[0].affinity) == ("hash", 1, "ada")
        owner, following = (candidate.worker for candidate in plain.ways[0].workers)
        assert f"{owner} owns it, and takes them" in plain.why
        one._presences.heard(prefill(owner, load=1.0, slots_free=0), time.monotonic() + 60)
        spilling = explain("ada", one, one._presences, time.monotonic)
        assert f"its owner {owner} is at 100%, so they spill to {following}" in spilling.why
        one._presences.heard(prefill(following, load=1.0, slots_free=0), time.monotonic() + 60)
        assert "and so are the next" in explain("ada", one, one._presences, time.monotonic).why
        one.routes["ada"] = HOT
        hot = explain("ada", one, one._presences, time.monotonic)
        assert (hot.route, [way.affinity for way in hot.ways]) == ("hot", ["ada~3", "ada~8"])
        assert "spread over 2 affinities" in hot.why
        one.routes["ada"] = Route(variants=(5,), reason="moved")
        assert "has been moved to another" in explain("ada", one, one._presences, time.monotonic).why


async def test_an_explanation_without_a_worker_says_that_requests_wait(url: str) -> None:
    async with routing(url, "g1") as one:
        alone = explain("a.b", one, Presences(), time.monotonic)
        assert alone.token == "a=2Eb"


def encode_route(route: Route) -> bytes:
    """As it lies in the bucket: JSON, which any tool may read."""
    variants = ", ".join(map(str, route.variants))
    return f'{{"variants": [{variants}], "reason": "{route.reason}"}}'.encode()
