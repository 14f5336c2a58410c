"""A bell that one task waits for, with a bound: event and cancel scope in one, for who waits a dozen times a request."""

import asyncio


class Bell:
    """Rung from any callback. A ring that nobody waits for is kept, once."""

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake who waits, or who will wait next."""
        self._rung = True
        if self._waiter is not None:
            _let_go(self._waiter)

    async def heard(self, within_s: float) -> bool:
        """Wait for a ring. False where there is none within so long."""
        if not self._rung:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(within_s, _let_go, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiter = None
        rung, self._rung = self._rung, False
        return rung


def _let_go(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
