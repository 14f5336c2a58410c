"""Completions: what a prompt may be, and what may be asked of it."""

from typing import Any

import pytest

from pipeline.errors import InvalidField
from pipeline.limits import COMPLETION_PROMPTS_MAX, PROMPT_ENTRIES_MAX
from pipeline.protocol import completions
from pipeline.protocol.chat import to_part
from pipeline.protocol.completions import CompletionRequest

ECHO = {"type": "completion", "echo": True}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_is_text_or_token_ids_or_several_of_either(prompt: Any, prompts: list[Any]) -> None:
    assert to_part({"prompt": prompt}, CompletionRequest).prompts == prompts


@pytest.mark.parametrize("prompt", [["a", 1], [1, [2]], ["a", [1]], ["a"] * (COMPLETION_PROMPTS_MAX + 1)])
def test_mixed_prompts_and_too_many_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        _ = to_part({"prompt": prompt}, CompletionRequest).prompts
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", [None, "", [], 7, [-1], [1.5], [True], {}])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        to_part({"prompt": prompt}, CompletionRequest)
    assert (caught.value.param or "").startswith("prompt")


def test_a_message_of_the_queue_brings_one_prompt() -> None:
    completions.check_single(to_part({"prompt": [1, 2]}, CompletionRequest))
    with pytest.raises(InvalidField) as caught:
        completions.check_single(to_part({"prompt": ["a", "b"]}, CompletionRequest))
    assert caught.value.param == "prompt"


def test_without_a_length_a_completion_has_16_tokens_and_one_that_only_echoes_generates_one() -> None:
    assert to_part({"prompt": "a"}, CompletionRequest).reply_tokens_max == 16
    assert to_part({"prompt": "a", "max_tokens": 3}, CompletionRequest).reply_tokens_max == 3
    assert to_part({"prompt": "a", "max_tokens": 0}, CompletionRequest).reply_tokens_max == 1


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        ({"messages": []}, "chat"),
        ({"message": "a"}, "chat"),
        ({}, "chat"),
        ({"prompt": "a"}, "completion"),
        ({"type": "completion"}, "completion"),
        ({"type": "chat", "prompt": "a"}, "chat"),
    ],
)
def test_a_prompt_makes_a_completion_where_no_type_is_said(tree: dict[str, Any], kind: str) -> None:
    assert completions.kind_of(tree) == kind


@pytest.mark.parametrize("more", [{"messages": []}, {"message": "a"}])
def test_a_prompt_beside_messages_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as caught:
        completions.kind_of({"prompt": "a"} | more)
    assert caught.value.param == "prompt"


def test_a_completion_has_no_persona() -> None:
    completions.check_no_reference({"metadata": {"team": "crm"}})
    completions.check_no_reference({})
    with pytest.raises(InvalidField) as caught:
        completions.check_no_reference({"metadata": {"persona": "ada"}})
    assert caught.value.param == "metadata.persona"


@pytest.mark.parametrize(
    ("tree", "asked"),
    [
        ({}, None),
        ({"logprobs": True, "top_logprobs": 3}, None),
        ({"prompt_logprobs": 2}, 2),
        ({"prompt_logprobs": 0, "stream": True}, None),
        ({"echo": True}, 0),
        ({"echo": True, "top_logprobs": 2}, 2),
        ({"echo": True, "top_logprobs": None}, None),
        ({"echo": True, "stream": True}, None),
        (ECHO, None),
        (ECHO | {"logprobs": 3}, 3),
        (ECHO | {"logprobs": 3, "stream": True}, 3),
        (ECHO | {"logprobs": 3, "prompt_logprobs": 1}, 1),
        (ECHO | {"prompt_logprobs": 0, "stream": True}, None),
        ({"type": "completion", "logprobs": 3}, None),
    ],
)
def test_logprobs_of_the_prompt_are_asked_for_by_name_or_by_an_echo(tree: dict[str, Any], asked: int | None) -> None:
    assert completions.prompt_logprobs(tree) == asked


@pytest.mark.parametrize(
    ("tree", "name", "longest"),
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs", PROMPT_ENTRIES_MAX // 2),
        ({"prompt_logprobs": 5}, "prompt_logprobs", PROMPT_ENTRIES_MAX // 7),
        (ECHO | {"logprobs": 0, "n": 3}, "echo", PROMPT_ENTRIES_MAX // 8),
    ],
)
def test_more_of_a_prompt_than_a_message_carries_is_refused(tree: dict[str, Any], name: str, longest: int) -> None:
    completions.check_prompt_entries(tree, longest)
    completions.check_prompt_entries({}, longest + 1)
    with pytest.raises(InvalidField) as caught:
        completions.check_prompt_entries(tree, longest + 1)
    assert caught.value.param == name
