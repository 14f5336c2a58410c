"""Replies in OpenAI's words: what workers say, in the shapes of `pipeline.protocol.openai`."""

import msgspec
from msgspec import UNSET

from gateway.intake import Order
from pipeline.protocol.messages import Done, Usage, unpack_ids
from pipeline.protocol.openai import (
    Choice,
    Completion,
    CompletionDetails,
    LogprobsBody,
    ModelCard,
    PromptDetails,
    ReplyMessage,
    Split,
    UsageBody,
)
from pipeline.protocol.pieces import Choice as Said

_json = msgspec.json.Encoder().encode


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
        completion_tokens_details=UNSET
        if usage.reasoning_tokens is None
        else CompletionDetails(usage.reasoning_tokens),
        headrace=Split(
            hbm_tokens=usage.hbm_tokens,
            decode_cached_tokens=usage.decode_cached_tokens,
            prefill_generated_tokens=usage.prefill_generated_tokens,
            prefill=usage.prefill,
            decode=usage.decode,
        ),
    )


def logprobs_of(entries: str) -> LogprobsBody:
    """Workers write the entries in OpenAI's words; here they are only put in their place."""
    return LogprobsBody(content=msgspec.Raw(f"[{entries}]".encode()))


def raw_or_unset(json: str) -> msgspec.Raw | msgspec.UnsetType:
    """What a worker has written, in its place."""
    return msgspec.Raw(json.encode()) if json else UNSET


def completion(order: Order, created: int, done: Done) -> bytes:
    """The body of a reply that is not streamed."""
    choices = tuple(_choice(order, index, choice) for index, choice in enumerate(done.all_choices))
    body = Completion(
        id=reply_id(order.id),
        created=created,
        model=order.model,
        choices=choices,
        usage=usage_of(done.usage),
        prompt_token_ids=unpack_ids(done.prompt) if order.detail.ids else UNSET,
        prompt_logprobs=raw_or_unset(done.prompt_logprobs),
    )
    return _json(body)


def _choice(order: Order, index: int, choice: Said) -> Choice:
    shows = not (choice.message and order.detail.hides_reasoning)
    return Choice(
        index=index,
        message=msgspec.Raw(choice.message.encode())
        if choice.message
        else ReplyMessage(role=order.detail.role, content=choice.text),
        logprobs=logprobs_of(choice.logprobs) if order.detail.logprobs and shows else None,
        finish_reason=choice.finish_reason,
        stop_reason=UNSET if choice.stop_reason is None else choice.stop_reason,
        token_ids=unpack_ids(choice.ids) if order.detail.ids and shows else UNSET,
    )


def model_card(model: str, max_model_len: int, created: int) -> ModelCard:
    """A served model. `created` is when this gateway came up: nothing older is known."""
    return ModelCard(id=model, created=created, max_model_len=max_model_len)
