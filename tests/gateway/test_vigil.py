"""The gateway's watch: the dead are accused, the living are not, and after its own absence it asks before it gives up."""

from collections.abc import Iterator
from typing import cast

import anyio
import pytest

from gateway.replies import ANSWER_WITHIN_S, Replies
from gateway.vigil import ARE_YOU_THERE, LOST, Vigil
from pipeline import outside
from pipeline.bus.connection import Bus, Message
from pipeline.limits import ABSENT_RATIO, ACCUSE_SILENT_S, ASK_BROKER_SILENT_S, RECEIVER_SILENT_MAX_S
from pipeline.protocol.accuser import Accuser
from pipeline.protocol.messages import Claim, From, Notice, Presence, encode
from pipeline.protocol.presence import Presences
from tests.gateway.test_replies import Posted, claim, message, tokens
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

ASKED = ("holder.1", ARE_YOU_THERE)


class Clock:
    """Time that stands until it is moved."""

    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.now_s

    def token(self, length_bytes: int) -> str:
        return "00" * length_bytes

    def roll(self) -> float:
        return 0.0


class Watched:
    """A vigil over one open reply, whose claim is made by worker "1" in its life "1"."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.asks = 0
        """How often the broker was asked for it."""
        self.bus = Posted()
        self.presences = Presences()
        accuser = Accuser(clock.now_s)
        self.replies = Replies(cast("Bus", self.bus), accuser, outside.monotonic_s)
        self.vigil = Vigil(cast("Bus", self.bus), accuser, self.presences, self.replies, "me")
        self.reply = self.replies.open("r", clock.now_s, 60.0)
        self.reply.published = True
        self.replies.on_claim(claim("r"))
        self.bus.take()

    def speaks(self, epoch: str = "1") -> None:
        self.presences.heard(Presence(role="decode", id="1", epoch=epoch, ready=True), self.clock.now_s)

    def broker_says(self, status: str) -> None:
        """Of the worker that was asked for."""
        self.vigil.answered(Message(self.bus.reply, "", b"", {"Status": status}))

    def later(self, passed_s: float, *, hears: bool = True) -> list[tuple[str, bytes]]:
        self.clock.now_s += passed_s
        if hears:
            self.presences.heard(Presence(role="gateway", id="me", epoch="1", ready=True), self.clock.now_s)
        self.vigil.look(self.clock.now_s)
        said = self.bus.take()
        self.asks += said.count(ASKED)
        return [one for one in said if one != ASKED]


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    outside.use(clock)
    yield clock
    outside.use(None)


@pytest.fixture
async def watched(clock: Clock) -> Watched:
    return Watched(clock)


async def test_a_worker_that_dies_has_its_message_given_back_once(watched: Watched) -> None:
    watched.speaks()
    assert watched.later(ACCUSE_SILENT_S - 0.01) == []
    assert watched.later(0.02) == [("ack", b"-NAK")]
    assert watched.later(1.0) == []


async def test_one_that_the_broker_does_not_know_any_more_is_given_up_sooner(watched: Watched) -> None:
    watched.later(0.01)
    watched.speaks()
    assert watched.later(ASK_BROKER_SILENT_S - 0.01) == []
    assert watched.asks == 0
    assert watched.later(0.02) == []
    assert watched.asks == 1
    watched.broker_says("503")
    assert watched.bus.take() == [], "its connection may be coming back"
    assert watched.later(ABSENT_RATIO * ACCUSE_SILENT_S + 0.01) == []
    watched.broker_says("503")
    assert watched.bus.take() == [("ack", b"-NAK")]
    assert watched.later(0.01) == []
    assert watched.asks == 2, "neither asked for nor accused again"


async def test_one_that_is_asked_for_and_speaks_is_left_alone(watched: Watched) -> None:
    watched.later(0.01)
    watched.speaks()
    for _ in range(4):
        watched.later(0.05)
    assert watched.asks == 1
    watched.broker_says("503")
    watched.speaks()
    watched.later(0.01)
    watched.broker_says("503")
    assert watched.bus.take() == []


async def test_what_only_its_holder_can_finish_is_waited_for(watched: Watched) -> None:
    """An accusation would end a reply that its client has begun to read."""
    watched.reply.continues = False
    watched.replies.on_frames(message([tokens("r", 0, "x")]))
    watched.reply.take()
    watched.later(0.01)
    watched.speaks()
    assert not any(watched.later(0.1) for _ in range(15))
    assert any(watched.later(0.1) for _ in range(2))


async def test_the_broker_tells_who_listens(broker: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers fall silent: one whose process is gone, and one that only says nothing."""
    told: set[str] = set()
    absent = Accuser.absent

    def noted(self: Accuser, worker: str, asked_s: float) -> None:
        told.add(worker)
        absent(self, worker, asked_s)

    monkeypatch.setattr(Accuser, "absent", noted)
    naks: set[str] = set()
    async with await Bus.connect(broker.url, "me") as bus, anyio.create_task_group() as tasks:
        presences, accuser = Presences(), Accuser(outside.monotonic_s())
        replies = Replies(bus, accuser, outside.monotonic_s)
        await bus.subscribe("ack.*", lambda message: naks.add(message.subject.removeprefix("ack.")))
        await bus.subscribe("holder.here", lambda _: None)
        tasks.start_soon(Vigil(bus, accuser, presences, replies, "me").run)

        async def silent(name: str, worker: str) -> None:
            """Claim once, and wait until the message is given back."""
            reply = replies.open(name, outside.monotonic_s(), 60.0)
            said = Claim(request=name, claim=name, epoch="1", holder=f"holder.{worker}", ack=f"ack.{name}")
            replies.on_claim(message(said))
            while name not in naks:
                presences.heard(Presence(role="gateway", id="me", epoch="1", ready=True), outside.monotonic_s())
                await anyio.sleep(0.02)
            replies.close(reply)

        with anyio.fail_after(60.0):
            await silent("r", "here")
            assert not told
            for number in range(5):  # where our own loop stalls meanwhile, only silence tells
                if not told:
                    await silent(f"r{number}", "gone")
        tasks.cancel_scope.cancel()
    assert told == {"holder.gone"}


