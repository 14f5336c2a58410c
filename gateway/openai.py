"""Replies in OpenAI's words: what workers say, in the shapes of `pipeline.protocol.openai`."""

import msgspec

from pipeline.protocol.messages import Done, Usage
from pipeline.protocol.openai import Choice, Completion, ModelCard, PromptDetails, ReplyMessage, Split, UsageBody

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
