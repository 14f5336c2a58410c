"""`headrace shards` beside a running fleet: backlog, owners, spill, and where prompt tokens came from."""

import json
from pathlib import Path

import anyio
import anyio.to_thread
from typer.testing import CliRunner, Result

from pipeline.bus.connection import Bus
from pipeline.cli.main import program
from pipeline.cli.shards import HEAD
from pipeline.protocol.subjects import CLASSES, partition
from tests.nats_server import NatsServer
from tests.workers.fleet import Caller, config_for, fleet, until


async def shards_of(config: Path, *arguments: str) -> Result:
    """The command, in a thread beside the fleet's loop."""
    command = ["shards", *arguments, "--config", str(config)]
    return await anyio.to_thread.run_sync(lambda: CliRunner().invoke(program(), command))


def test_a_shard_says_who_owns_it_and_what_was_served_of_it(broker: NatsServer, config: Path) -> None:
    async def serve() -> None:
        async with fleet(config_for(broker.url), prefill=2) as made:
            for _ in range(3):
                await made.ask(creator="alice")
            await until(lambda: all(made.prefill(name).slots.busy == 0 for name in ("prefill-1", "prefill-2")))
            shown, said = await shards_of(config), await shards_of(config, "--json")
        assert (shown.exit_code, said.exit_code) == (0, 0), shown.output + said.output
        report = json.loads(said.stdout)
        assert len(report["shards"]) == len(CLASSES) * made.config.requests.shards
        assert report["warm_creators"].keys() == {"prefill-1", "prefill-2"}
        [row] = [row for row in report["shards"] if row["served"]]
        assert (row["klass"], row["shard"]) == ("interactive", partition("alice", made.config.requests.shards))
        assert (row["served"], row["depth"], row["in_work"]) == (3, 0, 0)
        assert {row["owner"], row["next"]} == {"prefill-1", "prefill-2"}
        assert row["computed_tokens"] > 0
        assert row["hbm_tokens"] > 0
        head, line, *_ = shown.stdout.splitlines()
        assert head.split("  ")[0] == HEAD[0]
        assert line.startswith(f"interactive {row['shard']}")

    anyio.run(serve)


def test_backlog_is_shown_where_nobody_serves(broker: NatsServer, config: Path) -> None:
    async def wait() -> None:
        async with fleet(config_for(broker.url)) as made:
            shards = made.config.requests.shards
        async with await Bus.connect(broker.url, "test") as bus:
            await Caller(bus, "r1").publish("alice")
            shown, everything = await shards_of(config), await shards_of(config, "--all")
        assert "no prefill worker lives" in shown.stdout
        lines = [line.split() for line in shown.stdout.splitlines() if line.startswith("interactive")]
        assert [line[:3] for line in lines] == [["interactive", str(partition("alice", shards)), "1"]]
        listed = [line for line in everything.stdout.splitlines() if line.startswith(CLASSES)]
        assert len(listed) == len(CLASSES) * shards

    anyio.run(wait)


def test_a_broker_without_streams_is_a_clear_error(config: Path) -> None:
    result = CliRunner().invoke(program(), ["shards", "--config", str(config)])
    assert "JetStream does not list the consumers of REQUESTS_interactive" in str(result.exception)
