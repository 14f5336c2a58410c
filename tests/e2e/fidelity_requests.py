"""What is asked of `vllm serve` and of Headrace: each parameter alone and with others, streamed and not, and what is refused.

Replies are comparable where they are greedy or where nothing is left to draw (`top_k = 1`): float32, but another batch.
"""

from typing import Any, Final

from tests.e2e import fidelity_completions as asked
from tests.e2e.fidelity_completions import MODEL, Body

_COMPLETION: Final = "completion: "
_USER: Final = {"role": "user", "content": "What is the capital of France?"}
_JSON: Final = {"role": "user", "content": "Describe Paris as JSON with name and country."}
_SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}
_NAMED: Final[Body] = {"type": "function", "function": {"name": "weather"}}
_WEATHER: Final = {"role": "user", "content": "What is the weather in Paris? Use the tool."}
_CALL: Final = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
_ANSWERED: Final = [
    _WEATHER,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "Sunny."},
]
_FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
_NARROW: Final = {"temperature": 1.0, "top_k": 1}
"""Greedy in all but name, which vLLM refuses for several replies."""

_WORD: Final = {"choice": ["yes", "no"]}


def _body(**fields: Any) -> Body:
    return {"model": MODEL, "messages": [_USER], "max_tokens": 12, "temperature": 0} | fields


