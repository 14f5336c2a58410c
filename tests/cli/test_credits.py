"""`headrace credits` beside a running fleet: the books of every decode worker, and what is wrong with those that lie."""

import json
import signal
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest
from typer.testing import CliRunner, Result

from pipeline.bus.connection import Bus
from pipeline.cli import credits as books
from pipeline.cli.main import program
from pipeline.errors import OperatorError
from pipeline.protocol import subjects
from pipeline.protocol.credits import GrantState
from pipeline.protocol.messages import Account, Presence, encode
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, config_for, fleet, until

SOUND = Account(
    decode="d",
    epoch="1",
    blocks=100,
    free=80,
    reserve=10,
    waiting=0,
    granted_now=1,
    granted_blocks=5,
    consumed_now=2,
    consumed_blocks=15,
    granted=10,
    released=4,
    returned=2,
    expired=1,
    refused=3,
)


async def credits_of(config: Path, *arguments: str) -> Result:
    """The command, in a thread beside the fleet's loop."""
    command = ["credits", *arguments, "--config", str(config)]
    return await anyio.to_thread.run_sync(lambda: CliRunner().invoke(program(), command))


def test_the_books_of_a_working_fleet_add_up(broker: NatsServer, config: Path) -> None:
    async def serve() -> None:
        async with fleet(config_for(broker.url, step_s=0.02), decode=2) as made:
            for _ in range(3):
                await made.ask(max_tokens=4)
            caller = Caller(made.bus, "long")
            await caller.listen()
            await caller.publish("alice", max_tokens=400, ignore_eos=True)
            await until(lambda: any(made.decode(f"decode-{n}").ledger.count(GrantState.CONSUMED) for n in (1, 2)))
            shown, said = await credits_of(config), await credits_of(config, "--json")
            assert (shown.exit_code, said.exit_code) == (0, 0)
            lines = shown.stdout.splitlines()
            assert lines[0].split() == list(books.HEAD)
            assert [line.split()[0] for line in lines[1:3]] == ["decode-1", "decode-2"]
            assert all("✓" in line for line in lines[1:3])
            accounts = json.loads(said.stdout)
            assert sum(account["granted"] for account in accounts) == 4
            assert sum(account["consumed_now"] for account in accounts) == 1
            assert [account["problems"] for account in accounts] == [[], []]
            assert all(account["blocks"] == 512 for account in accounts)
            caller.leave()

    anyio.run(serve)


def test_books_that_do_not_add_up_and_workers_that_do_not_answer_are_shown(broker: NatsServer, config: Path) -> None:
    async def pretend() -> None:
        async with await Bus.connect(broker.url, "liar") as bus, anyio.create_task_group() as tasks:
            wrong = msgspec.structs.replace(SOUND, decode="liar", granted=11)
            await bus.subscribe(subjects.credit("liar"), lambda message: bus.post(message.reply, encode(wrong)))

            async def announce() -> None:
                while True:
                    for name in ("liar", "mute"):
                        presence = Presence(role="decode", id=name, epoch="1", ready=True)
                        bus.post(subjects.presence("decode", name), encode(presence))
                    await anyio.sleep(0.1)

            tasks.start_soon(announce)
            shown, said = await credits_of(config), await credits_of(config, "--json")
            assert (shown.exit_code, said.exit_code) == (1, 1)
            assert "✗ granted 11 ≠ ended 7 + outstanding 3" in shown.stdout
            assert "no answer" in shown.stdout
            liar, mute = json.loads(said.stdout)
            assert (liar["answered"], len(liar["problems"]), mute) == (True, 1, {"decode": "mute", "answered": False})
            tasks.cancel_scope.cancel()

    anyio.run(pretend)


def test_watching_shows_them_again_until_an_interrupt(broker: NatsServer, config: Path) -> None:
    async def watch() -> None:
        command = [sys.executable, "-m", "pipeline.cli", "credits", "--watch", "--json", "--config", str(config)]
        async with fleet(config_for(broker.url)), await anyio.open_process(command) as process:
            said = b""
            assert process.stdout is not None
            with anyio.fail_after(30.0):
                while said.count(b"\n") < 2:
                    said += await process.stdout.receive()
                process.send_signal(signal.SIGINT)
                assert await process.wait() == 130
            assert [json.loads(line)[0]["decode"] for line in said.splitlines()[:2]] == ["decode-1", "decode-1"]

    anyio.run(watch)


def test_without_decode_workers_the_operator_is_told(config: Path) -> None:
    result = CliRunner().invoke(program(), ["credits", "--config", str(config)])
    assert isinstance(result.exception, OperatorError)
    assert "headrace worker decode" in str(result.exception)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"released": 3}, ["granted 10 ≠ ended 6 + outstanding 3"]),
        ({"free": 79}, ["free 79 + held 20 ≠ 100 blocks"]),
        ({"free": -5, "consumed_blocks": 100}, ["free -5 is not within 0 and 100"]),
        ({"seats": 20, "seats_max": 20}, []),
        ({"seats": 21, "seats_max": 20}, ["21 seats are promised, of 20"]),
        ({"preemptions": 2}, ["the engine has preempted 2 times"]),
    ],
)
def test_each_thing_that_can_be_wrong_is_named(changes: dict[str, int], words: list[str]) -> None:
    assert books.problems(msgspec.structs.replace(SOUND, **changes)) == words
