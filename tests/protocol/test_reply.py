"""Replies: in order, once, whole or with an error, whatever the network does to the frames."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ErrorBody
from pipeline.limits import REPEAT_PERIOD_S
from pipeline.protocol.messages import (
    Claim,
    Done,
    Failed,
    Fenced,
    From,
    Go,
    Gone,
    Notice,
    Tokens,
    Usage,
    Whole,
    pack_ids,
)
from pipeline.protocol.pieces import Choice, Extra
from pipeline.protocol.reply import Heard, Outbox, Piece, Receiver, joined

USAGE = Usage(
    prompt_tokens=3,
    completion_tokens=0,
    cached_tokens=0,
    decode_cached_tokens=0,
    prefill_generated_tokens=1,
    prefill="p",
    decode="d",
)


def claim(name: str, follows: str | None = None) -> Claim:
    return Claim(request="r", claim=name, epoch="e", holder=f"holder.{name}", ack="$JS.ACK.x", follows=follows)


def held(name: str = "a") -> tuple[Receiver, Outbox]:
    receiver = Receiver("r")
    receiver.claim(claim(name))
    return receiver, Outbox("r", name)


def sent(outbox: Outbox, ids: list[int], text: str) -> Tokens:
    frame = outbox.add(ids, text)
    assert frame is not None
    return frame


def done_of(outbox: Outbox) -> Done:
    outbox.end(0, "stop")
    return outbox.done(USAGE)


def test_tokens_are_delivered_in_order_and_the_end_is_said_once() -> None:
    receiver, outbox = held()
    assert receiver.frame(sent(outbox, [1], "Hel"), 0.0) == Heard(text="Hel", ids=(1,))
    assert receiver.frame(sent(outbox, [2, 3], "lo"), 0.0) == Heard(text="lo", ids=(2, 3))
    done = done_of(outbox)
    assert receiver.frame(done, 0.0) == Heard(answer=Whole(), end=done)
    assert receiver.frame(done, 0.0) == Heard(answer=Whole(), repeated=3)
    assert (list(receiver.ids), receiver.text) == ([1, 2, 3], "Hello")


def test_a_repeated_frame_is_counted_and_dropped() -> None:
    receiver, outbox = held()
    frame = sent(outbox, [1, 2], "x")
    receiver.frame(frame, 0.0)
    assert receiver.frame(frame, 0.0) == Heard(repeated=2)


def test_a_gap_asks_the_holder_once_a_period() -> None:
    receiver, outbox = held()
    sent(outbox, [1], "a")
    missing = Heard(notice=("holder.a", Notice("r", "a", From(0))))
    assert receiver.frame(sent(outbox, [2], "b"), 0.0) == missing
    assert receiver.frame(sent(outbox, [3], "c"), 0.01) == Heard()
    assert receiver.frame(sent(outbox, [4], "d"), REPEAT_PERIOD_S) == missing
    for frame in outbox.since(0):
        receiver.frame(frame, 1.0)
    assert receiver.text == "abcd"


def test_a_lost_tail_is_mended_from_the_end() -> None:
    receiver, outbox = held()
    receiver.frame(sent(outbox, [1], "a"), 0.0)
    sent(outbox, [2], "b")
    assert outbox.add([], "!") is None, "text without a token travels with the end"
    done = done_of(outbox)
    assert receiver.frame(done, 0.0) == Heard(text="b!", ids=(2,), answer=Whole(), end=done)


def test_held_back_text_goes_with_the_next_token() -> None:
    outbox = Outbox("r", "a")
    outbox.add([], "x")
    assert sent(outbox, [1], "y").text == "xy"


def test_frames_of_a_superseded_claim_are_refused_and_their_sender_is_told() -> None:
    receiver, old = held("a")
    receiver.frame(sent(old, [1], "a"), 0.0)
    receiver.claim(claim("b"))
    stale = sent(old, [2], "b")
    assert receiver.frame(stale, 0.0) == Heard(answer=Fenced(), notice=("holder.a", Notice("r", "a", Fenced())))
    assert receiver.text == "a"


def test_a_reply_that_begins_again_forgets_what_came_under_the_claim_before() -> None:
    receiver, old = held("a")
    receiver.frame(sent(old, [1, 2], "ab"), 0.0)
    assert receiver.claim(claim("a"), afresh=True) == Go(pack_ids([1, 2])), "the same claim once more goes on"
    assert receiver.claim(claim("c", follows="x"), afresh=True) == Fenced()
    assert list(receiver.ids) == [1, 2]
    assert receiver.claim(claim("b"), afresh=True) == Go()
    assert (list(receiver.ids), receiver.text) == ([], "")
    new = Outbox("r", "b")
    assert receiver.frame(sent(new, [1], "a"), 0.0).text == "a"
    done = done_of(new)
    assert receiver.frame(done, 0.0) == Heard(answer=Whole(), end=done)


def test_frames_of_a_claim_that_nobody_made_are_refused() -> None:
    assert Receiver("r").frame(Tokens(1, "r", "x", 0, b"", "x"), 0.0) == Heard(answer=Fenced())


def test_another_claim_continues_after_what_was_delivered() -> None:
    receiver, old = held("a")
    receiver.frame(sent(old, [1, 2], "ab"), 0.0)
    receiver.claim(claim("b"))
    new = Outbox("r", "b", delivered=list(receiver.ids))
    new.before = receiver.text
    assert receiver.frame(sent(new, [3], "c"), 0.0).text == "c"
    assert list(receiver.ids) == [1, 2, 3]
    sent(new, [4], "d")
    done = done_of(new)
    assert (done.text, done.index) == ("abcd", 4)
    assert receiver.frame(done, 0.0) == Heard(text="d", ids=(4,), answer=Whole(), end=done)


def test_several_replies_are_numbered_as_one_and_end_together() -> None:
    receiver, outbox = held()
    sent(outbox, [1], "a")
    lost = outbox.add([2], "x", 1, '{"t":2}')
    outbox.end(0, "stop", ".")
    last = outbox.add([3, 4], "yz", 1, '{"t":3},{"t":4}')
    assert lost is not None
    assert last is not None
    assert (lost.index, last.index) == (1, 2)
    outbox.end(1, "length")
    done = outbox.done(USAGE)
    assert done.index == outbox.length == 4
    assert done.choices == [
        Choice(pack_ids([1]), "a", "stop", "."),
        Choice(pack_ids([2, 3, 4]), "xyz", "length", None, '{"t":2},{"t":3},{"t":4}'),
    ]
    assert receiver.frame(outbox.since(0)[0], 0.0).pieces == (Piece(0, "a", (1,)),)
    assert receiver.frame(last, 0.0).notice is not None, "the gap is seen over all of them"
    assert receiver.frame(lost, 0.0).pieces == (Piece(1, "x", (2,), '{"t":2}'),)
    heard = receiver.frame(done, 0.0)
    assert heard.pieces == (Piece(1, "yz", (3, 4), '{"t":3},{"t":4}'),)
    assert sorted(receiver.ids) == [1, 2, 3, 4]
    assert receiver.text == "a"


def test_logprobs_that_came_in_several_frames_are_counted_with_their_commas() -> None:
    receiver, outbox = held()
    for token in (1, 2):
        frame = outbox.add([token], "a", logprobs=f'{{"t":{token}}}')
        assert frame is not None
        receiver.frame(frame, 0.0)
    outbox.add([3], "a", logprobs='{"t":3}')
    assert receiver.frame(done_of(outbox), 0.0).pieces == (Piece(0, "a", (3,), '{"t":3}'),)


def test_the_prompt_comes_with_the_first_tokens_of_a_claim() -> None:
    receiver, outbox = held()
    outbox.prompt_tokens, outbox.prompt = 2, pack_ids([8, 9])
    first, second = sent(outbox, [1], "a"), sent(outbox, [2], "b")
    assert first.extra == Extra(prompt_tokens=2, prompt=pack_ids([8, 9]))
    assert second.extra is None
    receiver.frame(first, 0.0)
    assert (receiver.prompt_tokens, receiver.prompt) == (2, pack_ids([8, 9]))
    assert done_of(outbox).prompt == pack_ids([8, 9])


def test_held_back_text_of_one_choice_does_not_go_with_another() -> None:
    outbox = Outbox("r", "a")
    outbox.add([], "x", 1)
    assert sent(outbox, [1], "a").text == "a"
    outbox.end(0, "stop")
    outbox.end(1, "stop")
    assert outbox.ended == 2
    assert [choice.text for choice in outbox.done(USAGE).choices] == ["a", "x"]


def test_what_the_text_means_comes_in_pieces_and_what_is_lost_at_the_end() -> None:
    receiver, outbox = held()
    first = outbox.add([1], "a", message='{"d":1}')
    assert first is not None
    assert receiver.frame(first, 0.0).pieces == (Piece(0, "a", (1,), "", '{"d":1}'),)
    assert outbox.add([], "", message='{"d":2}') is None, "a delta without a token goes with the next"
    second = outbox.add([2], "b", message='{"d":3}')
    assert second is not None
    assert receiver.frame(second, 0.0).message == '{"d":2},{"d":3}'
    outbox.add([3], "", message='{"d":4}')
    outbox.add([], "", message='{"d":5}')
    done = done_of(outbox)
    assert done.choices[0].message == '{"d":1},{"d":2},{"d":3},{"d":4},{"d":5}'
    assert receiver.frame(done, 0.0).pieces == (Piece(0, "", (3,), "", '{"d":4},{"d":5}'),)


def test_a_message_alone_is_news() -> None:
    receiver, outbox = held()
    receiver.frame(sent(outbox, [1], "a"), 0.0)
    outbox.add([], "", message='{"content":"a"}')
    assert receiver.frame(done_of(outbox), 0.0).pieces == (Piece(0, "", (), "", '{"content":"a"}'),)


def test_news_is_joined_by_choice() -> None:
    pieces = [Piece(0, "a", (1,), "{}"), Piece(1, "x", (2,)), Piece(0, "b", (3,), "{}")]
    assert joined(pieces) == [Piece(0, "ab", (1, 3), "{},{}"), Piece(1, "x", (2,))]
    assert joined(pieces[:1]) == pieces[:1]
    assert joined([]) == []


def test_an_error_ends_the_reply() -> None:
    receiver, _ = held()
    failed = Failed(1, "r", "a", 0, ErrorBody(message="m", type="t", code="c", status=500))
    assert receiver.frame(failed, 0.0) == Heard(answer=Whole(), end=failed)
    assert receiver.frame(failed, 0.0).end is None


def test_when_the_client_leaves_the_holder_is_told_and_everybody_after_it() -> None:
    receiver, outbox = held()
    assert receiver.leave() == ("holder.a", Notice("r", "a", Gone()))
    assert receiver.leave() is None
    assert receiver.frame(sent(outbox, [1], "x"), 0.0) == Heard(answer=Gone())
    assert receiver.claim(claim("b")) == Gone()


def test_leaving_before_any_claim_or_after_the_end_tells_nobody() -> None:
    assert Receiver("r").leave() is None
    receiver, outbox = held()
    receiver.frame(done_of(outbox), 0.0)
    assert receiver.leave() is None


def test_a_gap_before_any_claim_cannot_ask_anybody() -> None:
    receiver = Receiver("r")
    receiver.arbiter.gone = False
    assert receiver.frame(Tokens(1, "r", "a", 5, b"", ""), 0.0).notice is None


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), max_size=8), st.randoms(use_true_random=False))
def test_whatever_is_lost_repeated_or_reordered_each_token_arrives_once_and_in_order(
    steps: list[list[int]], chance: object
) -> None:
    receiver, outbox = held()
    frames = [sent(outbox, ids, f"<{','.join(map(str, ids))}>") for ids in steps]
    wire: list[Tokens | Done] = [frame for frame in frames * 2 if chance.random() < 0.7]  # type: ignore[attr-defined]
    chance.shuffle(wire)  # type: ignore[attr-defined]
    text = "".join(receiver.frame(frame, 0.0).text for frame in [*wire, done_of(outbox)])
    assert text == "".join(frame.text for frame in frames)
    assert list(receiver.ids) == [token for ids in steps for token in ids]
    assert isinstance(receiver.frame(done_of(outbox), 0.0).answer, Whole)
    assert not isinstance(receiver.frame(done_of(outbox), 0.0).end, Failed)
