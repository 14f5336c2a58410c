"""What must run for `headrace up`, and in which order. Pure: a plan is data, made from a configuration.

    nats ──► streams ──┬──────────────► gateway, keeper
    model ─────────────┼─► prefill-1 … decode-1 …
    lmcache ───────────┘

A unit starts when all that it comes `after` is ready. Nothing else orders the start: what can start together does. `streams` and
`model` are steps, ready when they have ended well; the simulated engine needs neither `model` nor `lmcache`.

A worker falls with LMCache: an engine does not notice a server that came back between two heartbeats, and would hand over
KV that is not there. The drain goes the other way, a stage at a time: who takes requests first, who carries them last.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from pipeline.config import ENV_PREFIX, Config, Up
from pipeline.errors import OperatorError
from pipeline.protocol.arrangement import Role, takes
from workers.engines import launch
from workers.engines.simulated.engine import TIER_VARIABLE

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


class Stage(IntEnum):
    """When a unit is told to stop: the lowest first."""

    GATEWAY = 0
    WORKERS = 1
    STORE = 2
    BROKER = 3


DRAIN_SHARES: Final[Mapping[Stage, float]] = {
    Stage.GATEWAY: 0.5,
    Stage.WORKERS: 0.3,
    Stage.STORE: 0.1,
    Stage.BROKER: 0.1,
}
"""Of `up.drain_s`. Half is the gateway's, whose streams must end first; what a stage leaves, the later ones may use."""


class Ended(msgspec.Struct, frozen=True):
    """Ready when the process has ended with status 0: a step."""


class Answers(msgspec.Struct, frozen=True):
    """Ready when a GET of `url` is answered with 200. `certificate`: where it is https, what it must show."""

    url: str
    certificate: str = ""


class Present(msgspec.Struct, frozen=True):
    """Ready when the worker says so in its presence."""

    role: str
    id: str


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the stack. `environment` is added to ours; `leftovers` are files that it leaves when killed.

    `metrics` is where Prometheus reads it. `cores`: it stays on these; none: on any.
    """

    name: str
    command: tuple[str, ...]
    ready: Ended | Answers | Present
    stage: Stage
    environment: Mapping[str, str] = {}
    after: tuple[str, ...] = ()
    falls_with: tuple[str, ...] = ()
    leftovers: tuple[Path, ...] = ()
    metrics: str | None = None
    cores: tuple[int, ...] = ()

    @property
    def is_step(self) -> bool:
        """Whether it runs to its end, once."""
        return isinstance(self.ready, Ended)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line sets over the configuration."""

    engine: Literal["vllm", "simulated"] | None = None
    prefill: int | None = None
    decode: int | None = None
    both: int | None = None
    port: int | None = None
    model: str | None = None


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run takes place: its name and folder, the programs and files it uses, the cores that it may use."""

    run: str
    folder: Path
    config_path: Path
    nats_server: Path
    nats_config: Path
    cores: tuple[int, ...]


# --------------------------------------------------------------------------------------------------------------
# The configuration of a run


def chosen(config: Config, options: Options) -> Config:
    """`config` with the command line's choices."""
    fleet = {name: value for name in ("prefill", "decode", "both") if (value := getattr(options, name)) is not None}
    up = replace(config.up, **fleet)
    return replace(
        config,
        engine=options.engine or config.engine,
        up=up,
        gateway=replace(config.gateway, port=config.gateway.port if options.port is None else options.port),
        model=replace(config.model, source=options.model or config.model.source),
    )


def check_fleet(up: Up) -> None:
    """Raise `OperatorError` where nobody would prefill, or nobody decode."""
    for role in ("prefill", "decode"):
        if not getattr(up, role) and not any(takes(begin, role) for begin in beginning(up)):
            raise OperatorError(
                f"Nobody would {role}: up.{role} is 0, and no worker for both begins so.",
                f"Give --{role} or --both, or correct up.begin_as.",
            )


def beginning(up: Up) -> list[Role]:
    """What each worker for both begins as."""
    return list(islice(chain(up.begin_as, repeat("both")), up.both))


