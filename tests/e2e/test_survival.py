"""Kills on the real stack: whoever dies, the client gets the reply that it would have got.

Each kill is SIGKILL, to a worker and everything it has started. The replies are greedy and in float32, so they can be compared
token for token with undisturbed ones; the requests have time for a real engine to start again.
"""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.e2e.running import Running

pytestmark = pytest.mark.timeout(900)

STORY = "Tell me a long story about a river, a bridge and a lighthouse keeper who writes letters. "
PATIENT = {"x-request-class": "batch", "x-request-timeout-ms": "400000"}


def stream(client: openai.OpenAI, content: str, tokens: int, creator: str, **fields: Any) -> Any:
    return client.chat.completions.create(
        model="smollm2-135m-instruct",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={**PATIENT, "x-creator-id": creator},
        timeout=420.0,
        **fields,
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


WITH_STATE: dict[str, dict[str, Any]] = {
    "n": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools": {"tools": [{"type": "function", "function": {"name": "row", "parameters": {"type": "object"}}}]},
    "temperature": {},
}
"""By the field that a continuation fails at; the last one can be continued."""


class Told:
    """What a client was told of a reply: each choice's text, tool calls and logprobs, and the error at the end."""

    def __init__(self) -> None:
        self.of: dict[int, list[str]] = {}
        self.ended: dict[int, str] = {}
        self.error: dict[str, Any] = {}
        self.chunks = 0

    def read(self, chunks: Any, at_least: threading.Semaphore) -> None:
        """All of a stream. Releases `at_least` once it has four pieces."""
        try:
            for chunk in chunks:
                for choice in chunk.choices:
                    self._take(choice)
                self.chunks += 1
                if self.chunks == 4:
                    at_least.release()
        except openai.APIError as error:
            self.error = error.body if isinstance(error.body, dict) else {"code": None, "param": None, "is": error}

    def _take(self, choice: Any) -> None:
        parts = self.of.setdefault(choice.index, ["", "", ""])
        parts[0] += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            parts[1] += f"{call.function.name or ''}{call.function.arguments or ''}"
        for token in choice.logprobs.content if choice.logprobs else []:
            parts[2] += f"{token.token}:{token.logprob:.4f} "
        if choice.finish_reason:
            self.ended[choice.index] = choice.finish_reason

    def is_part_of(self, whole: "Told") -> bool:
        """Whether nothing was said that an undisturbed reply does not say."""
        return all(
            said == "" or all_of_it.startswith(said)
            for index, parts in self.of.items()
            for said, all_of_it in zip(parts, whole.of[index], strict=True)
        )


def all_at_once(client: openai.OpenAI, creator: str, then: Callable[[], None]) -> dict[str, Told]:
    """A reply for each of `WITH_STATE`, side by side; `then` happens once all have begun."""
    told = {field: Told() for field in WITH_STATE}
    begun = threading.Semaphore(0)

    def one(field: str) -> None:
        told[field].read(stream(client, STORY, 100, creator, **WITH_STATE[field]), begun)

    with concurrent.futures.ThreadPoolExecutor(len(told)) as pool:
        futures = [pool.submit(one, field) for field in told]
        for _ in futures:
            assert begun.acquire(timeout=120)
        then()
        for future in futures:
            future.result(timeout=420)
    return told


def test_a_reply_with_state_that_dies_with_its_worker_is_right_or_ends_with_an_error(
    running: Running, client: openai.OpenAI
) -> None:
    undisturbed = all_at_once(client, "undisturbed", lambda: None)
    assert not [field for field, whole in undisturbed.items() if whole.error]
    victim = running.pid("decode-1")
    killed = all_at_once(client, "killed-state", lambda: running.kill("decode-1"))
    for field, said in killed.items():
        assert said.is_part_of(undisturbed[field]), field
        if field == "temperature":
            assert (said.of, said.ended, said.error) == (undisturbed[field].of, undisturbed[field].ended, {})
        else:
            assert (said.error["code"], said.error["param"]) == ("reply_lost", field), said.error
            assert len(said.ended) < len(undisturbed[field].ended), "a reply that has ended was not cut"
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
