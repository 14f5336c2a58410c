"""Typed configuration: defaults, then a TOML file, then the environment (`HEADRACE__GATEWAY__PORT=8080`).

Unknown names are errors, and every error names its place: ``$.gateway.port``. What operators change while processes run lies
over all of it: see `pipeline.protocol.settings`.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from pipeline.errors import OperatorError
from pipeline.limits import RESERVE_RATIO, SPILL_BACK_LOAD, SPILL_LOAD
from pipeline.protocol.arrangement import Role
from pipeline.protocol.balancer import Rules
from pipeline.protocol.classes import WEIGHTS, Weights
from pipeline.protocol.keys import Key
from pipeline.protocol.settings import Number, Source

ENV_PREFIX: Final = "HEADRACE__"

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
"""A TCP port. 0 lets `headrace up` choose a free one."""
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Ratio = Annotated[float, msgspec.Meta(gt=0, le=1)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class Nats(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The broker. `monitor_port` is the HTTP monitor of the server that `headrace up` starts."""

    url: str = "nats://127.0.0.1:4222"
    """Of one server, or of several of a cluster, between commas. `tls://` asks for TLS, and then nothing is sent without it."""
    connect_timeout_s: PositiveFloat = 5.0
    monitor_port: Port = 8222
    ca: str = ""
    """PEM file of who signs the servers' certificates. Empty, with `tls://`: those that the system trusts."""
    cert: str = ""
    """PEM file of our own certificate, and `key` of its key, where the servers ask for one."""
    key: str = ""
    nkey_seed: str = ""
    """File with our NKey seed (`SU…`), which says who we are. A seed is a secret: only its file is named here."""
    inbox_prefix: str = "_INBOX"
    """All our inboxes lie under it: a role's own where the broker tells roles apart (`configs/nats/roles.conf`)."""
    replicas: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1
    """Copies of each stream and consumer, whatever `configs/jetstream` says: 3 in a cluster of three."""


