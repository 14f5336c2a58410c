"""How late an event loop wakes who sleeps on it: what else is slow when this is."""

import time
from typing import Final

import anyio

from pipeline.telemetry import metrics

PERIOD_S: Final = 0.1


async def measure_lag() -> None:
    """Measure it, until cancelled."""
    while True:
        asked_s = time.monotonic()
        await anyio.sleep(PERIOD_S)
        metrics.LOOP_LAG_SECONDS.set(max(0.0, time.monotonic() - asked_s - PERIOD_S))
