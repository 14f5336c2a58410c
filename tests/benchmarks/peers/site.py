"""Where a run takes place, and the sides' common parts: a router, and Headrace as `headrace up` starts it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from pipeline.config import Up
from pipeline.protocol.arrangement import Role, takes
from tests.benchmarks.peers import install
from tests.benchmarks.peers.side import Side, Unit
from tests.ports import free_port
from workers.supervisor.plan import beginning

MODEL: Final = "smollm2-135m-instruct"

PORTS: Final = "[nats]\nurl = 'nats://127.0.0.1:0'\nmonitor_port = 0\n[lmcache]\nport = 0\nhttp_port = 0\n"


class Site(msgspec.Struct, frozen=True):
    """`folder` is one start's alone and exists; `home` holds the peers' environments, `model` the prepared model."""

    folder: Path
    home: Path
    model: str


Recipe = Callable[[Site], Side]


def url(port: int) -> str:
    """On loopback."""
    return f"http://127.0.0.1:{port}"


def router(site: Site, port: int, *options: str) -> Unit:
    """vllm-router, which asks nobody for anything but what `options` say."""
    command = (
        str(install.python(site.home, install.ROUTER)), "-m", "vllm_router.launch_router", "--host", "127.0.0.1",
        "--port", str(port), "--prometheus-port", str(free_port()), "--log-level", "warning",
        "--worker-startup-check-interval", "1", *options,
    )  # fmt: skip
    return Unit(name="router", command=command, ready=f"{url(port)}/health", part="front")


def headrace(site: Site, prefill: int, decode: int, both: int, entries: str, begin_as: tuple[Role, ...] = ()) -> Side:
    """`headrace up` with so many workers; `entries` are further tables of its configuration."""
    port, config = free_port(), site.folder / "headrace.toml"
    fleet = f"prefill = {prefill}\ndecode = {decode}\nboth = {both}\nbegin_as = {list(begin_as)}\n"
    up = f"[up]\n{fleet}state_dir = '{site.folder}'\n"
    config.write_text(f"{entries}{PORTS}[gateway]\nport = {port}\n[model]\nsource = '{site.model}'\n{up}")
    begins = beginning(Up(both=both, begin_as=begin_as))

    def says(role: Role, alone: int) -> bytes:
        return f'"{role}":{alone + sum(takes(begin, role) for begin in begins)}'.encode()

    unit = Unit(
        name="headrace",
        command=(sys.executable, "-P", "-m", "pipeline.cli", "up", "--config", str(config)),
        ready=f"{url(port)}/ready",
        says=(says("prefill", prefill), says("decode", decode)),
        part="beside",
        members=site.folder / "last.json",
    )
    return Side(stages=((unit,),), url=url(port))
