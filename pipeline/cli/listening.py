"""A connection for a command that has to know who lives."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pipeline.bus.connection import Bus
    from pipeline.config import Config
    from pipeline.protocol.presence import Presences

LISTEN_S: Final = 0.6
"""Three presence periods: who has said nothing by then does not live, or is about to be taken for dead."""


@asynccontextmanager
async def listening(config: "Config", name: str) -> "AsyncIterator[tuple[Bus, Presences]]":
    """Connect as `name`, and hear for `LISTEN_S` who lives. Raises `OperatorError` where NATS cannot be reached."""
    from pipeline import outside
    from pipeline.bus.connection import Bus
    from pipeline.bus.presence import Watcher
    from pipeline.protocol.presence import Presences

    presences = Presences()
    async with await Bus.connect(config.nats, name) as bus:
        await Watcher(bus, presences, outside.monotonic_s).start()
        await asyncio.sleep(LISTEN_S)
        yield bus, presences
