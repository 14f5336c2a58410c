"""Replies that say more than one text: several choices, logprobs, token ids, usage in every chunk, who speaks."""

import json
import re
from typing import Any

import msgspec
import pytest

from pipeline.errors import EngineFailed
from pipeline.protocol.messages import Done, Tokens, pack_ids
from pipeline.protocol.reply import Outbox
from tests.gateway.stack import HELLO, Stack, connection, events
from tests.gateway.worker_double import Job, Script, saying

pytestmark = pytest.mark.anyio

ENTRIES: list[dict[str, Any]] = [{"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": []} for word in "abc"]
WRITTEN = [json.dumps(entry) for entry in ENTRIES]


def replying(*steps: tuple[int, str, str], stop_reason: str | None = None) -> Script:
    """A script: a token for each step of (choice, text, logprobs), in order, and the end of all choices."""

    async def script(job: Job) -> None:
        await job.claim()
        outbox = Outbox(job.id, job.claim_id)
        outbox.prompt_tokens, outbox.prompt = 3, pack_ids([7, 8, 9])
        for number, (choice, text, logprobs) in enumerate(steps):
            frame = outbox.add([number], text, choice, logprobs)
            assert isinstance(frame, Tokens)
            await job.send([frame])
        for choice in sorted({choice for choice, _, _ in steps}):
            outbox.end(choice, "stop", stop_reason)
        done: Done = outbox.done(job.usage())
        await job.done_with(done)

    return script


def joined(chunks: list[Any], index: int) -> dict[str, Any]:
    """One choice of a stream."""
    said = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    logprobs = [entry for choice in said for entry in (choice["logprobs"] or {"content": []})["content"]]
    return {
        "roles": [choice["delta"]["role"] for choice in said if "role" in choice["delta"]],
        "text": "".join(choice["delta"].get("content", "") for choice in said),
        "logprobs": logprobs,
        "ids": [token for choice in said for token in choice.get("token_ids", [])],
        "ends": [choice["finish_reason"] for choice in said if choice["finish_reason"]],
    }


async def test_several_replies_come_side_by_side(served: Stack) -> None:
    served.double.script = replying((0, "a", ""), (1, "x", ""), (0, "b", ""))
    body = (await served.ask(n=2)).json()
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [(0, "ab"), (1, "x")]
    *chunks, end = events((await served.ask(n=2, stream=True)).content)
    assert end == "[DONE]"
    assert [joined(chunks, index)["text"] for index in (0, 1)] == ["ab", "x"]
    assert [joined(chunks, index)["roles"] for index in (0, 1)] == [["assistant"]] * 2
    assert [joined(chunks, index)["ends"] for index in (0, 1)] == [["stop"]] * 2
    assert "usage" not in chunks[0]


async def test_logprobs_come_with_their_tokens_even_where_these_add_no_text(served: Stack) -> None:
    served.double.script = replying((0, "a", WRITTEN[0]), (0, "", WRITTEN[1]), (0, "c", WRITTEN[2]))
    body = (await served.ask(logprobs=True)).json()
    assert body["choices"][0]["logprobs"] == {"content": ENTRIES}
    *chunks, _ = events((await served.ask(logprobs=True, stream=True)).content)
    assert joined(chunks, 0)["logprobs"] == ENTRIES


async def test_token_ids_are_returned_with_the_prompts(served: Stack) -> None:
    served.double.script = replying((0, "a", ""), (0, "", ""))
    body = (await served.ask(return_token_ids=True)).json()
    assert body["prompt_token_ids"] == [7, 8, 9]
    assert body["choices"][0]["token_ids"] == [0, 1]
    *chunks, _ = events((await served.ask(return_token_ids=True, stream=True)).content)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[7, 8, 9], *[None] * (len(chunks) - 1)]
    assert joined(chunks, 0)["ids"] == [0, 1]


async def test_usage_counts_up_in_every_chunk_where_it_is_asked_for(served: Stack) -> None:
    served.double.script = replying((0, "a", ""), (0, "b", ""))
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = events((await served.ask(stream=True, stream_options=options)).content)
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert last["choices"] == []
    assert last["usage"]["headrace"]["decode"] == "decode-1"


async def test_usage_counts_a_token_once_however_slowly_it_is_read(served: Stack) -> None:
    piece = "0123456789abcdef" * 4096  # 100 of them are more than the kernel's largest buffers
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with connection(served, HELLO | {"stream": True, "stream_options": options}) as slow:
        job = await served.double.next_job()
        await job.claim()
        for _ in range(10):
            await job.say(*[piece] * 10)
        await job.fail(EngineFailed("The engine failed.").body())
        counts = re.findall(rb'"completion_tokens":(\d+)', await slow.rest())
    assert int(counts[-1]) == 100


async def test_usage_comes_at_the_end_of_detailed_replies_too(served: Stack) -> None:
    served.double.script = replying((0, "a", ""), (1, "b", ""))
    *chunks, last, _ = events((await served.ask(n=2, stream=True, stream_options={"include_usage": True})).content)
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert last["usage"]["prompt_tokens"] == 2210


