"""The `openai` package, unmodified, against the gateway."""

from collections.abc import AsyncIterator, Iterator

import anyio
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from pipeline.errors import CapacityError, EngineFailed, PromptTooLong, ServiceError
from tests.gateway.stack import Stack
from tests.gateway.worker_double import MODEL, Job, Script, failing, saying

pytestmark = pytest.mark.anyio

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def sdk(served: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """The asynchronous client, with its default of two retries."""
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        yield client


@pytest.fixture
def blocking(served: Stack) -> Iterator[openai.OpenAI]:
    """The synchronous client; used from a thread."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        yield client


async def test_a_reply_in_one_piece(served: Stack, sdk: openai.AsyncOpenAI) -> None:
    served.double.script = saying("Par", "is.")
    reply = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5)
    assert reply.choices[0].message.content == "Paris."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2210, 2)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 1792


async def test_a_stream_with_usage(served: Stack, sdk: openai.AsyncOpenAI) -> None:
    served.double.script = saying("Par", "is.", finish_reason="length")
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "Paris."
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 2212


async def test_the_synchronous_client(served: Stack, blocking: openai.OpenAI) -> None:
    served.double.script = saying("Par", "is.")
    create = blocking.chat.completions.create

    def whole() -> str | None:
        return create(model=MODEL, messages=MESSAGES).choices[0].message.content

    def streamed() -> str:
        chunks = create(model=MODEL, messages=MESSAGES, stream=True)
        return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)

    assert await anyio.to_thread.run_sync(whole) == "Paris."
    assert await anyio.to_thread.run_sync(streamed) == "Paris."


async def test_the_models_are_listed(served: Stack, sdk: openai.AsyncOpenAI) -> None:
    models = await sdk.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("gpt-9")


async def test_errors_arrive_as_the_sdks_own_exceptions(served: Stack, sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        await sdk.chat.completions.create(model=MODEL, messages=[])
    assert (wrong.value.code, wrong.value.param) == ("invalid_value", "messages")
    with pytest.raises(openai.NotFoundError) as unknown:
        await sdk.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    served.double.script = failing(PromptTooLong("5000 do not fit 4096.", param="messages").body())
    with pytest.raises(openai.BadRequestError) as long:
        await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    assert long.value.code == "context_length_exceeded"
    assert served.double.seen == 1


async def test_an_error_under_way_raises_in_the_middle_of_the_stream(served: Stack, sdk: openai.AsyncOpenAI) -> None:
    begun = anyio.Event()

    async def script(job: Job) -> None:
        await job.claim()
        await job.say("Par")
        await begun.wait()
        await job.fail(EngineFailed("The engine failed.").body())

    served.double.script = script
    stream = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    first = await anext(stream)
    assert first.choices[0].delta.content == "Par"
    begun.set()
    with pytest.raises(openai.APIError) as failed:
        await anext(stream)
    assert failed.value.code == "engine_failed"


def first_then(first: Script, then: Script) -> Script:
    """A script whose first job goes one way, and all others another."""
    ways = [first]

    async def script(job: Job) -> None:
        await (ways.pop() if ways else then)(job)

    return script


async def test_a_503_is_tried_again_after_the_time_it_names(served: Stack, sdk: openai.AsyncOpenAI) -> None:
    full = CapacityError("Full.", retry_after_s=0.8).body()
    served.double.script = first_then(failing(full), saying("yes"))
    asked_s = anyio.current_time()
    reply = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert anyio.current_time() - asked_s >= 0.8, "left to itself, the SDK pauses for 0.5 s at most"
    assert reply.choices[0].message.content == "yes"
    assert served.double.seen == 2


async def test_what_a_retry_cannot_help_is_not_tried_again(served: Stack, sdk: openai.AsyncOpenAI) -> None:
    class Hopeless(ServiceError):
        retryable = False

    served.double.script = failing(Hopeless("It will not work.").body())
    with pytest.raises(openai.InternalServerError):
        await sdk.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert served.double.seen == 1


async def test_a_stream_that_is_closed_early_stops_its_worker(served: Stack, sdk: openai.AsyncOpenAI) -> None:
    async def script(job: Job) -> None:
        await job.claim()
        await job.say("Par")

    served.double.script = script
    stream = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    async with stream:
        async for chunk in stream:
            request = chunk.id.removeprefix("chatcmpl-")
            break
    assert await served.double.next_cancel() == request
