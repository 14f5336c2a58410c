"""A client's chat in vLLM's own words: its request, its template, its sampling parameters, its errors.

All of it is what `vllm serve` uses, so that a parameter means here what it means there. Imports vLLM.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, cast

import msgspec
from pydantic import TypeAdapter, ValidationError
from vllm.entrypoints.generate.base.serving import clamp_prompt_logprobs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.renderers.chat_utils import has_non_text_content
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from pipeline.errors import EngineDead, EngineFailed, InvalidField, PromptTooLong, ReplyError, RequestError
from pipeline.protocol.pieces import Echo
from workers.engines import launch, vllm_parsed
from workers.engines.port import FinishReason, Rendered, Step

ENVELOPE: Final = frozenset({"id", "reply_to", "claim_at", "timeout_ms", "type", "v"})
"""The pipeline's own keys, which travel beside the client's."""

OURS: Final = frozenset({"kv_transfer_params", "ec_transfer_params", "stream", "stream_options", "request_id"})
"""What a client may not decide in an engine. The first two reach into the scheduler, where a wrong value ends the process."""

_PROMPT_LOGPROBS: Final = TypeAdapter(list[dict[int, Logprob] | None])

TOO_LONG: Final = frozenset({"input_tokens", "input_text"})
"""vLLM's names for a prompt that does not fit."""


class Sampling(msgspec.Struct, frozen=True):
    """vLLM's request, its sampling parameters, and further arguments of the engine's `generate`."""

    request: Any
    parameters: Any
    arguments: dict[str, Any] = {}


def chat_request(chat: Mapping[str, Any]) -> Any:
    """vLLM's `ChatCompletionRequest` for a client's body. Leaves `chat` as it is.

    Raises `RequestError` where vLLM would refuse it, and where it asks for what this pipeline cannot deliver.
    """
    request = validated(ChatCompletionRequest, chat)
    if has_non_text_content(request.messages):
        raise InvalidField("Content other than text is not supported.", param="messages")
    if request.return_prompt_text:
        raise InvalidField(
            "`return_prompt_text` is not supported: ask for `return_token_ids`.", param="return_prompt_text"
        )
    return request


def validated(as_class: Any, tree: Mapping[str, Any]) -> Any:
    """vLLM's request for a client's body, which is left as it is. Raises `RequestError`."""
    body = {key: value for key, value in tree.items() if key not in ENVELOPE and key not in OURS}
    try:
        # vLLM's validators change messages in place.
        request = as_class(**copy.deepcopy(body), stream=bool(tree.get("stream")))
    except ValidationError as error:
        raise _invalid(error) from None
    except Exception as error:
        raise blame(error) from error
    if request.use_beam_search:
        raise InvalidField(
            "`use_beam_search` is not supported: its beams are further requests, one for each token, that no credit covers.",
            param="use_beam_search",
        )
    request.stream = True  # so that its sampling parameters yield deltas
    return request


def renderer(engine: Any, tool_parser: str = "", reasoning_parser: str = "") -> Any:
    """The renderer of `vllm serve` with its default options, and parsers. It renders in a thread of its own."""
    online = OnlineRenderer(
        model_config=engine.model_config,
        renderer=engine.renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=bool(tool_parser),
        tool_parser=tool_parser or None,
        reasoning_parser=reasoning_parser or None,
    )
    online.warmup()
    return online


async def render(engine: Any, online: Any, chat: Mapping[str, Any], defaults: Mapping[str, Any]) -> Rendered:
    """The prompt's tokens. Raises `RequestError` where the chat, the template or the length does not fit.

    Checks the sampling parameters as well: better refused before the prompt is computed than after.
    """
    request = chat_request(chat)
    try:
        result = await online.render_chat(request)
        verify(engine, parameters_of(request, _max_tokens(request, engine), defaults))
    except Exception as error:
        raise blame(error) from error
    if isinstance(result, ErrorResponse):
        raise refused(result)
    conversation, (engine_input,) = result
    echo = _last_turn(request, conversation) if request.echo else ""
    return Rendered(list(engine_input["prompt_token_ids"]), echo)


