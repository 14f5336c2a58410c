"""Replay of a trace: its times, its lengths, its shared prefixes."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from pipeline.bench import replay, template
from pipeline.bench.template import Template
from pipeline.cli.client import Gateway
from pipeline.errors import OperatorError
from pipeline.protocol.messages import pack_ids
from pipeline.protocol.traces import Line, block_hashes
from tests.bench.server import refusal, serving
from workers.engines.simulated.words import prompt_of

SIMULATED = Template(head=4, tail=5)
"""START user NEWLINE "Read" … END NEWLINE START assistant NEWLINE."""

LINES = (
    Line(1000, 1307, 32, [0, 1, 2]),
    Line(1500, 1307, 13, [0, 1, 3]),
    Line(2000, 600, 5, [0, 4]),
    Line(2000, 2048, 5, [7, 8, 9, 10]),
    Line(2000, 512 + 8, 1, [0, 5]),
    Line(2000, 12, 1, [11]),
)


def prompts(lines: tuple[Line, ...], run: str = "a") -> list[list[int]]:
    """As the simulated engine reads them."""
    return [prompt_of(msgspec.json.decode(order.body)) for order in replay.orders(lines, SIMULATED, run)]


def written(path: Path, *rows: str) -> Path:
    trace = path / "trace.jsonl"
    trace.write_text("\n".join(rows), "utf-8")
    return trace


def test_prompts_and_replies_have_exactly_the_lengths_of_the_trace() -> None:
    assert [len(prompt) for prompt in prompts(LINES)] == [line.input_length for line in LINES]
    bodies = [msgspec.json.decode(order.body) for order in replay.orders(LINES, SIMULATED, "a")]
    assert [body["max_tokens"] for body in bodies] == [line.output_length for line in LINES]
    assert all(body["ignore_eos"] for body in bodies)


def test_equal_hashes_are_equal_prefixes_and_other_hashes_are_none() -> None:
    hashes = [block_hashes(b"s", "", pack_ids(prompt)) for prompt in prompts(LINES)]
    for one, mine in zip(LINES, hashes, strict=True):
        for other, theirs in zip(LINES, hashes, strict=True):
            assert shared_names(one, other) == shared_hashes(mine, theirs)


def shared_names(one: Line, other: Line) -> int:
    return next(
        (at for at, (mine, theirs) in enumerate(zip(one.hash_ids, other.hash_ids, strict=False)) if mine != theirs),
        min(len(one.hash_ids), len(other.hash_ids)),
    )


def shared_hashes(one: bytes, other: bytes) -> int:
    count = 0
    while 8 * count < min(len(one), len(other)) and one[8 * count : 8 * count + 8] == other[8 * count : 8 * count + 8]:
        count += 1
    return count


def test_what_shares_a_first_block_is_one_creators() -> None:
    assert [order.creator for order in replay.orders(LINES, SIMULATED, "a")] == [
        "trace-0", "trace-0", "trace-0", "trace-7", "trace-0", "trace-11",
    ]  # fmt: skip


def test_another_run_has_other_text() -> None:
    assert prompts(LINES, "a") == prompts(LINES, "a")
    assert prompts(LINES, "a")[0][:20] != prompts(LINES, "b")[0][:20]


def test_times_count_from_the_first_line_and_run_faster() -> None:
    assert list(replay.times_s(LINES[:3], 1.0)) == [0.0, 0.5, 1.0]
    assert list(replay.times_s(LINES[:3], 2.0)) == [0.0, 0.25, 0.5]


def test_a_prompt_shorter_than_the_template_gets_one_word() -> None:
    words = replay.words_of(Line(0, 3, 1, [1]), Template(head=600, tail=5), "a")
    assert len(words.split()) == 1


def test_where_a_word_is_more_than_a_token_lengths_are_about_right() -> None:
    words = replay.words_of(Line(0, 1000, 1, [1, 2]), Template(head=10, tail=10, tokens_per_word=2.0), "a").split()
    assert len(words) == pytest.approx(490, abs=2)


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    late = '{"timestamp": 30, "input_length": 600, "output_length": 2, "hash_ids": [4, 5], "chat_id": 7}'
    early = '{"timestamp": 10.5, "input_length": 1, "output_length": 1, "hash_ids": [4]}'
    assert replay.read(written(tmp_path, late, "", early)) == [Line(10.5, 1, 1, [4]), Line(30, 600, 2, [4, 5])]


def test_blocks_without_a_name_are_shared_with_nobody(tmp_path: Path) -> None:
    row = '{"timestamp": 0, "input_length": 1030, "output_length": 2, "hash_ids": [4]}'
    one, other = replay.read(written(tmp_path, row, row))
    assert len(one.hash_ids) == 3
    assert one.hash_ids[0] == other.hash_ids[0] == 4
    assert not {*one.hash_ids[1:]} & {*other.hash_ids[1:]}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["{}"], "Line 1 of .* required field `timestamp`"),
        (['{"timestamp": 0, "input_length": 1, "output_length": 1}', "nonsense"], "Line 2 of .* is no line of a trace"),
        (['{"timestamp": 0, "input_length": 0, "output_length": 1}'], "lengths 1 or more"),
        ([""], "is empty"),
    ],
)
def test_what_is_no_trace_is_named_with_its_place(tmp_path: Path, rows: list[str], words: str) -> None:
    with pytest.raises(OperatorError, match=words):
        replay.read(written(tmp_path, *rows))


def test_a_trace_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "TRACE_LINES_MAX", 1)
    row = '{"timestamp": 0, "input_length": 1, "output_length": 1}'
    with pytest.raises(OperatorError, match="more than 1 lines"):
        replay.read(written(tmp_path, row, row))


def test_a_file_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="No such file"):
        replay.read(tmp_path / "none.jsonl")


def asked(answer: str, status: str = "200 OK") -> Template:
    async def main() -> Template:
        async with serving(lambda number: [refusal(status, answer.split("|")[number])]) as served:
            return await template.ask(Gateway(served.url), {})

    return asyncio.run(main())


def test_a_template_is_found_by_what_two_prompts_have_in_common() -> None:
    def answer(count: int, first: int) -> str:
        ids = [1, 2, 3, 4, *range(first, first + count), 9, 9]
        usage = {"prompt_tokens": len(ids)}
        return msgspec.json.encode({"usage": usage, "prompt_token_ids": ids}).decode()

    assert asked(f"{answer(256, 1000)}|{answer(128, 2000)}") == Template(4, 2)


def test_without_ids_the_whole_template_counts_as_head() -> None:
    assert asked('{"usage":{"prompt_tokens":300}}|{"usage":{"prompt_tokens":172}}') == Template(44, 0)


def test_a_vocabulary_of_other_words_is_seen() -> None:
    found = asked('{"usage":{"prompt_tokens":532}}|{"usage":{"prompt_tokens":276}}')
    assert (found, found.exact) == (Template(20, 0, 2.0), False)


def test_a_gateway_that_refuses_is_an_operators_error() -> None:
    with pytest.raises(OperatorError, match="HTTP 401: No key"):
        asked('{"error":{"message":"No key."}}', "401 Unauthorized")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("<html>}|", "no gateway: JSON is malformed"),
        ('{"id":"chat"}|', "no gateway: Object missing required field `usage`"),
        ('{"usage":{}}|{"usage":{}}', "no more tokens in a longer prompt"),
    ],
)
def test_what_is_no_gateway_is_an_operators_error(answer: str, words: str) -> None:
    with pytest.raises(OperatorError, match=words):
        asked(answer)


def test_no_gateway_is_an_operators_error() -> None:
    with pytest.raises(OperatorError, match="No gateway answers"):
        asyncio.run(template.ask(Gateway("http://127.0.0.1:1"), {}))