def broker(config: Config) -> tuple[str, int]:
    """Host and port of `nats.url`. Raises `OperatorError` where `up` cannot start a server there."""
    try:
        parts = urlsplit(config.nats.url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host not in LOOPBACK:
        raise OperatorError(
            f"nats.url is {config.nats.url}, but `headrace up` starts a NATS server of its own on loopback.",
            "Set it to nats://127.0.0.1:4222, or start gateway and workers one by one against your server.",
        )
    return host, 4222 if port is None else port


def settled(config: Config, run: str, free_ports: Sequence[int]) -> Config:
    """`config` with each port 0 replaced by the next of `free_ports`, and names that no other run has."""
    free = iter(free_ports)

    def port(configured: int) -> int:
        return configured or next(free)

    host, nats_port = broker(config)
    return replace(
        config,
        nats=replace(
            config.nats,
            url=f"nats://{launch.bracketed(host)}:{port(nats_port)}",
            monitor_port=port(config.nats.monitor_port),
        ),
        gateway=replace(config.gateway, port=port(config.gateway.port)),
        lmcache=replace(
            config.lmcache,
            port=port(config.lmcache.port),
            http_port=port(config.lmcache.http_port),
            shm_name=f"{config.lmcache.shm_name}-{run}" if config.lmcache.shm_name else "",
        ),
    )


PORTS_MAX: Final = 5
"""Ports that `settled` may have to replace."""


def overlay(config: Config) -> dict[str, str]:
    """What `chosen` and `settled` may have changed, as variables for every child (see `pipeline.config`)."""
    places = {
        "ENGINE": config.engine,
        "NATS__URL": config.nats.url,
        "NATS__MONITOR_PORT": config.nats.monitor_port,
        "GATEWAY__PORT": config.gateway.port,
        "LMCACHE__PORT": config.lmcache.port,
        "LMCACHE__HTTP_PORT": config.lmcache.http_port,
        "LMCACHE__SHM_NAME": config.lmcache.shm_name,
        "MODEL__SOURCE": config.model.source,
    }
    return {ENV_PREFIX + place: str(value) for place, value in places.items()}


def ports(config: Config) -> dict[int, str]:
    """The ports that a settled configuration takes on this machine, and what for."""
    taken = {broker(config)[1]: "nats.url", config.nats.monitor_port: "nats.monitor_port"}
    if config.engine == "vllm":
        taken |= {config.lmcache.port: "lmcache.port", config.lmcache.http_port: "lmcache.http_port"}
    return taken | {config.gateway.port: "gateway.port"}


def gateway_url(config: Config) -> str:
    """Where this machine reaches the gateway."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.gateway.host, config.gateway.host)
    scheme = "https" if config.gateway.tls_cert else "http"
    return f"{scheme}://{launch.bracketed(host)}:{config.gateway.port}"


# --------------------------------------------------------------------------------------------------------------
# The units

_SERVED: Final = ("nats", "streams")
"""What everybody needs to start. The broker itself, too: a step that has ended stays so, and who is started again while the
broker is would take its set-up for one that cannot work."""


def plan(config: Config, site: Site, metrics_ports: Sequence[int]) -> tuple[Unit, ...]:
    """All units of a settled configuration. `metrics_ports` has one for each worker, and one for the keeper."""
    real = config.engine == "vllm"
    units = [_nats(config, site), _streams(config, site)]
    if real:
        units += [_model(config), _lmcache(config)]
    free = iter(metrics_ports)
    up = config.up
    fleet: tuple[tuple[Role, int], ...] = (("prefill", up.prefill), ("decode", up.decode), ("both", up.both))
    roles = [role for role, count in fleet for _ in range(count)]
    names = [f"{role}-{i + 1}" for role, count in fleet for i in range(count)]
    begins = [*roles[: up.prefill + up.decode], *beginning(up)]
    shares = shared(site.cores, [launch.settings(config, role).threads for role in roles])
    for role, begin, name, cores in zip(roles, begins, names, shares, strict=True):
        pinned = cores if real and up.pin_cores and launch.cpu_build() else ()
        units.append(replace(_worker(config, site, (role, begin), name, next(free)), cores=pinned))
    return (*units, _keeper(config, site, next(free)), _gateway(config, site))


def shared(cores: Sequence[int], wanted: Sequence[int]) -> list[tuple[int, ...]]:
    """So many cores for each, none of them twice. Nobody has any where there are too few for all.

    Engines that wander over the same cores wait for each other: an engine's step ends when its last thread does, and its
    processes look for each other's messages without a pause.
    """
    if sum(wanted) > len(cores):
        return [()] * len(wanted)
    free = iter(cores)
    return [tuple(islice(free, count)) for count in wanted]


def _nats(config: Config, site: Site) -> Unit:
    host, port = broker(config)
    monitor = config.nats.monitor_port
    command = (str(site.nats_server), "-c", str(site.nats_config), "-a", host, "-p", str(port), "-m", str(monitor))
    return Unit(
        name="nats",
        command=(*command, "-sd", str(site.folder / "nats")),
        ready=Answers(f"http://{launch.bracketed(host)}:{monitor}/healthz"),
        stage=Stage.BROKER,
    )


def _streams(config: Config, site: Site) -> Unit:
    return Unit(
        name="streams",
        command=_headrace(site, "streams", "apply"),
        environment=overlay(config),
        ready=Ended(),
        after=("nats",),
        stage=Stage.WORKERS,
    )


def _model(config: Config) -> Unit:
    module = ("-m", "workers.engines.model", "--source", config.model.source, "--state-dir", config.up.state_dir)
    return Unit(name="model", command=(*_PYTHON, *module), ready=Ended(), stage=Stage.WORKERS)


def _lmcache(config: Config) -> Unit:
    segment, url = launch.shm_path(config), launch.lmcache_url(config)
    return Unit(
        name="lmcache",
        command=tuple(launch.lmcache_command(config)),
        environment=launch.lmcache_environment(),
        ready=Answers(f"{url}/healthcheck"),
        metrics=f"{url}/metrics",
        leftovers=(segment,) if segment else (),
        stage=Stage.STORE,
    )


def _worker(config: Config, site: Site, roles: tuple[Role, Role], name: str, metrics_port: int) -> Unit:
    """`roles`: what its engine is built for, and what it begins as."""
    (role, begin), real = roles, config.engine == "vllm"
    begins = () if begin == role else ("--as", begin)
    engine = launch.environment(config, role) if real else {TIER_VARIABLE: str(site.folder / "simulated-lmcache")}
    return Unit(
        name=name,
        command=_headrace(site, "worker", role, "--id", name, "--metrics-port", str(metrics_port), *begins),
        environment={**engine, **overlay(config)},
        ready=Present("decode" if begin == "both" else begin, name),
        after=(*_SERVED, "model", "lmcache") if real else _SERVED,
        falls_with=("lmcache",) if real else (),
        stage=Stage.WORKERS,
        metrics=_metrics(metrics_port),
    )


def _keeper(config: Config, site: Site, metrics_port: int) -> Unit:
    """It serves its metrics from when it works on."""
    return Unit(
        name="keeper",
        command=_headrace(site, "keeper", "--id", "keeper", "--metrics-port", str(metrics_port)),
        environment=overlay(config),
        ready=Answers(_metrics(metrics_port)),
        after=_SERVED,
        stage=Stage.WORKERS,
        metrics=_metrics(metrics_port),
    )


def _metrics(port: int) -> str:
    return f"http://127.0.0.1:{port}/metrics"


def _gateway(config: Config, site: Site) -> Unit:
    return Unit(
        name="gateway",
        command=_headrace(site, "gateway"),
        environment=overlay(config),
        ready=Answers(f"{gateway_url(config)}/health", config.gateway.tls_cert),
        metrics=f"{gateway_url(config)}/metrics",
        after=_SERVED,
        stage=Stage.GATEWAY,
    )


_PYTHON: Final = (sys.executable, "-P")
"""Without the current folder on the path: a stranger's `queue.py` there must not become ours."""


def _headrace(site: Site, *arguments: str) -> tuple[str, ...]:
    return (*_PYTHON, "-m", "pipeline.cli", *arguments, "--config", str(site.config_path))


# --------------------------------------------------------------------------------------------------------------
# What follows from a plan


def falling_with(units: Sequence[Unit], dead: str) -> tuple[str, ...]:
    """The units that are restarted when `dead` has died, beside itself."""
    return tuple(unit.name for unit in units if dead in unit.falls_with)


def drain_order(units: Sequence[Unit], drain_s: float) -> Iterator[tuple[tuple[str, ...], float]]:
    """The units to stop together, and until when: seconds from the start of the drain."""
    until_s = 0.0
    for stage in Stage:
        until_s += DRAIN_SHARES[stage] * drain_s
        yield tuple(unit.name for unit in units if unit.stage == stage), until_s
