"""`headrace trace` beside a running fleet: what became of one request, from every process that had it."""

import json
from pathlib import Path

import anyio
import anyio.to_thread
from typer.testing import CliRunner, Result

from pipeline.cli.main import program
from pipeline.cli.trace import story
from pipeline.errors import OperatorError
from pipeline.protocol.records import Record
from pipeline.protocol.stages import STAGES
from tests.gateway.stack import HELLO, serving, until_ready
from tests.nats_server import NatsServer
from tests.workers.fleet import config_for, fleet, until


async def trace_of(config: Path, *arguments: str) -> Result:
    """The command, in a thread beside the fleet's loop."""
    command = ["trace", *arguments, "--config", str(config)]
    return await anyio.to_thread.run_sync(lambda: CliRunner().invoke(program(), command))


def test_a_finished_request_is_told_by_its_reply_and_by_its_clients_name(broker: NatsServer, config: Path) -> None:
    async def serve() -> None:
        settings = config_for(broker.url)
        async with fleet(settings), serving(settings) as served:
            await until_ready(served.client)
            reply = (await served.ask(headers={"x-request-id": "mine", "x-creator-id": "lovelace"})).json()
            shown, said = await trace_of(config, reply["id"]), await trace_of(config, "mine", "--json")
        assert (shown.exit_code, said.exit_code) == (0, 0), shown.output + said.output
        records = [json.loads(line) for line in said.stdout.splitlines()]
        assert [record["role"] for record in records] == ["gateway", "prefill", "decode"]
        assert [record["outcome"] for record in records] == ["whole", "handed_off", "whole"]
        assert {record["request"] for record in records} == {reply["id"].removeprefix("chatcmpl-")}
        assert {record["request_id"] for record in records} == {"mine"}
        gateway = records[0]
        assert sum(gateway["stages"].values()) <= gateway["took_s"] * 1.001
        assert list(gateway["stages"]) == [stage for stage in STAGES if stage != "work"]
        assert "lovelace" not in said.stdout
        for stage in ("accept", "render", "prefill", "decode"):
            assert f"\n  {stage} " in shown.stdout
        assert "prefill-1: handed_off after" in shown.stdout
        assert "x-request-id mine" in shown.stdout

    anyio.run(serve)


def test_a_request_under_way_is_told_up_to_now(broker: NatsServer, config: Path) -> None:
    async def serve() -> None:
        settings = config_for(broker.url, step_s=0.05)
        async with fleet(settings) as made, serving(settings) as served, anyio.create_task_group() as tasks:
            await until_ready(served.client)
            body = HELLO | {"max_tokens": 400, "ignore_eos": True}
            tasks.start_soon(served.ask, body)
            working = made.decode()._jobs._jobs
            await until(lambda: any(job.outbox.length for job in working.values()))
            [job] = working.values()
            shown = await trace_of(config, job.holding.request)
            tasks.cancel_scope.cancel()
        assert shown.exit_code == 0, shown.output
        assert shown.stdout.count("under way for") == 2, "at the gateway and at decode"
        assert "prefill-1: handed_off after" in shown.stdout

    anyio.run(serve)


def test_a_name_that_nobody_knows_is_an_error_that_says_why(broker: NatsServer, config: Path) -> None:
    async def serve() -> None:
        async with fleet(config_for(broker.url)):
            told = await trace_of(config, "nobody's")
        assert isinstance(told.exception, OperatorError)
        assert "telemetry.kept_max" in str(told.exception)

    anyio.run(serve)


def record(process: str, role: str, outcome: str, began_s: float, took_s: float, **stages: float) -> Record:
    return Record(
        process=process,
        role=role,  # type: ignore[arg-type]
        request="r",
        outcome=outcome,
        began_unix_s=1000 + began_s,
        took_s=took_s,
        stages=stages,
        trace_id="0af7651916cd43dd8448eb211c80319c",
        facts={"delivery": 1},
    )


def test_attempts_that_were_lost_are_told_with_their_own_stages() -> None:
    told = story(
        [
            record("prefill-1", "prefill", "fenced", 0.2, 0.5, render=0.1, prefill=0.4),
            record("gateway", "gateway", "whole", 0.0, 2.0, lost=0.5, decode=1.0),
            record("prefill-2", "prefill", "handed_off", 0.8, 0.1, render=0.1),
        ]
    ).splitlines()
    assert told[0] == "Request r, trace 0af7651916cd43dd8448eb211c80319c"
    assert told[2].startswith("gateway: whole after 2,000.0 ms, from 0.0 ms on")
    assert [line.split()[0] for line in told[3:5]] == ["lost", "decode"]
    assert told[5].split() == ["(not", "told)", "500.00", "ms"]
    assert told[7].startswith("prefill-1: fenced after 500.0 ms, from 200.0 ms on")
    assert [line.split()[0] for line in told[8:10]] == ["render", "prefill"]
    assert told[11].startswith("prefill-2: handed_off after")
    assert len(told) == 12, "what the gateway tells already is not told again"


def test_bars_show_when_and_how_long() -> None:
    lines = story([record("decode-1", "decode", "failed", 0, 4.0, takeover=0.01, load=1.99, decode=2.0)]).splitlines()
    bars = [line.split("ms  ")[1][:40] for line in lines[3:]]
    assert [bar.strip() for bar in bars] == ["▏", "█" * 20, "█" * 20]
    assert [bar.index(bar.strip()[0]) for bar in bars] == [0, 0, 20]
