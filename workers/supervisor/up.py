"""`headrace up` from its options to its end: configure, check, start, say what is there."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio

from pipeline import tls
from pipeline.cli import client
from pipeline.config import Config, load
from pipeline.paths import NATS_CONFIG, require, state_folder
from pipeline.telemetry import logs
from workers.engines import launch
from workers.supervisor import checks, folder, plan
from workers.supervisor.plan import Options, Site, Unit
from workers.supervisor.run import Stack
from workers.supervisor.screen import Screen

FIRST_REPLY_CREATOR: Final = "up"
"""Who asks with `--ask`."""


def up(config_path: Path, options: Options, ask: str | None) -> None:
    """Run the stack until a signal. Raises `OperatorError` where it cannot start or cannot be kept running."""
    config = plan.chosen(load(config_path), options)
    plan.check_fleet(config.up)
    run = folder.name_of(time.localtime(), os.getpid())
    if segment := launch.shm_path(config):
        folder.remove_stale(segment)
    config = plan.settled(config, run, checks.free_ports(plan.PORTS_MAX))
    nats_server = checks.nats_server()
    checks.check_machine(config, plan.ports(config))
    run_folder = folder.create(state_folder(config.up.state_dir), run)
    site = Site(
        run=run,
        folder=run_folder,
        config_path=config_path.resolve(),
        nats_server=nats_server,
        nats_config=require(NATS_CONFIG),
        cores=tuple(sorted(os.sched_getaffinity(0))),
    )
    units = plan.plan(config, site, checks.free_ports(config.up.prefill + config.up.decode + config.up.both + 1))
    with (run_folder / "logs" / "up.log").open("a") as log:
        logs.configure("up", log)
        anyio.run(_run, config, units, run_folder, ask)


async def _run(config: Config, units: Sequence[Unit], run_folder: Path, ask: str | None) -> None:
    screen, url, certificate = Screen(), plan.gateway_url(config), config.gateway.tls_cert

    async def live() -> None:
        screen.answer(greeting(config, run_folder))
        if ask:
            trust = tls.trusting_ours(certificate) if certificate else None
            await _first_reply(client.Gateway(url, trust), ask, screen)

    await Stack(config, units, run_folder, screen, gate=plan.Answers(f"{url}/ready", certificate)).run(live)


async def _first_reply(at: client.Gateway, ask: str, screen: Screen) -> None:
    screen.answer(f"\n> {ask}")
    reply = await client.chat(
        at, client.chat_body(ask, system=None, max_tokens=None, temperature=0), FIRST_REPLY_CREATOR, screen.piece
    )
    screen.answer("")
    screen.tell(reply.error or client.summary(reply))


def greeting(config: Config, run_folder: Path) -> str:
    """What the user reads when all is ready."""
    url = plan.gateway_url(config)
    trusted = f" --cacert {config.gateway.tls_cert}" if config.gateway.tls_cert else ""
    return f"""
Ready at {url}

  curl -N{trusted} {url}/v1/chat/completions -H 'content-type: application/json' -H 'x-creator-id: ada' \\
    -d '{{"messages": [{{"role": "user", "content": "What is the capital of France?"}}], "stream": true}}'

  headrace chat "What is the capital of France?" --creator ada

Logs in {run_folder / "logs"}. Ctrl-C to stop."""