async def test_a_worker_that_speaks_or_sends_frames_is_left_alone(watched: Watched) -> None:
    for _ in range(10):
        watched.speaks()
        assert watched.later(0.2) == []
    for number in range(10):
        watched.replies.on_frames(message([tokens("r", number, "x")]))
        assert watched.later(0.2) == []


async def test_a_worker_in_a_new_life_has_lost_what_it_held(watched: Watched) -> None:
    watched.speaks("2")
    assert watched.later(0.01) == [("ack", b"-NAK")]


async def test_without_a_connection_nobody_is_accused(watched: Watched) -> None:
    watched.bus.lost = True
    assert watched.later(5.0) == []


async def test_after_a_long_absence_holders_are_asked_and_silence_ends_the_reply(watched: Watched) -> None:
    watched.vigil.was_away(watched.clock.now_s)
    assert watched.bus.take() == [("holder.1", encode(Notice("r", "c1", From(0))))]
    watched.later(ANSWER_WITHIN_S + 0.01)
    assert watched.reply.end == LOST
    assert LOST.retryable


async def test_after_a_long_absence_one_frame_is_answer_enough(watched: Watched) -> None:
    watched.vigil.was_away(watched.clock.now_s)
    watched.replies.on_frames(message([tokens("r", 0, "x")]))
    watched.later(ANSWER_WITHIN_S + 0.01)
    assert watched.reply.end is None


async def test_what_is_not_published_yet_is_doubted_from_when_it_is(watched: Watched) -> None:
    watched.reply.published = False
    watched.vigil.was_away(watched.clock.now_s)
    watched.later(RECEIVER_SILENT_MAX_S)
    assert watched.reply.end is None
    watched.replies.confirm(watched.reply)
    watched.later(ANSWER_WITHIN_S / 2)
    assert watched.reply.end is None
    watched.later(ANSWER_WITHIN_S)
    assert watched.reply.end == LOST


async def test_on_a_connection_that_carries_nothing_nobody_is_accused(watched: Watched) -> None:
    watched.speaks()
    for _ in range(20):
        assert watched.later(0.2, hears=False) == []


async def test_after_an_absence_a_fenced_claim_is_no_answer(watched: Watched) -> None:
    watched.replies.on_claim(claim("r", 2))
    watched.vigil.was_away(watched.clock.now_s)
    watched.replies.on_claim(claim("r", 1))
    watched.later(ANSWER_WITHIN_S + 0.01)
    assert watched.reply.end == LOST
