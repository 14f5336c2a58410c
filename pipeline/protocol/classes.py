"""Interactive requests before batch ones, with a floor for batch: two rules, wherever both want the same thing.

* **Turns.** While both wait, interactive requests go first, but of each `interactive_weight + batch_weight` turns `batch_weight`
  are batch's. A turn is a prefill slot, a grant of a decode worker, or a place in a prefill engine.
* **Room.** A turn helps only when something becomes free, and what batch requests hold is held for as long as they last. So of
  slots, and of a decode worker's seats and blocks, batch never holds more than all but a part, also while nobody else wants
  them: an interactive request that comes finds a place at once. One place is always batch's to take, however few there are.

The first rule costs batch nothing where no interactive request waits. The second does: what is kept free is idle meanwhile. In
prefill hardly anything, since half the slots keep the engine busy; in decode it is the price of the burst.
"""

import math
from typing import Final

import msgspec

INTERACTIVE: Final = "interactive"
BATCH: Final = "batch"


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """How the classes share. Weights are whole, at least 1; rooms are parts of all there is, 0…1, that batch never holds.

    Of ten turns one is batch's: what a saturated fleet gives to batch, interactive requests miss, and a tenth is what they may
    lose. Of the room of decode a quarter: as many interactive requests as that come at once find a seat beside batch.
    """

    interactive_weight: int = 9
    batch_weight: int = 1
    prefill_room: float = 0.5
    decode_room: float = 0.25

    @property
    def starved_max(self) -> int:
        """Turns that interactive requests can have one after the other while batch waits."""
        return math.ceil(self.interactive_weight / self.batch_weight)

    def slots_most(self, slots: int) -> int:
        """Of so many prefill slots, how many batch may hold at a time."""
        return max(1, slots - math.ceil(slots * self.prefill_room))

    def most(self, places: int) -> int:
        """The same of seats or blocks of a decode worker."""
        return max(1, places - math.ceil(places * self.decode_room))


WEIGHTS: Final = Weights()


class Turns:
    """Whose turn it is while both wait. What batch is owed is never more than one turn, and what it had too much is forgotten."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._all = weights.interactive_weight + weights.batch_weight
        self._owed = 0
        self.batch = self._owed + weights.batch_weight >= self._all
        """Whether the next turn is batch's."""

    @property
    def order(self) -> tuple[str, str]:
        """The classes, who is next first."""
        return (BATCH, INTERACTIVE) if self.batch else (INTERACTIVE, BATCH)

    def served(self, klass: str) -> None:
        """A request of this class has had a turn."""
        owed = self._owed + self.weights.batch_weight
        self._owed = max(0, owed - self._all) if klass == BATCH else min(owed, self._all - 1)
        self.batch = self._owed + self.weights.batch_weight >= self._all

    def passed(self) -> None:
        """It was batch's turn, and nobody took it."""
        if self.batch:
            self.served(BATCH)
