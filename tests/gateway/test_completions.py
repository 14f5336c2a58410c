"""`POST /v1/completions`: one prompt or several, whole and streamed."""

import json
from typing import Any

import httpx
import pytest

from pipeline.errors import EngineFailed
from pipeline.limits import COMPLETION_PROMPTS_MAX
from pipeline.protocol.messages import Done, Gone, Tokens, pack_ids
from pipeline.protocol.reply import Outbox
from tests.gateway.stack import Stack, events, stack
from tests.gateway.test_bad_input import refused
from tests.gateway.test_documents import HTTP, fits
from tests.gateway.worker_double import Job, Script, failing, saying
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


async def complete(served: Stack, prompt: Any = "Once", **fields: Any) -> httpx.Response:
    return await served.client.post(PATH, json={"prompt": prompt} | fields)


def columns(offset: int, token: str, logprob: float | None) -> str:
    return json.dumps(
        {"text_offset": [offset], "token_logprobs": [logprob], "tokens": [token], "top_logprobs": [{token: -0.5}]}
    )


def replying(*steps: tuple[int, str, str], prompt_logprobs: str = "") -> Script:
    """A script: a token for each step of (choice, text, logprobs), in order, and the end of all choices."""

    async def script(job: Job) -> None:
        await job.claim()
        outbox = Outbox(job.id, job.claim_id)
        outbox.prompt_tokens, outbox.prompt, outbox.prompt_logprobs = 3, pack_ids([7, 8, 9]), prompt_logprobs
        for number, (choice, text, logprobs) in enumerate(steps):
            frame = outbox.add([number], text, choice, logprobs)
            assert isinstance(frame, Tokens)
            await job.send([frame])
        for choice in sorted({choice for choice, _, _ in steps}):
            outbox.end(choice, "length")
        done: Done = outbox.done(job.usage())
        await job.done_with(done)

    return script


def joined(chunks: list[Any]) -> dict[int, str]:
    """The text of each choice."""
    said: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
    return said


async def test_a_prompt_is_sent_as_it_is_and_what_follows_comes_back(served: Stack) -> None:
    jobs: list[Job] = []

    async def script(job: Job) -> None:
        jobs.append(job)
        await saying(" upon", " a time", finish_reason="length")(job)

    served.double.script = script
    body = (await complete(served, max_tokens=2)).json()
    (job,) = jobs
    assert (job.tree["type"], job.tree["prompt"], job.tree["max_tokens"]) == ("completion", "Once", 2)
    assert body["id"] == f"cmpl-{job.id}"
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": " upon a time", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"]["completion_tokens"] == 2
    fits(HTTP, "TextCompletion", body)


async def test_it_is_streamed_like_a_chat(served: Stack) -> None:
    served.double.script = saying(" upon", " a time")
    stream = await complete(served, stream=True, stream_options={"include_usage": True})
    *chunks, usage, end = events(stream.content)
    assert end == "[DONE]"
    assert joined(chunks) == {0: " upon a time"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert (usage["choices"], usage["usage"]["prompt_tokens"]) == ([], 2210)
    for chunk in (*chunks, usage):
        fits(HTTP, "TextCompletion", chunk)


async def test_several_prompts_are_several_requests_and_one_reply(served: Stack) -> None:
    async def script(job: Job) -> None:
        await replying((0, f"{job.tree['prompt']}!", ""), (1, f"{job.tree['prompt']}?", ""))(job)

    served.double.script = script
    prompts = ["a", "b", "c"]
    body = (await complete(served, prompts, n=2)).json()
    said = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert said == list(enumerate(["a!", "a?", "b!", "b?", "c!", "c?"]))
    assert body["usage"]["prompt_tokens"] == 3 * 2210
    *chunks, usage, _ = events(
        (await complete(served, prompts, n=2, stream=True, stream_options={"include_usage": True})).content
    )
    assert joined(chunks) == dict(enumerate(["a!", "a?", "b!", "b?", "c!", "c?"]))
    assert usage["usage"]["prompt_tokens"] == 3 * 2210
    assert served.gateway.admission.in_flight == 0


async def test_of_several_prompts_that_one_fails_is_said_of_all(served: Stack) -> None:
    async def script(job: Job) -> None:
        await (failing(EngineFailed("Broken.").body()) if job.tree["prompt"] == "b" else saying("x"))(job)

    served.double.script = script
    response = await complete(served, ["a", "b"])
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "Broken."
    assert served.gateway.admission.in_flight == 0


async def test_logprobs_are_put_together_and_ids_said_with_each_choice(served: Stack) -> None:
    written = [columns(0, "a", None), columns(1, "b", -1.5)]
    served.double.script = replying((0, "a", written[0]), (0, "b", written[1]), prompt_logprobs='[null,{"8":{}}]')
    (choice,) = (await complete(served, logprobs=1, return_token_ids=True)).json()["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [None, -1.5],
        "tokens": ["a", "b"],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}],
    }
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([0, 1], [7, 8, 9])
    assert choice["prompt_logprobs"] == [None, {"8": {}}]
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await complete(served, logprobs=1, return_token_ids=True, stream=True, stream_options=options)
    *chunks, _, _ = events(stream.content)
    said = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token for choice in said for token in (choice["logprobs"] or {"tokens": []})["tokens"]] == ["a", "b"]
    assert [choice.get("prompt_token_ids") for choice in said] == [[7, 8, 9], *[None] * (len(said) - 1)]
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a"] * (COMPLETION_PROMPTS_MAX + 1)}, "prompt"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "metadata": {"persona": "ada"}}, "metadata.persona"),
    ],
)
async def test_what_cannot_be_completed_is_refused_by_its_field(
    served: Stack, fields: dict[str, Any], param: str
) -> None:
    response = await served.client.post(PATH, json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_what_every_prompt_repeats_is_bounded_together(served: Stack) -> None:
    served.double.script = saying("x")
    large = {"metadata": {"note": "x" * 300_000}}
    assert (await complete(served, ["a", "b"], **large)).status_code == 200
    seen = served.double.seen
    response = await complete(served, ["a"] * COMPLETION_PROMPTS_MAX, **large)
    assert refused(response, 413, "request_too_large", None)
    assert (served.double.seen, served.gateway.guests.shares.bytes) == (seen, 0)


async def test_each_prompt_needs_a_place(broker: NatsServer) -> None:
    async with stack(broker.url, in_flight_max=2) as served:
        served.double.script = saying("x")
        assert (await complete(served, ["a", "b"])).status_code == 200
        assert (await complete(served, ["a", "b", "c"])).status_code in (429, 503)
        assert served.gateway.admission.in_flight == 0


async def test_each_prompt_is_a_request_of_its_creator(broker: NatsServer) -> None:
    async with stack(broker.url, creator_in_flight_max=2) as served:
        served.double.script = saying("x")
        assert (await complete(served, ["a", "b", "c"])).status_code == 429
        assert (await complete(served, ["a", "b"])).status_code == 200


async def test_a_client_that_leaves_cancels_all_its_prompts(served: Stack) -> None:
    served.double.script = None
    with pytest.raises(httpx.ReadTimeout):
        await served.client.post(PATH, json={"prompt": ["a", "b"]}, timeout=0.3)
    jobs = [await served.double.next_job() for _ in range(2)]
    assert {await served.double.next_cancel() for _ in jobs} == {job.id for job in jobs}
    assert [await job.claim() for job in jobs] == [Gone(), Gone()]
    for job in jobs:
        await job.ack()
