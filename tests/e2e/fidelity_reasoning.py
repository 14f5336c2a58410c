"""What is asked where a parser of reasoning is named: `olmo3`, whose `</think>` is ordinary text, so that any model can write it.

The model served here does not reason. After a prompt that has begun a thought, a bias brings it to write the end of one. Where it
writes none, this parser takes all of a streamed reply for reasoning, and a whole one for content.
"""

from typing import Any, Final

from tests.e2e.fidelity_completions import MODEL, Body

PARSER: Final = "olmo3"

_USER: Final = {"role": "user", "content": "What is the capital of France?"}
_BEGUN: Final = {"role": "assistant", "content": "<think>The user asks for the capital of"}
_ENDS: Final = {"9617": 6, "17400": 6, "32853": -100}
"""Towards `</` and `think`, away from `thought`."""

_NARROW: Final = {"temperature": 1.0, "top_k": 1}
_TOOL: Final = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def _body(**fields: Any) -> Body:
    return {"model": MODEL, "messages": [_USER], "max_tokens": 12, "temperature": 0} | fields


def _thought(**fields: Any) -> Body:
    how = {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "logit_bias": _ENDS,
        "frequency_penalty": 2.0,
    }
    return _body(messages=[_USER, _BEGUN], max_tokens=20, **how) | fields


BOTH: Final[dict[str, Body]] = {
    "no thought": _body(),
    "thought": _thought(),
    "thought, cut": _thought(max_tokens=2),
    "thought hidden": _thought(include_reasoning=False),
    "thought hidden with its tokens": _thought(include_reasoning=False, logprobs=True, return_token_ids=True),
    "no thought hidden": _body(include_reasoning=False),
    "thought and ids": _thought(return_token_ids=True),
    "thought and logprobs": _thought(logprobs=True, top_logprobs=1),
    "thoughts": _thought(n=2) | _NARROW,
    "thought and stop": _thought(stop=["asking"]),
    "thought and echo": _thought(echo=True),
    "thought, echo, ids, logprobs": _thought(echo=True, return_token_ids=True, logprobs=True),
    "thought and prompt_logprobs": _thought(prompt_logprobs=0),
    "thought over": _body(
        messages=[_USER, {"role": "assistant", "content": "<think>Hm.</think>The"}],
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    "grammar": _body(structured_outputs={"choice": ["yes", "no"]}),
    "grammar, thought hidden": _body(structured_outputs={"choice": ["yes", "no"]}, include_reasoning=False),
    "tools": _thought(tools=[_TOOL]),
    "tool required": _body(tools=[_TOOL], tool_choice="required", max_tokens=30),
    "include_reasoning null": _body(include_reasoning=None),
}
"""Sent twice, whole and streamed with usage."""


def reasoning_requests() -> dict[str, Body]:
    """By name. A streamed one is named so."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return BOTH | {f"{name}, streamed": body | usage for name, body in BOTH.items()}
