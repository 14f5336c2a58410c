"""What it costs to see a request: bytes on the wire, and microseconds in each process. `python -m tests.benchmarks.telemetry`

The parts are measured alone, the best of five rounds, as they are called for a request that ends whole.
"""

import os
import time
import timeit
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec

from pipeline.bus.connection import Bus
from pipeline.bus.recorder import Recorder
from pipeline.cli.tables import table
from pipeline.config import Telemetry
from pipeline.protocol.messages import Done, Handoff, Usage, encode, frames_decoder
from pipeline.protocol.recent import LOOKED_AT_MAX, NAMED_MAX, WantRecent, recent
from pipeline.protocol.records import Record, creator_as
from pipeline.protocol.request import Event
from pipeline.protocol.stages import (
    AT_GATEWAY,
    AT_WORKERS,
    AtDecode,
    AtGateway,
    AtPrefill,
    Decoding,
    Prefilling,
    Stages,
    at_decode,
    at_prefill,
    seconds,
)
from pipeline.telemetry import logs
from pipeline.telemetry.otel import OtelSpans
from pipeline.telemetry.spans import NoSpans

ROUNDS: Final = 5
CALLS: Final = 5000
SUMS: Final = 200
SPANS: Final = 60
"""Of four to eight spans each: more than the exporter's queue holds would be dropped."""

STAGES: Final = Stages(
    AtPrefill(120, 900, 0, 650, 3120, 4000, 150, 0, 0, 40), AtDecode(90, 700, 1100, 8000, 7000, 101_000, 400)
)

TRACE: Final = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}

DONE: Final = Done(
    1,
    "a" * 32,
    f"decode-1-{'b' * 16}",
    200,
    b"\1\2\3\4" * 200,
    "Four letters a token. " * 40,
    "stop",
    Usage(
        prompt_tokens=2210,
        completion_tokens=200,
        cached_tokens=1792,
        decode_cached_tokens=2208,
        prefill_generated_tokens=1,
        prefill="prefill-1",
        decode="decode-1",
    ),
)

HANDOFF: Final = Handoff(
    request="a" * 32,
    klass="interactive",
    ask=f"prefill-1-{'b' * 16}.1",
    epoch="1790000000000-abcdef01",
    claim=f"prefill-1-{'b' * 16}",
    ack="$JS.ACK.REQUESTS_interactive.s11.1.1000.1000.1790000000000000000.0",
    reply_to="_INBOX.gateway-abcdef01.abcdef01.2.r",
    claim_at="_INBOX.gateway-abcdef01.abcdef01.2.c",
    receiver="gateway-abcdef01/1790000000000-abcdef01",
    encoding="msgpack",
    deadline_s=1_790_000_000.0,
    ids=b"\1\2\3\4" * 2210,
    salt="0" * 32,
    max_tokens=256,
    chat={"temperature": 0, "max_tokens": 256},
    cached_tokens=1792,
    prefill_generated_tokens=1,
    prefill="prefill-1",
)


def us(call: Callable[[], object], calls: int = CALLS) -> float:
    """Microseconds of one call: of this thread's own CPU time, as others may use the cores."""
    return round(min(timeit.repeat(call, timer=time.thread_time, number=calls, repeat=ROUNDS)) / calls * 1e6, 1)


def prefill() -> AtPrefill:
    """The stages at prefill, event by event."""
    times = Prefilling(began_s=1.0, asked_s=1.001, answered_s=1.002)
    for event in (Event.DELIVERED, Event.GO, Event.RENDERED, Event.STORED, Event.GRANTED):
        times.happened(event, 1.5)
    return at_prefill(times, 1.6)


def decode() -> AtDecode:
    """Those at decode."""
    times = Decoding(began_s=1.0, asked_s=1.001, answered_s=1.002, first_s=1.2)
    for event in (Event.TAKEN, Event.GO, Event.GENERATED):
        times.happened(event, 1.3)
    return at_decode(times, 1.4)


