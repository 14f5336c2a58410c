"""The window of a conversation moves in steps, and what is stored gives the same prompt every time."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InvalidField, PromptTooLong
from pipeline.limits import HISTORY_BYTES_MAX
from pipeline.protocol import turns
from pipeline.protocol.personas import Persona
from pipeline.protocol.turns import Sent, Turn, in_window, start_of

PERSONA = Persona(creator="ada", system="You are Ada.", template={"mood": "merry", "thinking": False})
NEW = {"role": "user", "content": "And you?"}


def turn(number: int, reply: str = "Fine.") -> Turn:
    message = {"role": "user", "content": f"Message {number}."}
    return Turn(number=number, request=f"r{number}", origin=f"R-{number}", message=message, reply=reply)


def prompt(told: list[Turn], tree: dict[str, Any] | None = None) -> dict[str, Any]:
    return turns.assembled(tree or {}, PERSONA, told, NEW, "conversation")


@given(finished=st.integers(0, 10_000), window=st.integers(0, 60), step=st.integers(1, 60))
def test_a_window_holds_between_window_and_window_and_a_step_and_starts_at_multiples_of_the_step(
    finished: int, window: int, step: int
) -> None:
    start = start_of(finished, window, step)
    held = finished - start
    assert start % step == 0
    if finished < window:
        assert start == 0, "all there is"
    else:
        assert window <= held < window + step
    later = start_of(finished + 1, window, step)
    assert later in (start, start + step), "it stays, or moves by a step"


@given(finished=st.integers(1, 60), kept=st.integers(15, 64))
def test_what_is_kept_is_enough_for_the_window(finished: int, kept: int) -> None:
    every = [turn(number) for number in range(1, finished + 1)]
    assert in_window(every[-kept:], 10, 5) == in_window(every, 10, 5) == every[start_of(finished, 10, 5) :]


@given(finished=st.integers(10, 200))
def test_of_a_step_of_turns_all_but_one_begin_with_the_prompt_before(finished: int) -> None:
    every = [turn(number) for number in range(1, finished + 7)]
    prompts = [prompt(in_window(every[:upto], 10, 5))["messages"] for upto in range(finished, finished + 6)]
    moved = [after[: len(before) - 1] != before[:-1] for before, after in itertools.pairwise(prompts)]
    assert sum(moved) == 1


@pytest.mark.parametrize(("origin", "seen"), [("R-4", [1, 2, 3]), ("R-2", [1]), ("R-1", [])])
def test_a_message_that_is_delivered_again_sees_what_was_said_before_it(origin: str, seen: list[int]) -> None:
    told = [turn(number) for number in (1, 2, 3)]
    assert [one.number for one in turns.before(told, origin)] == seen


def test_without_turns_there_is_no_history() -> None:
    assert in_window([], 10, 5) == []
    assert prompt([])["messages"] == [{"role": "system", "content": "You are Ada."}, NEW]


def test_a_prompt_is_persona_history_and_message_and_the_same_to_the_byte() -> None:
    tree = {"temperature": 0.5, "chat_template_kwargs": {"thinking": True}}
    told = [turn(1), turn(2, "Well.")]
    again = [turns.read_turn(msgspec.json.encode(one)) for one in told]
    made = prompt(told, tree)
    assert made["messages"] == [
        {"role": "system", "content": "You are Ada."},
        {"role": "user", "content": "Message 1."},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "Message 2."},
        {"role": "assistant", "content": "Well."},
        NEW,
    ]
    assert made["chat_template_kwargs"] == {"mood": "merry", "thinking": True}, "a request overrides its persona"
    assert made["temperature"] == 0.5
    assert msgspec.json.encode(prompt(again, tree)) == msgspec.json.encode(made)
    assert "messages" not in tree, "what was sent is left alone"


def test_a_persona_without_arguments_leaves_the_template_alone() -> None:
    plain = Persona(creator="ada", system="You are Ada.")
    assert "chat_template_kwargs" not in turns.assembled({}, plain, [], NEW, "conversation")


def test_what_was_really_sent_is_history_and_the_newest_word_wins() -> None:
    sent = [Sent(request="r1", text="Too long."), Sent(request="r1", text="Short."), Sent(request="r9", text="?")]
    assert [one.reply for one in turns.corrected([turn(1), turn(2)], sent)] == ["Short.", "Fine."]


def test_a_history_beyond_every_bound_names_the_conversation_and_the_remedy() -> None:
    with pytest.raises(PromptTooLong, match="begin a new conversation") as caught:
        prompt([turn(number, "x" * (HISTORY_BYTES_MAX // 10)) for number in range(1, 12)])
    assert caught.value.param == "conversation"


@pytest.mark.parametrize("data", [b"", b"no json", b"{}", b'{"type":"turn"}', b'{"request":"r","text":7}', b'"\xff"'])
def test_what_is_no_turn_and_no_word_is_said_so(data: bytes) -> None:
    for read in (turns.read_turn, turns.read_sent):
        with pytest.raises(InvalidField):
            read(data)


def test_an_editor_needs_no_tag() -> None:
    assert turns.read_sent(b'{"request":"r1","text":"Short."}') == Sent(request="r1", text="Short.")
