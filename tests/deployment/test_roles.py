"""What each role may do at the brokers, and what is refused: every act of the table, tried by every role with its own NKey.

The server answers what it refuses before it answers a later PING, so nothing here waits for silence.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import pytest

from pipeline.bus import acks, streams
from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError
from pipeline.errors import OperatorError
from pipeline.paths import JETSTREAM
from tests.deployment.cluster import ROLES, Cluster
from tests.deployment.fleet import asked

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

Verb = Literal["publish", "subscribe"]

ALL: Final = "gateway prefill decode both keeper operator"
ACTS: Final[tuple[tuple[str, Verb, str, str], ...]] = (
    # What it is, how, on which subject, and who may.
    ("ask for a reply", "publish", "requests.in.interactive.ada.ada", "gateway operator producer"),
    ("ask in another creator's name", "publish", "requests.in.interactive.bob.bob", "gateway operator"),
    ("put a request into a shard, past the transform", "publish", "requests.shard.3.interactive.ada.ada", ""),
    ("read requests as they are published", "subscribe", "requests.in.>", ""),
    ("read requests as they are stored", "subscribe", "requests.shard.>", ""),
    ("pull a request", "publish", "$JS.API.CONSUMER.MSG.NEXT.REQUESTS_interactive.s0", "prefill both operator"),
    ("ask how far it is delivered", "publish", "$JS.API.CONSUMER.INFO.REQUESTS_interactive.s0",
     "gateway prefill decode both keeper operator"),
    ("ack a request", "publish", "$JS.ACK.REQUESTS_interactive.s0.1.1.1.1.0", "gateway prefill decode both"),
    ("read a request out of its stream", "publish", "$JS.API.STREAM.MSG.GET.REQUESTS_batch", "keeper operator"),
    ("read one as replicas give it", "publish", "$JS.API.DIRECT.GET.REQUESTS_batch", "operator"),
    ("delete a request", "publish", "$JS.API.STREAM.MSG.DELETE.REQUESTS_interactive", "keeper operator"),
    ("empty the queue", "publish", "$JS.API.STREAM.PURGE.REQUESTS_interactive", "operator"),
    ("delete a stream", "publish", "$JS.API.STREAM.DELETE.REQUESTS_interactive", "operator"),
    ("change a stream", "publish", "$JS.API.STREAM.UPDATE.REQUESTS_interactive", "operator"),
    ("make a stream", "publish", "$JS.API.STREAM.CREATE.MINE", "operator"),
    ("make a consumer", "publish", "$JS.API.CONSUMER.CREATE.REQUESTS_interactive.mine", "operator"),
    ("delete a consumer", "publish", "$JS.API.CONSUMER.DELETE.REQUESTS_interactive.s0", "operator"),
    ("see how a stream is declared", "publish", "$JS.API.STREAM.INFO.REQUESTS_batch", "prefill decode both keeper operator"),
    ("see what waits on each shard", "publish", "$JS.API.CONSUMER.LIST.REQUESTS_interactive", "keeper operator"),
    ("list all streams", "publish", "$JS.API.STREAM.LIST", "operator"),
    ("ask for credits", "publish", "credit.decode-1", "prefill both operator"),
    ("give credits", "subscribe", "credit.decode-1", "decode both"),
    ("hand over", "publish", "handoff.decode-1", "prefill both"),
    ("take a handoff", "subscribe", "handoff.decode-1", "decode both"),
    ("fence a holder", "publish", "holder.decode-1", "gateway"),
    ("be told as a holder", "subscribe", "holder.decode-1", "prefill decode both"),
    ("cancel a request", "publish", "control.cancel.r", "gateway operator"),
    ("order a worker", "publish", "control.worker.prefill-1", "gateway operator"),
    ("take orders", "subscribe", "control.worker.prefill-1", "prefill decode both"),
    ("change a setting", "publish", "$KV.settings.prefill.slots", "operator"),
    ("follow settings", "subscribe", "$KV.settings.>", "gateway prefill decode both"),
    ("read settings", "publish", "$JS.API.STREAM.MSG.GET.KV_settings", "gateway prefill decode both operator"),
    ("see how far settings are", "publish", "$JS.API.STREAM.INFO.KV_settings", "gateway prefill decode both keeper operator"),
    ("answer as a gateway's worker", "publish", "_INBOX.gateway.g.1.f", "prefill decode both keeper"),
    ("answer a producer", "publish", "_INBOX.producer.shop.1", "prefill decode both keeper"),
    ("answer a prefill worker", "publish", "_INBOX.prefill.p.1", "gateway decode both"),
    ("answer a decode worker", "publish", "_INBOX.decode.d.1", "gateway"),
    ("answer a worker for both", "publish", "_INBOX.both.b.1", "gateway decode both"),
    ("answer an operator", "publish", "_INBOX.operator.o.1", "gateway prefill decode both keeper"),
    ("hear a gateway's answers", "subscribe", "_INBOX.gateway.>", "gateway"),
    ("hear a prefill worker's answers", "subscribe", "_INBOX.prefill.>", "prefill"),
    ("hear a decode worker's answers", "subscribe", "_INBOX.decode.>", "decode"),
    ("hear the answers of one for both", "subscribe", "_INBOX.both.>", "both"),
    ("hear the shop's answers", "subscribe", "_INBOX.producer.shop.>", "producer"),
    ("hear another producer's answers", "subscribe", "_INBOX.producer.other.>", ""),
    ("hear all answers", "subscribe", "_INBOX.>", ""),
    ("hear everything", "subscribe", ">", ""),
    ("keep a reply for a producer", "publish", "replies.shop.r", "prefill decode both keeper"),
    ("hear replies as they are kept", "subscribe", "replies.>", ""),
    ("read the shop's kept replies", "publish", "$JS.API.DIRECT.GET.REPLIES.replies.shop.r", "producer operator"),
    ("read another's kept replies", "publish", "$JS.API.DIRECT.GET.REPLIES.replies.other.r", "operator"),
    ("read any kept reply", "publish", "$JS.API.DIRECT.GET.REPLIES", "operator"),
    ("write a persona", "publish", "$KV.personas.ada", "gateway operator"),
    ("read personas", "publish", "$JS.API.STREAM.MSG.GET.KV_personas", "gateway prefill both operator"),
    ("read personas as replicas give them", "publish", "$JS.API.DIRECT.GET.KV_personas.$KV.personas.bob", "operator"),
    ("follow personas", "subscribe", "$KV.personas.>", "prefill both operator"),
    ("delete personas", "publish", "$JS.API.STREAM.PURGE.KV_personas", "operator"),
    ("write a route", "publish", "$KV.routes.ada", "gateway operator"),
    ("follow routes", "subscribe", "$KV.routes.>", "gateway operator"),
    ("drop a route", "publish", "$JS.API.STREAM.PURGE.KV_routes", "gateway operator"),
    ("record a start", "publish", "$KV.starts.REQUESTS_interactive.1.e", "prefill decode both"),
    ("take a start back", "publish", "$JS.API.STREAM.PURGE.KV_starts", "prefill decode both operator"),
    ("take a conversation", "publish", "$KV.conversations.ada.c", "prefill decode both"),
    ("write a turn", "publish", "turns.ada.c", "prefill decode both"),
    ("read turns", "publish", "$JS.API.DIRECT.GET.TURNS", "prefill both operator"),
    ("follow conversations", "subscribe", "turns.>", ""),
    ("say which reply was sent", "publish", "chat.sent.ada.c", "producer"),
    ("say it for another creator", "publish", "chat.sent.bob.c", ""),
    ("keep a dead letter", "publish", "dlq.poison.interactive", "prefill decode both keeper"),
    ("watch dead letters", "subscribe", "dlq.>", "operator"),
    ("delete a dead letter", "publish", "$JS.API.STREAM.MSG.DELETE.DLQ", "operator"),
    ("make a work item for keepers", "publish", "keeper.expired.REQUESTS_batch.1", "keeper"),
    ("take a keeper's item", "publish", "$JS.API.CONSUMER.MSG.NEXT.ADVISORIES.keeper", "keeper operator"),
    ("ack a keeper's item", "publish", "$JS.ACK.ADVISORIES.keeper.1.1.1.1.0", "keeper"),
    ("hear advisories", "subscribe", "$JS.EVENT.ADVISORY.>", "operator"),
    ("forge an advisory", "publish", "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.REQUESTS_batch.s0", ""),
    ("live as a gateway", "publish", "presence.gateway.g", "gateway"),
    ("live as a prefill worker", "publish", "presence.prefill.p", "prefill both"),
    ("live as a decode worker", "publish", "presence.decode.d", "decode both"),
    ("see who lives", "subscribe", "presence.>", ALL),
    ("ask what became of a request", "publish", "control.trace.r", "operator"),
    ("be asked what became of it", "subscribe", "control.trace.*", "gateway prefill decode both keeper"),
    ("ask how requests fare", "publish", "control.recent", "operator"),
    ("be asked how they fare", "subscribe", "control.recent", "gateway"),
    ("record traffic", "publish", "trace.ask", "operator"),
    ("hear who records", "subscribe", "trace.ask", "decode both"),
    ("tell a recorder of a reply", "publish", "trace.record.r", "decode both"),
    ("hear what is recorded", "subscribe", "trace.record.r", "operator"),
    ("ask a prefill worker", "publish", "prefill.prefill-1", "gateway operator"),
    ("be asked as one", "subscribe", "prefill.prefill-1", "prefill both"),
    ("say what is warm", "publish", "cache.warm.prefill-1", "prefill both"),
    ("hear what is warm", "subscribe", "cache.warm.*", "gateway"),
    ("ask the servers about themselves", "publish", "$SYS.REQ.SERVER.PING", ""),
)  # fmt: skip


@pytest.fixture
def anyio_backend() -> Any:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("roles")).running() as running:
        yield running


@pytest.fixture
async def declared(cluster: Cluster, anyio_backend: Any) -> None:
    async with await Bus.connect(cluster.nats("operator"), "test") as bus:
        await streams.apply(bus, streams.declared(JETSTREAM, 3))


async def refused(bus: Bus, verb: Verb, subject: str) -> bool:
    """Whether the server says no. What it lets through is empty, and answered nowhere."""
    bus._last_error = ""
    if verb == "publish":
        await bus.publish(subject, b"")
    else:
        await (await bus.subscribe(subject, lambda _: None)).unsubscribe()
    await bus.barrier()
    said = bus._last_error.lower()
    assert not said or "permissions violation" in said, said
    return bool(said)


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_may_do_what_it_needs_and_is_refused_the_rest(cluster: Cluster, role: str) -> None:
    """Before any stream is declared: what is let through reaches nothing."""
    async with await Bus.connect(cluster.nats(role), "test") as bus:
        wrong = [
            f"{act}: {'refused' if no else 'let through'}"
            for act, verb, subject, who in ACTS
            if (no := await refused(bus, verb, subject)) == (role in who.split())
        ]
    assert wrong == []


def test_the_table_has_every_permission_that_the_files_give(cluster: Cluster) -> None:
    """So that none is added that nobody has thought about: each line of roles.conf is some act's."""
    text = (cluster.folder / "roles.conf").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.strip().startswith("#")]
    patterns = {word for line in lines for word in line.split('"')[1::2]}
    unknown = {pattern for pattern in patterns if not any(_covers(pattern, subject) for _, _, subject, _ in ACTS)}
    assert unknown <= UNTRIED


