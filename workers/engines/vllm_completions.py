"""A client's completion in vLLM's own words: what `vllm_chat` is for a chat. Imports vLLM."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.renderers.inputs.preprocess import extract_prompt_components

from pipeline.errors import InvalidField
from pipeline.protocol.pieces import Echo
from workers.engines import vllm_chat
from workers.engines.port import Rendered, Step
from workers.engines.vllm_chat import Sampling


def completion_request(tree: Mapping[str, Any]) -> Any:
    """vLLM's `CompletionRequest` for a client's body. Raises `RequestError`."""
    request = vllm_chat.validated(CompletionRequest, tree)
    if request.prompt_embeds is not None:
        raise InvalidField("`prompt_embeds` is not supported: a prompt is text or token ids.", param="prompt_embeds")
    return request


async def render(engine: Any, online: Any, tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> Rendered:
    """The prompt's tokens, as `vllm_chat.render`."""
    request = completion_request(tree)
    try:
        result = await online.render_completion(request)
        vllm_chat.verify(engine, vllm_chat.parameters_of(request, request.max_tokens, defaults))
    except Exception as error:
        raise vllm_chat.blame(error) from error
    if isinstance(result, ErrorResponse):
        raise vllm_chat.refused(result)
    (engine_input,) = result
    said = extract_prompt_components(engine.model_config, engine_input)
    # Who asks for the ids gets the prompt as ids.
    return Rendered(list(said.token_ids), said.text if request.echo and not request.return_token_ids else "")


def sampling(
    _online: Any, tree: Mapping[str, Any], _token_ids: Sequence[int], max_tokens: int, defaults: Mapping[str, Any]
) -> Sampling:
    """As `vllm_chat.sampling`. vLLM demands a prompt, which need not be this one."""
    request = completion_request({"prompt": [0], **tree})
    try:
        parameters = vllm_chat.parameters_of(request, max_tokens, defaults)
    except Exception as error:
        raise vllm_chat.blame(error) from error
    parameters.prompt_logprobs = None  # prefill has told them
    return Sampling(request, parameters)


class Said:
    """The steps of a completion. Its `logprobs` have the place of each token in the text, so each choice counts its own."""

    is_parsed = False

    def __init__(
        self, engine: Any, _online: Any, request: Any, _prompt: Sequence[int], echo: Echo, *, streamed: bool
    ) -> None:
        del streamed  # both ways say the same
        self._request = request
        self._echo = echo
        self._tokenizer = engine.renderer.tokenizer
        self._next: dict[int, int] = {}

    async def step(self, output: Any, cached_tokens: int) -> Step:
        """What vLLM's output of one choice adds. Raises `EngineFailed` where the engine has given the request up."""
        echo = Echo() if output.index in self._next else self._echo
        self._next.setdefault(output.index, _end_of(json.loads(echo.logprobs)) if echo.logprobs else 0)
        # Of a prompt that is only to be echoed, vLLM generates a token which it does not show.
        only_echo = self._request.echo and self._request.max_tokens == 0
        own = "" if only_echo else self._logprobs(output)
        return Step(
            token_ids=list(output.token_ids),
            text=echo.text + ("" if only_echo else output.text),
            cached_tokens=cached_tokens,
            finish_reason=vllm_chat.finish_reason(output.finish_reason),
            choice=output.index,
            stop_reason=output.stop_reason,
            logprobs=",".join(filter(None, (echo.logprobs, own))),
        )

    async def continued(self, step: Step, _delivered: Sequence[int]) -> Step:
        """One that can be continued says nothing beside its text."""
        return step

    def _logprobs(self, output: Any) -> str:
        if self._request.logprobs is None or not output.token_ids:
            return ""
        columns = _columns(self._request, self._tokenizer, output.token_ids, output.logprobs, self._next[output.index])
        self._next[output.index] = _end_of(columns.model_dump())
        return str(columns.model_dump_json())


def told_of_prompt(engine: Any, tree: Mapping[str, Any], token_ids: Sequence[int], logprobs: Any) -> tuple[str, str]:
    """vLLM's logprobs of a prompt as `Done` carries them, and as an echo begins with them."""
    request = completion_request(tree)
    told = vllm_chat.prompt_logprobs_json(logprobs)
    if not request.echo or request.logprobs is None:
        return told, ""
    return told, str(_columns(request, engine.renderer.tokenizer, token_ids, logprobs, 0).model_dump_json())


def _columns(request: Any, tokenizer: Any, token_ids: Sequence[int], logprobs: Any, offset: int) -> Any:
    """OpenAI's `logprobs` of these tokens, whose text begins at a character, by vLLM's own code, which needs no server."""
    serving: Any = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
    serving.return_tokens_as_token_ids = False
    return serving._create_completion_logprobs(  # noqa: SLF001  # a copy would be ours to keep equal
        token_ids=token_ids,
        top_logprobs=logprobs,
        num_output_top_logprobs=request.logprobs,
        tokenizer=tokenizer,
        logprob_token_ids=request.logprob_token_ids,
        initial_text_offset=offset,
        return_as_token_id=request.return_tokens_as_token_ids,
    )


def _end_of(columns: Mapping[str, Any]) -> int:
    """The character after the last of these tokens."""
    return int(columns["text_offset"][-1]) + len(columns["tokens"][-1])
