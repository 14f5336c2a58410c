"""Traces of traffic: what is hashed, who is told, and what comes out in which order."""

import random

import pytest

from pipeline.limits import RECORDER_SILENT_MAX_S, RECORDERS_MAX, TRACE_REORDER_S
from pipeline.protocol import traces
from pipeline.protocol.messages import encode, pack_ids
from pipeline.protocol.traces import (
    BLOCK_TOKENS,
    Line,
    Recorders,
    Recording,
    Traced,
    TraceWanted,
    block_hashes,
    traced_decoder,
    wanted_decoder,
)

SECRET = b"0123456789abcdef"
PROMPT = list(range(3 * BLOCK_TOKENS + 100))


def hashed(ids: list[int], salt: str = "s", secret: bytes = SECRET) -> list[bytes]:
    raw = block_hashes(secret, salt, pack_ids(ids))
    return [raw[at : at + 8] for at in range(0, len(raw), 8)]


def traced(at_s: float, *blocks: int, input_length: int = 100, output_length: int = 5) -> Traced:
    raw = b"".join(block.to_bytes(8, "little") for block in blocks)
    return Traced(stored_at_s=at_s, input_length=input_length, output_length=output_length, blocks=raw)


# Hashes


def test_every_block_has_a_hash_the_last_one_as_far_as_it_goes() -> None:
    assert len(hashed(PROMPT)) == len(set(hashed(PROMPT))) == 4
    assert len(hashed(PROMPT[:BLOCK_TOKENS])) == 1
    assert hashed([]) == []


def test_equal_prefixes_have_equal_hashes_up_to_the_first_block_that_differs() -> None:
    other = [*PROMPT]
    other[BLOCK_TOKENS + 1] += 1
    assert hashed(PROMPT)[:1] == hashed(other)[:1]
    assert not {*hashed(PROMPT)[1:]} & {*hashed(other)[1:]}, (
        "what follows stands on another prefix, though it is the same"
    )


def test_a_part_of_a_block_is_another_block() -> None:
    assert hashed(PROMPT)[:3] == hashed(PROMPT[:-1])[:3]
    assert hashed(PROMPT)[3] != hashed(PROMPT[:-1])[3]


def test_what_lies_in_anothers_cache_is_not_shared() -> None:
    assert not {*hashed(PROMPT, "s")} & {*hashed(PROMPT, "t")}


def test_without_the_secret_a_text_cannot_be_tried() -> None:
    assert not {*hashed(PROMPT)} & {*hashed(PROMPT, secret=b"another")}


# Who is told


def wanted(recorder: str, secret: bytes = SECRET) -> TraceWanted:
    return TraceWanted(recorder=recorder, secret=secret)


def test_nobody_is_told_before_somebody_asks() -> None:
    assert Recorders().live(0.0) == []


def test_a_recorder_is_told_while_it_asks() -> None:
    recorders = Recorders()
    assert recorders.asked(wanted("r1"), 0.0)
    assert not recorders.asked(wanted("r1"), 1.0), "known already"
    assert recorders.live(1.0 + RECORDER_SILENT_MAX_S) == [("r1", SECRET)]
    assert recorders.live(1.1 + RECORDER_SILENT_MAX_S) == []
    assert recorders.asked(wanted("r1"), 9.0), "new again"


def test_recorders_have_a_secret_each_and_a_bound() -> None:
    recorders = Recorders()
    for number in range(RECORDERS_MAX):
        assert recorders.asked(wanted(f"r{number}", b"%d" % number), 0.0)
    assert not recorders.asked(wanted("more"), 0.0)
    assert recorders.live(0.0) == [(f"r{number}", b"%d" % number) for number in range(RECORDERS_MAX)]
    assert recorders.asked(wanted("more"), 9.0), "the others have gone"


@pytest.mark.parametrize("name", ["", "a.b", "*", ">", "$JS.API"])
def test_a_name_that_would_be_another_subject_is_not_heard(name: str) -> None:
    recorders = Recorders()
    assert not recorders.asked(wanted(name), 0.0)
    assert recorders.live(0.0) == []


def test_a_secret_too_long_to_be_a_key_is_cut() -> None:
    recorders = Recorders()
    recorders.asked(wanted("r1", b"x" * 1000), 0.0)
    [(_, secret)] = recorders.live(0.0)
    assert hashed(PROMPT, secret=secret)


def test_both_messages_survive_the_wire() -> None:
    assert wanted_decoder.decode(encode(wanted("r1"))) == wanted("r1")
    assert traced_decoder.decode(encode(traced(1.0, 1, 2))) == traced(1.0, 1, 2)


# The recording


def test_hashes_become_small_numbers_in_the_order_of_their_appearance() -> None:
    recording = Recording()
    for one in (traced(1.0, 900, 901, input_length=1000), traced(2.0, 900, 777, output_length=9), traced(3.0, 5)):
        assert recording.add(one) == []
    assert recording.rest() == [
        Line(0, 1000, 5, [0, 1]),
        Line(1000, 100, 9, [0, 2]),
        Line(2000, 100, 5, [3]),
    ]
    assert recording.lines == 3
    assert recording.rest() == []


def test_lines_come_out_in_the_order_in_which_requests_came() -> None:
    recording, chance = Recording(), random.Random(1)
    times_s = [number * 0.1 for number in range(2000)]
    ended = sorted(times_s, key=lambda at_s: at_s + chance.random() * TRACE_REORDER_S * 0.9)
    lines = [line for at_s in ended for line in recording.add(traced(at_s, 1))]
    assert len(lines) > 500, "those that nothing older can precede"
    lines += recording.rest()
    assert [line.timestamp for line in lines] == [number * 100 for number in range(2000)]


def test_a_reply_that_took_very_long_comes_late_and_is_not_lost() -> None:
    recording = Recording()
    recording.add(traced(10.0, 1))
    assert [line.timestamp for line in recording.add(traced(10.0 + 2 * TRACE_REORDER_S, 2))] == [0]
    assert [line.timestamp for line in recording.add(traced(9.0, 3))] == [0], "never before the beginning"
    assert [line.timestamp for line in recording.rest()] == [2000 * TRACE_REORDER_S]


def test_lines_that_are_held_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "TRACE_LINES_HELD_MAX", 2)
    recording = Recording()
    assert recording.add(traced(1.0, 1)) == recording.add(traced(2.0, 2)) == []
    assert recording.add(traced(3.0, 3)) == [Line(0, 100, 5, [0])]


def test_a_block_that_was_not_seen_for_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "TRACE_BLOCKS_KNOWN_MAX", 2)
    recording = Recording()
    for at_s, block in enumerate((10, 11, 10, 12, 10, 11)):
        recording.add(traced(float(at_s), block))
    assert [line.hash_ids for line in recording.rest()] == [[0], [1], [0], [2], [0], [3]]