def test_a_worker_for_both_may_do_what_its_two_roles_may_and_no_more(cluster: Cluster) -> None:
    """But hear: each connection has its own inboxes."""
    text = (cluster.folder / "roles.conf").read_text("utf-8")
    for verb in ("publish", "subscribe"):
        prefill, decode, both = (_given(text, role, verb) for role in ("prefill", "decode", "both"))
        own = {f"_INBOX.{role}.>" for role in ("prefill", "decode", "both")} if verb == "subscribe" else set()
        assert both - own == (prefill | decode) - own


def _given(text: str, role: str, verb: str) -> set[str]:
    """The patterns that a role has of one kind."""
    block = text.split(f"{role}_may {{", 1)[1].split("\n}", 1)[0]
    lines = block.split(f"{verb}: [", 1)[1].split("]", 1)[0].splitlines()
    return {word for line in lines if not line.strip().startswith("#") for word in line.split('"')[1::2]}


UNTRIED: Final = {
    "$JS.API.CONSUMER.LIST.REQUESTS_batch",
    "$JS.API.CONSUMER.INFO.REQUESTS_batch.*", "$JS.API.STREAM.INFO.KV_routes", "$JS.API.STREAM.MSG.GET.KV_routes",
    "$JS.API.STREAM.MSG.GET.KV_conversations", "$JS.API.STREAM.MSG.GET.TURNS", "$JS.API.DIRECT.GET.SENT",
    "$JS.API.CONSUMER.MSG.NEXT.REQUESTS_batch.*", "$JS.ACK.REQUESTS_batch.>", "$JS.API.STREAM.MSG.GET.REQUESTS_interactive",
    "$JS.API.STREAM.MSG.DELETE.REQUESTS_batch", "cache.ask.*", "cache.evicted.*", "_INBOX.keeper.>",
}  # fmt: skip
"""Twins of what is tried: another class, another bucket, the other way round."""


