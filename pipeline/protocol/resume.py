"""Whether a reply that another worker had begun can be continued, and how. Prefill begins it so, and decode goes on.

The receiver says which tokens it has. Greedy and freely sampled replies continue after them: those tokens join the prompt, and
what follows is drawn as it would have been. What hangs on state that died with the worker (a seed's stream, counts of
penalties, a grammar's position, a bad word that has begun, logprobs) cannot: it starts again if nobody has seen any of it, which
a gateway knows of its clients, else it ends with an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pipeline.errors import ReplyLost

_HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "seed": (None,),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "echo": (None, False),
    "n": (None, 1),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "tools": (None, []),
    "thinking_token_budget": (None,),
    "bad_words": (None, []),
    "watermarking": (None, False),
    "logprob_token_ids": (None, []),
    "vllm_xargs": (None, {}),
    "repetition_detection": (None,),
}
"""Field → the values under which a reply has no state beyond its tokens; where it is not there, it has none."""


def stateful_field(chat: Mapping[str, Any]) -> str | None:
    """The first field that makes a reply depend on more than its tokens."""
    said = ((name, value) for name, value in chat.items() if name in _HARMLESS)
    return next((name for name, value in said if not _is_one_of(value, _HARMLESS[name])), None)


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    """A completion's `logprobs` of 0 are some, a chat's of false are none, and for Python both are equal."""
    return any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in harmless)


def continues(chat: Mapping[str, Any]) -> bool:
    """Whether another worker can go on with such a reply after the tokens that have been sent."""
    return stateful_field(chat) is None or _is_greedy_with_seed_only(chat)


def begins_at_prefill(chat: Mapping[str, Any], delivered: Sequence[int]) -> bool:
    """Whether the token that prefill makes may be the reply's first.

    It need not be a good one to go on from: a token that ends the reply is sent as well. What is kept must not hang on which
    token was drawn, or the replies that begin with it would be drawn twice, and so too seldom.
    """
    return not delivered and continues(chat)


def check_resumable(chat: Mapping[str, Any], delivered: Sequence[int]) -> None:
    """Raise `ReplyLost` where a reply of which `delivered` has been sent cannot be continued."""
    if delivered and not continues(chat):
        name = stateful_field(chat)
        raise ReplyLost(
            f"A worker was lost after {len(delivered)} tokens, and a reply with {name} cannot be continued: send it again.",
            param=name,
        )


def _is_greedy_with_seed_only(chat: Mapping[str, Any]) -> bool:
    """A seed means nothing where nothing is drawn."""
    return chat.get("temperature") == 0 and stateful_field({**chat, "seed": None}) is None
