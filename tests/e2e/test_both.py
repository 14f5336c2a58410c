"""Two real engines for both roles: a request stays in one, roles change while they stay up, and replies are as of one engine.

Float32, as everywhere where replies are compared token by token.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.e2e.conftest import ENGINES, PORTS, ROOT, up
from tests.e2e.engines import Reply
from tests.e2e.prompts import CHUNK, LENGTHS, PROMPTS, loadable
from tests.e2e.running import Running
from tests.e2e.test_pipeline import produce

pytestmark = [pytest.mark.timeout(600), pytest.mark.anyio]

CACHE = "[both]\nprefill_slots = 1\nkv_cache_bytes = 320_000_000\nprompt_tokens_beside_replies = 64\n"
"""Room for the largest prompt in prefill, and as much again for replies. Beside those a prompt is read in small steps."""

FEW = range(0, len(LENGTHS), 3)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory, model_path: str) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("both")
    config = folder / "headrace.toml"
    config.write_text(f"{PORTS}{ENGINES}{CACHE}[up]\nprefill = 0\ndecode = 0\nboth = 2\nstate_dir = '{folder}'\n")
    with up(config, folder / "up.log", folder, model_path) as running:
        yield running


def order(running: Running, *arguments: str) -> str:
    """A command to the workers of this stack."""
    environment = os.environ | {"HEADRACE__NATS__URL": running.nats}
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments],
        cwd=ROOT, env=environment, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def usages(running: Running, creator: str, expected: Sequence[Reply]) -> list[dict[str, Any]]:
    """Of every third prompt, sent one after the other. Each reply is that of one plain engine."""
    ends = await produce(running.nats, creator, [PROMPTS[number].chat for number in FEW])
    assert [(end["ids"], end["text"]) for end in ends] == [
        (list(expected[number].token_ids), expected[number].text) for number in FEW
    ]
    return [end["usage"] for end in ends]


async def test_a_request_stays_in_one_engine_and_roles_change_while_it_serves(
    colocated: Running, reference_replies: list[Reply]
) -> None:
    pids = colocated.pids
    cold = await usages(colocated, "at-home", reference_replies)
    for usage in cold:
        assert usage["prefill"] == usage["decode"]
        assert usage["prefill_generated_tokens"] == 0, "it is one request to its engine, which reads the prompt once"
    home = max(cold, key=lambda usage: int(usage["prompt_tokens"]))["decode"]
    other = "both-1" if home == "both-2" else "both-2"
    assert "serving as prefill" in order(colocated, "role", other, "prefill")
    assert "serving as decode" in order(colocated, "role", home, "decode")
    for read, usage in zip(cold, await usages(colocated, "at-home", reference_replies), strict=True):
        assert (usage["prefill"], usage["decode"]) == (other, home)
        assert usage["cached_tokens"] >= loadable(usage["prompt_tokens"]), "it is in LMCache, too"
        if read["decode"] == home:
            assert usage["hbm_tokens"] < CHUNK, "only there"
    for usage in await usages(colocated, "split", reference_replies):
        assert (usage["prefill"], usage["decode"]) == (other, home)
        assert usage["decode_cached_tokens"] == loadable(usage["prompt_tokens"])
    for worker in ("both-1", "both-2"):  # somebody must be left for each part at any time
        assert "serving as both" in order(colocated, "role", worker, "both")
    assert "serving as decode" in order(colocated, "role", other, "decode")
    assert "serving as prefill" in order(colocated, "role", home, "prefill")
    for usage in await usages(colocated, "turned-round", reference_replies):
        assert (usage["prefill"], usage["decode"]) == (home, other)
    assert colocated.pids == pids, "no engine was started anew"
