"""A completion as it comes from outside: a prompt that no template is put around.

vLLM's `prompt` is one prompt or several, each as text or as token ids. Over HTTP several are several requests of the pipeline,
whose replies are put together again: each has its own credit, its own place in the queue and its own prefix. A producer sends
them one by one.

What a prompt itself is worth to the model (`prompt_logprobs`, and `logprobs` with `echo`) only who computes all of it can tell.
That is prefill, which then takes nothing from a cache; it travels with the handoff, so what may be asked for is bounded.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec

from pipeline.errors import InvalidField
from pipeline.limits import COMPLETION_PROMPTS_MAX, PROMPT_ENTRIES_MAX
from pipeline.protocol.chat import Asked, Chat

MAX_TOKENS: Final = 16
"""Tokens of a completion that says nothing of its length: OpenAI's default, and vLLM's."""

Token = Annotated[int, msgspec.Meta(ge=0)]
Prompt = str | list[Token]


class CompletionRequest(Asked, frozen=True, kw_only=True):
    """The part of vLLM's completion request that we act on or check before any engine sees it.

    `prompt` is text or token ids, or over HTTP a list of either.
    """

    prompt_field: ClassVar[str] = "prompt"
    prompt: (
        Annotated[str, msgspec.Meta(min_length=1)]
        | Annotated[list[str | Token | list[Token]], msgspec.Meta(min_length=1)]
    )
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    logprobs: int | None = None

    @property
    def reply_tokens_max(self) -> int:
        """The reply's length. Of a prompt that is only to be echoed vLLM generates one token, which is not shown."""
        return MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, mostly one. Raises `InvalidField` where they are mixed, or too many."""
        return prompts_of(self.prompt)


Request = Chat | CompletionRequest


def kind_of(tree: Mapping[str, Any]) -> Literal["chat", "completion"]:
    """What a request's body is. Raises `InvalidField` for one that brings both messages and a prompt."""
    said = tree.get("type")
    if said in ("chat", "completion"):
        return "chat" if said == "chat" else "completion"
    if tree.get("prompt") is None:
        return "chat"
    if tree.get("messages") is not None or tree.get("message") is not None:
        raise InvalidField("Either prompt, as it is, or messages under the template: leave one out.", param="prompt")
    return "completion"


def prompts_of(prompt: Prompt | list[str | Token | list[Token]]) -> list[Prompt]:
    """The prompts that stand in one field. Raises `InvalidField` where they are mixed, or too many."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(one) for one in prompt}
    if kinds == {int}:
        return [[one for one in prompt if isinstance(one, int)]]
    if len(kinds) > 1:
        raise InvalidField("prompt must be text, token ids, or a list of one of them.", param="prompt")
    if len(prompt) > COMPLETION_PROMPTS_MAX:
        raise InvalidField(
            f"prompt has {len(prompt)} prompts; {COMPLETION_PROMPTS_MAX} go in one request: send the others in further ones.",
            param="prompt",
        )
    return [one for one in prompt if not isinstance(one, int)]


def check_no_reference(tree: Mapping[str, Any]) -> None:
    """Raise `InvalidField` where a completion names a persona, which stands under a chat's template."""
    metadata = tree.get("metadata")
    if isinstance(metadata, Mapping) and metadata.get("persona") is not None:
        raise InvalidField("metadata.persona goes with messages: a prompt is taken as it is.", param="metadata.persona")


def check_single(request: CompletionRequest) -> None:
    """Raise `InvalidField` where a message of the queue brings several prompts."""
    if len(request.prompts) > 1:
        raise InvalidField("prompt: a message brings one prompt; publish one for each.", param="prompt")


def prompt_logprobs(tree: Mapping[str, Any]) -> int | None:
    """How many alternatives to each token of the prompt are wanted with its logprob (-1: all). None: no logprobs.

    With `stream` they are no part of a reply, but where a completion's `echo` has them. With `echo` vLLM takes what is asked of
    the reply's own tokens for the prompt, too.
    """
    is_completion, echo = tree.get("type") == "completion", bool(tree.get("echo"))
    asked: int | None = tree.get("prompt_logprobs")
    if asked is None and echo:
        asked = tree.get("logprobs") if is_completion else tree.get("top_logprobs", 0)
    echoed = is_completion and echo and tree.get("logprobs") is not None
    return asked if echoed or not tree.get("stream") else None


def check_prompt_entries(tree: Mapping[str, Any], prompt_tokens: int) -> None:
    """Raise `InvalidField` where a reply would say more of its prompt than one message carries."""
    asked = prompt_logprobs(tree)
    if asked is None:
        return
    echoes = int(tree.get("n") or 1) if tree.get("type") == "completion" and tree.get("echo") else 0
    each = 2 + max(0, asked)
    entries = prompt_tokens * each * (1 + echoes)
    if entries > PROMPT_ENTRIES_MAX:
        name = "prompt_logprobs" if tree.get("prompt_logprobs") is not None else "echo"
        raise InvalidField(
            f"{name}: a prompt of {prompt_tokens} tokens with {each} logprobs for each makes {entries} entries of a reply, which "
            f"carries {PROMPT_ENTRIES_MAX}: shorten the prompt, or ask for fewer.",
            param=name,
        )