async def test_calls_of_tools_are_passed_on_as_the_worker_has_read_them(served: Stack) -> None:
    deltas = ['{"tool_calls":[{"index":0,"id":"t","function":{"name":"sun"}}]}', '{"content":"b"}', '{"content":"c"}']

    async def script(job: Job) -> None:
        await job.claim()
        outbox = Outbox(job.id, job.claim_id)
        if job.tree.get("stream"):
            for number, message in enumerate((deltas[0], "", f"{deltas[1]},{deltas[2]}")):
                frame = outbox.add([number], "x", message=message)
                assert isinstance(frame, Tokens)
                await job.send([frame])
        else:
            outbox.add([0], "x", message='{"role":"assistant","content":null}')
        outbox.end(0, "tool_calls")
        await job.done_with(outbox.done(job.usage()))

    served.double.script = script
    tools = [{"type": "function", "function": {"name": "sun"}}]
    body = (await served.ask(tools=tools)).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": None}
    *chunks, _ = events((await served.ask(tools=tools, stream=True)).content)
    said = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["delta"]]
    assert said == [{"role": "assistant", "content": ""}, *map(json.loads, deltas)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_where_tools_may_not_be_called_the_text_is_the_message(served: Stack) -> None:
    served.double.script = saying("a", "b")
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "sun"}}], "tool_choice": "none"}
    assert (await served.ask(**fields)).json()["choices"][0]["message"]["content"] == "ab"
    *chunks, _ = events((await served.ask(**fields, stream=True)).content)
    assert joined(chunks, 0)["text"] == "ab"


async def test_what_stopped_a_reply_is_said(served: Stack) -> None:
    served.double.script = replying((0, "a", ""), stop_reason="Paris")
    assert (await served.ask()).json()["choices"][0]["stop_reason"] == "Paris"
    chunks = events((await served.ask(stream=True)).content)
    assert chunks[-2]["choices"][0]["stop_reason"] == "Paris"
    chunks = events((await served.ask(stream=True, logprobs=True)).content)
    assert chunks[-2]["choices"][0]["stop_reason"] == "Paris"


async def test_where_no_turn_begins_the_last_speaker_goes_on(served: Stack) -> None:
    served.double.script = saying("a")
    fields: dict[str, Any] = {"add_generation_prompt": False}
    assert (await served.ask(**fields)).json()["choices"][0]["message"]["role"] == "user"
    chunks = events((await served.ask(**fields, stream=True)).content)
    assert chunks[0]["choices"][0]["delta"]["role"] == "user"


def thinking(*deltas: str, message: str) -> Script:
    """A script: as a worker whose parser finds reasoning. A token for each of `deltas`, or the whole `message` at the end."""

    async def script(job: Job) -> None:
        await job.claim()
        outbox = Outbox(job.id, job.claim_id)
        for number, delta in enumerate(deltas):
            said = delta if job.tree.get("stream") else message if number == len(deltas) - 1 else ""
            frame = outbox.add([number], "raw", logprobs=WRITTEN[number], message=said)
            assert isinstance(frame, Tokens)
            await job.send([frame])
        outbox.end(0, "stop")
        usage = msgspec.structs.replace(job.usage(), reasoning_tokens=1)
        await job.done_with(outbox.done(usage))

    return script


THOUGHT = thinking("{}", '{"reasoning":"hm"}', '{"content":"b"}', message='{"content":"b","reasoning":"hm"}')


async def test_reasoning_is_passed_on_as_the_worker_has_read_it_and_the_text_is_not(served: Stack) -> None:
    served.double.script = THOUGHT
    body = (await served.ask()).json()
    assert body["choices"][0]["message"] == {"content": "b", "reasoning": "hm"}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    *chunks, usage, _ = events((await served.ask(stream=True, stream_options={"include_usage": True})).content)
    said = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["delta"]]
    assert said == [{"role": "assistant", "content": ""}, {"reasoning": "hm"}, {"content": "b"}]
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


async def test_tokens_do_not_tell_reasoning_that_is_hidden(served: Stack) -> None:
    served.double.script = THOUGHT
    fields: dict[str, Any] = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    choice = (await served.ask(**fields)).json()["choices"][0]
    assert choice["logprobs"] is None
    assert "token_ids" not in choice
    *chunks, _ = events((await served.ask(**fields, stream=True)).content)
    said = [choice for chunk in chunks for choice in chunk["choices"]]
    assert {str(choice["logprobs"]) for choice in said} == {"None"}
    assert not any("token_ids" in choice for choice in said)


async def test_logprobs_of_the_prompt_are_in_the_reply(served: Stack) -> None:
    async def script(job: Job) -> None:
        await job.claim()
        outbox = Outbox(job.id, job.claim_id)
        outbox.prompt_logprobs = '[null,{"7":{"logprob":-0.5,"rank":1,"decoded_token":"a"}}]'
        outbox.add([1], "a")
        outbox.end(0, "stop")
        await job.done_with(outbox.done(job.usage()))

    served.double.script = script
    body = (await served.ask(prompt_logprobs=0)).json()
    assert body["prompt_logprobs"] == [None, {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]
