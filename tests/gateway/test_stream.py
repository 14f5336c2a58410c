"""A streamed reply, to the byte, through a real uvicorn and a real broker."""

import anyio
import pytest

from pipeline.protocol.messages import Fenced, From, Go, Whole, pack_ids
from pipeline.telemetry.metrics import REGISTRY
from tests.gateway.stack import CHAT, HELLO, Stack, connection, events, text_of
from tests.gateway.worker_double import HOLDER, MODEL, Job, saying

pytestmark = pytest.mark.anyio

STREAMED = HELLO | {"stream": True}


async def test_a_stream_is_these_bytes_and_no_others(served: Stack) -> None:
    async def script(job: Job) -> None:
        await job.claim()
        await job.say("Par", "is.")
        await job.done()

    served.double.script = script
    response = await served.ask(stream=True, stream_options={"include_usage": True})
    first = events(response.content)[0]
    head = (
        f'data: {{"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},"model":"{MODEL}"'
    )
    assert response.text in {
        # What is ready together is written together; `done` may come before the first write or after it.
        f'{head},"choices":[{{"index":0,"delta":{{"role":"assistant","content":"Paris."}},"logprobs":null,"finish_reason":{end}\n\n'
        for end in ('"stop"}],"usage":null}' + _tail(head), 'null}],"usage":null}\n\n' + _finish(head) + _tail(head))
    }
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert first["id"] == "chatcmpl-" + response.headers["x-request-id"]


def _finish(head: str) -> str:
    return head + ',"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null}'


def _tail(head: str) -> str:
    return (
        f'\n\n{head},"choices":[],"usage":{{"prompt_tokens":2210,"completion_tokens":2,"total_tokens":2212,'
        '"prompt_tokens_details":{"cached_tokens":1792},"headrace":{"hbm_tokens":0,"decode_cached_tokens":2208,'
        '"prefill_generated_tokens":1,"prefill":"prefill-1","decode":"decode-1"}}}\n\ndata: [DONE]'
    )


async def test_usage_is_streamed_only_where_it_is_asked_for(served: Stack) -> None:
    served.double.script = saying("a", "b")
    response = await served.ask(stream=True)
    assert b"usage" not in response.content
    assert events(response.content)[-1] == "[DONE]"
    assert events(response.content)[-2]["choices"][0]["finish_reason"] == "stop"


async def test_nothing_is_sent_before_the_first_text_and_the_role_comes_with_it(served: Stack) -> None:
    async with connection(served, STREAMED) as client:
        job = await served.double.next_job()
        begun: list[bytes] = []

        async def read() -> None:
            begun.append(await client.until(b"\n\n"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            assert await job.claim() == Go()
            await job.say("")
            assert await job.claim() == Go(pack_ids([0]))
            assert (await served.client.get("/health")).status_code == 200
            assert begun == []
            await job.say("Par")
        head, _, first = begun[0].partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b'"delta":{"role":"assistant","content":"Par"}' in first
        await job.done()
        assert (await client.rest()).count(b"role") == 0


async def test_text_that_splits_over_tokens_is_never_broken(served: Stack) -> None:
    served.double.script = saying("na", "", "ï", "ve ", "", "", "🦜", "\u2028", '"\\\n', "日本")
    response = await served.ask(stream=True)
    assert text_of(response.content) == 'naïve 🦜\u2028"\\\n日本'
    assert "\ufffd" not in response.text


async def test_a_reply_without_text_still_says_who_spoke(served: Stack) -> None:
    served.double.script = saying()
    (chunk, done) = events((await served.ask(stream=True)).content)
    assert chunk["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": "stop"}
    ]
    assert done == "[DONE]"


async def test_a_reply_in_one_piece_has_openais_shape(served: Stack) -> None:
    served.double.script = saying("Par", "is.", finish_reason="length")
    response = await served.ask()
    body = response.json()
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "id": "chatcmpl-" + response.headers["x-request-id"],
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Paris."},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 2210,
            "completion_tokens": 2,
            "total_tokens": 2212,
            "prompt_tokens_details": {"cached_tokens": 1792},
            "headrace": {
                "hbm_tokens": 0,
                "decode_cached_tokens": 2208,
                "prefill_generated_tokens": 1,
                "prefill": "prefill-1",
                "decode": "decode-1",
            },
        },
    }


async def test_a_whole_reply_without_text_has_empty_content(served: Stack) -> None:
    served.double.script = saying()
    assert (await served.ask()).json()["choices"][0]["message"]["content"] == ""


