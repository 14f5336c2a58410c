"""What lies where, as the broker says: requests that wait, shards on which nobody pulls, dead letters. For keepers' metrics."""

from collections import Counter
from typing import Final

import anyio

from pipeline.bus import reading
from pipeline.bus.connection import Bus
from pipeline.bus.errors import BusError
from pipeline.limits import SCAN_PERIOD_S
from pipeline.protocol import dead_letters
from pipeline.protocol.subjects import CLASSES, Shard
from pipeline.telemetry import logs, metrics

log: Final = logs.get("backlog")


async def measure_backlog(bus: Bus, period_s: float = SCAN_PERIOD_S) -> None:
    """Look at it again and again, until cancelled. What cannot be read now stays as it was."""
    while True:
        try:
            metrics.DEAD_LETTERS_KEPT.set((await reading.state(bus, dead_letters.STREAM)).messages)
            for klass in CLASSES:
                await _measure(bus, klass)
        except BusError as error:
            log.warning("backlog_unread", error=str(error))
        await anyio.sleep(period_s)


async def _measure(bus: Bus, klass: str) -> None:
    consumers = await reading.consumers(bus, Shard(klass, 0).stream)
    states = Counter(
        "pulled" if said["num_waiting"] else "starved" if said["num_pending"] else "quiet" for said in consumers
    )
    for state in metrics.LABELS["headrace_shards"]["state"]:
        metrics.SHARDS.labels(klass=klass, state=state).set(states[state])
    metrics.QUEUE_WAITING.labels(klass=klass).set(sum(said["num_pending"] for said in consumers))
