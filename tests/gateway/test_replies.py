"""The replies under way, without a broker: what is said to workers, and what is remembered."""

import asyncio
from typing import Any, cast

import anyio
import pytest

from gateway import replies as module
from gateway.replies import Replies
from gateway.together import Together
from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import Disconnected
from pipeline.errors import EngineFailed
from pipeline.protocol.accuser import Accuser
from pipeline.protocol.messages import (
    Cancel,
    Claim,
    Done,
    Failed,
    From,
    Go,
    Gone,
    Notice,
    Tokens,
    Usage,
    Whole,
    encode,
    pack_ids,
)
from pipeline.protocol.reply import Piece

pytestmark = pytest.mark.anyio


class Posted:
    """A bus that keeps what it is given, or has lost its connection."""

    def __init__(self) -> None:
        self.said: list[tuple[str, bytes]] = []
        self.reply = ""
        """Where the last answer is to go."""
        self.lost = False

    @property
    def connected(self) -> bool:
        return not self.lost

    def inbox(self) -> str:
        return "inbox"

    def post(self, subject: str, data: bytes, reply: str = "") -> None:
        if self.lost:
            raise Disconnected("There is no connection.")
        self.said.append((subject, data))
        self.reply = reply

    def take(self) -> list[tuple[str, bytes]]:
        said, self.said = self.said, []
        return said


class Wakes(asyncio.Event):
    """Counts how often a task was woken."""

    count = 0

    def set(self) -> None:
        self.count += 1
        super().set()


@pytest.fixture
def bus() -> Posted:
    return Posted()


@pytest.fixture
async def replies(bus: Posted) -> Replies:
    return Replies(cast("Bus", bus), Accuser(0.0), anyio.current_time)


def message(data: Any, reply: str = "") -> Message:
    return Message("here", reply, data if isinstance(data, bytes) else encode(data), None)


def claim(request: str, number: int = 1) -> Message:
    return message(Claim(request=request, claim=f"c{number}", epoch="1", holder=f"holder.{number}", ack="ack"), "asker")


def tokens(request: str, index: int, text: str) -> Tokens:
    return Tokens(1, request, "c1", index, pack_ids([7]), text)


def failed(request: str) -> Message:
    return message([Failed(1, request, "c1", 0, EngineFailed("No.").body())], "asker")


async def test_a_claim_is_answered_where_it_asks_to_be(replies: Replies, bus: Posted) -> None:
    replies.open("r", 0.0, 60.0)
    replies.on_claim(claim("r"))
    replies.on_claim(claim("unknown"))
    assert bus.take() == [("asker", encode(Go())), ("asker", encode(Gone()))]


async def test_text_waits_joined_until_it_is_taken(replies: Replies) -> None:
    reply = replies.open("r", 0.0, 60.0)
    replies.on_claim(claim("r"))
    replies.on_frames(message([tokens("r", 0, "Par"), tokens("other", 0, "x"), tokens("r", 1, "is.")]))
    await reply.something()
    assert [piece.text for piece in reply.take()] == ["Paris."]
    assert reply.take() == []


async def test_news_goes_to_who_takes_it_at_once_and_waits_in_order_behind_what_was_not_taken(replies: Replies) -> None:
    reply = replies.open("r", 0.0, 60.0)
    replies.on_claim(claim("r"))
    sent, keeps_up = list[str](), True

    def sink(piece: Piece) -> bool:
        if keeps_up:
            sent.append(piece.text)
        return keeps_up

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reply.something, sink)
        await anyio.wait_all_tasks_blocked()
        replies.on_frames(message([tokens("r", 0, "a"), tokens("r", 1, "b")]))
        assert (sent, reply.news) == (["a", "b"], False)
        keeps_up = False
        replies.on_frames(message([tokens("r", 2, "c")]))
        keeps_up = True
        replies.on_frames(message([tokens("r", 3, "d")]))
    assert sent == ["a", "b"], "nothing overtakes what waits"
    replies.on_frames(message([tokens("r", 4, "e")]))
    assert [piece.text for piece in reply.take()] == ["cde"], "nobody waits for it any more"


async def test_the_last_text_waits_to_be_sent_with_the_end(replies: Replies) -> None:
    reply = replies.open("r", 0.0, 60.0)
    replies.on_claim(claim("r"))
    sent = list[str]()

    def sink(piece: Piece) -> bool:
        sent.append(piece.text)
        return True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reply.something, sink)
        await anyio.wait_all_tasks_blocked()
        replies.on_frames(message([tokens("r", 0, "a")]))
        usage = Usage(**dict.fromkeys(Usage.__struct_fields__[:5], 0), prefill="p", decode="d")
        replies.on_frames(message([Done(1, "r", "c1", 2, pack_ids([7, 7]), "ab", "stop", usage)], "asker"))
    assert sent == ["a"]
    assert [piece.text for piece in reply.take()] == ["b"]


async def test_who_waits_for_the_whole_is_not_woken_for_news_and_keeps_none(replies: Replies) -> None:
    wakes = Wakes()
    parts = [replies.open("r", 0.0, 60.0, wakes), replies.open("other", 0.0, 60.0, wakes)]
    for request in ("r", "other"):
        replies.on_claim(claim(request))
    for waiting in (parts[0], Together(parts, 1, wakes)):
        index, before = len(parts[0].receiver.ids), wakes.count
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waiting.everything)
            await anyio.wait_all_tasks_blocked()
            replies.on_frames(message([tokens("r", index, "a"), tokens("r", index + 1, "b")]))
            assert (parts[0].news, wakes.count) == (False, before)
            tasks.cancel_scope.cancel()