class Gateway(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP front door. Without `keys` it is open to everybody who reaches it."""

    host: str = "127.0.0.1"
    port: Port = 8000
    body_bytes_max: Positive = 900_000
    body_timeout_s: PositiveFloat = 30.0
    """For a body to come, from its head on."""
    in_flight_max: Positive = 2048
    in_flight_bytes_max: Positive = 256 * 1024 * 1024
    """Bodies of all requests in flight: 2,048 of the largest would be 1.8 GB."""
    creator_in_flight_max: Positive = 1024
    """One creator's requests at this gateway: half of it. A hot creator fits, and the other half is left to all others."""
    creator_in_flight_bytes_max: Positive = 128 * 1024 * 1024
    queued_tokens_max: Positive = 4_000_000
    """Prompt tokens of all requests whose reply has not begun, as estimated: `in_flight_max` prompts of 2,000."""
    creator_queued_tokens_max: Positive = 2_000_000
    """One creator's: half of it, as of the requests."""
    timeout_s: PositiveFloat = 60.0
    default_creator: str = "default"
    cors_origins: tuple[str, ...] = ()
    """Sites whose pages may call this gateway from a browser, as `https://chat.example`; `*` is any. None: none may."""
    open_pages: tuple[Literal["/metrics", "/v1/routes"], ...] = ("/metrics",)
    """Operators' pages that need no key where there are keys."""
    tls_cert: str = ""
    """The certificate, with its chain, in PEM. With it and its key the door speaks HTTPS, and nothing else."""
    tls_key: str = ""
    keys: tuple[Key, ...] = ()


class Requests(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contract of the REQUESTS streams; must agree with `configs/jetstream`."""

    shards: Positive = 16
    timeout_max_s: Mapping[str, PositiveFloat] = msgspec.field(
        default_factory=lambda: {"interactive": 60.0, "batch": 600.0}
    )
    default_max_tokens: Positive | None = None
    """Reply tokens where the client sets none. Unset: the rest of the context, as in vLLM, and all of it is reserved."""
    reply_subjects: tuple[str, ...] = ("_INBOX.>", "replies.>")
    """A worker publishes replies only here: it must not be told to publish to `$JS.API…`."""
    starts_max: Positive = 3
    """Workers that may die with a request before it goes to the DLQ as poison. Chaos runs, which kill at random, set more."""
    salt_scope: Literal["creator", "tenant", "none"] = "creator"
    """Who may share cached prefixes: the requests of a creator, all creators of a tenant, or everybody."""
    first_token_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """An interactive request whose reply has not begun so long after it was queued is refused. 0: it may wait."""
    prefill_begins: bool = True
    """Prefill sends the first token of a plain reply. Else decode does, later, with no longer gap after it than after others."""
    direct_tokens_max: Annotated[int, msgspec.Meta(ge=0)] = 0
    """A prompt with fewer tokens than this to compute goes directly to decode, which computes them. 0: none does."""


class Conversations(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Histories that are kept here, for requests by reference. All workers of a fleet have the same."""

    window_turns: Annotated[int, msgspec.Meta(ge=0)] = 10
    """Exchanges that a prompt holds at least, where there are so many."""
    step_turns: Positive = 5
    """The window moves by so many at once, so that a prompt goes on as the one before began."""


class Model(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is served. `source` is `smollm2` (the packaged SmolLM2-135M-Instruct), a local HF folder, or a hub id."""

    source: str = "smollm2"
    served_name: str = "smollm2-135m-instruct"
    max_model_len: Positive = 4096
    dtype: Literal["bfloat16", "float32", "float16", "auto"] = "bfloat16"
    tool_parser: str = ""
    """vLLM's parser of this model's tool calls, such as `hermes`. Without one, requests that want calls are refused."""
    reasoning_parser: str = ""
    """vLLM's parser of this model's reasoning, such as `qwen3`: replies then say it apart from their content."""


class Engine(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One role's engine. `extra` holds further `AsyncEngineArgs`, passed as they are."""

    slots: Positive = 4
    """Prefill: requests worked on at a time. Decode: sequences (`max_num_seqs`)."""
    kv_cache_bytes: Positive = 512 * 1024 * 1024
    max_num_batched_tokens: Positive = 512
    """Chunked prefill: tokens of one engine step."""
    threads: Positive = 1
    """OMP threads of the engine's worker process, on CPU."""
    extra: Mapping[str, Any] = {}


class Decode(Engine, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decode engine: its table need not say all, so that it has defaults of its own."""

    slots: Positive = 16
    prompt_tokens_beside_replies: Count = 0
    """Prompt tokens of a step while the engine writes replies, whose gaps it makes; 0: as many as fit into it."""


class Both(Decode, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine for both roles. Beside `slots` sequences that decode it prefills `prefill_slots` prompts at a time.

    While it only prefills it works on as many as `prefill.slots` says.
    """

    prefill_slots: Positive = 2


class Placement(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a prefill worker leaves its work to others: from one load on, until it is under the other."""

    spill_load: Ratio = SPILL_LOAD
    spill_back_load: Annotated[float, msgspec.Meta(ge=0, lt=1)] = SPILL_BACK_LOAD

    def __post_init__(self) -> None:
        if self.spill_back_load >= self.spill_load:
            raise ValueError("spill_back_load must be less than spill_load")


class Credits(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decode workers promise. `reserve_ratio` of their blocks is never granted."""

    reserve_ratio: Annotated[float, msgspec.Meta(ge=0, lt=1)] = RESERVE_RATIO


class Classes(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How interactive and batch requests share (see `pipeline.protocol.classes`)."""

    interactive_weight: Positive = WEIGHTS.interactive_weight
    batch_weight: Positive = WEIGHTS.batch_weight
    prefill_room: Annotated[float, msgspec.Meta(ge=0, lt=1)] = WEIGHTS.prefill_room
    decode_room: Annotated[float, msgspec.Meta(ge=0, lt=1)] = WEIGHTS.decode_room

    @property
    def weights(self) -> Weights:
        """As the one who decides reads them."""
        return Weights(**{name: getattr(self, name) for name in Weights.__struct_fields__})


class Balancer(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers for both change their roles as the load asks for it. Pressures are 0…1 (see `pipeline.protocol.balancer`)."""

    enabled: bool = False
    high: Ratio = Rules().high
    low: Ratio = Rules().low
    """A part is the bottleneck while its pressure is `high` and the other's below `low`."""
    patience_s: PositiveFloat = Rules().patience_s
    settle_s: PositiveFloat = Rules().settle_s
    remember_s: PositiveFloat = Rules().remember_s
    prefill_min: Positive = Rules().prefill_min
    decode_min: Positive = Rules().decode_min

    @property
    def rules(self) -> Rules:
        """As the one who decides reads them."""
        return Rules(**{name: getattr(self, name) for name in Rules.__struct_fields__})


class LMCache(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV store of a host, through which prefill hands over to decode."""

    host: str = "127.0.0.1"
    port: Port = 5655
    http_port: Port = 5656
    l1_bytes: Positive = 1024 * 1024 * 1024
    chunk_size: Positive = 32
    """Tokens of a chunk: a multiple of the block size. Only full chunks travel."""
    block_size: Positive = 32
    """Tokens of a vLLM KV block. CPU attention wants multiples of 32."""
    timeout_s: PositiveFloat = 20.0
    shm_name: str = "headrace"
    """Shared memory segment between server and engines; empty: through sockets, 5 to 40 times slower."""
    l2: tuple[Mapping[str, Any], ...] = ()
    """Tiers behind the host's own, each an `--l2-adapter` of `lmcache server`: through one that is shared, hosts find each
    other's KV. A password is no part of it: the server takes LMCACHE_RESP_PASSWORD from its environment."""


class Metrics(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where workers and keepers answer `/metrics` and `/ready`, on the port that `--metrics-port` gives them."""

    host: str = "127.0.0.1"


class Simulated(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The timing of the simulated engine. All rates are of one engine."""

    seed: int = 1
    prefill_tokens_per_s: PositiveFloat = 100_000.0
    prefill_overhead_s: Annotated[float, msgspec.Meta(ge=0)] = 0.002
    step_s: PositiveFloat = 0.004
    """One decode step of an empty batch."""
    step_per_sequence_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0001
    kv_blocks: Positive = 4096
    lmcache_blocks: Positive = 65_536
    lmcache_blocks_per_s: PositiveFloat = 20_000.0
    failure_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of prefills and decodes that fail."""


class Telemetry(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process says of the requests that it has worked on. What a prompt or a reply says is never in it."""

    log_requests: bool = True
    """A log line for each request that has ended."""
    creators: Literal["hashed", "plain", "none"] = "hashed"
    """How logs and `headrace trace` name creators."""
    kept_max: Positive = 1024
    """Ended requests that a process remembers for `headrace trace`: about 2 KB each."""
    otlp_endpoint: str = ""
    """Where spans go, over HTTP: an OpenTelemetry collector's `…/v1/traces`. Empty: none are made."""


class Up(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fleet that `headrace up` starts on this machine."""

    prefill: Count = 1
    decode: Count = 1
    both: Count = 0
    """Workers whose engine can be of either role, and is of both at first."""
    begin_as: tuple[Role, ...] = ()
    """The roles that the first of those begin in instead, in turn: a balancer, or an operator, moves them from there."""
    state_dir: str = "~/.cache/headrace"
    """The prepared model, and per run: logs, the broker's files."""
    start_timeout_s: PositiveFloat = 240.0
    drain_s: PositiveFloat = 20.0
    pin_cores: bool = True
    """Each engine on CPU has as many cores as `threads`, and none of another's, where there are enough for all."""


class Config(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    engine: Literal["vllm", "simulated"] = "vllm"
    nats: Nats = Nats()
    gateway: Gateway = Gateway()
    requests: Requests = Requests()
    conversations: Conversations = Conversations()
    model: Model = Model()
    prefill: Engine = Engine()
    decode: Decode = Decode()
    both: Both = Both()
    placement: Placement = Placement()
    credits: Credits = Credits()
    classes: Classes = Classes()
    balancer: Balancer = Balancer()
    lmcache: LMCache = LMCache()
    metrics: Metrics = Metrics()
    simulated: Simulated = Simulated()
    telemetry: Telemetry = Telemetry()
    up: Up = Up()


def load(path: Path | None, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration of `path` (defaults alone where it is None) under the environment's overlay.

    Raises `OperatorError` naming the file and the place in it.
    """
    tree = _read(path) if path else {}
    where = str(path) if path else "the environment"
    _overlay(tree, os.environ if environ is None else environ)
    try:
        return msgspec.convert(tree, Config, strict=False)
    except msgspec.ValidationError as error:
        raise OperatorError(f"Configuration in {where}: {error}.", "Correct that entry.") from None


def flat(config: Config) -> dict[str, object]:
    """Every entry by its name, as `gateway.port`."""
    return dict(_entries(config))


def _entries(section: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, object]]:
    for field in section.__struct_fields__:
        value = getattr(section, field)
        if isinstance(value, _Section):
            yield from _entries(value, f"{prefix}{field}.")
        else:
            yield prefix + field, value


def with_live(config: Config, live: Mapping[str, Number]) -> Config:
    """`config` under live settings, which are entries of its tables by name."""
    tables: dict[str, dict[str, Number]] = {}
    for key, value in live.items():
        table, _, entry = key.partition(".")
        tables.setdefault(table, {})[entry] = value
    # Each table at once: what must agree in it does so only when all of it is there.
    changed = {table: msgspec.structs.replace(getattr(config, table), **entries) for table, entries in tables.items()}
    return msgspec.structs.replace(config, **changed)


def sources(path: Path | None, environ: Mapping[str, str] | None = None) -> dict[str, Source]:
    """Where each entry comes from that is not a default. Raises `OperatorError` as `load`."""
    file = _read(path) if path else {}
    env: dict[str, Any] = {}
    _overlay(env, os.environ if environ is None else environ)
    known = flat(Config())
    found: dict[str, Source] = {key: "file" for key in known if _names(file, key)}
    return found | {key: "environment" for key in known if _names(env, key)}


def _names(tree: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise OperatorError(
            f"Cannot read configuration {path}: {error.strerror}.", "Give an existing file with --config."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OperatorError(f"Configuration {path} is not TOML: {error}.", "Correct it there.") from None


def _overlay(tree: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Write `HEADRACE__A__B=value` into `tree["a"]["b"]`. A later conversion turns strings into what the field wants."""
    for name, value in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX):
            continue
        *tables, leaf = name[len(ENV_PREFIX) :].lower().split("__")
        at = tree
        for table in tables:
            at = at.setdefault(table, {})
            if not isinstance(at, dict):
                raise OperatorError(
                    f"Environment variable {name} names a table where the file has a value.", "Unset it."
                )
        at[leaf] = value
