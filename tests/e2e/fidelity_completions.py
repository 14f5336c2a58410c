"""What is asked of completions, and of prompts themselves: `echo` and `prompt_logprobs`. See `fidelity_requests`."""

from typing import Any, Final

Body = dict[str, Any]

MODEL: Final = "smollm2-135m-instruct"
_USER: Final = {"role": "user", "content": "What is the capital of France?"}
_BEGUN: Final = [_USER, {"role": "assistant", "content": "The capital"}]
_CONTINUED: Final[Body] = {"messages": _BEGUN, "continue_final_message": True, "add_generation_prompt": False}
_NARROW: Final = {"temperature": 1.0, "top_k": 1}
_TEXT: Final = "The capital of France is"
_TOKENS: Final = [504, 3575, 282, 4649, 314]
_LONG: Final = "Paris is the capital of France, and Rome is the capital of Italy. " * 12
_SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}},
    "required": ["name"],
    "additionalProperties": False,
}


def _body(prompt: Any = _TEXT, **fields: Any) -> Body:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 10, "temperature": 0} | fields


def _chat(**fields: Any) -> Body:
    return {"model": MODEL, "messages": [_USER], "max_tokens": 10, "temperature": 0} | fields


BOTH: Final[dict[str, Body]] = {
    "text": _body(),
    "tokens": _body(_TOKENS),
    "texts": _body([_TEXT, "One, two, three,"]),
    "lists of tokens": _body([_TOKENS, _TOKENS[:3], [504]]),
    "one text in a list": _body([_TEXT]),
    "one list of tokens in a list": _body([_TOKENS]),
    "sixteen texts": _body([f"{number}, {number + 1}," for number in range(16)], max_tokens=4),
    "long": _body(_LONG),
    "max_tokens unsaid": {"model": MODEL, "prompt": _TEXT, "temperature": 0},
    "max_tokens null": _body(max_tokens=None),
    "stop": _body(stop=["Paris"]),
    "stop included": _body(stop=[" Paris"], include_stop_str_in_output=True),
    "stop ids": _body(stop_token_ids=[7042]),
    "ignore_eos": _body(ignore_eos=True, max_tokens=40),
    "min_tokens": _body(min_tokens=8),
    "seed": _body(temperature=1.0, seed=7),
    "presence": _body(presence_penalty=1.5),
    "repetition": _body(repetition_penalty=1.3),
    "logit_bias": _body(logit_bias={"7042": -100}),
    "bad_words": _body(bad_words=["Paris"]),
    "n": _body(n=2) | _NARROW,
    "n of several": _body([_TEXT, "One, two,"], n=2) | _NARROW,
    "best_of": _body(best_of=3),
    "special tokens": _body("<|im_start|>user\nHi<|im_end|>\n", add_special_tokens=False, skip_special_tokens=False),
    "truncated": _body(_LONG, truncate_prompt_tokens=8),
    "truncated on the right": _body(_LONG, truncate_prompt_tokens=8, truncation_side="right"),
    "logprobs 0": _body(logprobs=0),
    "logprobs": _body(logprobs=2),
    "logprobs as ids": _body(logprobs=1, return_tokens_as_token_ids=True),
    "logprobs of ids": _body(logprobs=1, logprob_token_ids=[504, 7042]),
    "logprobs and stop": _body(logprobs=1, stop=["Paris"]),
    "logprobs of several": _body([_TEXT, "One, two,"], logprobs=1, n=2) | _NARROW,
    "return_token_ids": _body(return_token_ids=True),
    "return_token_ids of several": _body([_TEXT, _TEXT[:11]], return_token_ids=True),
    "echo": _body(echo=True),
    "echo of tokens": _body(_TOKENS, echo=True),
    "echo of several": _body([_TEXT, "One, two,"], echo=True, n=2) | _NARROW,
    "echo and logprobs": _body(echo=True, logprobs=1),
    "echo and logprobs 0": _body(_TOKENS, echo=True, logprobs=0),
    "echo, logprobs and n": _body([_TEXT, "One, two,"], echo=True, logprobs=1, n=2) | _NARROW,
    "echo and ids": _body(echo=True, return_token_ids=True),
    "echo alone": _body(echo=True, max_tokens=0),
    "echo alone and logprobs": _body(echo=True, max_tokens=0, logprobs=1),
    "echo alone, several, ids": _body([_TEXT, "One, two,"], echo=True, max_tokens=0, logprobs=0, return_token_ids=True),
    "echo of what is cached": _body(_LONG, echo=True, logprobs=1),
    "json_schema": _body(
        "Paris as JSON:",
        max_tokens=30,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    ),
    "regex": _body(structured_outputs={"regex": "[A-Z]{3}"}),
    "unknown field": _body(surprise=1),
    "suffix": _body(suffix="."),
    "prompt_logprobs": _body(prompt_logprobs=1),
    "prompt_logprobs 0": _body(prompt_logprobs=0),
    "prompt_logprobs of several": _body([_TEXT, "One, two,"], prompt_logprobs=1, logprobs=1),
    "prompt_logprobs of what is cached": _body(_LONG, prompt_logprobs=0),
    "prompt_logprobs and echo": _body(prompt_logprobs=2, echo=True, logprobs=1, n=2) | _NARROW,
}
"""Sent twice, whole and streamed with usage."""

