"""Whether this host's LMCache server answers. An engine that has lost it works on, and computes what it could have loaded."""

import time
from typing import Final

import anyio

from pipeline.cli import http
from pipeline.telemetry import metrics

PERIOD_S: Final = 5.0
"""Between two questions, and so long an answer may take: LMCache logs a line for each."""


async def watch_store(url: str, period_s: float = PERIOD_S) -> None:
    """Ask `url`, LMCache's health page, until cancelled, and measure for how long it has been silent."""
    heard_s = time.monotonic()
    while True:
        if await _answers(url, period_s):
            heard_s = time.monotonic()
            metrics.LMCACHE_SILENT_SECONDS.set(0.0)
        else:
            metrics.LMCACHE_SILENT_SECONDS.set(time.monotonic() - heard_s)
        await anyio.sleep(period_s)


async def _answers(url: str, timeout_s: float) -> bool:
    try:
        status, _ = await http.get(url, timeout_s)
    except OSError:
        return False
    return status == 200
