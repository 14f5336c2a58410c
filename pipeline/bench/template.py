"""What the model's chat template and tokeniser make of our words: asked of the gateway, so that lengths come out exactly."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pipeline.bench.words import WORDS
from pipeline.cli import client, http
from pipeline.errors import OperatorError

FIRST: Final = "Read"
"""A text begins with it, so that all words drawn have a space before them."""

_HALF: Final = len(WORDS) // 2


class Template(msgspec.Struct, frozen=True):
    """Tokens of a prompt before and after the words drawn, and how many a word is: 1, with any vocabulary that we know of."""

    head: int
    tail: int
    tokens_per_word: float = 1.0

    @property
    def exact(self) -> bool:
        """Whether prompts have exactly the length that is wanted."""
        return self.tokens_per_word == 1.0


class _Completion(msgspec.Struct):
    usage: client.Usage
    prompt_token_ids: list[int] | None = None


def body_of(words: str, **fields: Any) -> dict[str, Any]:
    """One message of these words."""
    return {"messages": [{"role": "user", "content": f"{FIRST} {words}"}], **fields}


async def ask(gateway: client.Gateway, headers: Mapping[str, str]) -> Template:
    """Send two prompts, and compare. Raises `OperatorError` where no gateway answers them."""
    long = await _probe(gateway, headers, WORDS)
    short = await _probe(gateway, headers, WORDS[:_HALF][::-1])
    per_word = (long.usage.prompt_tokens - short.usage.prompt_tokens) / _HALF
    if per_word <= 0:
        raise _no_gateway(gateway, "it counts no more tokens in a longer prompt")
    around = round(long.usage.prompt_tokens - per_word * len(WORDS))
    head = _common(long.prompt_token_ids or [], short.prompt_token_ids or []) or around
    return Template(min(head, around), max(0, around - head), per_word)


async def _probe(at: client.Gateway, headers: Mapping[str, str], words: tuple[str, ...]) -> _Completion:
    body = msgspec.json.encode(body_of(" ".join(words), max_tokens=1, return_token_ids=True))
    try:
        async with http.requested(
            "POST",
            f"{at.url}/v1/chat/completions",
            body=body,
            headers={**headers, "x-creator-id": "bench-probe"},
            trust=at.trust,
        ) as answer:
            status, said = answer.status, await answer.body()
    except OSError as error:
        raise OperatorError(f"No gateway answers at {at.url}: {error}.", "Start one, or correct --url.") from None
    if status != 200:
        raise OperatorError(f"The gateway refuses a first prompt: {client.refusal(status, said)}", "Mend that first.")
    try:
        return msgspec.json.decode(said, type=_Completion)
    except msgspec.DecodeError as error:
        raise _no_gateway(at, str(error)) from None


def _no_gateway(at: client.Gateway, why: str) -> OperatorError:
    return OperatorError(f"What answers at {at.url} is no gateway: {why}.", "Correct --url.")


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    for at, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return at
    return 0
