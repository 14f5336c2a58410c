"""`headrace top` beside a running fleet: a page, JSON, and a real terminal whose keys are pressed."""

import json
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from typer.testing import CliRunner, Result

from pipeline.bus import streams
from pipeline.bus.connection import Bus, Message
from pipeline.cli.main import program
from pipeline.errors import OperatorError
from pipeline.paths import JETSTREAM
from pipeline.protocol import subjects
from pipeline.protocol.messages import Presence, encode
from pipeline.top.snapshot import POOLS
from tests.gateway.stack import HELLO, Stack, serving, until_ready
from tests.nats_server import NatsServer
from tests.top.terminal import Terminal, ran
from tests.workers.fleet import Fleet, config_for, fleet, until

pytestmark = pytest.mark.anyio


async def top(config: Path, *arguments: str) -> Result:
    """The command, in a thread beside the fleet's loop."""
    command = ["top", *arguments, "--config", str(config)]
    return await anyio.to_thread.run_sync(lambda: CliRunner().invoke(program(), command))


async def busy(made: Fleet, served: Stack, tasks: anyio.abc.TaskGroup) -> str:
    """Two whole replies and one that goes on; the id of the first."""
    await until_ready(served.client)
    replies = [(await served.ask(headers={"x-creator-id": creator})).json() for creator in ("lovelace", "bob")]
    tasks.start_soon(served.ask, HELLO | {"max_tokens": 400, "ignore_eos": True})
    await until(lambda: len(made.decode()._jobs._jobs) == 1)
    return str(replies[0]["id"].removeprefix("chatcmpl-"))


async def test_a_page_and_its_json_tell_of_all_that_runs(broker: NatsServer, config: Path) -> None:
    settings = config_for(broker.url, step_s=0.05)
    async with fleet(settings, prefill=2) as made, serving(settings) as served, anyio.create_task_group() as tasks:
        request = await busy(made, served, tasks)
        shown, said = await top(config, "--once"), await top(config, "--once", "--json")
        tasks.cancel_scope.cancel()
    assert (shown.exit_code, said.exit_code) == (0, 0), shown.output + said.output
    now = json.loads(said.stdout)
    assert said.stdout.count("\n") == 1
    pools = [(one["pool"], one["state"]) for one in now["processes"]]
    assert pools == [("gateway", "serving"), ("prefill", "serving"), ("prefill", "serving"), ("decode", "serving")]
    assert all(0 <= one["up_s"] < 100 for one in now["processes"])
    assert (now["errors"], now["silent"], now["connected"]) == ([], [], True)
    assert sum(row["served"] for row in now["queues"]) == 3
    assert [(one["decode"], one["problems"], one["account"]["consumed_now"]) for one in now["ledgers"]] == [
        ("decode-1", [], 1)
    ]
    fared = now["fare"]
    assert (fared["outcomes"], fared["under_way"], fared["missing"]) == ({"whole": 2}, 1, [])
    assert fared["took"]["count"] == fared["ttft"]["count"] == 2
    assert fared["took"]["p50_s"] <= fared["took"]["p99_s"]
    assert {"accept", "prefill", "decode"} <= fared["stages"].keys()
    assert sorted(one["outcome"] for one in fared["requests"]) == ["", "whole", "whole"]
    assert now["messages"] == 2 * len(subjects.CLASSES) + 2 * 2 + 2 * 1 + 1 + 1, "queues, prefill, decode, gateways"
    for part in ("2, 0 of 8 slots busy", "1 under way; 2 whole", "Where the time goes", request, "gateway-", "smollm2"):
        assert part in shown.stdout
    assert "lovelace" not in shown.stdout + said.stdout


async def test_nobody_alive_and_no_streams_are_sentences(broker: NatsServer, config: Path) -> None:
    shown = await top(config, "--once")
    assert shown.exit_code == 0
    assert f"! Nobody lives at 127.0.0.1:{broker.port}: start a fleet with `headrace up`" in shown.stdout
    assert "! JetStream does not list the consumers of REQUESTS_interactive" in shown.stdout


async def test_workers_without_a_gateway_are_shown_all_the_same(broker: NatsServer, config: Path) -> None:
    async with fleet(config_for(broker.url)) as made:
        await made.ask()
        shown = await top(config, "--once")
    assert "1, 0 of 4 slots busy" in shown.stdout
    assert "No gateway lives, and it is gateways that know how requests fare." in shown.stdout