def _covers(pattern: str, subject: str) -> bool:
    want, have = pattern.split("."), subject.split(".")
    for at, part in enumerate(want):
        if part == ">":
            return len(have) > at
        if at >= len(have) or part not in ("*", have[at]):
            return False
    return len(want) == len(have)


@pytest.mark.usefixtures("declared")
async def test_a_producer_that_tries_leaves_the_queue_as_it_was(cluster: Cluster) -> None:
    async with (
        await Bus.connect(cluster.nats("operator"), "test") as operator,
        await Bus.connect(cluster.nats("prefill"), "test") as prefill,
        await Bus.connect(cluster.nats("producer"), "shop") as shop,
    ):
        await shop.store("requests.in.interactive.ada.ada", b"{}", "one", 10.0)
        ack = await _pulled(prefill)
        for attempt in (
            acks.ack_unconfirmed(shop, ack),
            shop.request("$JS.API.STREAM.PURGE.REQUESTS_interactive", b"", 0.2),
            shop.request("$JS.API.STREAM.DELETE.REQUESTS_interactive", b"", 0.2),
        ):
            try:
                await attempt
            except BusError:
                continue
        await shop.barrier()
        assert (await asked(operator, "STREAM.INFO.REQUESTS_interactive"))["state"]["messages"] == 1
        await acks.ack(prefill, ack)
        with anyio.fail_after(10):  # removed by all three, one after the other
            while (await asked(operator, "STREAM.INFO.REQUESTS_interactive"))["state"]["messages"]:
                await anyio.sleep(0.05)


