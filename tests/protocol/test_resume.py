"""Resuming: what can be continued after its worker died, and what cannot is said, not spliced."""

from typing import Any

import pytest

from pipeline.errors import ReplyLost
from pipeline.protocol.resume import begins_at_prefill, check_resumable


@pytest.mark.parametrize(
    "chat",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "stop": ["."], "min_tokens": 5},
        {"temperature": 0, "seed": 7},
        {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}, "repetition_penalty": 1.0},
    ],
)
def test_a_reply_that_depends_on_its_tokens_alone_is_continued(chat: dict[str, Any]) -> None:
    check_resumable(chat, [1, 2])
    assert begins_at_prefill(chat, [])
    assert not begins_at_prefill(chat, [1]), "it has begun"


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        ({"seed": 7, "temperature": 0.5}, "seed"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"temperature": 0, "seed": 7, "frequency_penalty": 1}, "seed"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{}]}, "tools"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 2}, "n"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs"),
        ({"repetition_detection": {}}, "repetition_detection"),
        ({"bad_words": ["not this"]}, "bad_words"),
        ({"watermarking": True}, "watermarking"),
        ({"logprob_token_ids": [3]}, "logprob_token_ids"),
        ({"vllm_xargs": {"a_processor_of_the_operators": 1}}, "vllm_xargs"),
    ],
)
def test_a_reply_with_more_state_starts_again_or_ends_with_an_error(chat: dict[str, Any], field: str) -> None:
    check_resumable(chat, [])
    assert not begins_at_prefill(chat, [])
    with pytest.raises(ReplyLost) as caught:
        check_resumable(chat, [1, 2])
    assert caught.value.param == field
    assert "2 tokens" in caught.value.message
    assert caught.value.retryable
