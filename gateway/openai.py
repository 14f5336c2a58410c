"""The shapes of OpenAI's API, as vLLM serves them. What we add stands under `headrace`, or is vLLM's own (`max_model_len`)."""

from typing import Literal

import msgspec

from pipeline.protocol.messages import Done, Usage

_json = msgspec.json.Encoder().encode


class ChunkHead(msgspec.Struct, frozen=True, kw_only=True):
    """What all chunks of a streamed reply have in common; `choices` and `usage` follow."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str


class PromptDetails(msgspec.Struct, frozen=True):
    """`cached_tokens` of the prompt were not computed by prefill."""

    cached_tokens: int


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Our extension of usage: how the work was divided, and between which workers."""

    hbm_tokens: int
    decode_cached_tokens: int
    prefill_generated_tokens: int
    prefill: str
    decode: str


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's `usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    headrace: Split


class ReplyMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's turn. `content` is a string even where the reply is empty."""

    role: Literal["assistant"] = "assistant"
    content: str


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The one choice that we serve."""

    index: int = 0
    message: ReplyMessage
    logprobs: None = None
    finish_reason: str


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply in one piece."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[Choice]
    usage: UsageBody


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `/v1/models`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["headrace"] = "headrace"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def reply_id(request: str) -> str:
    """OpenAI's id of the reply to a request."""
    return f"chatcmpl-{request}"


def usage_of(usage: Usage) -> UsageBody:
    """What a worker counted, in OpenAI's words."""
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptDetails(usage.cached_tokens),
        headrace=Split(
            hbm_tokens=usage.hbm_tokens,
            decode_cached_tokens=usage.decode_cached_tokens,
            prefill_generated_tokens=usage.prefill_generated_tokens,
            prefill=usage.prefill,
            decode=usage.decode,
        ),
    )


def completion(request: str, model: str, created: int, text: str, done: Done) -> bytes:
    """The body of a reply that is not streamed."""
    choice = Choice(message=ReplyMessage(content=text), finish_reason=done.finish_reason)
    return _json(
        Completion(id=reply_id(request), created=created, model=model, choices=(choice,), usage=usage_of(done.usage))
    )


def model_card(model: str, max_model_len: int, created: int) -> ModelCard:
    """A served model. `created` is when this gateway came up: nothing older is known."""
    return ModelCard(id=model, created=created, max_model_len=max_model_len)