async def test_news_that_cannot_be_sent_at_once_waits_and_harms_no_other_reply(replies: Replies) -> None:
    def fails(piece: Piece) -> bool:
        raise ValueError(piece.text)

    broken, other = replies.open("r", 0.0, 60.0), replies.open("other", 0.0, 60.0)
    for request in ("r", "other"):
        replies.on_claim(claim(request))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(broken.something, fails)
        await anyio.wait_all_tasks_blocked()
        replies.on_frames(message([tokens("r", 0, "Par"), tokens("other", 0, "x"), tokens("r", 1, "is.")]))
    assert [piece.text for reply in (broken, other) for piece in reply.take()] == ["Paris.", "x"]


async def test_what_nobody_can_go_on_with_begins_again_as_long_as_nobody_has_seen_it(
    replies: Replies, bus: Posted
) -> None:
    reply = replies.open("r", 0.0, 60.0)
    reply.continues = False
    replies.on_claim(claim("r"))
    replies.on_frames(message([tokens("r", 0, "Par"), tokens("r", 1, "is")]))
    bus.take()
    replies.on_claim(claim("r", 2))
    assert bus.take() == [("asker", encode(Go()))]
    assert not reply.news
    replies.on_frames(message([Tokens(1, "r", "c2", 0, pack_ids([7]), "Lon")]))
    assert [piece.text for piece in reply.take()] == ["Lon"]
    replies.on_claim(claim("r", 3))
    assert bus.take() == [("asker", encode(Go(pack_ids([7]))))], "that has been seen"


async def test_what_is_sent_past_its_task_has_been_seen(replies: Replies, bus: Posted) -> None:
    reply, sent = replies.open("r", 0.0, 60.0), list[str]()
    reply.continues = False

    def sink(piece: Piece) -> bool:
        sent.append(piece.text)
        return True

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reply.something, sink)
        await anyio.wait_all_tasks_blocked()
        replies.on_claim(claim("r"))
        replies.on_frames(message([tokens("r", 0, "Par")]))
        bus.take()
        replies.on_claim(claim("r", 2))
        tasks.cancel_scope.cancel()
    assert (sent, bus.take()) == (["Par"], [("asker", encode(Go(pack_ids([7]))))])


async def test_a_reply_that_is_given_in_one_piece_is_unseen_until_then(replies: Replies, bus: Posted) -> None:
    reply = replies.open("r", 0.0, 60.0)
    reply.continues = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reply.everything)
        await anyio.wait_all_tasks_blocked()
        replies.on_claim(claim("r"))
        replies.on_frames(message([tokens("r", 0, "Par")]))
        bus.take()
        replies.on_claim(claim("r", 2))
        tasks.cancel_scope.cancel()
    assert bus.take() == [("asker", encode(Go()))]


async def test_after_a_reconnect_every_holder_is_asked_to_go_on(replies: Replies, bus: Posted) -> None:
    replies.open("r", 0.0, 60.0)
    replies.open("unclaimed", 0.0, 60.0)
    replies.on_claim(claim("r"))
    replies.on_frames(message([tokens("r", 0, "Par")]))
    bus.take()
    replies.ask_holders()
    assert bus.take() == [("holder.1", encode(Notice("r", "c1", From(1))))]


async def test_a_reply_closed_early_tells_its_holder_and_everybody_else(replies: Replies, bus: Posted) -> None:
    reply = replies.open("r", 0.0, 60.0)
    reply.published = True
    replies.on_claim(claim("r"))
    bus.take()
    replies.close(reply)
    replies.close(reply)
    assert bus.take() == [
        ("holder.1", encode(Notice("r", "c1", Gone()))),
        ("control.cancel.r", encode(Cancel("r"))),
    ]
    assert len(replies) == 0


async def test_tokens_for_a_client_that_has_left_are_answered_by_another_cancel(replies: Replies, bus: Posted) -> None:
    reply = replies.open("r", 0.0, 60.0)
    replies.on_claim(claim("r"))
    replies.close(reply)
    bus.take()
    replies.on_frames(message([tokens("r", 0, "Par")]))
    assert bus.take() == [("control.cancel.r", encode(Cancel("r")))]


async def test_a_request_that_was_never_published_is_not_cancelled(replies: Replies, bus: Posted) -> None:
    replies.close(replies.open("r", 0.0, 60.0))
    assert bus.take() == []


async def test_only_the_first_end_counts(replies: Replies) -> None:
    reply = replies.open("r", 0.0, 60.0)
    replies.fail_all(EngineFailed("First.").body())
    replies.fail_all(EngineFailed("Second.").body())
    await reply.everything()
    assert reply.end == EngineFailed("First.").body()


async def test_ended_requests_answer_whole_until_they_are_forgotten(
    replies: Replies, bus: Posted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WHOLE_REMEMBERED_MAX", 2)
    for request in ("first", "second", "third"):
        replies.open(request, 0.0, 60.0)
        replies.on_claim(claim(request))
        replies.on_frames(failed(request))
    bus.take()
    for request in ("first", "second", "third"):
        replies.on_frames(failed(request))
    assert [data for _, data in bus.take()] == [encode(Gone()), encode(Whole()), encode(Whole())]


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x91\x93\xa6tokens\x02\xa1r", encode({"type": "claim"}), encode([1])])
async def test_what_cannot_be_read_is_dropped(replies: Replies, bus: Posted, data: bytes) -> None:
    replies.on_claim(message(data, "asker"))
    replies.on_frames(message(data, "asker"))
    assert bus.take() == []


async def test_without_a_connection_nothing_is_said_and_nothing_breaks(replies: Replies, bus: Posted) -> None:
    replies.open("r", 0.0, 60.0)
    bus.lost = True
    replies.on_claim(claim("r"))
    bus.lost = False
    replies.on_claim(claim("r"))
    assert bus.take() == [("asker", encode(Go()))]