@pytest.mark.parametrize("listens", [True, False])
async def test_who_does_not_answer_is_shown_as_such(broker: NatsServer, config: Path, listens: bool) -> None:
    """A prefill and a decode worker and a gateway that say that they live, and hear nothing, or say nothing to what they hear."""
    async with await Bus.connect(broker.url, "test") as bus, anyio.create_task_group() as tasks:
        await streams.apply(bus, streams.declared(JETSTREAM))
        for subject in (
            (subjects.recent(), subjects.prefill("prefill-1"), subjects.credit("decode-1")) if listens else ()
        ):
            await bus.subscribe(subject, lambda _: None)
        tasks.start_soon(_say_to_live, bus)
        said = await top(config, "--once", "--json")
        tasks.cancel_scope.cancel()
    now = json.loads(said.stdout)
    assert now["errors"] == ["prefill-1 does not say what it has served."]
    assert now["ledgers"] == [{"decode": "decode-1", "account": None, "problems": []}]
    assert now["fare"]["missing"] == ["gateway-1"]


async def _say_to_live(bus: Bus) -> None:
    while True:
        for role in POOLS:
            presence = Presence(role=role, id=f"{role}-1", epoch="1", ready=True, slots=1)
            await bus.publish(subjects.presence(role, presence.id), encode(presence))
        await anyio.sleep(0.1)


async def test_what_is_no_question_is_not_answered_and_harms_no_gateway(broker: NatsServer) -> None:
    settings = config_for(broker.url)
    async with fleet(settings) as made, serving(settings) as served:
        await until_ready(served.client)
        answers: list[Message] = []
        inbox = made.bus.inbox()
        await made.bus.subscribe(inbox, answers.append)
        await made.bus.publish(subjects.recent(), b"\xc1", inbox)
        await made.bus.publish(subjects.recent(), b"")
        assert (await served.ask()).status_code == 200
    assert answers == []


async def test_without_nats_it_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    config = tmp_path / "none.toml"
    config.write_text('[nats]\nurl = "nats://127.0.0.1:1"\nconnect_timeout_s = 0.5\n', "utf-8")
    result = await top(config, "--once")
    assert isinstance(result.exception, OperatorError)


async def test_no_terminal_is_an_error_that_names_what_to_give(config: Path) -> None:
    result = await top(config)
    assert isinstance(result.exception, OperatorError)
    assert "--once" in str(result.exception)


async def test_json_without_once_is_a_line_each_time(broker: NatsServer, config: Path) -> None:
    lines = await anyio.to_thread.run_sync(lambda: ran(config, "--json", "--interval", "0.5", lines=2))
    assert [json.loads(line)["connected"] for line in lines] == [True, True]


async def test_keys_change_what_a_real_terminal_shows_and_it_is_left_as_it_was(
    broker: NatsServer, config: Path
) -> None:
    settings = config_for(broker.url, step_s=0.05)
    async with fleet(settings) as made, serving(settings) as served, anyio.create_task_group() as tasks:
        request = await busy(made, served, tasks)

        def use() -> None:
            with Terminal(config, 80, 24) as terminal:
                terminal.until("Where the time goes")
                assert terminal.raw
                for key, there in (
                    ("2", "FIGURES"),
                    ("3", "IN WORK"),
                    ("4", "BOOKS"),
                    ("\t", "SHARE"),
                    ("\x1b[C", request),
                    ("s", "s order: by TOOK"),
                    ("?", "the order round"),
                    ("x", "s order: by TOOK"),
                    (" ", "paused"),
                    ("4", "BOOKS"),
                    ("1", "first token"),
                ):
                    terminal.type(key)
                    terminal.until(there)
                terminal.resize(60, 20)
                terminal.until("first token", 60)
                terminal.type("q")
                assert terminal.left() == 0
                assert terminal.restored

        await anyio.to_thread.run_sync(use)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("by", ["ctrl-c", "sigterm", "hang-up"])
async def test_however_it_ends_the_terminal_is_as_it_was(broker: NatsServer, config: Path, by: str) -> None:
    def use() -> None:
        with Terminal(config, 80, 24) as terminal:
            terminal.until("Nobody lives")
            terminal.end(by)
            assert terminal.left() == 0
            assert by == "hang-up" or terminal.restored

    await anyio.to_thread.run_sync(use)


async def test_a_broker_that_dies_is_told_and_one_that_comes_back_is_used(broker: NatsServer, config: Path) -> None:
    def use() -> None:
        with Terminal(config, 80, 24) as terminal:
            terminal.until("Nobody lives")
            broker.kill9()
            terminal.until("No connection to NATS")
            broker.start()
            terminal.until("Nobody lives", absent="No connection")
            terminal.type("q")
            assert terminal.left() == 0

    await anyio.to_thread.run_sync(use)