BOTH: Final[dict[str, Body]] = {
    "plain": _body(),
    "max_completion_tokens": _body(max_completion_tokens=5),
    "length": _body(max_tokens=2),
    "system": _body(messages=[{"role": "system", "content": "Answer in one word."}, _USER]),
    "parts": _body(messages=[{"role": "user", "content": [{"type": "text", "text": "Say hi."}]}]),
    "many turns": _body(
        messages=[_USER, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Why?"}]
    ),
    "strange role": _body(messages=[{"role": "wizard", "content": "hi"}]),
    "developer": _body(messages=[{"role": "developer", "content": "Be short."}, _USER]),
    "top_k 1": _body(temperature=1.0, top_k=1),
    "hot and top_k 1": _body(temperature=2.0, top_k=1),
    "empty parts": _body(messages=[{"role": "user", "content": []}]),
    "top_p": _body(temperature=0.7, top_p=0.001),
    "min_p": _body(temperature=1.0, min_p=1.0),
    "seed": _body(temperature=1.0, seed=7, max_tokens=8),
    "stop string": _body(stop=" is"),
    "stop strings": _body(stop=["Paris", "zzz"]),
    "stop included": _body(stop=["Paris"], include_stop_str_in_output=True),
    "stop ids": _body(stop_token_ids=[7042, 282]),
    "min_tokens": _body(min_tokens=10, max_tokens=16),
    "ignore_eos": _body(ignore_eos=True, max_tokens=24),
    "special tokens": _body(skip_special_tokens=False, ignore_eos=True, max_tokens=24),
    "presence": _body(presence_penalty=1.5),
    "frequency": _body(frequency_penalty=1.5),
    "repetition": _body(repetition_penalty=1.3),
    "logit_bias": _body(logit_bias={"7042": -100}),
    "bad_words": _body(bad_words=["Paris"]),
    "allowed_token_ids": _body(allowed_token_ids=[504, 7042, 282, 2]),
    "continue": _body(
        messages=[_USER, {"role": "assistant", "content": "The capital"}],
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    "no generation prompt": _body(add_generation_prompt=False),
    "template": _body(chat_template_kwargs={"enable_thinking": False}),
    "cache_salt": _body(cache_salt="theirs"),
    "user": _body(user="ada"),
    "return_token_ids": _body(return_token_ids=True),
    "logprobs": _body(logprobs=True),
    "top_logprobs": _body(logprobs=True, top_logprobs=3),
    "top_logprobs as ids": _body(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True),
    "logprob_token_ids": _body(logprobs=True, logprob_token_ids=[504, 7042]),
    "logprobs and stop": _body(logprobs=True, top_logprobs=1, stop=["Paris"]),
    "logprobs and ids": _body(logprobs=True, return_token_ids=True),
    "n": _body(n=2) | _NARROW,
    "n and logprobs": _body(n=2, logprobs=True, top_logprobs=1) | _NARROW,
    "n and stop": _body(n=3, stop=[" is"], return_token_ids=True) | _NARROW,
    "n seeded": _body(n=2, temperature=1.0, seed=3, max_tokens=8),
    "json_object": _body(messages=[_JSON], response_format={"type": "json_object"}, max_tokens=40),
    "json_schema": _body(messages=[_JSON], response_format=_FORMAT, max_tokens=40),
    "text": _body(response_format={"type": "text"}),
    "choice": _body(structured_outputs=_WORD),
    "regex": _body(structured_outputs={"regex": "[A-Z]{3}"}),
    "grammar": _body(structured_outputs={"grammar": 'root ::= "Paris" | "Rome"'}),
    "schema and logprobs": _body(structured_outputs=_WORD, logprobs=True, n=2) | _NARROW,
    "tools auto": _body(tools=[_TOOL]),
    "tools auto, asked": _body(messages=[_WEATHER], tools=[_TOOL], tool_choice="auto", max_tokens=40),
    "tools required": _body(messages=[_WEATHER], tools=[_TOOL], tool_choice="required", max_tokens=60),
    "tool named": _body(messages=[_WEATHER], tools=[_TOOL], tool_choice=_NAMED, max_tokens=40),
    "tool named, cut": _body(messages=[_WEATHER], tools=[_TOOL], tool_choice=_NAMED, max_tokens=4),
    "tools required, one": _body(
        messages=[_WEATHER], tools=[_TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=60
    ),
    "tools, n and ids": _body(
        messages=[_WEATHER], tools=[_TOOL], tool_choice=_NAMED, n=2, return_token_ids=True, logprobs=True, max_tokens=30
    )
    | _NARROW,
    "tool answered": _body(messages=_ANSWERED, tools=[_TOOL], tool_choice="none"),
    "tools unused": _body(tools=[_TOOL], tool_choice="none"),
    "unknown field": _body(surprise=1),
    "priority": _body(priority=3),
    "nulls": _body(stop=None, seed=None, n=None, logprobs=None, top_p=None, tools=None, response_format=None),
}
"""Sent twice, whole and streamed with usage."""

STREAMS: Final[dict[str, Body]] = {
    "no usage": _body(stream=True),
    "continuous usage": _body(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "continuous usage with n": _body(
        n=2, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    | _NARROW,
    "stream_interval": _body(stream=True, stream_interval=4),
}

ERRORS: Final[dict[str, Body]] = {
    "no messages": {"model": MODEL, "messages": []},
    "messages missing": {"model": MODEL},
    "messages no list": _body(messages="hi"),
    "no role": _body(messages=[{"content": "hi"}]),
    "max_tokens 0": _body(max_tokens=0),
    "max_tokens negative": _body(max_tokens=-1),
    "max_tokens text": _body(max_tokens="many"),
    "too long": _body(max_tokens=5000),
    "prompt too long": _body(messages=[{"role": "user", "content": "word " * 4000}]),
    "temperature": _body(temperature=-0.1),
    "temperature too high": _body(temperature=2.5),
    "top_p": _body(top_p=0),
    "top_k": _body(top_k=-2),
    "n 0": _body(n=0),
    "greedy n": _body(n=2),
    "too many n": _body(n=99999),
    "top_logprobs alone": _body(top_logprobs=2),
    "too many logprobs": _body(logprobs=True, top_logprobs=99),
    "stop empty": _body(stop=[""]),
    "penalty": _body(presence_penalty=5),
    "min over max": _body(min_tokens=50),
    "logit_bias outside": _body(logit_bias={"999999": 1}),
    "bad schema": _body(response_format={"type": "json_schema"}),
    "bad format": _body(response_format={"type": "poem"}),
    "bad regex": _body(structured_outputs={"regex": "(["}),
    "two constraints": _body(structured_outputs={"regex": "a", "choice": ["a"]}),
    "both prompts": _body(continue_final_message=True, add_generation_prompt=True),
    "usage unstreamed": _body(stream_options={"include_usage": True}),
    "tool_choice unknown": _body(tools=[_TOOL], tool_choice=_NAMED | {"function": {"name": "sun"}}),
    "tools empty": _body(tools=[]),
    "tool_choice alone": _body(tool_choice="auto"),
    "model": _body(model="another"),
    "salt": _body(cache_salt="a/b"),
    "image": _body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
}


def all_requests() -> dict[str, Body]:
    """By name. A streamed one is named so."""
    chats = _named(BOTH | asked.CHATS, STREAMS, ERRORS | asked.CHAT_ERRORS)
    completions = _named(asked.BOTH, asked.STREAMS, asked.ERRORS, asked.WHOLE_ONLY)
    return chats | {f"{_COMPLETION}{name}": body for name, body in completions.items()}


def path_of(name: str) -> str:
    """Where a request of this name goes."""
    return "/v1/completions" if name.startswith(_COMPLETION) else "/v1/chat/completions"


def _named(
    both: dict[str, Body], streams: dict[str, Body], errors: dict[str, Body], whole_only: frozenset[str] = frozenset()
) -> dict[str, Body]:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = {f"{name}, streamed": body | usage for name, body in both.items() if name not in whole_only}
    return both | streamed | streams | {f"error: {name}": body for name, body in errors.items()}
