"""What workers say of requests that do not end as they should: counted, logged and remembered under one word."""

import io
import json
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
import structlog

from pipeline.protocol import subjects
from pipeline.protocol.messages import Done, Failed, encode
from pipeline.protocol.records import Record, records_decoder
from pipeline.telemetry import logs, metrics
from tests.nats_server import NatsServer
from tests.workers.fleet import PROMPT, Caller, Fleet, config_for, fleet, until

pytestmark = pytest.mark.anyio

TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged, a JSON object a line."""
    out = io.StringIO()
    logs.configure("test", out, {})
    yield out
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


async def ask(made: Fleet, request: str, **fields: Any) -> Done | Failed:
    """A producer's request with a trace and a name of its client's."""
    caller = Caller(made.bus, request)
    await caller.listen()
    body = {"messages": PROMPT, "id": request, "request_id": "mine", "reply_to": f"{caller.inbox}.r"}
    body |= {"claim_at": f"{caller.inbox}.c", **fields}
    await made.bus.store(subjects.request_in("interactive", "ada", "ada"), encode(body), request, 2.0, HEADERS)
    with anyio.fail_after(10):
        return (await caller.reply()).end


async def known(made: Fleet, name: str, payload: bytes | None = None) -> list[Record]:
    """What the workers answer."""
    records: list[Record] = []
    inbox = made.bus.inbox()
    await made.bus.subscribe(inbox, lambda message: records.extend(records_decoder.decode(message.data)))
    await made.bus.barrier()
    await made.bus.publish(subjects.trace(name), name.encode() if payload is None else payload, inbox)
    await made.bus.barrier()
    await anyio.sleep(0.1)
    return records


def said(out: io.StringIO) -> list[dict[str, Any]]:
    """The lines of requests."""
    return [line for line in map(json.loads, out.getvalue().splitlines()) if line["event"] == "request"]


async def test_a_producers_whole_reply_has_one_line_and_its_stages(broker: NatsServer, lines: io.StringIO) -> None:
    async with fleet(config_for(broker.url)) as made:
        end = await ask(made, "r1")
        assert isinstance(end, Done)
        assert end.stages is not None
        await until(lambda: said(lines))
        records = await known(made, "mine")
    [line] = said(lines)
    assert (line["request"], line["request_id"], line["trace_id"], line["outcome"]) == ("r1", "mine", TRACE, "whole")
    assert {"load", "first_step", "decode"} & line["stages_ms"].keys()
    assert "Tell me about the sea" not in lines.getvalue()
    by_role = {record.role: record for record in records}
    assert (by_role["prefill"].outcome, by_role["decode"].outcome) == ("handed_off", "whole")
    assert {record.trace_id for record in records} == {TRACE}
    assert by_role["prefill"].facts["prompt_tokens"] == by_role["decode"].facts["prompt_tokens"]
    assert sum(by_role["decode"].stages.values()) == pytest.approx(by_role["decode"].took_s, abs=0.25)


async def test_a_decode_that_fails_is_no_whole_one(broker: NatsServer, lines: io.StringIO) -> None:
    failed, whole = (metrics.DECODES.labels(outcome=word) for word in ("failed", "whole"))
    before = failed._value.get(), whole._value.get()
    async with fleet(config_for(broker.url)) as made:
        made.workers["decode-1"].engine.fail_next("decode")
        assert isinstance(await ask(made, "r2"), Failed)
        await until(lambda: said(lines))
    [line] = said(lines)
    assert (line["request"], line["outcome"], line["level"]) == ("r2", "failed", "warning")
    assert (failed._value.get() - before[0], whole._value.get() - before[1]) == (1, 0)


@pytest.mark.parametrize(
    ("fields", "word"), [({"timeout_ms": 1}, "expired"), ({"temperature": "hot"}, "malformed")], ids=["late", "wrong"]
)
async def test_what_prefill_turns_away_has_the_word_for_it(
    broker: NatsServer, lines: io.StringIO, fields: dict[str, Any], word: str
) -> None:
    counted = metrics.PREFILLS.labels(outcome=word)
    before = counted._value.get()
    async with fleet(config_for(broker.url)) as made:
        assert isinstance(await ask(made, "r3", **fields), Failed)
        await until(lambda: said(lines))
        [record] = await known(made, "r3", b"")
    [line] = said(lines)
    assert (line["outcome"], line["request_id"], record.outcome) == (word, "mine", word)
    assert counted._value.get() - before == 1


async def test_lines_that_are_written_while_a_request_is_worked_on_name_it(
    broker: NatsServer, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(config_for(broker.url)) as made:
        monkeypatch.setattr(made.workers["prefill-1"].engine, "render", _broken)
        assert isinstance(await ask(made, "r4"), Failed)
    [line] = [one for one in map(json.loads, lines.getvalue().splitlines()) if one["event"] == "effect failed"]
    assert (line["request"], line["request_id"], line["trace_id"]) == ("r4", "mine", TRACE)


async def test_nobody_answers_for_a_request_that_nobody_knows(broker: NatsServer) -> None:
    async with fleet(config_for(broker.url)) as made:
        assert await known(made, "nobody") == []


async def _broken(chat: object) -> list[int]:
    raise RuntimeError("a bug")


async def test_the_metrics_of_a_ledger_add_up(broker: NatsServer) -> None:
    ended = [metrics.GRANTS.labels(state=state) for state in ("released", "returned", "expired")]
    granted, consumed = metrics.GRANTS.labels(state="granted"), metrics.GRANTS_OUTSTANDING.labels(state="consumed")
    before = granted._value.get() - sum(one._value.get() for one in ended)

    def outstanding() -> Any:
        """Granted and not ended, by the counters."""
        return granted._value.get() - sum(one._value.get() for one in ended) - before

    async with fleet(config_for(broker.url, step_s=0.01)) as made, anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(lambda name: ask(made, name, max_tokens=60, ignore_eos=True), f"g{number}")
        await until(lambda: consumed._value.get() == 3)
        assert outstanding() == 3
        await until(lambda: consumed._value.get() == 0)
        assert outstanding() == 0
