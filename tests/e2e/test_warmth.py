"""What the index of cache events expects a real engine to find is what vLLM finds, while its small cache evicts."""

from pathlib import Path

import msgspec
import pytest

from tests.e2e.conftest import ENGINES, Engines
from tests.e2e.warmth import Hit, Seen

pytestmark = pytest.mark.timeout(300)  # a start of a real engine is in it

SMALL_PREFILL = "[prefill]\nkv_cache_bytes = 50_000_000\n"
"""1,080 tokens in float32: room for one context, as vLLM demands, and for the prefixes of two creators of three."""


def wrong(hits: list[Hit], block: int) -> list[Hit]:
    """Where vLLM found another number of blocks in its own cache than was expected, by more than one."""
    return [hit for hit in hits if abs(hit.expected - hit.found) > block]


def test_22_predicted_hits_equal_what_the_engine_finds_within_one_block(
    engines: Engines, model_path: str, stack: Path
) -> None:
    """By name, test 22 of the field's failure modes: the router's idea of a cache is not the engine's."""
    config = stack.with_name("warmth.toml")
    config.write_text(stack.read_text().replace(ENGINES, ENGINES.replace("3072", "1024") + SMALL_PREFILL))
    seen = msgspec.json.decode(engines("warmth", model_path, str(config), timeout_s=200), type=Seen)
    assert not wrong(seen.hits, seen.block_size), seen
    assert not wrong(seen.hits_with_losses, seen.block_size), "a second after a loss"
    assert all(hit.found + hit.loaded == hit.cached for hit in seen.hits)
    again = seen.hits[3:]
    assert any(hit.found < 400 for hit in again), "something was evicted"
    assert any(hit.found > 400 for hit in again), "and something not"
    assert 3 <= seen.lost == seen.repeated, "what did not come was asked for again"
    assert (seen.resyncs, seen.whole) == (0, True)
    assert all(0 < len(warm) < 3 for warm in seen.warm[3:])
    assert seen.left_when_cleared == 0
