"""A client's chat in vLLM's own words: its request, its template, its sampling parameters, its errors.

All of it is what `vllm serve` uses, so that a parameter means here what it means there. Imports vLLM.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import has_non_text_content
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from pipeline.errors import EngineDead, EngineFailed, InvalidField, PromptTooLong, ReplyError, RequestError
from workers.engines import vllm_tools
from workers.engines.port import FinishReason

ENVELOPE: Final = frozenset({"id", "reply_to", "claim_at", "timeout_ms", "type", "v"})
"""The pipeline's own keys, which travel beside the client's."""

OURS: Final = frozenset({"kv_transfer_params", "ec_transfer_params", "stream", "stream_options", "request_id"})
"""What a client may not decide in an engine. The first two reach into the scheduler, where a wrong value ends the process."""

TOO_LONG: Final = frozenset({"input_tokens", "input_text"})
"""vLLM's names for a prompt that does not fit."""


def chat_request(chat: Mapping[str, Any]) -> Any:
    """vLLM's `ChatCompletionRequest` for a client's body. Leaves `chat` as it is.

    Raises `RequestError` where vLLM would refuse it, and where it asks for what this pipeline cannot deliver.
    """
    body = {key: value for key, value in chat.items() if key not in ENVELOPE and key not in OURS}
    try:
        # vLLM's validators change messages in place. `stream` makes its sampling parameters yield deltas.
        request = ChatCompletionRequest(**copy.deepcopy(body), stream=True)
    except ValidationError as error:
        raise _invalid(error) from None
    except Exception as error:
        raise blame(error) from error
    _refuse_undeliverable(request)
    return request


def _refuse_undeliverable(request: Any) -> None:
    """A reply is text with its logprobs: refuse what would silently be left out of it."""
    asked = {
        "prompt_logprobs": request.prompt_logprobs is not None,
        "use_beam_search": request.use_beam_search,
        "echo": request.echo,
        "messages": has_non_text_content(request.messages),
    }
    for parameter, is_asked in asked.items():
        if is_asked:
            what = "Content other than text" if parameter == "messages" else f"`{parameter}`"
            raise InvalidField(f"{what} is not supported.", param=parameter)


def renderer(engine: Any, tool_parser: str = "") -> Any:
    """The renderer of `vllm serve` with its default options, and a tool parser. It renders in a thread of its own."""
    online = OnlineRenderer(
        model_config=engine.model_config,
        renderer=engine.renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=bool(tool_parser),
        tool_parser=tool_parser or None,
    )
    online.warmup()
    return online


async def render(engine: Any, online: Any, chat: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[int]:
    """The prompt's tokens. Raises `RequestError` where the chat, the template or the length does not fit.

    Checks the sampling parameters as well: better refused before the prompt is computed than after.
    """
    request = chat_request(chat)
    try:
        result = await online.render_chat(request)
        _parameters(request, _max_tokens(request, engine), defaults).verify(
            engine.model_config,
            engine.vllm_config.speculative_config,
            engine.vllm_config.structured_outputs_config,
            engine.renderer.tokenizer,
        )
    except Exception as error:
        raise blame(error) from error
    if isinstance(result, ErrorResponse):
        raise _refused(result)
    _, (engine_input,) = result
    return list(engine_input["prompt_token_ids"])


def sampling(
    online: Any, chat: Mapping[str, Any], max_tokens: int, defaults: Mapping[str, Any]
) -> tuple[Any, Any, bool | None]:
    """vLLM's request and sampling parameters for a chat, and whether structured output starts at the first token.

    `defaults` are the model's, of its `generation_config.json`. The messages may be missing: they are a prompt by now.
    Raises `RequestError`.
    """
    request = chat_request({"messages": [], **chat})
    try:
        request = vllm_tools.adjust(online, request)
        parameters = _parameters(request, max_tokens, defaults)
    except Exception as error:
        raise blame(error) from error
    return request, parameters, request.resolve_reasoning_ended(None, [])


def _parameters(request: Any, max_tokens: int, defaults: Mapping[str, Any]) -> Any:
    parameters = request.to_sampling_params(max_tokens, dict(defaults))
    # `vllm_xargs` becomes extra_args, and would be another way in for what `chat_request` has dropped.
    kept = {key: value for key, value in (parameters.extra_args or {}).items() if key not in OURS}
    parameters.extra_args = kept or None
    return parameters


def _max_tokens(request: Any, engine: Any) -> int:
    """What the client asks for, or else more than it can get: only for checking the other parameters against it."""
    for asked in (request.max_completion_tokens, request.max_tokens):
        if asked is not None:
            return int(asked)
    return int(engine.model_config.max_model_len)


class Said:
    """What a reply says beside its text, in the words of `vllm serve`, by its own code: logprobs, and calls of tools."""

    def __init__(self, engine: Any, online: Any, request: Any, prompt: Sequence[int], *, streamed: bool) -> None:
        self._request = request
        self._calls: dict[int, Any] | None = {} if vllm_tools.wanted(online, request) else None
        self._new = partial(vllm_tools.Calls, online, request, prompt, streamed=streamed)
        self._tokenizer = engine.renderer.tokenizer
        self._serving: Any = OpenAIServingChat.__new__(
            OpenAIServingChat
        )  # of which this needs one setting, and no server
        self._serving.return_tokens_as_token_ids = False

    async def message(self, output: Any, reason: FinishReason | None) -> tuple[str, FinishReason | None]:
        """What a step adds to the message where tools may be called, and the reason, which may be that one was."""
        if self._calls is None:
            return "", reason
        if output.index not in self._calls:
            self._calls[output.index] = self._new()
        said, why = await self._calls[output.index].read(output, reason)
        return said, why

    def logprobs(self, output: Any) -> str:
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


def prefill_sampling() -> Any:
    """One greedy token, which nobody reads: the cheapest request that makes vLLM compute and store a prompt."""
    return SamplingParams(
        max_tokens=1,
        min_tokens=0,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def blame(error: Exception) -> ReplyError:
    """Our error for one of vLLM's: the client's where `vllm serve` would answer 4xx, else the engine's."""
    if isinstance(error, EngineDeadError):
        return EngineDead("The engine has died.")
    response = create_error_response(error)
    if 400 <= response.error.code < 500:
        return _refused(response)
    cause = error.__cause__ or error
    return EngineFailed(f"The engine failed: {type(cause).__name__}: {cause}")


def _refused(response: Any) -> RequestError:
    message, parameter = response.error.message, response.error.param
    if parameter in TOO_LONG:
        return PromptTooLong(message, param=parameter)
    return InvalidField(message, param=parameter) if parameter else RequestError(message)


def _invalid(error: ValidationError) -> RequestError:
    """The first of pydantic's complaints. vLLM's own checks are inside it, with the parameter they blame."""
    first = error.errors()[0]
    own = first.get("ctx", {}).get("error")
    if isinstance(own, VLLMValidationError):
        return _refused(create_error_response(own))
    return InvalidField(str(first["msg"]), param=clean_loc_for_param(first["loc"]) or None)
