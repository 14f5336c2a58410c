"""`headrace drain`, `pause`, `resume` and `workers` beside a running fleet."""

from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from typer.testing import CliRunner, Result

from pipeline.cli import control
from pipeline.cli.main import program
from pipeline.errors import OperatorError
from tests.nats_server import NatsServer
from tests.workers.fleet import config_for, fleet


async def headrace(config: Path, *arguments: str) -> Result:
    """The command, in a thread beside the fleet's loop."""
    return await anyio.to_thread.run_sync(lambda: CliRunner().invoke(program(), [*arguments, "--config", str(config)]))


def said(result: Result) -> list[str]:
    """What the command printed; the fleet beside it logs there, too."""
    return sorted(line for line in result.stdout.splitlines() if line.startswith(("prefill-", "decode-", "both-")))


def rows(shown: Result) -> dict[str, list[str]]:
    """The table of `headrace workers`: what stands behind each name."""
    head, *lines = (line.split() for line in shown.stdout.splitlines())
    assert head[:5] == ["WORKER", "LOOP", "SERVES", "AS", "STATE"]
    return {name: rest for name, *rest in lines}


def test_orders_are_obeyed_shown_and_followed_to_their_end(broker: NatsServer, config: Path) -> None:
    async def serve() -> None:
        async with fleet(config_for(broker.url), prefill=2) as made:
            paused = await headrace(config, "pause", "prefill")
            assert paused.exit_code == 0
            assert said(paused) == [f"prefill-{number}: paused as prefill, 0 requests under way." for number in (1, 2)]
            shown = rows(await headrace(config, "workers"))
            assert {name: row[:3] for name, row in shown.items()} == {
                "prefill-1": ["prefill", "prefill", "paused"],
                "prefill-2": ["prefill", "prefill", "paused"],
                "decode-1": ["decode", "decode", "serving"],
            }
            resumed = await headrace(config, "resume", "prefill-1")
            assert said(resumed) == ["prefill-1: serving as prefill, 0 requests under way."]
            left = await headrace(config, "drain", "prefill-2")
            assert left.exit_code == 0
            assert said(left)[0] == "prefill-2: draining as prefill, 0 requests under way."
            assert said(left)[-1].startswith("prefill-2: has left, after")
            assert made.workers["prefill-2"].scope.cancel_called

    anyio.run(serve)


def test_a_worker_that_cannot_obey_says_why_and_the_command_fails(broker: NatsServer, config: Path) -> None:
    async def serve() -> None:
        async with fleet(config_for(broker.url)) as made:
            made.workers["decode-1"].leaves = True  # and takes its time
            refused = await headrace(config, "pause", "decode-1")
            assert refused.exit_code == 1
            assert "decode-1: refused, because it is draining, and leaves when its requests have ended." in said(
                refused
            )

    anyio.run(serve)


def test_a_worker_changes_its_role_unless_nobody_would_be_left(broker: NatsServer, config: Path) -> None:
    async def serve() -> None:
        async with fleet(config_for(broker.url), prefill=1, decode=0, both=1):
            alone = await headrace(config, "role", "both-1", "prefill")
            assert isinstance(alone.exception, OperatorError)
            assert "nobody would be left to decode" in str(alone.exception)
            turned = await headrace(config, "role", "both-1", "decode")
            assert turned.exit_code == 0
            assert said(turned)[-1].startswith("both-1: serving as decode, 0 requests under way. That took")
            assert rows(await headrace(config, "workers"))["both-1"][:3] == ["decode", "decode", "serving"]
            assert (await headrace(config, "role", "both-1", "prefill", "--anyway", "--no-wait")).exit_code == 0
            refused = await headrace(config, "role", "prefill-1", "both")
            assert refused.exit_code == 1
            assert "started for prefill alone" in said(refused)[0]

    anyio.run(serve)


def test_who_does_not_live_cannot_be_told_anything(broker: NatsServer, config: Path) -> None:
    async def serve() -> None:
        async with fleet(config_for(broker.url)):
            result = await headrace(config, "pause", "prefill-7")
            with pytest.raises(OperatorError, match=r"prefill-7.*Name one of decode-1, prefill-1") as error:
                raise result.exception or AssertionError
            assert error.value.remedy

    anyio.run(serve)


@pytest.mark.parametrize(("count", "said"), [(1, "1 request under way"), (2, "2 requests under way")])
def test_an_answer_reads_as_a_sentence(count: int, said: str) -> None:
    from pipeline.protocol.control import Standing

    assert said in control.sentence(Standing(worker="w", role="prefill", state="paused", under_way=count))
