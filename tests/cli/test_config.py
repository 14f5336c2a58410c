"""`headrace config` beside a running fleet: set, follow, unset, show, and refuse."""

import json
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from typer.testing import CliRunner, Result

from pipeline.cli import config as command
from pipeline.cli.main import program
from pipeline.config import Config, Gateway, Nats
from pipeline.errors import OperatorError
from pipeline.protocol.keys import Key
from tests.nats_server import NatsServer
from tests.workers.fleet import config_for, fleet, until


async def headrace(config: Path, *arguments: str) -> Result:
    """The command, in a thread beside the fleet's loop."""
    return await anyio.to_thread.run_sync(
        lambda: CliRunner().invoke(program(), ["config", *arguments, "--config", str(config)])
    )


def test_a_setting_changes_in_all_processes_at_once_and_survives_a_restart(broker: NatsServer, config: Path) -> None:
    async def serve() -> None:
        async with fleet(config_for(broker.url)) as made:
            done = await headrace(config, "set", "prefill.slots", "9")
            assert "prefill.slots = 9. 2 of 2 processes have followed." in done.stdout
            assert made.prefill().slots.capacity == 9
            assert (await headrace(config, "set", "credits.reserve_ratio", "0.5")).exit_code == 0
            assert made.decode().ledger.reserve == made.decode().ledger.blocks / 2
            assert (await headrace(config, "set", "classes.decode_room", "0.5")).exit_code == 0
            assert made.prefill().slots.weights.decode_room == 0.5
            assert made.decode().ledger.weights.decode_room == 0.5
            await made.add("prefill", "prefill-2")
            assert made.prefill("prefill-2").slots.capacity == 9
            assert made.prefill("prefill-2").slots.weights.decode_room == 0.5
            again = await headrace(config, "set", "prefill.slots", "3")
            assert "prefill.slots = 3" in again.stdout
            back = await headrace(config, "unset", "prefill.slots")
            assert "is 4 again" in back.stdout
            await until(lambda: made.prefill("prefill-2").slots.capacity == 4)

    anyio.run(serve)


def test_what_holds_is_shown_with_where_it_comes_from(
    broker: NatsServer, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE__GATEWAY__IN_FLIGHT_MAX", "77")

    async def serve() -> None:
        async with fleet(config_for(broker.url)):
            await headrace(config, "set", "placement.spill_load", "0.9")
            shown = await headrace(config, "show")
            lines = {line.split()[0]: line.split() for line in shown.stdout.splitlines() if line}
            assert lines["placement.spill_load"][1:5] == ["0.9", "live", "0.05", "…"]
            assert lines["gateway.in_flight_max"][1:3] == ["77", "environment"]
            assert lines["decode.slots"][1:6] == ["16", "default", "1", "…", "16"]
            assert "nats.url" not in lines
            told = await headrace(config, "show", "--effective", "--json")
            rows = {row["setting"]: row for row in json.loads(told.stdout.splitlines()[-1])}
            assert rows["nats.url"]["source"] == "file"
            assert rows["placement.spill_load"]["set"].startswith("by ")

    anyio.run(serve)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("set", "model.source", "other"), "cannot change while processes run"),
        (("set", "prefill.slots", "0"), "from 1 to 1,024"),
        (("unset", "prefill.slots"), "is not set live"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    broker: NatsServer, config: Path, arguments: tuple[str, ...], said: str
) -> None:
    async def serve() -> None:
        async with fleet(config_for(broker.url)):
            result = await headrace(config, *arguments)
            assert isinstance(result.exception, OperatorError)
            assert said in str(result.exception)

    anyio.run(serve)


def test_without_the_bucket_the_operator_is_told(broker: NatsServer, config: Path) -> None:
    result = CliRunner().invoke(program(), ["config", "show", "--config", str(config)])
    assert isinstance(result.exception, OperatorError)
    assert "headrace streams apply" in result.exception.remedy


def test_nothing_secret_is_shown() -> None:
    key = Key(name="team", sha256="0" * 64)
    config = Config(nats=Nats(url="nats://me:secret@host:4222"), gateway=Gateway(keys=(key,)))
    shown = {row["setting"]: row["value"] for row in command.rows(config, {}, {}, everything=True)}
    assert shown["nats.url"] == "nats://…@host:4222"
    assert shown["gateway.keys"] == "1 keys"
