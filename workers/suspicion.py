"""The start of one request at prefill, kept by `workers.starts`: recorded before the engine sees it, one suspect at a time."""

from pipeline.bus.errors import Unanswered
from pipeline.errors import CapacityError
from pipeline.protocol.subjects import AckSubject
from workers.prefill_desk import Desk


class Start:
    """One request's. Nothing is recorded before `count`; with a `suspect` workers have died."""

    def __init__(self, desk: Desk, message: AckSubject) -> None:
        self._desk, self._message = desk, message
        self._counted = self.suspect = False

    async def count(self) -> int:
        """Record it. Returns how many workers have died since they began on this request. Raises `BusError`."""
        dead = await self._record()
        if 0 < dead < self._desk.config.requests.starts_max:
            # Two suspects at work would both be blamed for the one that kills: they go one at a time, and are counted then.
            await self._desk.starts.take_back(self._message)
            self._counted = False
            await self._desk.suspects.acquire()
            self.suspect = True
            dead = await self._record()
        return dead

    def goes_over(self) -> None:
        """The decode loop beside us has the request now, and the record, which is of the same life, to take back."""
        self._counted = False

    async def end(self) -> None:
        """We live, so it has not killed us. Once, at the end of its job."""
        if self.suspect:
            self._desk.suspects.release()
        if self._counted:
            await self._desk.starts.take_back_shielded(self._message)

    async def _record(self) -> int:
        self._counted = True  # also where it is not known
        try:
            epochs = await self._desk.starts.read(self._message)
        except CapacityError as error:
            raise Unanswered(f"The start was not recorded: {error}.") from None
        return len(set(epochs) - self._desk.living() - {self._desk.me.epoch})
