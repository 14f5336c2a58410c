"""The `openai` SDK, unmodified, where not all goes well: refusals, retries, timeouts, and clients that leave."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from pipeline.protocol.admission import RETRY_AFTER_MIN_S
from tests.chaos.rest import Rest, rest
from tests.clients.conftest import PLACES, Served
from tests.clients.test_sdk import MESSAGES, MODEL
from tests.ports import free_port

pytestmark = pytest.mark.anyio

Keyed = Callable[[str], openai.AsyncOpenAI]

LONG: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
"""Half a minute of decode: what ends sooner was stopped."""

SHORT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}


@pytest.fixture(autouse=True)
async def nothing_left(served: Served) -> AsyncIterator[None]:
    """Whatever a client does: its blocks, its slot and its message are free before its reply could have been whole."""
    yield
    left = await rest(served.stack)
    assert left == Rest(accusations=left.accusations)


@asynccontextmanager
async def streams_open(sdk: openai.AsyncOpenAI, count: int, creator: str) -> AsyncIterator[None]:
    """So many replies are under way while the block runs; `creator` may have a place for a number."""
    async with AsyncExitStack() as held:
        for number in range(count):
            user = creator.format(number)
            stream = await held.enter_async_context(await sdk.chat.completions.create(**LONG, user=user, stream=True))
            await anext(stream)
        yield


async def exhaust(stream: openai.AsyncStream[ChatCompletionChunk]) -> None:
    """Read it to its end."""
    async for _ in stream:
        pass


# ------------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("fields", "raised", "code"),
    [
        ({"messages": []}, openai.BadRequestError, "invalid_value"),
        ({"temperature": "hot"}, openai.BadRequestError, "invalid_value"),
        (
            {"messages": [{"role": "user", "content": "word " * 9000}]},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found"),
        ({"messages": [{"role": "user", "content": "x" * 1_000_000}]}, openai.APIStatusError, "request_too_large"),
    ],
)
async def test_a_request_that_cannot_be_served_raises_the_sdks_own_exception(
    served: Served, sdk: openai.AsyncOpenAI, fields: dict[str, Any], raised: type[openai.APIStatusError], code: str
) -> None:
    before = await served.ended("invalid")
    with pytest.raises(raised) as refused:
        await sdk.chat.completions.create(**SHORT | fields)
    assert refused.value.code == code
    assert refused.value.request_id == refused.value.response.headers["x-request-id"]
    after = (await served.settled()).total("headrace_requests_total", outcome="invalid")
    assert after - before == 1, "and it is not tried again"


async def test_a_key_that_is_unknown_or_may_not_raises_as_such(keyed: Keyed) -> None:
    with pytest.raises(openai.AuthenticationError) as unknown:
        await keyed("nobody's").chat.completions.create(**SHORT)
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        await keyed("nobody's").models.list()
    with pytest.raises(openai.PermissionDeniedError) as forbidden:
        await keyed("narrow").chat.completions.create(**SHORT, user="bob")
    assert forbidden.value.param == "x-creator-id"


async def test_a_creator_with_all_that_one_may_have_raises_as_a_rate_limit(sdk: openai.AsyncOpenAI) -> None:
    async with streams_open(sdk, 2, "busy"):
        with pytest.raises(openai.RateLimitError) as refused:
            await sdk.with_options(max_retries=0).chat.completions.create(**SHORT, user="busy")
        assert refused.value.code == "creator_queue_full"
        assert float(refused.value.response.headers["retry-after"]) >= RETRY_AFTER_MIN_S
        assert (await sdk.chat.completions.create(**SHORT, user="another")).choices


async def test_nobody_there_raises_as_a_connection_that_failed() -> None:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{free_port()}/v1", api_key="open", max_retries=0) as sdk:
        with pytest.raises(openai.APIConnectionError):
            await sdk.chat.completions.create(**SHORT)


async def test_a_deadline_raises_also_in_the_middle_of_a_stream(sdk: openai.AsyncOpenAI) -> None:
    soon = {"x-request-timeout-ms": "3000"}
    with pytest.raises(openai.InternalServerError) as late:
        await sdk.with_options(max_retries=0).chat.completions.create(**LONG, extra_headers=soon)
    assert (late.value.status_code, late.value.code) == (504, "deadline")
    stream = await sdk.chat.completions.create(**LONG, extra_headers=soon, stream=True)
    assert (await anext(stream)).choices[0].delta.content
    with pytest.raises(openai.APIError) as cut:
        await exhaust(stream)
    assert cut.value.code == "deadline"


# ------------------------------------------------------------------------------------------------------------
# Retries


async def test_a_429_is_tried_again_when_the_keys_next_turn_has_come(served: Served, keyed: Keyed) -> None:
    paced, rejected = keyed("paced"), await served.ended("rejected")
    await paced.chat.completions.create(**SHORT)
    asked_s = time.monotonic()
    raw = await paced.chat.completions.with_raw_response.create(**SHORT)
    assert raw.parse().choices
    assert time.monotonic() - asked_s >= RETRY_AFTER_MIN_S, "left to itself, the SDK pauses for 0.5 s at most"
    assert raw.retries_taken == 1
    assert await served.ended("rejected") - rejected == 1


async def test_a_503_is_tried_again_when_a_place_may_be_free(
    served: Served, sdk: openai.AsyncOpenAI, blocking: openai.OpenAI
) -> None:
    for _ in range(20):  # so that places are known to become free often, and the wait is short
        await sdk.chat.completions.create(**SHORT)
    rejected = await served.ended("rejected")
    asked_s, ended = time.monotonic(), list[tuple[int, float]]()

    async def ask() -> None:
        raw = await sdk.chat.completions.with_raw_response.create(**SHORT)
        ended.append((raw.retries_taken, time.monotonic() - asked_s))

    async def ask_blocking() -> None:
        raw = await anyio.to_thread.run_sync(lambda: blocking.chat.completions.with_raw_response.create(**SHORT))
        ended.append((raw.retries_taken, time.monotonic() - asked_s))

    async with anyio.create_task_group() as tasks, streams_open(sdk, PLACES, "holder-{}"):
        asked_s = time.monotonic()
        tasks.start_soon(ask)
        tasks.start_soon(ask_blocking)
        with anyio.fail_after(20):
            while await served.ended("rejected") - rejected < 2:
                await anyio.sleep(0.02)
    assert [retries for retries, _ in ended] == [1, 1]
    assert min(took_s for _, took_s in ended) >= RETRY_AFTER_MIN_S


async def test_a_full_gateway_that_stays_full_raises_after_the_last_retry(sdk: openai.AsyncOpenAI) -> None:
    async with streams_open(sdk, PLACES, "holder-{}"):
        with pytest.raises(openai.InternalServerError) as full:
            await sdk.with_options(max_retries=0).chat.completions.create(**SHORT)
    assert (full.value.status_code, full.value.code) == (503, "overloaded")
    assert full.value.response.headers["x-should-retry"] == "true"
    assert float(full.value.response.headers["retry-after"]) >= RETRY_AFTER_MIN_S


async def test_what_a_retry_cannot_help_is_asked_once(served: Served, keyed: Keyed) -> None:
    rare = keyed("rare").with_options(max_retries=5)
    await rare.chat.completions.create(**SHORT)
    rejected = await served.ended("rejected")
    with pytest.raises(openai.RateLimitError) as refused:
        await rare.chat.completions.create(**SHORT)
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert await served.ended("rejected") - rejected == 1


# ------------------------------------------------------------------------------------------------------------
# Clients that leave. `nothing_left` sees to it that their work ends.


async def cancelled_since(served: Served, before: float) -> float:
    """How many clients have left since, once one has, or after a while."""
    with anyio.move_on_after(10):
        while await served.ended("cancelled") == before:
            await anyio.sleep(0.02)
    return await served.ended("cancelled") - before


async def test_a_client_that_waits_no_longer_stops_the_work(served: Served, sdk: openai.AsyncOpenAI) -> None:
    before = await served.ended("cancelled")
    with pytest.raises(openai.APITimeoutError):
        await sdk.with_options(timeout=1.0, max_retries=0).chat.completions.create(**LONG)
    assert await cancelled_since(served, before) == 1


async def test_a_stream_that_is_closed_stops_the_work(served: Served, sdk: openai.AsyncOpenAI) -> None:
    before = await served.ended("cancelled")
    stream = await sdk.chat.completions.create(**LONG, stream=True)
    await anext(stream)
    await stream.close()
    assert await cancelled_since(served, before) == 1


async def test_the_synchronous_client_may_close_its_stream(served: Served, blocking: openai.OpenAI) -> None:
    def read_and_close() -> None:
        with blocking.chat.completions.create(**LONG, stream=True) as stream:
            next(stream)

    before = await served.ended("cancelled")
    await anyio.to_thread.run_sync(read_and_close)
    assert await cancelled_since(served, before) == 1


async def test_a_task_that_is_cancelled_while_it_waits_stops_the_work(served: Served, sdk: openai.AsyncOpenAI) -> None:
    before = await served.ended("cancelled")
    with anyio.move_on_after(1.0):
        await sdk.chat.completions.create(**LONG)
    assert await cancelled_since(served, before) == 1
