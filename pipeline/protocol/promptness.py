"""Whether a prompt that is to be read now can still have its first token in time.

An engine reads prompts one after the other, in the order in which they came. So a prompt waits until those before it have been
read, and then takes a time for each token that has to be computed, whose mean is followed here. A prompt with less time left than
that is refused before anything is computed for it: late it would be worth nothing, and make others late.

It is the mean and no more: to refuse what may be in time costs as much as to try what may be late, and that is given up anyway.

**Where nothing is read, what has waited for less than a tenth of its time is tried** whatever is expected: else a few slow ones,
of which the first is always one, could have everything refused, and nothing would ever show that it is fast again.
"""

from typing import Final

MEAN_RATIO: Final = 1 / 8
"""Of what is new, in the mean: as TCP follows round trips (RFC 6298)."""

FRESH: Final = 0.9
"""Of its time: who has more left is tried."""


class Promptness:
    """One engine's. A prompt is at least a step's work, for less than that takes a step, too."""

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._inside: list[Read] = []
        self._since_s = 0.0
        """Since when the first of them has been read: for the others wait."""
        self._mean_s: float | None = None
        self.nothing = Read(self, 0, 0.0)
        """A read that has not begun, and is over."""

    def too_late(self, tokens: int, now_s: float, first_by_s: float, bound_s: float) -> bool:
        """Whether a prompt of so many tokens to compute has its first token after `first_by_s`, of `bound_s` in all."""
        left_s, expected_s = first_by_s - now_s, self.expected_s(tokens, now_s)
        return left_s <= (expected_s if self._inside else min(expected_s, FRESH * bound_s))

    def expected_s(self, tokens: int, now_s: float) -> float:
        """What such a prompt takes from now on, behind all others. 0 while nothing is known."""
        if self._mean_s is None:
            return 0.0
        before_s = self._mean_s * sum(read.cost for read in self._inside) - (now_s - self._since_s)
        return max(0.0, before_s if self._inside else 0.0) + self._mean_s * self._cost(tokens)

    def begin(self, tokens: int, now_s: float) -> "Read":
        """Such a prompt is read from now on."""
        read = Read(self, self._cost(tokens), now_s)
        if not self._inside:
            self._since_s = now_s
        self._inside.append(read)
        return read

    def over(self, read: "Read", now_s: float, *, whole: bool) -> None:
        """It has been read, if it is `whole`, or is not read any more. Once for each."""
        if read not in self._inside:
            return
        self._inside.remove(read)
        if whole:
            self._took((now_s - max(read.began_s, self._since_s)) / read.cost)
        self._since_s = now_s

    def _took(self, each_s: float) -> None:
        if self._mean_s is None:
            self._mean_s = each_s
        self._mean_s += MEAN_RATIO * (each_s - self._mean_s)

    def _cost(self, tokens: int) -> int:
        return max(tokens, self._step_tokens)


class Read:
    """A prompt that is read. It ends once, whatever is said later."""

    __slots__ = ("_of", "began_s", "cost")

    def __init__(self, of: Promptness, cost: int, began_s: float) -> None:
        self._of, self.cost, self.began_s = of, cost, began_s

    def end(self, now_s: float) -> None:
        """It has been read."""
        self._of.over(self, now_s, whole=True)

    def give_up(self, now_s: float) -> None:
        """It is not read any more: that says nothing of what reads take."""
        self._of.over(self, now_s, whole=False)
