"""Two real prefill workers: a creator's persona is warm where it is served, and where it has never been it comes from LMCache."""

import contextlib
from typing import Any

import anyio
import openai
import pytest

from pipeline.bus.connection import Bus
from pipeline.config import Requests
from tests.benchmarks.warmth import Elsewhere, Stand
from tests.e2e.running import Running

pytestmark = [pytest.mark.timeout(600), pytest.mark.anyio]

CHUNK = 32
PERSONA_TOKENS = 300
CREATORS = ("grace", "joan", "radia")
"""Several: on a busy machine a worker may be silent for so long that it is taken for dead, and its request goes elsewhere."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def client(running: Running) -> Any:
    with openai.OpenAI(base_url=f"{running.gateway}/v1", api_key="none", max_retries=0) as client:
        yield client


def chunks_of(tokens: int) -> int:
    """Of so many tokens, those in full chunks."""
    return tokens // CHUNK * CHUNK


async def test_a_worker_that_has_never_seen_a_creator_loads_its_persona_from_lmcache(running: Running) -> None:
    async with await Bus.connect(running.nats, "test") as bus:
        stand = Stand(running.gateway, bus, Requests().shards, PERSONA_TOKENS)
        for creator in CREATORS:
            with contextlib.suppress(Elsewhere):
                cold, hbm, lmcache = await stand.measure(creator)
                if cold.cached_tokens < CHUNK:  # or it was delivered twice, and found what the first time had stored
                    break
        else:
            pytest.fail(f"none of {CREATORS} was served where it should")
    assert hbm.worker == cold.worker != lmcache.worker
    assert min(hbm.cached_tokens, lmcache.cached_tokens) >= chunks_of(PERSONA_TOKENS)


async def test_when_the_owner_is_killed_the_other_serves_its_creators_warm(
    running: Running, client: openai.OpenAI
) -> None:
    """Its persona is in LMCache, so the spill is a load and no cold prefill."""
    persona = "You are Hedy, who invents things and explains them to her fans. " * 24

    def ask(question: str) -> Any:
        reply = client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[{"role": "system", "content": persona}, {"role": "user", "content": question}],
            max_tokens=4,
            extra_headers={"x-creator-id": "hedy", "x-request-class": "batch", "x-request-timeout-ms": "300000"},
            timeout=320.0,
        )
        assert reply.usage is not None
        return reply.usage.model_dump()

    async with await Bus.connect(running.nats, "test") as bus:
        stand = Stand(running.gateway, bus, Requests().shards, 0)
        owner, other = await stand.owners("hedy")
    cold, warm = ask("Who are you?"), ask("What is a frequency hop?")
    assert cold["headrace"]["prefill"] == warm["headrace"]["prefill"] == owner
    victim = running.pid(owner)
    running.kill(owner)
    elsewhere = await anyio.to_thread.run_sync(ask, "And what is a torpedo?")
    assert elsewhere["headrace"]["prefill"] == other
    cached = elsewhere["prompt_tokens_details"]["cached_tokens"]
    assert min(cached, warm["prompt_tokens_details"]["cached_tokens"]) > 256
    assert elsewhere["headrace"]["hbm_tokens"] == 0, "it came from LMCache"
    running.await_another(owner, than=victim)