async def _pulled(bus: Bus) -> str:
    """The ack subject of the one message that is there."""
    acks_at: list[str] = []
    inbox = bus.inbox()
    await bus.subscribe(inbox, lambda message: acks_at.append(message.reply) if message.reply else None)
    with anyio.fail_after(20):
        while not acks_at:
            for shard in range(16):
                subject = f"$JS.API.CONSUMER.MSG.NEXT.REQUESTS_interactive.s{shard}"
                await bus.publish(subject, b'{"batch":1,"no_wait":true,"group":"pool","priority":0}', inbox)
            await anyio.sleep(0.2)
    return acks_at[0]


async def test_a_producer_answers_what_it_was_asked_once_and_nothing_else(cluster: Cluster) -> None:
    async with (
        await Bus.connect(cluster.nats("decode"), "decode-1") as decode,
        await Bus.connect(cluster.nats("producer"), "shop") as shop,
    ):
        where = shop.inbox()
        questions: list[Message] = []
        await shop.subscribe(where, questions.append)
        await shop.barrier()
        inbox = decode.inbox()
        with anyio.fail_after(10):
            while not questions:  # it may be at another node, which has not told ours yet that it listens
                await decode.publish(where, b"claim", inbox)
                await decode.barrier()
                await anyio.sleep(0.5)
        assert not await refused(shop, "publish", inbox)
        assert await refused(shop, "publish", inbox), "it has had its say"
        assert await refused(shop, "publish", decode.inbox()), "nobody asked there"


