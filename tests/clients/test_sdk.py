"""The `openai` SDK, unmodified, against a stack of real processes: what it asks for, it gets."""

import anyio
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.clients.conftest import Served

pytestmark = pytest.mark.anyio

MODEL = "smollm2-135m-instruct"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You are Ada. " * 40},
    {"role": "user", "content": "What do you see from your window?"},
]
TWELVE = {"ignore_eos": True}
"""With `max_tokens`, a reply of exactly so many tokens."""


async def test_a_reply_in_one_piece_has_as_many_tokens_as_it_says(sdk: openai.AsyncOpenAI) -> None:
    reply = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, extra_body=TWELVE)
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12


async def test_a_stream_adds_up_to_the_reply_in_one_piece(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_the_synchronous_client_reads_the_same(sdk: openai.AsyncOpenAI, blocking: openai.OpenAI) -> None:
    whole = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    create = blocking.chat.completions.create

    def streamed() -> str:
        chunks = create(model=MODEL, messages=MESSAGES, stream=True)
        return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)

    def in_one_piece() -> str | None:
        return create(model=MODEL, messages=MESSAGES).choices[0].message.content

    assert await anyio.to_thread.run_sync(in_one_piece) == whole.choices[0].message.content
    assert await anyio.to_thread.run_sync(streamed) == whole.choices[0].message.content


async def test_the_event_interface_accumulates_a_whole_completion(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    asked = {"include_usage": True}
    async with sdk.chat.completions.stream(
        model=MODEL, messages=MESSAGES, extra_body={"stream_options": asked}
    ) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


async def test_a_raw_response_has_the_headers_and_parses_to_the_same(sdk: openai.AsyncOpenAI) -> None:
    raw = await sdk.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, extra_headers={"x-request-id": "mine"}
    )
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    assert raw.request_id == raw.headers["x-request-id"] == "mine"
    assert raw.retries_taken == 0
    assert raw.parse().choices[0].message.content


async def test_a_raw_stream_ends_as_the_format_says(sdk: openai.AsyncOpenAI) -> None:
    asked = sdk.chat.completions.with_streaming_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, stream=True
    )
    async with asked as raw:
        lines = [line async for line in raw.iter_lines() if line]
        assert raw.headers["content-type"].startswith("text/event-stream")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


async def test_the_models_are_listed(sdk: openai.AsyncOpenAI, blocking: openai.OpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == [MODEL]
    listed = await anyio.to_thread.run_sync(blocking.models.list)
    assert [model.id for model in listed.data] == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).id == MODEL


async def test_the_gateway_counts_what_the_client_counts(served: Served, sdk: openai.AsyncOpenAI) -> None:
    before = await served.settled()
    replies = [await sdk.chat.completions.create(model=MODEL, messages=MESSAGES) for _ in range(3)]
    after = await served.settled()
    usages = [reply.usage for reply in replies if reply.usage is not None]
    for name, said in (
        ("headrace_requests_total", len(replies)),
        ("headrace_output_tokens_total", sum(usage.completion_tokens for usage in usages)),
        ("headrace_prompt_tokens_total", sum(usage.prompt_tokens for usage in usages)),
    ):
        assert after.total(name) - before.total(name) == said
