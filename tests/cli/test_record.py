"""`headrace record`, and the way round: load is recorded, replayed, and recorded again."""

import asyncio
import itertools
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
from typer.testing import CliRunner, Result

from pipeline.cli import record
from pipeline.cli.main import program
from pipeline.config import load
from pipeline.errors import OperatorError
from pipeline.protocol.traces import Line
from tests.gateway.stack import serving, until_ready
from tests.nats_server import NatsServer
from tests.workers.fleet import config_for, fleet, until

RECORDING_S = 60.0


async def command(*arguments: str) -> Result:
    """A command, in a thread beside the fleet's loop."""
    return await anyio.to_thread.run_sync(lambda: CliRunner().invoke(program(), arguments))


@asynccontextmanager
async def stack(broker: NatsServer) -> AsyncIterator[str]:
    """The URL of a gateway with a fleet behind it."""
    config = config_for(broker.url, kv_blocks=2048)
    async with fleet(config, prefill=2), serving(config) as served:
        await until_ready(served.client)
        yield served.url


async def recorded(config: Path, to: Path, count: int, *load_arguments: str) -> list[Line]:
    """What `headrace record` writes of this load."""
    sink: list[record.Sink] = []

    def make() -> record.Sink:
        sink.append(record.Sink(to.open("wb"), count))
        return sink[0]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(record._record, load(config), make, RECORDING_S)
        await until(lambda: sink, RECORDING_S)
        await anyio.sleep(0.5)
        done = await command("bench", *load_arguments, "--config", str(config))
        assert done.exit_code == 0, done.output
    return read(to)


def read(trace: Path) -> list[Line]:
    return [msgspec.json.decode(line, type=Line) for line in trace.read_bytes().splitlines()]


def sharing(lines: list[Line]) -> list[tuple[int, int, int]]:
    """Of any two requests: how long each is, and how many blocks both begin with."""
    return sorted(
        (
            min(one.input_length, other.input_length),
            max(one.input_length, other.input_length),
            common(one.hash_ids, other.hash_ids),
        )
        for one, other in itertools.combinations(lines, 2)
    )


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def lengths(lines: list[Line]) -> list[tuple[int, int]]:
    return sorted((line.input_length, line.output_length) for line in lines)


def test_what_is_recorded_of_a_replay_is_what_was_replayed(broker: NatsServer, config: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with stack(broker) as url:
            first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
            said = ("--url", url, "--requests", "16", "--prompt-tokens", "1300", "--creators", "3", "--max-tokens", "9")
            live = await recorded(config, first, 16, *said)
            replayed = await recorded(config, second, 18, "--url", url, "--trace", str(first))
        assert len(live) == 16
        assert {common(one.hash_ids, other.hash_ids) for one, other in itertools.combinations(live, 2)} == {0, 2}
        without_probes = [line for line in replayed if line.input_length > 300]  # two prompts ask for the template
        assert lengths(without_probes) == lengths(live)
        assert sharing(without_probes) == sharing(live)
        assert [line.timestamp for line in live] == sorted(line.timestamp for line in live)

    anyio.run(main)


def test_a_trace_holds_nothing_that_was_said(broker: NatsServer, config: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with stack(broker) as url:
            [line] = await recorded(config, tmp_path / "t.jsonl", 1, "--url", url, "--requests", "1", "--warm")
        assert line.hash_ids == [0]
        written = msgspec.json.decode((tmp_path / "t.jsonl").read_bytes())
        assert written.keys() == {"timestamp", "input_length", "output_length", "hash_ids"}

    anyio.run(main)


def test_ctrl_c_ends_the_file(broker: NatsServer, config: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with stack(broker) as url:
            trace = tmp_path / "t.jsonl"
            command_line = ["-m", "pipeline.cli", "record", str(trace), "--config", str(config)]
            process = await asyncio.create_subprocess_exec(sys.executable, *command_line, stderr=subprocess.PIPE)
            assert process.stderr
            try:
                assert await process.stderr.readline() == b"recording decode-1; Ctrl-C ends it\n"
                await anyio.sleep(0.5)
                done = await command("bench", "--requests", "3", "--url", url, "--config", str(config))
                assert done.exit_code == 0
                process.send_signal(signal.SIGINT)
                assert await process.stderr.read() == f"3 requests in {trace}\n".encode()
                assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        assert len(trace.read_bytes().splitlines()) == 3

    anyio.run(main)


def test_a_recording_ends_after_its_time(broker: NatsServer, config: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    done = CliRunner().invoke(program(), ["record", str(trace), "--duration", "1", "--config", str(config)])
    assert done.exit_code == 0
    assert "no decode worker lives; recording whoever comes" in done.stderr
    assert trace.read_bytes() == b""
    assert broker.url


def test_a_file_is_not_replaced_unasked(config: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("precious", "utf-8")
    done = CliRunner().invoke(program(), ["record", str(trace), "--config", str(config)])
    assert isinstance(done.exception, OperatorError)
    assert trace.read_text("utf-8") == "precious"
    arguments = ["record", str(trace), "--force", "--duration", "1", "--config", str(config)]
    assert CliRunner().invoke(program(), arguments).exit_code == 0
    assert trace.read_bytes() == b""


def test_a_file_that_cannot_be_written_is_said_to_be(config: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(program(), ["record", str(tmp_path / "none" / "t.jsonl"), "--config", str(config)])
    assert "Cannot write" in str(done.exception)
