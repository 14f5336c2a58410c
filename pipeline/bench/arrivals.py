"""When requests are sent in an open loop: seconds from its beginning, whatever becomes of those before."""

import itertools
import random
from collections.abc import Iterator
from typing import Literal

Arrivals = Literal["poisson", "constant"]


def constant(per_s: float) -> Iterator[float]:
    """Evenly, for ever."""
    return (number / per_s for number in itertools.count())


def poisson(per_s: float, seed: str) -> Iterator[float]:
    """As people come who know nothing of each other, for ever: the same for the same seed."""
    chance, at_s = random.Random(seed), 0.0
    while True:
        at_s += chance.expovariate(per_s)
        yield at_s


def times(arrivals: Arrivals, per_s: float, seed: str) -> Iterator[float]:
    """Either of them."""
    return constant(per_s) if arrivals == "constant" else poisson(per_s, seed)
