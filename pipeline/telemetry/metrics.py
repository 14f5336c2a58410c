"""Every metric of the project, declared once. Elsewhere they are only moved.

Names are `headrace_<what>_<unit>`; a counter ends in `_total`, a time in `_seconds`, a share in `_ratio`. All lie in `REGISTRY`,
which is ours alone: vLLM and LMCache fill prometheus_client's default one when they share the process. Both are served.

Labels are bounded, and `LABELS` is their whole vocabulary: a request, a creator or a conversation is never a label.
"""

from collections.abc import Iterable
from threading import Thread
from typing import TYPE_CHECKING, Final
from wsgiref.simple_server import WSGIServer

import prometheus_client
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    generate_latest,
    make_wsgi_app,
    start_http_server,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from pipeline.protocol.stages import STAGES
from pipeline.protocol.subjects import CLASSES

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

REGISTRY: Final = CollectorRegistry()

_OUTCOMES: Final = ("whole", "invalid", "rejected", "failed", "expired", "cancelled")

_ENDINGS: Final = (
    "whole",
    "failed",
    "malformed",
    "expired",
    "late",
    "cancelled",
    "gone",
    "fenced",
    "waiting",
    "unheard",
    "unanswered",
    "let_go",
)
"""Of `pipeline.protocol.outcomes`: how a request ends at a worker."""

LABELS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "headrace_pressure": {"part": ("prefill", "decode")},
    "headrace_turns": {"role": ("prefill", "decode", "both")},
    "headrace_requests": {"outcome": _OUTCOMES, "klass": CLASSES},
    "headrace_ttft_seconds": {"outcome": _OUTCOMES, "klass": CLASSES},
    "headrace_e2e_seconds": {"outcome": _OUTCOMES, "klass": CLASSES},
    "headrace_itl_seconds": {"klass": CLASSES},
    "headrace_stage_seconds": {"stage": tuple(STAGES)},
    "headrace_attempts": {"attempts": ("1", "2", "3", "more")},
    "headrace_queue_requests": {"klass": CLASSES},
    "headrace_queue_bytes": {"klass": CLASSES},
    "headrace_queue_tokens": {"klass": CLASSES},
    "headrace_queue_oldest_seconds": {"klass": CLASSES},
    "headrace_queue_waiting": {"klass": CLASSES},
    "headrace_shards": {"klass": CLASSES, "state": ("pulled", "quiet", "starved")},
    "headrace_grants_outstanding": {"state": ("granted", "consumed")},
    "headrace_refusals": {
        "reason": (
            "overloaded",
            "no_workers",
            "broker_unavailable",
            "creator_queue_full",
            "key_limit_exceeded",
            "rate_limit_exceeded",
            "invalid_api_key",
            "permission_denied",
        ),
    },
    "headrace_prefills": {"outcome": ("handed_off", *_ENDINGS)},
    "headrace_slots": {"state": ("busy", "free")},
    "headrace_prefill_tokens": {"source": ("hbm", "lmcache", "none")},
    "headrace_served": {"by": ("owner", "spill")},
    "headrace_routes": {"reason": ("hot", "moved")},
    "headrace_route_changes": {"kind": ("hot", "moved", "dropped")},
    "headrace_deliveries": {"kind": ("first", "again", "surplus")},
    "headrace_dead_letters": {"reason": ("malformed", "poison", "exhausted", "expired", "terminated")},
    "headrace_decodes": {"outcome": _ENDINGS},
    "headrace_blocks": {"state": ("total", "free", "granted", "consumed", "reserve")},
    "headrace_grants": {"state": ("granted", "released", "returned", "expired", "refused")},
}
"""Metric, label, values. An operator may add classes of requests, which then add values to `klass`."""

_REPLY_SECONDS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60,
)  # fmt: skip
"""Close together around 200 ms, the bound of an interactive first token; up to a request's longest life."""

_STEP_SECONDS: Final = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 15, 60)
"""Close together where one engine step lies."""

# --------------------------------------------------------------------------------------------------------------
# Gateway

REQUESTS: Final = Counter(
    "headrace_requests", "Requests that have ended, by how.", ("outcome", "klass"), registry=REGISTRY
)
REFUSALS: Final = Counter(
    "headrace_refusals",
    "Requests that were refused for no fault in them: for want of room, of a turn, or of a right.",
    ("reason",),
    registry=REGISTRY,
)
TTFT_SECONDS: Final = Histogram(
    "headrace_ttft_seconds",
    "From a request's arrival at the gateway to its first text; counted when it has ended, by how.",
    ("outcome", "klass"),
    buckets=_REPLY_SECONDS,
    registry=REGISTRY,
)
E2E_SECONDS: Final = Histogram(
    "headrace_e2e_seconds",
    "From a request's arrival at the gateway to its end, whatever that was.",
    ("outcome", "klass"),
    buckets=_REPLY_SECONDS,
    registry=REGISTRY,
)
ITL_SECONDS: Final = Histogram(
    "headrace_itl_seconds",
    "Between two token frames of one reply, at the gateway.",
    ("klass",),
    buckets=_STEP_SECONDS,
    registry=REGISTRY,
)
ATTEMPTS: Final = Counter(
    "headrace_attempts",
    "Requests that have ended, by how many deliveries of them were claimed.",
    ("attempts",),
    registry=REGISTRY,
)
ATTEMPTS_TOLD: Final = 3
"""One that needed more is counted as `more`."""