WHOLE_ONLY: Final = frozenset({"echo, logprobs and n", "prompt_logprobs and echo"})
"""Streamed, `vllm serve` 0.32 ends some of these with `KeyError`: it has the prompt's logprobs with its first sequence alone."""

STREAMS: Final[dict[str, Body]] = {
    "no usage": _body(stream=True),
    "continuous usage": _body(
        [_TEXT, "One, two,"], stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "echo, continuous usage": _body(
        echo=True, n=2, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    | _NARROW,
}

ERRORS: Final[dict[str, Body]] = {
    "no prompt": {"model": MODEL},
    "prompt null": _body(None),
    "prompt empty": _body(""),
    "prompt a number": _body(7),
    "prompt mixed": _body(["a", 7]),
    "prompt of negative tokens": _body([-1]),
    "prompt of unknown tokens": _body([999_999]),
    "embeds": _body(prompt_embeds="AAAA"),
    "max_tokens 0": _body(max_tokens=0),
    "max_tokens negative": _body(max_tokens=-1),
    "too long": _body(max_tokens=5000),
    "prompt too long": _body("word " * 4000),
    "temperature": _body(temperature=-1),
    "n 0": _body(n=0),
    "n null": _body(n=None),
    "greedy n": _body(n=2),
    "logprobs negative": _body(logprobs=-2),
    "logprobs text": _body(logprobs="many"),
    "too many logprobs": _body(logprobs=50),
    "too many prompt_logprobs": _body(prompt_logprobs=50),
    "prompt_logprobs negative": _body(prompt_logprobs=-2),
    "prompt_logprobs all": _body(prompt_logprobs=-1),
    "logprobs of ids alone": _body(logprob_token_ids=[1]),
    "usage unstreamed": _body(stream_options={"include_usage": True}),
    "suffix and echo": _body(suffix=".", echo=True),
    "model": _body(model="another"),
    "salt": _body(cache_salt="a/b"),
    "bad regex": _body(structured_outputs={"regex": "(["}),
}

CHATS: Final[dict[str, Body]] = {
    "prompt_logprobs": _chat(prompt_logprobs=1),
    "prompt_logprobs 0": _chat(prompt_logprobs=0),
    "prompt_logprobs and logprobs": _chat(prompt_logprobs=2, logprobs=True, top_logprobs=1, n=2) | _NARROW,
    "echo": _chat(echo=True),
    "echo of what goes on": _chat(**_CONTINUED, echo=True),
    "echo of the user": _chat(add_generation_prompt=False, echo=True),
    "echo and logprobs": _chat(**_CONTINUED, echo=True, logprobs=True, top_logprobs=1),
    "echo, n, prompt_logprobs": _chat(**_CONTINUED, echo=True, n=2, prompt_logprobs=0, return_token_ids=True) | _NARROW,
}
"""Chats that ask for their prompt. Sent twice as well."""

CHAT_ERRORS: Final[dict[str, Body]] = {
    "too many prompt_logprobs": _chat(prompt_logprobs=50),
    "prompt_logprobs negative": _chat(prompt_logprobs=-2),
}