def _last_turn(request: Any, conversation: Any) -> str:
    """What `echo` repeats: the last message, where it is of who speaks."""
    role = "assistant" if request.add_generation_prompt else request.messages[-1]["role"]
    content = (conversation[-1].get("content") or "") if conversation and conversation[-1].get("role") == role else ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def sampling(
    online: Any, chat: Mapping[str, Any], token_ids: Sequence[int], max_tokens: int, defaults: Mapping[str, Any]
) -> Sampling:
    """How a chat is to be continued after its prompt's `token_ids`.

    `defaults` are the model's, of its `generation_config.json`. The messages may be missing: they are a prompt by now.
    Raises `RequestError`.
    """
    request = chat_request({"messages": [], **chat})
    try:
        request = vllm_parsed.adjust(online, request)
        parameters = parameters_of(request, max_tokens, defaults)
        parameters.prompt_logprobs = None  # prefill has told them
        return Sampling(request, parameters, vllm_parsed.engine_arguments(online, request, token_ids))
    except Exception as error:
        raise blame(error) from error


def verify(engine: Any, parameters: Any) -> None:
    """As vLLM's own input processor does it."""
    parameters.verify(
        engine.model_config,
        engine.vllm_config.speculative_config,
        engine.vllm_config.structured_outputs_config,
        engine.renderer.tokenizer,
    )


def parameters_of(request: Any, max_tokens: int, defaults: Mapping[str, Any]) -> Any:
    """vLLM's sampling parameters for its request."""
    parameters = request.to_sampling_params(max_tokens, dict(defaults))
    # `vllm_xargs` becomes extra_args, and would be another way in for what `validated` has dropped.
    kept = {key: value for key, value in (parameters.extra_args or {}).items() if key not in OURS}
    parameters.extra_args = kept or None
    return parameters


def stays(parameters: Any) -> Any:
    """The same, of a request whose KV comes from nowhere else and goes nowhere. Its engine's connector reads this."""
    parameters.extra_args = {**(parameters.extra_args or {}), "kv_transfer_params": {launch.STAYS: True}}
    return parameters


def _max_tokens(request: Any, engine: Any) -> int:
    """What the client asks for, or else more than it can get: only for checking the other parameters against it."""
    for asked in (request.max_completion_tokens, request.max_tokens):
        if asked is not None:
            return int(asked)
    return int(engine.model_config.max_model_len)


class Said:
    """The steps of a reply, with what it says beside its text in the words of `vllm serve`, by its own code."""

    def __init__(
        self, engine: Any, online: Any, request: Any, prompt: Sequence[int], echo: Echo, *, streamed: bool
    ) -> None:
        self._request = request
        self._echo = echo.text
        self._begun: set[int] = set()
        self._parsed: dict[int, Any] | None = {} if vllm_parsed.wanted(online, request) else None
        self._new = partial(vllm_parsed.Parsed, online, request, prompt, echo.text, streamed=streamed)
        self._tokenizer = engine.renderer.tokenizer
        self._serving: Any = OpenAIServingChat.__new__(
            OpenAIServingChat
        )  # of which this needs one setting, and no server
        self._serving.return_tokens_as_token_ids = False

    @property
    def is_parsed(self) -> bool:
        """Whether a parser makes the message of the text."""
        return self._parsed is not None

    async def step(self, output: Any, cached_tokens: int) -> Step:
        """What vLLM's output of one choice adds. Raises `EngineFailed` where the engine has given the request up."""
        message, reason = await self._message(output, finish_reason(output.finish_reason))
        begins = "" if output.index in self._begun else self._echo
        self._begun.add(output.index)
        return Step(
            token_ids=list(output.token_ids),
            text=begins + output.text,
            cached_tokens=cached_tokens,
            finish_reason=reason,
            choice=output.index,
            stop_reason=output.stop_reason,
            logprobs=self._logprobs(output),
            message=message,
            reasoning_tokens=self._reasoning_tokens(output.index, reason),
        )

    async def continued(self, step: Step, delivered: Sequence[int]) -> Step:
        """A step of a reply that another worker had begun, whole where a parser makes the message: it reads that from its start.

        `delivered`: the tokens before the first such step.
        """
        if self._parsed is None:
            return step
        output = SimpleNamespace(
            index=0,
            text=step.before + step.text,
            token_ids=[*delivered, *step.token_ids],
            finish_reason=step.finish_reason,
            stop_reason=step.stop_reason,
        )
        message, reason = await self._message(output, step.finish_reason)
        tokens = self._reasoning_tokens(0, reason)
        return msgspec.structs.replace(step, message=message, finish_reason=reason, reasoning_tokens=tokens)

    def _reasoning_tokens(self, choice: int, reason: FinishReason | None) -> int | None:
        """Told once a choice has ended."""
        if self._parsed is None or reason is None:
            return None
        told: int | None = self._parsed[choice].reasoning_tokens
        return told

    async def _message(self, output: Any, reason: FinishReason | None) -> tuple[str, FinishReason | None]:
        """What a step adds to the message where a parser makes it, and the reason, which may be that a tool was called."""
        if self._parsed is None:
            return "", reason
        if output.index not in self._parsed:
            self._parsed[output.index] = self._new()
        said, why = await self._parsed[output.index].read(output, reason)
        return said, why

    def _logprobs(self, output: Any) -> str:
        """Those of a step's tokens, as `Step` carries them. Nothing where none were asked for."""
        if not self._request.logprobs or not output.token_ids:
            return ""
        said = self._serving._create_chat_logprobs(  # noqa: SLF001  # a copy would be ours to keep equal
            token_ids=output.token_ids,
            top_logprobs=output.logprobs,
            tokenizer=self._tokenizer,
            num_output_top_logprobs=self._request.top_logprobs,
            logprob_token_ids=self._request.logprob_token_ids,
            return_as_token_id=self._request.return_tokens_as_token_ids,
        )
        return ",".join(entry.model_dump_json() for entry in said.content)


