"""Tool calls and reasoning, read from a reply's text by vLLM's own parsers. Imports vLLM.

A parser has state, so each choice has one of its own. Streamed replies become OpenAI's deltas, step by step; others one message,
at their end, which vLLM reads from the whole text and not from the deltas.
"""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionNamedToolChoiceParam
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.utils.tool_calls_utils import maybe_filter_parallel_tool_calls
from vllm.outputs import CompletionOutput, RequestOutput

from workers.engines.port import FinishReason

NOTHING_YET: Final = "{}"
"""The delta of tokens that mean nothing by themselves. It says that a parser is at work, too: the text is not the message."""


def wanted(online: Any, request: Any) -> bool:
    """Whether a reply is more than its text: it may reason, or call tools, or must not show what a parser would hide."""
    if online.parser is None:
        return False
    calls = bool(request.tools) and request.tool_choice != "none"
    return calls or online.parser.reasoning_parser_cls is not None or not request.include_reasoning


def adjust(online: Any, request: Any) -> Any:
    """The request as the renderer leaves it where a parser reads the reply: `required` becomes a grammar, for one."""
    return parser_of(online, request).adjust_request(request=request) if wanted(online, request) else request


def engine_arguments(online: Any, request: Any, prompt: Sequence[int]) -> dict[str, Any]:
    """What vLLM's engine is told of reasoning: a grammar holds from where it has ended."""
    parser = parser_of(online, request) if wanted(online, request) else None
    reasons = parser is not None and parser.reasoning_parser is not None
    return {
        "reasoning_ended": request.resolve_reasoning_ended(parser, list(prompt)),
        "reasoning_parser_kwargs": {"chat_template_kwargs": online.effective_chat_template_kwargs(request)}
        if reasons
        else None,
    }


def parser_of(online: Any, request: Any) -> Any:
    """A parser for one choice, or for looking at the request."""
    arguments = online.effective_chat_template_kwargs(request)
    tokenizer = online.renderer.tokenizer
    return online.parser(tokenizer, request.tools, chat_template_kwargs=arguments, model_config=online.model_config)


class Parsed:
    """One choice's message, as far as it has come. `prompt` are its token ids; `echo` is what its content begins with."""

    def __init__(self, online: Any, request: Any, prompt: Sequence[int], echo: str, *, streamed: bool) -> None:
        self._online = online
        self._request = request
        self._prompt = list(prompt)
        self._echo = echo
        self._streamed = streamed
        self._parser = parser_of(online, request)
        self._called = False
        self._text = ""
        self._ids: list[int] = []

    @property
    def reasoning_tokens(self) -> int | None:
        """How many of its tokens so far were reasoning; None where no parser of reasoning is named."""
        if self._parser.reasoning_parser is None:
            return None
        return int(self._parser.count_reasoning_tokens(tuple(self._ids)))

    async def read(self, output: Any, reason: FinishReason | None) -> tuple[str, Any]:
        """What a step adds: deltas or at the end the message, as `Step` carries it, and the reason as OpenAI has it."""
        self._ids += output.token_ids
        if self._streamed:
            return self._delta(output, reason)
        self._text += output.text
        return ("", None) if reason is None else await self._message(output)

    def _delta(self, output: Any, reason: FinishReason | None) -> tuple[str, Any]:
        delta = self._parser.parse_delta(
            delta_text=output.text,
            delta_token_ids=list(output.token_ids),
            request=self._request,
            prompt_token_ids=self._prompt,
            finished=reason is not None,
        )
        if delta is not None:
            self._called |= bool(delta.tool_calls)
            delta = maybe_filter_parallel_tool_calls(delta, self._request)
        named = isinstance(self._request.tool_choice, ChatCompletionNamedToolChoiceParam)
        said = NOTHING_YET if delta is None else delta.model_dump_json(exclude_unset=True)
        if self._echo:
            said, self._echo = f"{json.dumps({'content': self._echo})},{said}", ""
        return said, "tool_calls" if self._called and not named and reason == "stop" else reason

    async def _message(self, last: Any) -> tuple[str, Any]:
        """By the code with which `vllm serve` makes a whole reply, given this one choice."""
        request = self._request.model_copy(update={"logprobs": False, "echo": False, "add_generation_prompt": True})
        output = CompletionOutput(0, self._text, self._ids, None, None, None, last.finish_reason, last.stop_reason)

        async def results() -> Any:
            yield RequestOutput("", None, self._prompt, None, [output], finished=True)

        response = await _serving(self._online).chat_completion_full_generator(
            request,
            results(),
            "",
            "",
            [],
            self._online.renderer.tokenizer,
            SimpleNamespace(),
            self._parser,
        )
        (choice,) = response.choices
        message = {"content": None} | choice.message.model_dump(exclude_none=True)
        if self._request.echo:
            message["content"] = self._echo + (message["content"] or "")
        return json.dumps(message), choice.finish_reason


def _serving(online: Any) -> Any:
    """vLLM's serving code with the settings that this uses, and no server."""
    serving: Any = OpenAIServingChat.__new__(OpenAIServingChat)
    settings = {
        "parser_cls": online.parser,
        "enable_auto_tools": online.enable_auto_tools,
        "response_role": "assistant",
        "enable_prompt_tokens_details": False,
        "enable_per_request_metrics": False,
        "enable_log_outputs": False,
        "request_logger": None,
        "system_fingerprint": None,
        "_include_reasoning_tokens_details": False,
        "online_renderer": online,
        "model_config": online.model_config,
        "chat_template": online.chat_template,
        "chat_template_content_format": online.chat_template_content_format,
        "default_chat_template_kwargs": online.default_chat_template_kwargs,
    }
    vars(serving).update(settings)
    return serving
