"""What frames carry beyond tokens and text: several replies to one request, logprobs, the prompt."""

import msgspec


class Extra(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What few tokens frames carry. `choice`: which of a request's `n` replies goes on.

    `logprobs` are JSON objects joined by commas: OpenAI's entries of `logprobs.content`, a token each; of a completion, OpenAI's
    `logprobs` of some tokens, in columns. The first frame of a claim has the prompt, where it is asked for: its length in
    tokens, and its ids (packed). `message` is what the text means where a parser reads calls of tools or reasoning from it:
    OpenAI's deltas, as JSON objects joined by commas, `{}` where these tokens say nothing yet.
    """

    choice: int = 0
    logprobs: str = ""
    prompt_tokens: int = 0
    prompt: bytes = b""
    message: str = ""


class Choice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One whole reply: packed ids, text, why and by what it ended (a stop string or token), and logprobs as in `Extra`.

    `message` is all its deltas, or where it is not streamed, OpenAI's message.
    """

    ids: bytes
    text: str
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: str = ""
    message: str = ""


class Echo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What each reply to a request begins with, before what is generated: the prompt's text, and its logprobs as in `Extra`."""

    text: str = ""
    logprobs: str = ""


class ExtraInJson(msgspec.Struct, frozen=True, kw_only=True):
    """`Extra` as JSON has it."""

    choice: int
    logprobs: msgspec.Raw
    prompt_tokens: int
    prompt: list[int]
    message: msgspec.Raw


class ChoiceInJson(msgspec.Struct, frozen=True, kw_only=True):
    """`Choice` as JSON has it."""

    ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    logprobs: msgspec.Raw
    message: msgspec.Raw


def extra_in_json(extra: Extra, prompt: list[int]) -> ExtraInJson:
    """`prompt` is the prompt's ids, unpacked."""
    return ExtraInJson(
        choice=extra.choice,
        logprobs=_listed(extra.logprobs),
        prompt_tokens=extra.prompt_tokens,
        prompt=prompt,
        message=_listed(extra.message),
    )


def choice_in_json(choice: Choice, ids: list[int]) -> ChoiceInJson:
    """`ids` are its tokens, unpacked."""
    return ChoiceInJson(
        ids=ids,
        text=choice.text,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        logprobs=_listed(choice.logprobs),
        message=_listed(choice.message),
    )


def _listed(entries: str) -> msgspec.Raw:
    return msgspec.Raw(f"[{entries}]".encode())