def told_of_prompt(_engine: Any, _chat: Mapping[str, Any], _token_ids: Sequence[int], logprobs: Any) -> tuple[str, str]:
    """vLLM's logprobs of a prompt as `Done` carries them, and as an echo begins with them: a chat's has none."""
    return prompt_logprobs_json(logprobs), ""


def prompt_logprobs_json(logprobs: Any) -> str:
    """As `vllm serve` writes them."""
    return _PROMPT_LOGPROBS.dump_json(clamp_prompt_logprobs(logprobs)).decode()


def prefill_sampling(prompt_logprobs: int | None = None) -> Any:
    """One greedy token, which nobody will read: the cheapest request that makes vLLM compute and store a prompt."""
    return SamplingParams(
        max_tokens=1,
        min_tokens=0,
        temperature=0.0,
        detokenize=prompt_logprobs is not None,  # which names the tokens
        prompt_logprobs=prompt_logprobs,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def first_sampling(parameters: Any) -> Any:
    """What vLLM is asked for at prefill: the first token of a reply under these, as a token alone."""
    first = copy.copy(parameters)
    first.max_tokens = 1
    first.min_tokens = min(first.min_tokens, 1)
    first.stop = []
    first.detokenize = False
    first.output_text_buffer_length = 0
    first.output_kind = RequestOutputKind.FINAL_ONLY
    return first


def finish_reason(reason: str | None) -> FinishReason | None:
    """vLLM's reason in ours. Raises `EngineFailed` for "error", after which no more comes."""
    if reason == "error":
        raise EngineFailed("The engine gave the request up.")
    if reason == "repetition":  # the client asked to stop there
        return "stop"
    return cast("FinishReason | None", reason)


def blame(error: Exception) -> ReplyError:
    """Our error for one of vLLM's: the client's where `vllm serve` would answer 4xx, else the engine's."""
    if isinstance(error, EngineDeadError):
        return EngineDead("The engine has died.")
    response = create_error_response(error)
    if 400 <= response.error.code < 500:
        return refused(response)
    cause = error.__cause__ or error
    return EngineFailed(f"The engine failed: {type(cause).__name__}: {cause}")


def refused(response: Any) -> RequestError:
    """Our error for one that vLLM answers with."""
    message, parameter = response.error.message, response.error.param
    if parameter in TOO_LONG:
        return PromptTooLong(message, param=parameter)
    return InvalidField(message, param=parameter) if parameter else RequestError(message)


def _invalid(error: ValidationError) -> RequestError:
    """The first of pydantic's complaints. vLLM's own checks are inside it, with the parameter they blame."""
    first = error.errors()[0]
    own = first.get("ctx", {}).get("error")
    if isinstance(own, VLLMValidationError):
        return refused(create_error_response(own))
    return InvalidField(str(first["msg"]), param=clean_loc_for_param(first["loc"]) or None)