def gateway() -> dict[str, float]:
    """All of them, put together."""
    at = AtGateway(0.0)
    at.sent_s, at.stored_s = 0.001, 0.002
    at.claimed("p", None, 0.003)
    at.claimed("d", "p", 0.02)
    at.ended_s = 0.15
    return at.stages(0.151, "d", STAGES)


def record(stages: dict[str, float]) -> Record:
    """What is kept of it."""
    return Record(
        process="gateway-abcdef01",
        role="gateway",
        request="a" * 32,
        outcome="whole",
        began_unix_s=1_790_000_000.0,
        took_s=0.151,
        stages=stages,
        request_id="mine",
        creator=creator_as("hashed", "ada"),
        facts={"klass": "interactive", "attempts": 1, "ttft_ms": 20.1, "prompt_tokens": 2210, "completion_tokens": 200},
    )


def measured() -> list[tuple[str, float, str]]:
    """Every line: what, how much, in which unit."""
    told = msgspec.structs.replace(DONE, stages=STAGES)
    handed = msgspec.structs.replace(HANDOFF, stages=STAGES.prefill)
    traced = msgspec.structs.replace(handed, trace=TRACE)
    plain, full = encode([DONE]), encode([told])
    loud, quiet = (Recorder(cast("Bus", None), Telemetry(log_requests=lines), lambda _: []) for lines in (True, False))
    passed = NoSpans().begin({})
    of_late = [msgspec.structs.replace(record(gateway()), took_s=0.001 * number) for number in range(LOOKED_AT_MAX)]
    at_gateway, at_workers = record(gateway()), record(seconds(STAGES.prefill))
    return [
        ("done frame: stages", len(full) - len(plain), "bytes"),
        ("hand-off: stages", len(encode(handed)) - len(encode(HANDOFF)), "bytes"),
        ("hand-off: trace context", len(encode(traced)) - len(encode(handed)), "bytes"),
        ("done frame: written and read, without stages", us(lambda: frames_decoder.decode(encode([DONE]))), "µs"),
        ("done frame: written and read, with them", us(lambda: frames_decoder.decode(encode([told]))), "µs"),
        ("prefill: stages", us(prefill), "µs"),
        ("prefill: record, kept and counted", us(lambda: loud.ended(at_workers, passed, AT_WORKERS, loud=False)), "µs"),
        ("decode: stages", us(decode), "µs"),
        ("gateway: stages put together", us(gateway), "µs"),
        ("gateway: record, kept and counted", us(lambda: quiet.ended(at_gateway, passed, AT_GATEWAY, loud=True)), "µs"),
        ("gateway: the same with its line", us(lambda: loud.ended(at_gateway, passed, AT_GATEWAY, loud=True)), "µs"),
        ("gateway: headrace top asked, of the last 256", us(lambda: _summed_up(of_late), SUMS), "µs"),
        ("gateway: its answer to headrace top", len(_summed_up(of_late)), "bytes"),
        ("OpenTelemetry: one process's spans", _spans(at_gateway), "µs"),
    ]


def _summed_up(of_late: list[Record]) -> bytes:
    """What a gateway answers, where the answer names as many requests as it may."""
    asked, now_s = WantRecent(named=NAMED_MAX), of_late[0].began_unix_s + 1.0
    return encode(recent("gateway-abcdef01", asked, of_late, NAMED_MAX, of_late[:NAMED_MAX], now_s))


def _spans(ended: Record) -> float:
    """Made and queued; where they are sent nobody listens, which costs the request nothing."""
    made = OtelSpans("http://127.0.0.1:1/v1/traces", "gateway", "gateway")

    def one() -> Any:
        made.begin(TRACE).end(ended, AT_GATEWAY)

    return us(one, SPANS)


if __name__ == "__main__":
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        logs.configure("gateway", nowhere, {})
        print(table(("WHAT", "", ""), measured()))
    os._exit(0)  # without waiting for spans that cannot be sent
