"""The stack that a client is run against: a `headrace up` of our own with the simulated engine, or one that serves already.

Its decode has the timing of an 8B model on an H200. Its prefill is slowed down, by `PREFILL_S` a prompt: a client's own
milliseconds, on few cores that it shares with the stack, are then far below the 2 % to which the two clocks must agree.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from pipeline.cli import http
from pipeline.errors import OperatorError
from tests.clients.scrape import Samples, scrape
from tests.e2e.running import ROOT, await_ready

PREFILL_S: Final = 0.5
"""What a prompt's prefill takes beyond its tokens, unless it is said otherwise."""

PREFILL_WORKERS: Final = 2
DECODE_WORKERS: Final = 1

ABOUT: Final = (
    f"headrace up --engine simulated --prefill {PREFILL_WORKERS} --decode {DECODE_WORKERS},"
    " with simulated.prefill_overhead_s = {prefill_s:g}"
)

END_S: Final = 30.0
"""For `headrace up` to drain: nothing is under way any more."""

QUIET_S: Final = 20.0
"""Until what a client has left behind is ended, and the last ack is counted."""

LOOK_S: Final = 0.25

CONFIG: Final = f"""
engine = "simulated"
nats.url = "nats://127.0.0.1:0"
nats.monitor_port = 0
gateway.port = 0
lmcache.port = 0
lmcache.http_port = 0
requests.default_max_tokens = 256
up.prefill = {PREFILL_WORKERS}
up.decode = {DECODE_WORKERS}
"""


class Stand(msgspec.Struct, frozen=True, kw_only=True):
    """A stack that serves `model` at `gateway`. `workers`: where their metrics are, as far as that is known."""

    about: str
    gateway: str
    model: str
    workers: tuple[str, ...] = ()

    def counted(self) -> Samples:
        """All metrics, once nothing is in flight and nothing is counted any more, or after a while."""
        return asyncio.run(self._settled())

    def ended(self, outcome: str) -> float:
        """How many requests the gateway has ended so, now."""
        return asyncio.run(scrape(f"{self.gateway}/metrics")).total("headrace_requests_total", outcome=outcome)

    async def _settled(self) -> Samples:
        until_s, former = time.monotonic() + QUIET_S, -1.0
        while True:
            now = await self._now()
            done = now.total("headrace_decodes_total") + now.total("headrace_requests_total")
            quiet = not now.total("headrace_in_flight") and done == former
            if quiet or time.monotonic() > until_s:
                return now
            former = done
            await asyncio.sleep(LOOK_S)

    async def _now(self) -> Samples:
        found = await asyncio.gather(*(scrape(url) for url in (f"{self.gateway}/metrics", *self.workers)))
        return sum(found, Samples())


def at(url: str) -> Stand:
    """A stack that others have started. Only the gateway's metrics are known. Raises `OperatorError` where it does not serve."""
    gateway = url.rstrip("/")
    try:
        return Stand(about="a stack that served already", gateway=gateway, model=asyncio.run(_model(gateway)))
    except OSError as error:
        raise OperatorError(f"{gateway} does not answer: {error}.", "Start it, or leave --url out.") from None


async def _model(gateway: str) -> str:
    status, body = await http.get(f"{gateway}/v1/models", 10.0)
    models = msgspec.json.decode(body).get("data") if status == 200 else None
    if not models:
        raise OperatorError(f"{gateway} serves no model (status {status}).", "Wait until its /ready says so.")
    return str(models[0]["id"])


@contextmanager
def up(folder: Path, prefill_s: float) -> Iterator[Stand]:
    """A stack of our own, with its files in `folder`. Nothing of it runs on."""
    config, log = folder / "headrace.toml", folder / "up.log"
    own = f'up.state_dir = "{folder}"\nsimulated.prefill_overhead_s = {prefill_s}\n'
    config.write_text(CONFIG + own, "utf-8")
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli", "up", "--config", str(config)],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        running = await_ready(process, folder / "last.json", log)
        workers = tuple(
            running.metrics[name] for name in sorted(running.metrics) if name.startswith(("prefill", "decode"))
        )
        about = ABOUT.format(prefill_s=prefill_s)
        model = asyncio.run(_model(running.gateway))
        yield Stand(about=about, gateway=running.gateway, model=model, workers=workers)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
