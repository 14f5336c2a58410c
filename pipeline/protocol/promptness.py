"""Whether a prompt that is to be read now can still have its first token in time.

An engine reads prompts in the order in which they came, some tokens a step. So what a prompt has before it counts as much as it
does itself: the *load* of a read is all tokens that the engine has to compute until it is over, and what a token of load takes is
followed as TCP follows round trips (RFC 6298): the mean, and how far from it things are. A prompt with less time left than its
load takes is refused before anything is computed for it: late it would be worth nothing, and make others late.

**What is expected never refuses what has waited for less than a tenth of its time**: else a few slow ones, of which the first is
always one, could have everything refused, and nothing would ever show that it is fast again.
"""

from typing import Final

MEAN_RATIO: Final = 1 / 8
DEVIATION_RATIO: Final = 1 / 4
"""Of what is new, in the two figures."""

SLOW: Final = 1.0
"""Deviations above the mean: about one of four takes longer."""

FRESH: Final = 0.9
"""Of its time: who has more left is tried."""


class Promptness:
    """One engine's. A prompt is at least a step's work, for less than that takes a step, too."""

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._inside = 0
        self._mean_s = 0.0
        self._deviation_s = 0.0
        self._knows = False
        self.nothing = Read(self, 0, 0, 0.0)
        """A read that has not begun, and is over."""
        self.nothing.give_up()

    def too_late(self, tokens: int, left_s: float, bound_s: float) -> bool:
        """Whether a prompt of so many tokens to compute will not make it, with `left_s` of its `bound_s` left."""
        return left_s <= min(self.expected_s(tokens), FRESH * bound_s)

    def expected_s(self, tokens: int) -> float:
        """What such a prompt takes now, behind all others. 0 while nothing is known."""
        return (self._inside + self._cost(tokens)) * (self._mean_s + SLOW * self._deviation_s)

    def begin(self, tokens: int, now_s: float) -> "Read":
        """Such a prompt is read from now on."""
        cost = self._cost(tokens)
        self._inside += cost
        return Read(self, cost, self._inside, now_s)

    def left(self, cost: int) -> None:
        """A read is over."""
        self._inside -= cost

    def took(self, load: int, seconds: float) -> None:
        """So long has a read taken, from its begin to the first token."""
        each_s = seconds / load
        if not self._knows:
            self._mean_s, self._deviation_s, self._knows = each_s, each_s / 2, True
            return
        self._deviation_s += DEVIATION_RATIO * (abs(each_s - self._mean_s) - self._deviation_s)
        self._mean_s += MEAN_RATIO * (each_s - self._mean_s)

    def _cost(self, tokens: int) -> int:
        return max(tokens, self._step_tokens)


class Read:
    """A prompt that is read. It ends once, whatever is said later."""

    def __init__(self, of: Promptness, cost: int, load: int, began_s: float) -> None:
        self._of, self._cost, self._load, self._began_s = of, cost, load, began_s
        self._over = False

    def end(self, now_s: float) -> None:
        """It has been read."""
        if not self._over:
            self._of.took(self._load, now_s - self._began_s)
        self.give_up()

    def give_up(self) -> None:
        """It is not read any more: that says nothing of what reads take."""
        if not self._over:
            self._over = True
            self._of.left(self._cost)
