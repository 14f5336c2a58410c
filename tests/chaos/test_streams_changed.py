"""An operator changes streams and consumers while requests are on their way; `configs/tuning.md` says what each is for."""

import asyncio
import shutil
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest
import uvloop

from pipeline.bus import streams
from pipeline.paths import JETSTREAM
from tests.chaos import load, verdict
from tests.chaos.rest import rest
from tests.chaos.run import asking, stack
from tests.chaos.stack import Settings, Stack

pytestmark = pytest.mark.timeout(240)

REQUESTS: Final = 200
RATE: Final = 20.0

CHANGES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("REQUESTS_interactive.stream.json", {"max_msgs_per_subject": 64, "max_msgs": 50_000}),
    ("REQUESTS_interactive.shards.consumer.json", {"ack_wait": 2_000_000_000, "max_ack_pending": 1024}),
    ("REQUESTS_interactive.shards.consumer.json", {"max_deliver": 200}),
    ("REQUESTS_interactive.stream.json", {"max_bytes": 1 << 30, "max_age": 180_000_000_000}),
    ("REPLIES.stream.json", {"max_age": 7_200_000_000_000}),
)
"""One after the other, each on top of those before it."""


def test_what_can_be_changed_in_place_is_changed_under_load_and_nothing_is_lost(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_changed_under_load(tmp_path))


async def _changed_under_load(tmp_path: Path) -> None:
    outcomes: list[load.Outcome] = []
    async with stack(Settings(prefill=2, decode=2), None) as running:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_change_all, running, tmp_path)
            await load.open_loop(load.orders(REQUESTS, "changed"), RATE, asking(running, outcomes, REQUESTS))
        left = await rest(running)
    assert [outcome.ending for outcome in outcomes] == ["whole"] * REQUESTS
    assert {verdict.tokens_amiss(outcome) for outcome in outcomes} == {(0, 0)}
    assert (left.blocks, left.slots, left.requests) == (0, 0, 0)


async def _change_all(running: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "jetstream"
    shutil.copytree(JETSTREAM, folder)
    for file, fields in CHANGES:
        await anyio.sleep(REQUESTS / RATE / (len(CHANGES) + 1))
        tree = {**msgspec.json.decode((folder / file).read_bytes()), **fields}
        (folder / file).write_bytes(msgspec.json.encode(tree))
        assert await streams.apply(running.bus, streams.declared(folder)), f"{file} was as declared"
        assert await streams.diff(running.bus, streams.declared(folder)) == []