async def test_a_stranger_a_wrong_authority_and_a_plain_connection_are_turned_away(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.new_key("stranger")
    stranger = str(cluster.seeds / "stranger.seed")
    for settings, sentence in (
        (cluster.nats("gateway", nkey_seed=stranger, connect_timeout_s=2.0), "(?i)authorization violation"),
        (cluster.nats("gateway", nkey_seed="", connect_timeout_s=2.0), "(?i)authorization violation"),
        (cluster.nats("gateway", ca="", connect_timeout_s=2.0), "certificate verify failed"),
    ):
        with pytest.raises(OperatorError, match=sentence):
            await Bus.connect(settings, "test")


async def test_a_process_with_another_roles_inboxes_is_told_which_setting_is_wrong(cluster: Cluster) -> None:
    with pytest.raises(OperatorError, match=r"does not let us hear answers.*\n?.*nats\.inbox_prefix"):
        await Bus.connect(cluster.nats("gateway", inbox_prefix="_INBOX"), "test")


async def test_a_key_is_rotated_while_the_servers_run(cluster: Cluster) -> None:
    """Beside the old one first, then alone: who still has the old one is cut off, and nobody else."""
    users, fresh = cluster.folder / "users.conf", cluster.new_key("gateway-2")
    text, seed = users.read_text("utf-8"), str(cluster.seeds / "gateway-2.seed")
    old = "{ nkey: $HEADRACE_NKEY_GATEWAY, permissions: $gateway_may }"
    new = f"{{ nkey: {fresh}, permissions: $gateway_may }}"
    assert old in text
    try:
        async with await Bus.connect(cluster.nats("gateway"), "old") as before:
            users.write_text(text.replace(old, f"{old}\n    {new}"), "utf-8")
            cluster.reload()
            async with await Bus.connect(cluster.nats("gateway", nkey_seed=seed), "new") as after:
                await before.barrier()
                users.write_text(text.replace(old, new), "utf-8")
                cluster.reload()
                with anyio.fail_after(10):
                    while before.connected:
                        await anyio.sleep(0.05)
                await after.barrier()
                with pytest.raises(OperatorError, match=r"(?i)authorization violation"):
                    await Bus.connect(cluster.nats("gateway", connect_timeout_s=1.0), "old")
    finally:
        users.write_text(text, "utf-8")
        cluster.reload()


async def test_a_node_that_is_told_to_leave_takes_no_connection_with_it(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    lost: list[int] = []
    here = cluster.nats("gateway", url=f"tls://127.0.0.1:{node.port},{cluster.url}")
    async with await Bus.connect(here, "test") as bus:
        bus.on_disconnect(lambda: lost.append(1))
        await anyio.to_thread.run_sync(cluster.end, node, signal.SIGTERM)
        await bus.wait_connected(10.0)
        await bus.barrier()
    cluster.start(node)
    cluster.await_healthy(cluster.nodes)


@pytest.mark.usefixtures("declared")
async def test_copies_are_taken_away_and_made_again_by_apply(cluster: Cluster) -> None:
    async with await Bus.connect(cluster.nats("operator"), "test") as bus:
        for replicas in (1, 3):
            wanted = streams.declared(JETSTREAM, replicas)
            assert await streams.apply(bus, wanted)
            assert await streams.diff(bus, wanted) == []
