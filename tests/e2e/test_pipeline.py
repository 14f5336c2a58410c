"""The whole stack as `headrace up` starts it: nats-server, LMCache, a prefill and a decode worker on vLLM, the gateway.

It is started once. Float32, as everywhere where replies are compared token by token (`test_split.py` says why).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import nats
import openai
import pytest

from pipeline.protocol import subjects
from tests.e2e.conftest import ROOT
from tests.e2e.engines import Reply
from tests.e2e.prompts import PROMPTS, loadable
from tests.e2e.running import Running

pytestmark = [pytest.mark.timeout(600), pytest.mark.anyio]  # a fixture's start counts to the first test that uses it

MODEL = "smollm2-135m-instruct"
SYSTEM = "You are Ada, who answers her fans in one short and friendly sentence. " * 43  # about 600 tokens


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def produce(
    url: str, creator: str, bodies: list[dict[str, Any]], klass: str = "interactive"
) -> list[dict[str, Any]]:
    """The `done` frames of requests that a plain producer publishes one after the other."""
    connection = await nats.connect(url)
    try:
        ends = []
        for body in bodies:
            inbox = connection.new_inbox()
            replies = await connection.subscribe(inbox)
            token = subjects.token(creator)
            request = json.dumps({**body, "reply_to": inbox}).encode()
            await connection.jetstream().publish(f"requests.in.{klass}.{token}.{token}", request)
            with anyio.fail_after(60):
                while (frame := json.loads((await replies.next_msg(timeout=60)).data))["kind"] == "tokens":
                    pass
            await replies.unsubscribe()
            ends.append(frame)
        return ends
    finally:
        await connection.close()


def generated_by_prefill(running: Running) -> float:
    """Tokens that the prefill workers have made and thrown away."""
    return sum(running.metric(f"prefill-{n}", "headrace_prefill_generated_tokens_total") for n in (1, 2))


async def test_a_batch_prompt_that_is_read_in_pieces_has_the_same_reply(
    running: Running, reference_replies: list[Reply]
) -> None:
    long = [(prompt, reply) for prompt, reply in zip(PROMPTS, reference_replies, strict=True) if prompt.tokens > 500]
    cold = [{**prompt.chat, "cache_salt": "pieces"} for prompt, _ in long]
    ends = await produce(running.nats, "pieces", cold, "batch")
    assert [(end["ids"], end["text"]) for end in ends] == [(list(reply.token_ids), reply.text) for _, reply in long]
    usages = [end["usage"] for end in ends]
    assert [usage["cached_tokens"] for usage in usages] == [0] * len(long), "no piece is computed twice"
    assert [usage["decode_cached_tokens"] for usage in usages] == [loadable(prompt.tokens) for prompt, _ in long]
    assert [usage["prefill_generated_tokens"] for usage in usages] == [-(-prompt.tokens // 512) for prompt, _ in long]


async def test_the_pipeline_replies_as_one_engine_does_and_prefill_and_decode_are_split(
    running: Running, reference_replies: list[Reply]
) -> None:
    prefilled = generated_by_prefill(running)
    loaded = running.metric("decode-1", "headrace_decode_loaded_tokens_total")
    ends = await produce(running.nats, "comparison", [prompt.chat for prompt in PROMPTS])
    assert [(end["ids"], end["text"]) for end in ends] == [(list(one.token_ids), one.text) for one in reference_replies]
    usages = [end["usage"] for end in ends]
    assert [usage["prompt_tokens"] for usage in usages] == [prompt.tokens for prompt in PROMPTS]
    assert [usage["decode_cached_tokens"] for usage in usages] == [loadable(prompt.tokens) for prompt in PROMPTS]
    assert {usage["prefill_generated_tokens"] for usage in usages} == {1}
    assert {usage["prefill"] for usage in usages} <= {"prefill-1", "prefill-2"}
    assert {usage["decode"] for usage in usages} == {"decode-1"}
    made = generated_by_prefill(running) - prefilled
    assert made == len(PROMPTS), "prefill makes one token a request, and throws it away"
    assert running.metric("decode-1", "headrace_decode_loaded_tokens_total") - loaded == sum(
        loadable(prompt.tokens) for prompt in PROMPTS
    )


def test_the_openai_sdk_works_unmodified(running: Running) -> None:
    with openai.OpenAI(base_url=f"{running.gateway}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        question: Any = [{"role": "user", "content": "What is the capital of France?"}]
        whole = client.chat.completions.create(model=MODEL, messages=question, temperature=0)
        assert "Paris" in (whole.choices[0].message.content or "")
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=question, temperature=0, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == loadable(usage.prompt_tokens), (
            "the second time it was cached"
        )
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=question, max_tokens=5000)
        assert "3072" in caught.value.message


def test_without_max_tokens_the_operators_default_applies(running: Running) -> None:
    with openai.OpenAI(base_url=f"{running.gateway}/v1", api_key="none") as client:
        reply = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Count."}], extra_body={"ignore_eos": True}
        )
    assert reply.usage is not None
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (256, "length")


def test_the_second_chat_of_a_creator_finds_its_persona_cached(running: Running) -> None:
    def chat() -> tuple[int, int]:
        said = running.run("chat", "Hello!", "--creator", "ada", "--system", SYSTEM, "--max-tokens", "8", "--json")
        usage = json.loads(said.splitlines()[-1])["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    (prompt, first), (again, second) = chat(), chat()
    assert prompt == again > 600
    assert first == 0
    assert second == loadable(prompt)


def test_bench_prints_one_json_object(running: Running) -> None:
    said = running.run("bench", "--requests", "20", "--concurrency", "4", "--json")
    result = json.loads(said.splitlines()[-1])
    assert (result["requests"], result["completed"], result["errors"]) == (20, 20, 0)
    assert 0 < result["ttft_p50_ms"] <= result["ttft_p99_ms"] <= result["e2e_p99_ms"]
    assert result["e2e_p50_ms"] > 0
    assert result["cached_tokens"] <= result["prompt_tokens"]
    assert result["output_tokens"] > 0


def test_a_trace_is_replayed_with_exactly_its_lengths_and_its_shared_prefix(running: Running, tmp_path: Path) -> None:
    lines = [(1200, 9, [0, 1, 2]), (1200, 5, [0, 1, 3]), (600, 7, [4, 5])]
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 4000 * at, "input_length": tokens, "output_length": reply, "hash_ids": ids}
        for at, (tokens, reply, ids) in enumerate(lines)
    ]
    trace.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    result = json.loads(running.run("bench", "--trace", str(trace), "--json").splitlines()[-1])
    assert (result["completed"], result["prompt_tokens"], result["output_tokens"]) == (3, 3000, 21)
    assert result["cached_tokens"] >= 1024, (
        "the two blocks that the second shares with the first; more if it came again"
    )


def test_decode_never_preempts_when_more_is_asked_for_than_it_has_room_for(running: Running) -> None:
    result = json.loads(running.run("bench", "--requests", "24", "--concurrency", "14", "--json").splitlines()[-1])
    assert (result["completed"], result["errors"]) == (24, 0)
    assert running.metric("decode-1", "headrace_engine_preemptions") == 0
    assert running.metric("decode-1", "headrace_ledger_disagreements_total") == 0


def test_a_client_that_leaves_in_mid_reply_stops_the_engine_and_frees_its_blocks(running: Running) -> None:
    consumed = 'headrace_blocks{state="consumed"}'
    with openai.OpenAI(base_url=f"{running.gateway}/v1", api_key="none") as client:
        chunks = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a long story."}],
            max_tokens=2000,  # a minute
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _ in range(4):
            next(chunks)
        running.await_metric("decode-1", consumed, lambda blocks: blocks > 60, within_s=5.0)
        chunks.close()
    running.await_metric("decode-1", consumed, lambda blocks: blocks == 0, within_s=2.0)
    running.await_metric("decode-1", "headrace_engine_kv_usage_ratio", lambda ratio: ratio == 0, within_s=2.0)
    assert running.metric("decode-1", "headrace_ledger_disagreements_total") == 0


def test_the_producer_of_the_readme_works_as_printed(running: Running) -> None:
    readme = (ROOT / "README.md").read_text()
    example = re.search(r"```python\n(# A producer.*?)```", readme, re.DOTALL)
    assert example
    assert len(example[1].splitlines()) <= 20
    said = subprocess.run(
        [sys.executable, "-c", example[1]],
        env=os.environ | {"NATS_URL": running.nats},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Paris" in said.stdout