PROMPT_TOKENS: Final = Counter("headrace_prompt_tokens", "Prompt tokens of whole replies.", registry=REGISTRY)
CACHED_TOKENS: Final = Counter(
    "headrace_cached_tokens", "Prompt tokens that prefill found in HBM or LMCache.", registry=REGISTRY
)
DECODE_CACHED_TOKENS: Final = Counter(
    "headrace_decode_cached_tokens", "Prompt tokens that decode did not compute again.", registry=REGISTRY
)
OUTPUT_TOKENS: Final = Counter("headrace_output_tokens", "Tokens of whole replies.", registry=REGISTRY)
IN_FLIGHT: Final = Gauge("headrace_in_flight", "Requests the gateway has accepted and not ended.", registry=REGISTRY)
QUEUED_TOKENS: Final = Gauge(
    "headrace_queued_tokens", "Prompt tokens of requests whose reply has not begun, as estimated.", registry=REGISTRY
)
DUPLICATE_TOKENS: Final = Counter(
    "headrace_duplicate_tokens", "Tokens dropped because the receiver had them already.", registry=REGISTRY
)

# --------------------------------------------------------------------------------------------------------------
# Prefill worker

ROLE_CHANGE_SECONDS: Final = Histogram(
    "headrace_role_change_seconds",
    "From a change of a worker's role until nothing of the former one is under way.",
    buckets=(0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 60),
    registry=REGISTRY,
)
PREFILLS: Final = Counter(
    "headrace_prefills", "Requests a prefill worker is done with, by how.", ("outcome",), registry=REGISTRY
)
PREFILL_PROMPT_TOKENS: Final = Counter(
    "headrace_prefill_prompt_tokens", "Prompt tokens given to the prefill engine.", registry=REGISTRY
)
PREFILL_CACHED_TOKENS: Final = Counter(
    "headrace_prefill_cached_tokens", "Of them, found in HBM or LMCache and not computed.", registry=REGISTRY
)
PREFILL_TOKENS: Final = Counter(
    "headrace_prefill_tokens",
    "The same prompt tokens by where their KV came from: the engine's own cache, by its events; LMCache; or it was computed.",
    ("source",),
    registry=REGISTRY,
)
PREFILLS_SKIPPED: Final = Counter(
    "headrace_prefills_skipped",
    "Requests that went directly to decode, for they had little to compute.",
    registry=REGISTRY,
)
WARM_CREATORS: Final = Gauge(
    "headrace_warm_creators", "Creators whose shared prefix is in this engine's own cache.", registry=REGISTRY
)
CACHE_BLOCKS: Final = Gauge(
    "headrace_cache_blocks", "Blocks that can be found in this engine's own cache, by its events.", registry=REGISTRY
)
CACHE_EVENT_GAPS: Final = Counter(
    "headrace_cache_event_gaps", "Times that cache events were missing, and had to be repeated.", registry=REGISTRY
)
CACHE_EVENT_RESYNCS: Final = Counter(
    "headrace_cache_event_resyncs", "Times that all was forgotten that cache events had told.", registry=REGISTRY
)
PREFILL_GENERATED_TOKENS: Final = Counter(
    "headrace_prefill_generated_tokens",
    "Tokens made by prefill: one a prompt, or a piece of it.",
    registry=REGISTRY,
)
PREFILL_BEGUN: Final = Counter("headrace_prefill_begun", "Replies whose first token prefill sent.", registry=REGISTRY)
PREFILL_SECONDS: Final = Histogram(
    "headrace_prefill_seconds",
    "One prompt in the prefill engine, until its KV is stored.",
    buckets=_REPLY_SECONDS,
    registry=REGISTRY,
)
CREDIT_WAIT_SECONDS: Final = Histogram(
    "headrace_credit_wait_seconds",
    "From the first ask for blocks to the grant.",
    buckets=_REPLY_SECONDS,
    registry=REGISTRY,
)
HANDOFF_SECONDS: Final = Histogram(
    "headrace_handoff_seconds",
    "From sending a hand-off to its acceptance.",
    buckets=_REPLY_SECONDS,
    registry=REGISTRY,
)
PREFILL_QUEUED_TOKENS: Final = Gauge(
    "headrace_prefill_queued_tokens", "Prompt tokens of the requests in this prefill worker's slots.", registry=REGISTRY
)
SLOTS: Final = Gauge("headrace_slots", "Room for requests in this prefill worker.", ("state",), registry=REGISTRY)
PULLS_OUTSTANDING: Final = Gauge(
    "headrace_pulls_outstanding", "Pulls that wait at the broker for a message.", registry=REGISTRY
)
PULLS_ABANDONED: Final = Counter(
    "headrace_pulls_abandoned",
    "Slots whose pull was given up: it is over, and its end was not heard.",
    registry=REGISTRY,
)
DELIVERIES: Final = Counter(
    "headrace_deliveries",
    "Messages delivered: first time, again, or beyond the free slots.",
    ("kind",),
    registry=REGISTRY,
)
WARM_UPS: Final = Counter(
    "headrace_warm_ups", "Prefixes loaded ahead of the requests that will need them.", registry=REGISTRY
)
DEAD_LETTERS: Final = Counter(
    "headrace_dead_letters", "Requests put into the DLQ, by reason.", ("reason",), registry=REGISTRY
)

