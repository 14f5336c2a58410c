"""Kills on the real stack: whoever dies, the client gets the reply that it would have got.

Each kill is SIGKILL, to a worker and everything it has started. The replies are greedy and in float32, so they can be compared
token for token with undisturbed ones; the requests have time for a real engine to start again.
"""

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
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


STATEFUL: Final[Mapping[str, dict[str, Any]]] = {
    "n": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "tools": {
        "tools": [
            {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
        ]
    },
}
"""Field → a request whose reply no other worker can go on with."""

DECODING: Final = 'headrace_grants_outstanding{state="consumed"}'


class Told(msgspec.Struct):
    """What a client was told of one request: of each choice its text and tokens, and why the reply broke off, if it did."""

    texts: dict[int, str] = {}
    tokens: dict[int, list[str]] = {}
    code: str = ""
    param: str = ""
    chunks: int = 0

    def take(self, choice: Any, said: Any) -> None:
        """Something of a choice: of a chunk, or all there is."""
        self.texts[choice.index] = self.texts.get(choice.index, "") + (said.content or "")
        if choice.logprobs is not None:
            self.tokens.setdefault(choice.index, []).extend(one.token for one in choice.logprobs.content)

    def begins(self, whole: "Told") -> bool:
        """Whether it is the other one, up to where it is."""
        texts = all(whole.texts[index].startswith(text) for index, text in self.texts.items())
        return texts and all(whole.tokens[index][: len(have)] == have for index, have in self.tokens.items())


def ask(client: openai.OpenAI, told: Told, fields: dict[str, Any], *, streamed: bool) -> None:
    """A request whose reply depends on more than its tokens, followed to its end."""
    made = client.with_options(timeout=420.0).chat.completions
    common: dict[str, Any] = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": STORY}],
        "max_tokens": 100,
        "extra_body": {"ignore_eos": True, "top_k": 1},  # greedy, which by `temperature` it may not be with `n`
        "extra_headers": {**PATIENT, "x-creator-id": "stateful"},
    }
    try:
        if not streamed:
            for choice in made.create(**common, **fields).choices:
                told.take(choice, choice.message)
            return
        for chunk in made.create(**common, **fields, stream=True):
            told.chunks += 1
            for choice in chunk.choices:
                told.take(choice, choice.delta)
    except openai.APIError as error:
        told.code, told.param = str(error.code), str(error.param)


@pytest.mark.parametrize("names", [("n",), ("logprobs", "tools")], ids=" ".join)
def test_what_nobody_can_go_on_with_is_begun_again_unless_its_client_has_seen_some(
    running: Running, client: openai.OpenAI, names: Sequence[str]
) -> None:
    """Streamed replies end with an error that names the field; whole ones are those of an undisturbed worker.

    Decode promises seats for five sequences: so many of these run at a time.
    """
    undisturbed = _asked(running, client, names, disturbed=False)
    killed = _asked(running, client, names, disturbed=True)
    assert {(key, one.code) for key, one in undisturbed.items() if one.code} == set()
    for name in names:
        assert (killed[name, True].code, killed[name, True].param) == ("reply_lost", name)
        assert killed[name, True].begins(undisturbed[name, True])
        assert killed[name, False] == undisturbed[name, False]
        assert undisturbed[name, False].texts == undisturbed[name, True].texts


def _asked(
    running: Running, client: openai.OpenAI, names: Sequence[str], *, disturbed: bool
) -> dict[tuple[str, bool], Told]:
    """These kinds at once, streamed and whole; `disturbed`: their worker dies in the middle."""
    told = {(name, streamed): Told() for name in names for streamed in (True, False)}
    with concurrent.futures.ThreadPoolExecutor(len(told)) as pool:
        asked = [
            pool.submit(ask, client, one, STATEFUL[name], streamed=streamed) for (name, streamed), one in told.items()
        ]
        if disturbed:
            victim = running.pid("decode-1")
            running.await_metric("decode-1", DECODING, lambda count: count == len(told) and _under_way(told), 60.0)
            running.kill("decode-1")
            running.await_another("decode-1", than=victim)
        for one in asked:
            one.result()
    return told


def _under_way(told: Mapping[tuple[str, bool], Told]) -> bool:
    """Every client that streams has seen some of its reply."""
    return all(one.chunks > 3 for (_, streamed), one in told.items() if streamed)


def stream_later(client: openai.OpenAI, content: str) -> Any:
    """Send a request from a thread, and return when it has been sent; its chunks come by calling the result."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(stream, client, content, 24, "killed-prefill")
    concurrent.futures.wait([future], timeout=1.0)  # a second into a prefill that takes several
    return future.result
