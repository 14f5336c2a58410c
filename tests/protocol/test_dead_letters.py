"""Dead letters: what a copy says, how it is replayed, and what the keeper decides."""

import msgspec
import pytest

from pipeline.errors import InvalidField, PromptTooLong
from pipeline.limits import AGES_MAX, EXPIRED_AFTER_S, MESSAGE_BYTES_MAX
from pipeline.protocol import dead_letters
from pipeline.protocol.dead_letters import Ages, Item, Judgement, Letter
from pipeline.protocol.intake import Rules
from pipeline.protocol.messages import Answer, Fenced, From, Go, Gone, Whole, encode
from pipeline.protocol.subjects import AckSubject

SUBJECT = "requests.shard.3.interactive.ada~1.ada"
ACK = AckSubject("REQUESTS_interactive", "s3", 2, 17, 1000.25, 5)
RULES = Rules(reply_subjects=("_INBOX.>",), timeout_max_s={"interactive": 60.0, "batch": 600.0})
LETTER = dead_letters.write("malformed", SUBJECT, ACK, PromptTooLong("Too long:\r\n «5000» tokens.", param="messages"))
BODY = {"type": "chat", "messages": [{"role": "user", "content": "Hi"}], "reply_to": "_INBOX.a", "claim_at": "_INBOX.c"}


# What a copy says


def test_a_letter_survives_its_headers() -> None:
    read = dead_letters.read("dlq.malformed.interactive", LETTER.headers())
    assert read == LETTER
    assert (read.reason, read.code, read.param) == ("malformed", "context_length_exceeded", "messages")
    assert (read.stream, read.sequence, read.stored_at_s, read.deliveries) == ("REQUESTS_interactive", 17, 1000.25, 2)


def test_why_is_one_line_of_ascii_of_bounded_length() -> None:
    assert LETTER.why == "Too long: \\xab5000\\xbb tokens."
    long = dead_letters.write("malformed", SUBJECT, ACK, InvalidField("x" * 5000))
    assert len(long.why) == 512


def test_a_letter_knows_whose_request_it_was() -> None:
    assert LETTER.request is not None
    assert (LETTER.klass, LETTER.request.affinity, LETTER.request.creator) == ("interactive", "ada~1", "ada")
    placeless = Letter(reason="terminated", stream="REQUESTS_batch", sequence=4)
    assert (placeless.request, placeless.klass) == (None, "batch")


def test_a_copy_has_one_id_whoever_makes_it() -> None:
    again = dead_letters.write("exhausted", SUBJECT, ACK, InvalidField("another reason"))
    assert again.msg_id == LETTER.msg_id == "REQUESTS_interactive-17-1000250"


def test_what_somebody_else_has_put_there_is_read_as_far_as_it_goes() -> None:
    read = dead_letters.read("dlq.odd.interactive", {"Headrace-Sequence": "x", "Headrace-Body": "half", "Other": "1"})
    assert read == Letter(reason="odd")


@pytest.mark.parametrize("body", ["whole", "deflated", "missing"])
def test_each_form_of_a_copy_is_read_back(body: str) -> None:
    copy = next(copy for copy in dead_letters.copies(LETTER, b"text " * 100, {}) if copy.letter.body == body)
    letter = dead_letters.read("dlq.malformed.interactive", copy.headers)
    assert letter.body == body
    if body == "missing":
        with pytest.raises(InvalidField, match="not kept"):
            dead_letters.content(letter, copy.data)
    else:
        assert dead_letters.content(letter, copy.data) == b"text " * 100