SERVED: Final = Counter(
    "headrace_served",
    "Requests handed over by the owner of their shard, or by another in its place.",
    ("by",),
    registry=REGISTRY,
)

# --------------------------------------------------------------------------------------------------------------
# Decode worker

DECODES: Final = Counter(
    "headrace_decodes", "Requests a decode worker is done with, by how.", ("outcome",), registry=REGISTRY
)
DECODE_LOADED_TOKENS: Final = Counter(
    "headrace_decode_loaded_tokens", "Prompt tokens that decode took from HBM or LMCache.", registry=REGISTRY
)
DECODE_RECOMPUTED_TOKENS: Final = Counter(
    "headrace_decode_recomputed_tokens", "Prompt tokens that decode had to compute itself.", registry=REGISTRY
)
DECODE_TOKENS: Final = Counter("headrace_decode_tokens", "Tokens generated by the decode engine.", registry=REGISTRY)
FIRST_STEP_SECONDS: Final = Histogram(
    "headrace_first_step_seconds",
    "From a hand-off's acceptance to the engine's first token.",
    buckets=_REPLY_SECONDS,
    registry=REGISTRY,
)
BLOCKS: Final = Gauge("headrace_blocks", "KV blocks of this decode worker's ledger.", ("state",), registry=REGISTRY)
GRANTS: Final = Counter(
    "headrace_grants",
    "Grants that have entered a state; granted = released + returned + expired + outstanding.",
    ("state",),
    registry=REGISTRY,
)
GRANTS_OUTSTANDING: Final = Gauge(
    "headrace_grants_outstanding",
    "Grants that have not ended: promised, and in use by a request.",
    ("state",),
    registry=REGISTRY,
)
ASKS_WAITING: Final = Gauge("headrace_asks_waiting", "Asks for blocks that wait for room.", registry=REGISTRY)
FRAMES: Final = Counter("headrace_frames", "Frames of replies that were sent.", registry=REGISTRY)
FRAME_MESSAGES: Final = Counter(
    "headrace_frame_messages", "Messages that carried them: frames of one step travel together.", registry=REGISTRY
)
FENCED: Final = Counter(
    "headrace_fenced", "Claims that a receiver has answered with fenced: another holds the request.", registry=REGISTRY
)
ENGINE_PREEMPTIONS: Final = Gauge(
    "headrace_engine_preemptions", "Sequences the engine has preempted since it started.", registry=REGISTRY
)
ENGINE_KV_USAGE_RATIO: Final = Gauge(
    "headrace_engine_kv_usage_ratio", "Share of KV blocks in use, as the engine says.", registry=REGISTRY
)
LEDGER_DISAGREEMENTS: Final = Counter(
    "headrace_ledger_disagreements", "Times the engine held more blocks than the ledger had granted.", registry=REGISTRY
)

# --------------------------------------------------------------------------------------------------------------
# Gateway: routes

ROUTES: Final = Gauge(
    "headrace_routes", "Creators whose requests are spread or moved, by reason.", ("reason",), registry=REGISTRY
)
PRESSURE: Final = Gauge(
    "headrace_pressure", "What the balancer measures of each part, 0 to 1.", ("part",), registry=REGISTRY
)
TURNS: Final = Counter(
    "headrace_turns", "Changes of roles that the balancer has ordered.", ("role",), registry=REGISTRY
)
ROUTE_CHANGES: Final = Counter(
    "headrace_route_changes", "Exceptions to the hash that this gateway has written.", ("kind",), registry=REGISTRY
)

# --------------------------------------------------------------------------------------------------------------
# Keeper: the queues, at each scan

