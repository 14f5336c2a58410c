"""`headrace calibrate` on a running stack of simulated engines, whose rates are known."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cli import calibrate, client
from pipeline.cli.calibrate import Plan
from pipeline.errors import OperatorError
from pipeline.planning import rates
from tests.cli import double
from tests.cli.test_up import CONFIG, Up

TIMING = """
[simulated]
prefill_tokens_per_s = 4000.0
prefill_overhead_s = 0.02
step_s = 0.02
step_per_sequence_s = 0.004
lmcache_blocks_per_s = 250.0
kv_blocks = 700
"""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Up]:
    config = tmp_path / "headrace.toml"
    config.write_text(CONFIG.format(state_dir=tmp_path) + TIMING, "utf-8")
    stack = Up(config)
    stack.until("Ready at")
    yield stack
    stack.end()


def test_the_rates_of_the_engines_come_out(stack: Up, tmp_path: Path) -> None:
    out = tmp_path / "measured.json"
    calibrate.calibrate(out=out, batches="1,4,8", reply_tokens=24, rounds=2, config=stack.config)
    found = rates.measured(out)
    of = found.rates
    assert found.model == "smollm2-135m-instruct"
    assert not found.notes
    assert of.prefill_tokens_per_s == pytest.approx(4000, rel=0.4)
    assert of.load_tokens_per_s == pytest.approx(8_000, rel=0.5)
    assert of.step_s == pytest.approx(0.02, rel=0.4)
    assert of.step_per_sequence_s == pytest.approx(0.004, rel=0.5)
    assert set(found.step_ms_by_batch) == {"1", "4", "8"}


def test_a_gateway_that_refuses_ends_it_with_a_sentence() -> None:
    plan = Plan(prompt_tokens=128, rounds=1, batches=(1,), reply_tokens=8, slots=1, filler_tokens=128)
    body = b'{"error": {"message": "No worker."}}'
    refused = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)

    async def main() -> None:
        async with double.gateway(refused) as (url, _):
            await calibrate.run(client.Gateway(url), "m", plan)

    with pytest.raises(OperatorError, match=r"A request failed: HTTP 503"):
        asyncio.run(main())


@pytest.mark.parametrize("batches", ["", "0", "a,b", "1,300"])
def test_wrong_batches_are_refused(batches: str) -> None:
    with pytest.raises(OperatorError, match="--batches is"):
        calibrate._numbers(batches)


def test_a_gateway_without_workers_in_its_usage_is_none_of_ours(tmp_path: Path) -> None:
    usage = double.event('{"choices":[],"usage":{"prompt_tokens":70,"completion_tokens":2}}')
    pieces = (double.text("a"), double.FINISH, usage, double.DONE)
    whole = double.HEAD + b"".join(double.chunked(piece) for piece in pieces) + double.END
    plan = Plan(prompt_tokens=128, rounds=1, batches=(1,), reply_tokens=8, slots=1, filler_tokens=128)

    async def main() -> None:
        async with double.gateway(whole) as (url, _):
            await calibrate.run(client.Gateway(url), "m", plan)

    with pytest.raises(OperatorError, match="names no workers"):
        asyncio.run(main())
