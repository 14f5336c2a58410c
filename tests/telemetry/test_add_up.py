"""A thousand requests through real processes: what each says of its time is the time that the request took."""

import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest

from pipeline.cli.trace import ask as ask_all
from pipeline.config import Config, Nats
from pipeline.protocol.records import Record
from pipeline.protocol.stages import AT_WORKERS, STAGES
from tests.chaos.stack import Settings, Stack

pytestmark = pytest.mark.anyio

REQUESTS = 1000
AT_A_TIME = 24

MISSED_MAX = 0.02
"""Of the end-to-end time."""

MISPLACED_RATIO = 0.25
"""Of the median request: the median distance between where the gateway says that a worker began, without having seen its clock,
and where it did. It is known to half a round trip, which on busy cores takes longer, as all does there."""

STEP_MS = 1000 * Settings().step_s


async def asked(client: httpx.AsyncClient, number: int) -> float:
    """One request, a third of them streamed; how long it took its client, in seconds."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Tell me about {number}. " + "Go on. " * (number % 200)}],
        "max_tokens": 4 + number % 20,
        "stream": number % 3 == 0,
    }
    began_s = time.monotonic()
    response = await client.post(
        "/v1/chat/completions", json=body, headers={"x-request-id": f"n{number}", "x-creator-id": f"c{number % 20}"}
    )
    assert response.status_code == 200, response.text
    return time.monotonic() - began_s


def logged(folder: Path) -> dict[str, dict[str, Any]]:
    """The gateway's line of each request."""
    lines = [msgspec.json.decode(line) for line in (folder / "gateway-1.log").read_bytes().splitlines()]
    return {line["request_id"]: line for line in lines if line["event"] == "request"}


@pytest.mark.timeout(240)
async def test_stage_times_of_a_thousand_requests_add_up(tmp_path: Path) -> None:
    took_s: dict[str, float] = {}
    room = anyio.CapacityLimiter(AT_A_TIME)
    async with Stack(tmp_path, Settings(prefill=2, decode=2, gateways=1)).running() as stack:
        url = stack.gateways()[0].url
        async with (
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
            anyio.create_task_group() as tasks,
        ):

            async def one(number: int) -> None:
                async with room:
                    took_s[f"n{number}"] = await asked(client, number)

            for number in range(REQUESTS):
                tasks.start_soon(one, number)
        stories = [await ask_all(Config(nats=Nats(url=stack.nats_url)), f"n{REQUESTS - 1 - n}") for n in range(20)]
        await _check_the_metrics(stack, url)

    lines = logged(tmp_path)
    assert lines.keys() == took_s.keys()
    for line in lines.values():
        assert line["outcome"] == "whole"
        assert sum(line["stages_ms"].values()) == pytest.approx(line["took_ms"], rel=MISSED_MAX)
        assert {"accept", "render", "prefill", "decode"} <= line["stages_ms"].keys() <= STAGES.keys()
        assert line["took_ms"] > 0.5 * STEP_MS * (line["completion_tokens"] - 1), "at least what its engine took"
    beyond = [line["took_ms"] - 1000 * took_s[name] for name, line in lines.items()]
    assert statistics.median(beyond) <= 0, "it is a part of what its client has waited"
    misplaced = statistics.median(error_s for records in stories for error_s in misplaced_s(records))
    assert misplaced < MISPLACED_RATIO * statistics.median(took_s.values())


def misplaced_s(records: list[Record]) -> list[float]:
    """By how much the gateway misses the beginnings of its workers. All processes of this machine read one wall clock."""
    role = {record.role: record for record in records}
    assert Counter(record.role for record in records) == {"gateway": 1, "prefill": 1, "decode": 1}
    gateway, errors = role["gateway"], []
    for worker, first in ((role["prefill"], "start"), (role["decode"], "takeover")):
        before = list(gateway.stages)[: list(gateway.stages).index(first)]
        began_s = gateway.began_unix_s + sum(gateway.stages[stage] for stage in before)
        errors.append(abs(began_s - worker.began_unix_s))
        own = {stage: took_s for stage, took_s in worker.stages.items() if stage in AT_WORKERS}
        assert own == {stage: gateway.stages[stage] for stage in own}
    return errors


async def _check_the_metrics(stack: Stack, url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{url}/metrics")).text
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples['headrace_requests_total{klass="interactive",outcome="whole"}'] == f"{REQUESTS:.1f}"
    assert samples['headrace_e2e_seconds_count{klass="interactive",outcome="whole"}'] == f"{REQUESTS:.1f}"
    assert samples['headrace_ttft_seconds_count{klass="interactive",outcome="whole"}'] == f"{REQUESTS:.1f}"
    assert samples['headrace_attempts_total{attempts="1"}'] == f"{REQUESTS:.1f}"
    assert float(samples['headrace_stage_seconds_count{stage="accept"}']) == REQUESTS
    assert float(samples["headrace_publish_seconds_count"]) >= REQUESTS