QUEUE_REQUESTS: Final = Gauge(
    "headrace_queue_requests", "Requests in a class's stream: waiting, or in work.", ("klass",), registry=REGISTRY
)
QUEUE_BYTES: Final = Gauge("headrace_queue_bytes", "Their size in the stream.", ("klass",), registry=REGISTRY)
QUEUE_TOKENS: Final = Gauge(
    "headrace_queue_tokens",
    "Their prompt tokens, estimated at 4 bytes each: nobody has tokenised what waits.",
    ("klass",),
    registry=REGISTRY,
)
QUEUE_OLDEST_SECONDS: Final = Gauge(
    "headrace_queue_oldest_seconds", "Age of the oldest of them; 0 where there is none.", ("klass",), registry=REGISTRY
)
QUEUE_WAITING: Final = Gauge(
    "headrace_queue_waiting", "Those that no worker holds: the consumers' lag.", ("klass",), registry=REGISTRY
)
SHARDS: Final = Gauge(
    "headrace_shards",
    "Shards of a class: a worker's pull stands there; none does, and nothing waits; none does, and requests wait.",
    ("klass", "state"),
    registry=REGISTRY,
)
DEAD_LETTERS_KEPT: Final = Gauge("headrace_dead_letters_kept", "Requests in the DLQ.", registry=REGISTRY)

# --------------------------------------------------------------------------------------------------------------
# Every process

STAGE_SECONDS: Final = Histogram(
    "headrace_stage_seconds",
    "Where the time of whole requests went: each stage at the process that has it, of requests that had it.",
    ("stage",),
    buckets=_REPLY_SECONDS,
    registry=REGISTRY,
)
PUBLISH_SECONDS: Final = Histogram(
    "headrace_publish_seconds",
    "From the first attempt to publish to a stream to its PubAck.",
    buckets=_REPLY_SECONDS,
    registry=REGISTRY,
)

ACCUSATIONS: Final = Counter(
    "headrace_accusations", "Messages given back in the name of a worker taken for dead.", registry=REGISTRY
)
STRAYS: Final = Counter(
    "headrace_strays", "Messages given back that were delivered and that nobody has claimed.", registry=REGISTRY
)
RECONNECTS: Final = Counter("headrace_reconnects", "Times the connection to NATS came back.", registry=REGISTRY)
HANDLER_ERRORS: Final = Counter(
    "headrace_handler_errors", "Exceptions caught in handlers of NATS messages.", registry=REGISTRY
)
SERVING: Final = Gauge(
    "headrace_serving",
    "Whether this process takes work: not while it starts, and not once it drains.",
    registry=REGISTRY,
)
LMCACHE_SILENT_SECONDS: Final = Gauge(
    "headrace_lmcache_silent_seconds",
    "For how long the LMCache server has not answered this worker; 0 where it does, and where there is none.",
    registry=REGISTRY,
)
LOOP_LAG_SECONDS: Final = Gauge(
    "headrace_loop_lag_seconds", "How late the event loop last was for its own timer.", registry=REGISTRY
)

# --------------------------------------------------------------------------------------------------------------
# The way out


class _Everything(Collector):
    """Our metrics, and what others in this process count: Python's, vLLM's."""

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        yield from REGISTRY.collect()
        yield from prometheus_client.REGISTRY.collect()


_EVERYTHING: Final = CollectorRegistry(auto_describe=False)
_EVERYTHING.register(_Everything())


def render() -> tuple[bytes, str]:
    """All metrics in Prometheus' text format, and its content type."""
    return generate_latest(_EVERYTHING), CONTENT_TYPE_LATEST


class Endpoint:
    """`/metrics` and `/ready` over HTTP, in a thread of its own: it answers while the event loop is busy."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self.port: Final = server.server_port
        self._server = server
        self._thread = thread

    def close(self) -> None:
        """Stop answering, and wait for the thread: up to 0.5 s."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(port: int, host: str = "127.0.0.1") -> Endpoint:
    """Answer on `port`; 0 takes a free one, which `Endpoint.port` names. Raises `OSError` where it is taken."""
    server, thread = start_http_server(port, host, registry=_EVERYTHING)
    server.set_app(_with_ready(make_wsgi_app(_EVERYTHING)))
    return Endpoint(server, thread)


def _with_ready(page: "WSGIApplication") -> "WSGIApplication":
    """`/ready` says what `SERVING` does: 200, or 503. Everything else is prometheus_client's."""

    def answer(environ: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/ready":
            return page(environ, start)
        serving = bool(REGISTRY.get_sample_value("headrace_serving"))
        start("200 OK" if serving else "503 Service Unavailable", [("Content-Type", "application/json")])
        return [b'{"ready":true}' if serving else b'{"ready":false}']

    return answer
