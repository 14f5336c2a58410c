"""What the gateway says over HTTP: the shapes of OpenAI's API, as vLLM serves them.

What we add stands under `headrace`, or is vLLM's own (`max_model_len`); only `Readiness` is all ours.
"""

from typing import Annotated, Any, Literal

import msgspec


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


class CompletionDetails(msgspec.Struct, frozen=True):
    """`reasoning_tokens` of the reply were reasoning."""

    reasoning_tokens: int


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's `usage`. How the work was divided is known at the end: what each chunk says on request has three numbers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | msgspec.UnsetType = msgspec.UNSET
    completion_tokens_details: CompletionDetails | msgspec.UnsetType = msgspec.UNSET
    headrace: Split | msgspec.UnsetType = msgspec.UNSET


class ReplyMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's turn, or whose the last message was where no new one was to begin. `content` may be empty."""

    role: str = "assistant"
    content: str


class LogprobsBody(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's `logprobs`: an entry for each token, as the engine's worker has written it."""

    content: msgspec.Raw


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the `n` replies. `stop_reason` and `token_ids` are vLLM's: what ended it, and its tokens, if asked for."""

    index: int = 0
    message: ReplyMessage | msgspec.Raw
    logprobs: LogprobsBody | None = None
    finish_reason: str
    stop_reason: int | str | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply in one piece. `prompt_logprobs` are vLLM's, as prefill's worker has written them."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: UsageBody
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


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


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New text. The first one also says who speaks."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the `n` replies, as far as it has come."""

    index: int = 0
    delta: Delta | msgspec.Raw
    logprobs: LogprobsBody | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Chunk(ChunkHead, frozen=True, kw_only=True):
    """One event of a streamed reply. The last one has no choice, but the usage, where that was asked for."""

    choices: list[ChunkChoice]
    usage: UsageBody | msgspec.UnsetType | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """A completion's `logprobs`, in columns: for each token where its text begins, its logprob, its text, and others."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the `n` replies to one prompt; those to the next prompt follow them. The token ids are vLLM's, if asked for."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A completion in one piece, and in a stream, one event of it: there `usage` is in the last one, which has no choice."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody | msgspec.UnsetType | None = None


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong. `param` names the field or the header to blame; programs should look at `code`."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every refusal, and the last event of a stream that fails."""

    error: ErrorDetail


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `/ready`. `reasons` says what is missing, and is empty where nothing is."""

    ready: bool
    reasons: list[str]
    prefill: int
    decode: int


class PersonaBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every prompt of a creator begins with; `template` are arguments of the chat template."""

    system: Annotated[str, msgspec.Meta(min_length=1)]
    template: dict[str, Any] = {}


class PersonaPublished(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a persona. `new`: this request has published it."""

    creator: str
    version: int
    new: bool
    system: str
    template: dict[str, Any]
