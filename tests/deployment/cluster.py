"""The cluster of `configs/nats`, on loopback: three servers over the project's own files, each role with its own NKey.

The files are copied as they are. What a node has of its own is in its environment, as the head of `cluster.conf` says.
"""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pipeline.bus.access import Nkey
from pipeline.config import Config, Nats, load
from pipeline.paths import CONFIGS
from tests.deployment.authority import Certificate, certificate
from tests.nats_server import binary
from tests.ports import free_port

ROLES: Final = ("gateway", "prefill", "decode", "both", "keeper", "operator", "producer")
PRODUCTION: Final = CONFIGS / "production.toml"
FILES: Final = ("cluster.conf", "common.conf", "roles.conf", "users.conf")

START_S: Final = 30.0
"""For a cluster to have elected who leads it: an election takes 4 to 9 s, and there may be one busy core."""


class Node:
    """One server."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"n{number}"
        self.folder = folder
        self.port, self.http_port, self.route_port = free_port(), free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What it has said."""
        return (self.folder / f"{self.name}.log").read_text("utf-8")

    @property
    def reloads(self) -> int:
        """How often it has read its files again."""
        return self.log.count("Reloaded server configuration")


class Cluster:
    """So many nodes, and a seed for each role."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self.folder = folder
        self.seeds = folder / "nkeys"
        self.seeds.mkdir(parents=True)
        self.certificate: Certificate = certificate(folder / "tls")
        self.public = {role: self.new_key(role) for role in ROLES}
        for file in FILES:
            shutil.copy(CONFIGS / "nats" / file, folder / file)
        self.nodes = [Node(number + 1, folder) for number in range(nodes)]

    # ---- as a client sees it

    @property
    def url(self) -> str:
        """All nodes, as `nats.url` names them."""
        return ",".join(f"tls://127.0.0.1:{node.port}" for node in self.nodes)

    def new_key(self, name: str) -> str:
        """A fresh NKey; its seed lies in a file of that name."""
        key = Nkey.fresh()
        (self.seeds / f"{name}.seed").write_text(key.seed, "ascii")
        return key.public

    def environment(self, role: str) -> dict[str, str]:
        """What a process of that role has beside `production.toml`."""
        prefix = "_INBOX.producer.shop" if role == "producer" else f"_INBOX.{role}"
        places = {
            "URL": self.url,
            "CA": self.certificate.ca,
            "NKEY_SEED": self.seeds / f"{role}.seed",
            "INBOX_PREFIX": prefix,
        }
        return {f"HEADRACE__NATS__{place}": str(value) for place, value in places.items()}

    def config(self, role: str) -> Config:
        """The configuration of a process of that role."""
        return load(PRODUCTION, self.environment(role))

    def nats(self, role: str, **other: Any) -> Nats:
        """How it connects, but for `other`."""
        settings = self.config(role).nats
        return Nats(**{name: getattr(settings, name) for name in settings.__struct_fields__} | other)

    # ---- its life

    @contextlib.contextmanager
    def running(self) -> Iterator["Cluster"]:
        """All nodes run, and JetStream has a leader."""
        try:
            for node in self.nodes:
                self.start(node)
            self.await_healthy(self.nodes)
            yield self
        finally:
            for node in self.nodes:
                self.end(node, signal.SIGKILL)

    def start(self, node: Node) -> None:
        """Start one."""
        with (self.folder / f"{node.name}.log").open("ab") as log:
            node.process = subprocess.Popen(
                [binary(), "-c", str(self.folder / "cluster.conf")], env=self._environment(node), stdout=log, stderr=log
            )

    def end(self, node: Node, number: int) -> None:
        """Send a signal that ends it, and wait. Nothing where it does not run."""
        process, node.process = node.process, None
        if process is not None:
            process.send_signal(number)
            process.wait(timeout=60)

    def reload(self) -> None:
        """Have every node read its files again."""
        for node in self.nodes:
            assert node.process is not None
            before = node.reloads
            node.process.send_signal(signal.SIGHUP)
            while node.reloads == before:
                assert node.process.poll() is None, node.log[-2000:]
                time.sleep(0.02)

    def await_healthy(self, nodes: Sequence[Node]) -> None:
        """Return when each says that it serves, streams and all."""
        for node in nodes:
            until_s = time.monotonic() + START_S
            while not _healthy(node):
                assert time.monotonic() < until_s, f"{node.name} took too long:\n{node.log[-2000:]}"
                time.sleep(0.05)

    def _environment(self, node: Node) -> Mapping[str, str]:
        host = "127.0.0.1"
        return {
            "NATS_NAME": node.name,
            "NATS_LISTEN": f"{host}:{node.port}",
            "NATS_HTTP": f"{host}:{node.http_port}",
            "NATS_CLUSTER": f"{host}:{node.route_port}",
            **{f"NATS_ROUTE_{n}": f"nats-route://{host}:{self._route(n)}" for n in (1, 2, 3)},
            "NATS_STORE": str(self.folder / node.name),
            "NATS_TLS_CERT": str(self.certificate.cert),
            "NATS_TLS_KEY": str(self.certificate.key),
            "NATS_TLS_CA": str(self.certificate.ca),
            **{f"HEADRACE_NKEY_{role.upper()}": public for role, public in self.public.items()},
        }

    def _route(self, number: int) -> int:
        return self.nodes[min(number, len(self.nodes)) - 1].route_port


def _healthy(node: Node) -> bool:
    assert node.process is not None
    assert node.process.poll() is None, f"{node.name} ended:\n{node.log[-2000:]}"
    with contextlib.suppress(OSError, ValueError), socket.create_connection(("127.0.0.1", node.http_port), 2) as line:
        line.settimeout(2)
        line.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        answer = line.makefile("rb").read()
        return bool(json.loads(answer.partition(b"\r\n\r\n")[2]).get("status") == "ok")
    return False
