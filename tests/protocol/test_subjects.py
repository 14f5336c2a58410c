"""Subjects: foreign ids are one token, injectively, and nothing else is let through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InvalidField
from pipeline.limits import CREATOR_TOKEN_BYTES_MAX
from pipeline.protocol import subjects
from pipeline.protocol.subjects import Shard


@pytest.mark.parametrize(
    ("creator", "expected"),
    [
        ("alice", "alice"),
        ("Al-ice_9", "Al-ice_9"),
        ("a.b", "a=2Eb"),
        ("*", "=2A"),
        (">", "=3E"),
        ("a b", "a=20b"),
        ("=", "=3D"),
        ("a~1", "a=7E1"),
        ("é", "=C3=A9"),
    ],
)
def test_a_creator_becomes_one_token(creator: str, expected: str) -> None:
    assert subjects.token(creator) == expected
    assert subjects.is_token(expected)


def test_a_long_creator_becomes_a_hash_of_bounded_length() -> None:
    long = subjects.token("x" * 500)
    assert long.startswith("=h")
    assert len(long) <= CREATOR_TOKEN_BYTES_MAX
    assert long != subjects.token("x" * 501)


def test_an_empty_creator_is_refused() -> None:
    with pytest.raises(InvalidField):
        subjects.token("")


@given(st.text(min_size=1), st.text(min_size=1))
def test_tokens_are_injective_and_safe(one: str, other: str) -> None:
    assert (subjects.token(one) == subjects.token(other)) == (one == other)
    assert subjects.is_token(subjects.token(one))


@pytest.mark.parametrize("text", ["", "a.b", "*", ">", "a b", "x" * 65, "é"])
def test_what_is_no_token_is_told_apart(text: str) -> None:
    assert not subjects.is_token(text)


def test_partition_is_fnv_1a() -> None:
    # 0xE40C292C is the published FNV-1a of "a".
    assert subjects.partition("a", 1 << 32) == 0xE40C292C
    assert 0 <= subjects.partition("alice", 16) < 16


def test_a_stored_subject_says_shard_affinity_and_creator() -> None:
    stored = subjects.parse_stored("requests.shard.7.interactive.alice~2.alice")
    assert stored == subjects.Stored(Shard("interactive", 7), "alice~2", "alice")
    assert (stored.shard.stream, stored.shard.consumer) == ("REQUESTS_interactive", "s7")


@pytest.mark.parametrize(
    "subject",
    ["requests.in.interactive.a.a", "requests.shard.x.interactive.a.a", "requests.shard.1.other.a.a", "a.b.c.d.e.f"],
)
def test_any_other_subject_is_no_stored_request(subject: str) -> None:
    with pytest.raises(InvalidField):
        subjects.parse_stored(subject)


def test_an_ack_subject_says_how_often_when_and_what_waits_behind() -> None:
    ack = subjects.parse_ack("$JS.ACK.REQUESTS_interactive.s3.2.17.19.1700000000500000000.4")
    assert ack == subjects.AckSubject("REQUESTS_interactive", "s3", 2, 17, 1700000000.5, 4)


@pytest.mark.parametrize("subject", ["$JS.ACK.a.b.1.2.3.4", "$JS.ACK._.hash.a.b.1.2.3.4.5", "x.ACK.a.b.1.2.3.4.5"])
def test_an_ack_subject_of_another_form_names_the_flag(subject: str) -> None:
    with pytest.raises(InvalidField, match="js_ack_fc_v2"):
        subjects.parse_ack(subject)


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("replies.>", "replies.a.b", True),
        ("replies.>", "replies", False),
        ("replies.>", "repliesx.a", False),
        ("_INBOX.>", "$JS.API.STREAM.PURGE.X", False),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.c.d", False),
        ("a.*.c", "a.b", False),
        ("a", "a", True),
        ("replies.>", "replies.>", False),
        ("replies.>", "replies.*", False),
        ("replies.>", "replies..a", False),
    ],
)
def test_an_allow_list_matches_as_nats_does(pattern: str, subject: str, expected: bool) -> None:
    assert subjects.matches(pattern, subject) is expected


def test_replies_to_the_stream_are_kept_whole() -> None:
    assert subjects.is_kept("replies.crm.r-1")
    assert not subjects.is_kept("_INBOX.x")


def test_every_subject_that_we_build_is_in_the_grammar() -> None:
    built = {
        subjects.request_in("interactive", "a", "b"): "requests.in.interactive.a.b",
        subjects.credit("d-1"): "credit.d-1",
        subjects.prefill("p-1"): "prefill.p-1",
        subjects.handoff("d-1"): "handoff.d-1",
        subjects.holder("p-1"): "holder.p-1",
        subjects.cancel("x.y"): "control.cancel.x=2Ey",
        subjects.presence("decode", "d-1"): "presence.decode.d-1",
        subjects.dead_letter("malformed", "batch"): "dlq.malformed.batch",
        subjects.trace_ask(): "trace.ask",
        subjects.trace_record("r1"): "trace.record.r1",
        subjects.turns("ada.c1"): "turns.ada.c1",
        subjects.chat_sent("ada.c1"): "chat.sent.ada.c1",
    }
    assert subjects.matches(subjects.cancel_any(), subjects.cancel("x.y"))
    assert subjects.trace("x.y") == "control.trace.x=2Ey"
    assert subjects.matches(subjects.trace_any(), subjects.trace("x.y"))
    assert not subjects.matches(subjects.cancel_any(), subjects.trace("x.y"))
    assert all(made == expected for made, expected in built.items())