async def test_frames_of_several_requests_travel_in_one_message(served: Stack) -> None:
    async with connection(served, STREAMED) as one, connection(served, STREAMED) as other:
        jobs = [await served.double.next_job(), await served.double.next_job()]
        for job in jobs:
            await job.claim()
        await jobs[0].send([jobs[0].tokens("first"), jobs[1].tokens("second")])
        for job in jobs:
            assert await job.done() == Whole()
        replies = [await one.rest(), await other.rest()]
    assert sorted(b"first" in reply for reply in replies) == [False, True]
    assert sorted(b"second" in reply for reply in replies) == [False, True]


async def test_a_lost_tail_is_mended_from_the_last_frame(served: Stack) -> None:
    async def script(job: Job) -> None:
        await job.claim()
        await job.say("Par")
        job.tokens("is.")
        assert await job.done() == Whole()

    served.double.script = script
    assert text_of((await served.ask(stream=True)).content) == "Paris."


async def test_a_repeated_token_is_dropped_and_counted(served: Stack) -> None:
    before = REGISTRY.get_sample_value("headrace_duplicate_tokens_total")

    async def script(job: Job) -> None:
        await job.claim()
        frame = job.tokens("Par")
        await job.send([frame, frame])
        await job.done()

    served.double.script = script
    assert text_of((await served.ask(stream=True)).content) == "Par"
    assert before is not None
    assert REGISTRY.get_sample_value("headrace_duplicate_tokens_total") == before + 1


async def test_a_gap_is_asked_for_at_the_holder(served: Stack) -> None:
    async with connection(served, STREAMED) as client:
        job = await served.double.next_job()
        await job.claim()
        await job.say("Par")
        lost, kept = job.tokens("is"), job.tokens(".")
        await job.send([kept])
        notice = await served.double.next_notice()
        assert (notice.request, notice.answer) == (job.id, From(1))
        await job.send([lost, kept])
        await job.done()
        assert b"Par" in await client.rest()


async def test_a_second_claim_goes_on_after_the_first_and_fences_it(served: Stack) -> None:
    async with connection(served, STREAMED) as client:
        job = await served.double.next_job()
        await job.claim("first")
        await job.say("Par")
        stale = job.tokens("XX")
        job.ids.pop()
        job.text = "Par"
        assert await job.claim("second") == Go(pack_ids([0]))
        await job.send([stale])
        notice = await served.double.next_notice()
        assert (notice.claim, notice.answer) == ("first", Fenced())
        assert await job.claim("first") == Fenced()
        job.claim_id = "second"
        await job.say("is.")
        assert await job.done() == Whole()
        reply = await client.rest()
    assert b"XX" not in reply
    assert b"is." in reply


async def test_a_late_claim_and_a_repeated_end_of_a_whole_reply_are_answered_whole(served: Stack) -> None:
    async with connection(served, HELLO):
        job = await served.double.next_job()
        await job.claim()
        assert await job.done() == Whole()
        assert await job.claim("late") == Whole()
        assert await job.end_again() == Whole()


@pytest.mark.parametrize("theirs", ["abc-123", "trace 7", "x" * 128])
async def test_a_clients_request_id_is_echoed_but_never_used(served: Stack, theirs: str) -> None:
    served.double.script = saying("a")
    response = await served.ask(headers={"x-request-id": theirs})
    assert response.headers["x-request-id"] == theirs
    assert theirs not in response.json()["id"]
    again = await served.ask(headers={"x-request-id": theirs})
    assert again.status_code == 200, "two requests under one client id are two requests"


@pytest.mark.parametrize("theirs", [b"", b"x" * 129, "ü".encode(), b"a\tb"])
async def test_an_unfit_request_id_is_replaced_by_ours(served: Stack, theirs: bytes) -> None:
    served.double.script = saying("a")
    response = await served.client.post(CHAT, json=HELLO, headers=[(b"x-request-id", theirs)])
    assert response.json()["id"] == "chatcmpl-" + response.headers["x-request-id"]


async def test_what_lies_in_the_queue_is_what_the_design_says(served: Stack) -> None:
    async with connection(
        served, HELLO | {"user": "ada", "seed": 7, "ec_transfer_params": {}, "reply_to": "$JS.API.x", "id": "mine"}
    ):
        job = await served.double.next_job()
        tree = dict(job.tree)
        assert job.headers["Nats-Msg-Id"] == tree.pop("id") != "mine"
        assert tree.pop("reply_to").startswith(f"_INBOX.{served.gateway.process}.")
        assert tree.pop("claim_at").startswith(f"_INBOX.{served.gateway.process}.")
        assert tree.pop("receiver") == f"{served.gateway.process}/{served.gateway.epoch}"
        assert tree == HELLO | {"user": "ada", "seed": 7, "type": "chat", "v": 1, "timeout_ms": 60_000}
        assert job.subject == "requests.in.interactive.ada.ada"
        assert HOLDER.startswith("holder.")
        await job.claim()
        await job.done()