def test_the_copies_of_the_largest_request_become_smaller_and_the_last_one_is_small() -> None:
    data = b"{}" * (MESSAGE_BYTES_MAX // 2)
    headers = {"Reply-To": "_INBOX.a", "nats-msg-id": "m", "Nats-TTL": "1", "headrace-reason": "of an earlier life"}
    whole, deflated, missing = dead_letters.copies(LETTER, data, headers)
    assert len(whole.data) == MESSAGE_BYTES_MAX > 100 * len(deflated.data)
    assert missing.data == b""
    assert sum(map(len, [*missing.headers, *missing.headers.values()])) < 1000
    assert whole.headers == {"Reply-To": "_INBOX.a", **LETTER.headers()}


def test_of_a_request_that_is_gone_only_its_place_is_kept() -> None:
    placeless = Letter(reason="terminated", stream="REQUESTS_batch", sequence=4, body="missing")
    (copy,) = dead_letters.copies(placeless, b"", None)
    assert (copy.letter, copy.data) == (placeless, b"")


def test_a_damaged_body_is_said() -> None:
    with pytest.raises(InvalidField, match="damaged"):
        dead_letters.content(msgspec.structs.replace(LETTER, body="deflated"), b"not deflated")


# Once more


def test_a_replay_is_the_request_as_it_came() -> None:
    copy = next(dead_letters.copies(LETTER, b"body", {"Reply-To": "_INBOX.a", "Nats-Msg-Id": "old"}))
    replay = dead_letters.replay(LETTER, copy.data, copy.headers)
    assert replay == dead_letters.Replay("requests.in.interactive.ada~1.ada", b"body", {"Reply-To": "_INBOX.a"})


@pytest.mark.parametrize("encoder", [msgspec.json.encode, encode])
def test_a_replay_for_somebody_else_keeps_the_encoding_and_forgets_the_old_receiver(encoder: object) -> None:
    assert callable(encoder)
    headers = {"reply-to": "_INBOX.a", "Claim-At": "_INBOX.c", "traceparent": "1"}
    replay = dead_letters.replay(LETTER, encoder({**BODY, "receiver": "gateway/1"}), headers, "replies.operator.1")
    decode = msgspec.json.decode if encoder is msgspec.json.encode else msgspec.msgpack.decode
    assert decode(replay.data) == {"type": "chat", "messages": BODY["messages"], "reply_to": "replies.operator.1"}
    assert replay.headers == {"traceparent": "1"}


def test_a_replay_has_an_id_of_its_own_that_its_repetition_shares() -> None:
    assert dead_letters.replay_id(4, 1000.25) == "replay-4-1000250" != LETTER.msg_id


def test_what_cannot_be_replayed_says_why() -> None:
    with pytest.raises(InvalidField, match="whose request"):
        dead_letters.replay(Letter(reason="terminated"), b"", {})
    with pytest.raises(InvalidField, match="not kept"):
        dead_letters.replay(msgspec.structs.replace(LETTER, body="missing"), b"", {})
    with pytest.raises(InvalidField, match="not valid json"):
        dead_letters.replay(LETTER, b"not json", {}, "replies.operator.1")


# What the keeper works on


def advisory(stream: str = "REQUESTS_batch") -> bytes:
    return msgspec.json.encode({"type": "…", "stream": stream, "stream_seq": 7, "deliveries": 1000, "reason": "why"})


@pytest.mark.parametrize(
    ("subject", "data", "wanted"),
    [
        ("$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.REQUESTS_batch.s1", advisory(), "exhausted"),
        ("$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.REQUESTS_batch.s1", advisory(), "terminated"),
        ("keeper.expired.REQUESTS_batch.7", b"", "expired"),
        ("keeper.expired.REQUESTS_batch.x", b"", None),
        ("$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.DLQ.x", advisory("DLQ"), None),
        ("$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.REQUESTS_batch.s1", b"{}", None),
        ("$JS.EVENT.ADVISORY.CONSUMER.PAUSE.REQUESTS_batch.s1", advisory(), None),
    ],
)
def test_an_item_names_a_request_and_why_it_may_be_dead(subject: str, data: bytes, wanted: str | None) -> None:
    item = dead_letters.item(subject, data)
    assert (item and item.reason) == wanted
    if item is not None:
        assert (item.stream, item.sequence) == ("REQUESTS_batch", 7)


def test_what_a_scan_says_is_read_back() -> None:
    said = dead_letters.expired_subject("REQUESTS_interactive", 12)
    assert dead_letters.item(said, b"") == Item(reason="expired", stream="REQUESTS_interactive", sequence=12)


@pytest.mark.parametrize(
    ("answer", "tries", "judgement"),
    [
        (Go(), 1, Judgement.BURY),
        (Gone(), 1, Judgement.BURY_UNHEARD),
        (Whole(), 1, Judgement.REMOVE),
        (Fenced(), 9, Judgement.LEAVE),
        (From(0), 1, Judgement.ASK_AGAIN),
        (None, 1, Judgement.ASK_AGAIN),
        (None, 2, Judgement.ASK_AGAIN),
        (None, 3, Judgement.BURY_UNHEARD),
    ],
)
def test_the_keeper_does_what_the_receivers_answer_says(
    answer: Answer | None, tries: int, judgement: Judgement
) -> None:
    assert dead_letters.judge(answer, tries) is judgement


# What has aged out


@pytest.mark.parametrize(
    ("body", "deadline_s"),
    [
        ({**BODY, "timeout_ms": 500}, 1000.75),
        ({**BODY, "timeout_ms": 900_000}, 1060.25),
        (BODY, 1060.25),
        ({**BODY, "messages": []}, 1060.25),
        ("no map", 1060.25),
    ],
)
def test_a_request_expires_a_while_after_its_deadline(body: object, deadline_s: float) -> None:
    at_s = dead_letters.expired_at_s(SUBJECT, encode(body), {}, ACK, RULES)
    assert at_s == deadline_s + EXPIRED_AFTER_S


def test_what_is_young_cannot_have_expired() -> None:
    assert not dead_letters.may_expire(1000.0, 1000.0 + EXPIRED_AFTER_S - 0.1)
    assert dead_letters.may_expire(1000.0, 1000.0 + EXPIRED_AFTER_S)


def test_a_scan_goes_on_where_it_was_and_each_message_expires_once() -> None:
    ages = Ages()
    ages.begin(first=4, last=9)
    assert ages.next_sequence == 4
    ages.saw(4, at_s=30.0)
    ages.saw(6, at_s=10.0)
    assert ages.next_sequence == 7
    assert (ages.expired(9.9), ages.expired(10.0), ages.expired(99.0)) == (None, 6, 6)
    ages.told()
    assert (ages.expired(10.0), ages.expired(30.0)) == (None, 4)
    ages.told()
    assert ages.expired(99.0) is None
    ages.begin(first=5, last=9)
    assert ages.next_sequence == 7


def test_a_stream_that_was_made_anew_is_read_from_its_start() -> None:
    ages = Ages()
    ages.begin(first=1, last=500)
    ages.saw(500, at_s=10.0)
    ages.begin(first=1, last=3)
    assert (ages.next_sequence, ages.expired(99.0)) == (1, None)


def test_an_emptied_stream_is_not_taken_for_a_new_one() -> None:
    ages = Ages()
    ages.begin(first=1, last=500)
    ages.saw(500, at_s=10.0)
    ages.begin(first=501, last=500)
    assert (ages.next_sequence, ages.expired(99.0)) == (501, 500)


def test_what_a_scan_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AGES_MAX >= 200_000
    monkeypatch.setattr(dead_letters, "AGES_MAX", 2)
    ages = Ages()
    ages.saw(1, at_s=1.0)
    assert not ages.full
    ages.saw(2, at_s=1.0)
    assert ages.full
