"""Kills on the real stack: whoever dies, the client gets the reply that it would have got.

Each kill is SIGKILL, to a worker and everything it has started. The replies are greedy and in float32, so they can be compared
token for token with undisturbed ones; the requests have time for a real engine to start again.
"""

import concurrent.futures
from typing import Any

import openai
import pytest

from tests.e2e.running import Running

pytestmark = pytest.mark.timeout(900)

STORY = "Tell me a long story about a river, a bridge and a lighthouse keeper who writes letters. "
PATIENT = {"x-request-class": "batch", "x-request-timeout-ms": "400000"}


def stream(client: openai.OpenAI, content: str, tokens: int, creator: str) -> Any:
    return client.chat.completions.create(
        model="smollm2-135m-instruct",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={**PATIENT, "x-creator-id": creator},
        timeout=420.0,
    )


def text(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.fixture
def client(running: Running) -> Any:
    with openai.OpenAI(base_url=f"{running.gateway}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_reply_outlives_its_decode_worker(running: Running, client: openai.OpenAI) -> None:
    whole = text(stream(client, STORY, 120, "undisturbed"))
    victim = running.pid("decode-1")
    chunks = stream(client, STORY, 120, "killed-decode")
    begun = "".join(next(chunks).choices[0].delta.content or "" for _ in range(8))
    running.kill("decode-1")
    assert begun + text(chunks) == whole
    running.await_another("decode-1", than=victim)


def test_a_request_outlives_its_prefill_worker(running: Running, client: openai.OpenAI) -> None:
    content = STORY * 80  # about 1,500 tokens: seconds of prefill
    whole = text(stream(client, content, 24, "undisturbed"))
    owner = running.owner("killed-prefill")
    victim = running.pid(owner)
    chunks = stream_later(client, content)
    running.kill(owner)
    assert text(chunks()) == whole
    running.await_another(owner, than=victim)


def test_a_reply_outlives_lmcache_and_the_workers_that_go_with_it(running: Running, client: openai.OpenAI) -> None:
    whole = text(stream(client, STORY, 60, "undisturbed"))
    victims = {name: running.pid(name) for name in ("prefill-1", "prefill-2", "decode-1")}
    chunks = stream(client, STORY, 60, "killed-lmcache")
    begun = "".join(next(chunks).choices[0].delta.content or "" for _ in range(4))
    running.kill("lmcache")
    assert begun + text(chunks) == whole
    for name, victim in victims.items():
        running.await_another(name, than=victim)


def stream_later(client: openai.OpenAI, content: str) -> Any:
    """Send a request from a thread, and return when it has been sent; its chunks come by calling the result."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(stream, client, content, 24, "killed-prefill")
    concurrent.futures.wait([future], timeout=1.0)  # a second into a prefill that takes several
    return future.result
