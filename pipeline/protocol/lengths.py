"""How many tokens a prompt will be, for who does not tokenise: by the bytes that carry it, and what recent replies' usage said.

A request that carries its prompt has so many tokens a byte. One by reference is a few bytes that stand for a persona and a
history: for those the mean of recent ones says more than their own size. Both forget: texts and languages change.
"""

from typing import Final

REPLIES_REMEMBERED: Final = 64
"""A reply counts for 1/e after so many others: enough that no single one decides, and the first hundred of a new kind do."""

TOKENS_PER_BYTE_UNMEASURED: Final = 0.25
"""English, before anything is known. The JSON around it makes it a little less."""

TOKENS_PER_BYTE_MIN: Final = 1 / 16
"""What one reply may teach at the least, so that padded bodies cannot make everybody's prompts look short …"""

TOKENS_PER_BYTE_MAX: Final = 1.0
"""… and at the most: no tokeniser makes more tokens of a text than it has bytes."""


class _Mean:
    """Tokens for each unit of something, of recent replies, each by its weight."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._units = 0.0

    def learn(self, tokens: float, units: float) -> None:
        kept = 1 - 1 / REPLIES_REMEMBERED
        self._tokens = self._tokens * kept + tokens
        self._units = self._units * kept + units

    def of(self, units: float) -> float | None:
        """None while nothing is measured."""
        return self._tokens / self._units * units if self._units else None


class Lengths:
    """What this gateway has learnt of prompts. `referred`: the request names its persona and history instead of carrying them."""

    def __init__(self) -> None:
        self._carried = _Mean()
        self._referred = _Mean()

    def learn(self, size: int, tokens: int, *, referred: bool) -> None:
        """A body of `size` bytes has come to be a prompt of `tokens`."""
        if referred:
            self._referred.learn(tokens, 1)
        else:
            self._carried.learn(min(max(tokens, size * TOKENS_PER_BYTE_MIN), size * TOKENS_PER_BYTE_MAX), size)

    def tokens(self, size: int, *, referred: bool) -> int:
        """Of the prompt of a body of `size` bytes; at least one."""
        measured = self._referred.of(1) if referred else self._carried.of(size)
        return max(1, round(size * TOKENS_PER_BYTE_UNMEASURED if measured is None else measured))
