"""What a gateway counts, logs and remembers of a request, however it ends."""

import io
import json
from collections.abc import Iterator
from typing import Any

import anyio
import msgspec
import pytest
import structlog

from pipeline.bus.connection import Bus
from pipeline.config import Config, Nats, Telemetry
from pipeline.errors import EngineFailed
from pipeline.protocol.records import Record
from pipeline.protocol.stages import AtDecode, AtPrefill, Stages
from pipeline.telemetry import logs, metrics
from tests.gateway.stack import HELLO, Stack, connection, serving, until_ready
from tests.gateway.worker_double import Job, WorkerDouble, failing, saying
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio

TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"x-request-id": "mine", "x-creator-id": "lovelace", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged, a JSON object a line."""
    out = io.StringIO()
    logs.configure("gateway", out, {})
    yield out
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def said(out: io.StringIO) -> list[dict[str, Any]]:
    """The lines of requests."""
    return [line for line in map(json.loads, out.getvalue().splitlines()) if line["event"] == "request"]


def remembered(served: Stack, name: str = "mine") -> list[Record]:
    """What `headrace trace` would be told."""
    recorder = served.gateway.account.recorder
    return [*recorder._ring.find(name), *recorder._working(name)]


def counted(outcome: str) -> tuple[float, float]:
    """Requests, and those of which the first text had come."""
    labels = {"outcome": outcome, "klass": "interactive"}
    ttft = sum(bucket.get() for bucket in metrics.TTFT_SECONDS.labels(**labels)._buckets)
    return metrics.REQUESTS.labels(**labels)._value.get(), ttft


async def test_a_whole_reply_is_one_line_with_all_that_helps_to_find_it(served: Stack, lines: io.StringIO) -> None:
    before = counted("whole")
    served.double.script = saying("a", "b")
    assert (await served.ask(headers=HEADERS)).status_code == 200
    [line] = said(lines)
    assert (line["request_id"], line["trace_id"], line["outcome"]) == ("mine", TRACE, "whole")
    assert (line["klass"], line["attempts"], line["prefill"], line["decode"]) == (
        "interactive",
        1,
        "prefill-1",
        "decode-1",
    )
    assert line["ttft_ms"] <= line["took_ms"]
    assert line["first_of"] == "prefill", "the double has one claim, which follows none"
    assert "lovelace" not in lines.getvalue()
    assert "hello" not in lines.getvalue()
    [record] = remembered(served)
    assert record.request == line["request"]
    assert counted("whole") == (before[0] + 1, before[1] + 1)


async def test_several_prompts_are_counted_once_and_each_is_remembered(served: Stack, lines: io.StringIO) -> None:
    jobs: list[Job] = []

    async def script(job: Job) -> None:
        jobs.append(job)
        await saying("a")(job)

    served.double.script = script
    before, tokens = counted("whole"), metrics.PROMPT_TOKENS._value.get()
    asked = {"prompt": ["one", "two", "three"]}
    response = await served.client.post("/v1/completions", json=asked, headers={"traceparent": HEADERS["traceparent"]})
    name = response.headers["x-request-id"]
    assert response.json()["id"] == f"cmpl-{name}"
    assert counted("whole") == (before[0] + 1, before[1] + 1)
    assert metrics.IN_FLIGHT._value.get() == 0
    assert metrics.PROMPT_TOKENS._value.get() == tokens + response.json()["usage"]["prompt_tokens"]
    records = remembered(served, name)
    ids = [name, f"{name}-1", f"{name}-2"]
    assert [record.request for record in records] == ids == [line["request"] for line in said(lines)]
    assert {record.outcome for record in records} == {"whole"}
    assert {record.trace_id for record in records} == {TRACE}
    for record in records:
        assert sum(record.stages.values()) == pytest.approx(record.took_s)
    assert {job.tree["request_id"] for job in jobs} == {name}, "so that workers know all by it"


async def test_a_double_that_says_no_stages_leaves_them_to_be_work(served: Stack) -> None:
    served.double.script = saying("a")
    await served.ask(headers=HEADERS)
    [*_, record] = remembered(served)
    assert list(record.stages) == ["accept", "publish", "queued", "work"]
    assert sum(record.stages.values()) == pytest.approx(record.took_s, abs=0.001)


async def test_what_its_workers_say_is_put_between(served: Stack) -> None:
    async def script(job: Job) -> None:
        await job.claim("p-claim")
        await job.claim("d-claim", follows="p-claim")
        await job.say("a")
        stages = Stages(AtPrefill(render=2000), AtDecode(decode=3000))
        await job.done_with(msgspec.structs.replace(job._done("stop"), stages=stages))

    served.double.script = script
    await served.ask(headers=HEADERS | {"x-request-id": "told"})
    [record] = remembered(served, "told")
    assert (record.stages["render"], record.stages["decode"]) == (0.002, 0.003)
    assert "work" not in record.stages


async def test_a_failure_is_a_warning_with_its_code(served: Stack, lines: io.StringIO) -> None:
    served.double.script = failing(EngineFailed("The engine failed.").body())
    await served.ask(headers=HEADERS)
    [line] = said(lines)
    assert (line["level"], line["outcome"], line["code"], line["status"]) == ("warning", "failed", "engine_failed", 500)


async def test_a_client_that_leaves_is_remembered_as_gone(served: Stack, lines: io.StringIO) -> None:
    before = counted("cancelled")
    async with connection(served, HELLO | {"stream": True}, "x-request-id: leaver\r\n") as client:
        job = await served.double.next_job()
        await job.claim()
        [working] = remembered(served, "leaver")
        assert (working.outcome, working.facts["attempts"]) == ("", 1)
        await client.leave()
        assert await served.double.next_cancel() == job.id
    with anyio.fail_after(5):
        while not said(lines):
            await anyio.sleep(0.01)
    [record] = remembered(served, "leaver")
    assert (record.outcome, list(record.stages)) == ("cancelled", ["accept", "publish", "queued", "work"])
    assert counted("cancelled") == (before[0] + 1, before[1])


async def test_what_is_not_let_in_is_counted_and_not_logged(served: Stack, lines: io.StringIO) -> None:
    before = counted("invalid")
    response = await served.ask(headers=HEADERS | {"x-request-class": "urgent"})
    assert response.status_code == 400
    assert counted("invalid") == (before[0] + 1, before[1])
    assert not said(lines), "a flood of what is refused would fill the disk"


async def test_an_operator_may_have_creators_named_and_lines_left_out(broker: NatsServer, lines: io.StringIO) -> None:
    telemetry = Telemetry(creators="plain", log_requests=False)
    async with await Bus.connect(broker.url, "double") as bus, anyio.create_task_group() as tasks:
        double = WorkerDouble(bus)
        await double.listen()
        double.script = saying("a")
        tasks.start_soon(double.run)
        async with serving(Config(nats=Nats(url=broker.url), telemetry=telemetry), double) as served:
            await until_ready(served.client)
            assert (await served.ask(headers=HEADERS)).status_code == 200
            [record] = remembered(served)
        tasks.cancel_scope.cancel()
    assert record.creator == "lovelace"
    assert not said(lines)
