"""Aborting a request while it loads from LMCache must not end the engine.

The first test shows the fault in LMCache's own connector, so that we notice when it is mended and ours can go. The engine dies
in it by an assertion in vLLM's scheduler, within a round or two of aborts.
"""

from pathlib import Path

import msgspec
import pytest

from tests.e2e.conftest import Engines
from tests.e2e.engines import Storm

pytestmark = pytest.mark.timeout(300)  # a start of a real engine is in each test

UPSTREAM = "lmcache.integration.vllm.lmcache_mp_connector:LMCacheMPConnector"
OURS = "workers.engines.connector:PDConnector"


def storm(engines: Engines, model_path: str, stack: Path, connector: str) -> Storm:
    return msgspec.json.decode(engines("storm", model_path, str(stack), connector, timeout_s=200), type=Storm)


def test_lmcaches_own_connector_dies_of_an_abort_during_a_load(engines: Engines, model_path: str, stack: Path) -> None:
    seen = storm(engines, model_path, stack, UPSTREAM)
    assert seen.loaded_tokens > 0
    assert not seen.alive


def test_our_connector_survives_aborts_during_loads_and_frees_their_blocks(
    engines: Engines, model_path: str, stack: Path
) -> None:
    seen = storm(engines, model_path, stack, OURS)
    assert seen.loaded_tokens > 0
    assert seen.aborted > 0
    assert (seen.alive, seen.freed) == (True, True)
