"""What is counted, remembered and logged of each request, once it has ended at this gateway."""

import itertools
from collections.abc import Sequence

import msgspec

from gateway.intake import Headers, Order, class_of
from gateway.replies import Reply
from gateway.together import AnyReply
from pipeline import outside
from pipeline.bus.connection import Bus
from pipeline.bus.recorder import Recorder
from pipeline.config import Telemetry
from pipeline.errors import ErrorBody, ReplyError
from pipeline.protocol import stages
from pipeline.protocol.messages import Done
from pipeline.protocol.records import Facts, Record, creator_as, is_called
from pipeline.telemetry import logs, metrics
from pipeline.telemetry.spans import Passed, Span, spans_of


class Open(msgspec.Struct):
    """One part of a request that has been let in. `request_id` is what the client calls the whole, or the whole's own id."""

    order: Order
    reply: Reply
    request_id: str
    span: Span


class Account:
    """One gateway's books: what is counted of each HTTP request, and a record of each of its parts."""

    def __init__(self, bus: Bus, settings: Telemetry, process: str) -> None:
        self.spans = spans_of(settings, process, "gateway")
        self.recorder = Recorder(bus, settings, self._working)
        self._process = process
        self._open: dict[str, Open] = {}

    async def listen(self) -> None:
        """Answer who asks what became of a request, and how they fare."""
        await self.recorder.listen()
        await self.recorder.tell_recent(self._process, self._under_way)

    def begin(self, order: Order, parts: Sequence[Reply], request_id: str, now_s: float) -> None:
        """It has been let in. Its stored messages get the trace context of our span, which tells of the first part."""
        span = self.spans.begin(order.trace, now_s - parts[0].at.asked_s)
        order.trace = span.context
        if span.trace_id:
            logs.bind(trace_id=span.trace_id)  # of this request's task
        self._open[parts[0].request] = Open(order, parts[0], request_id, span)
        for part in parts[1:]:
            self._open[part.request] = Open(order, part, request_id, Passed(order.trace))
        metrics.IN_FLIGHT.inc()

    def ended(self, order: Order, reply: AnyReply, now_s: float) -> None:
        """It is over: its client has all that it will get. The parts end as the whole does."""
        parts = [self._open.pop(part.id) for part in order.parts]
        metrics.IN_FLIGHT.dec()
        end = reply.end if reply.delivered else None
        word = outcome(end)
        _count(word, order.klass, now_s - parts[0].reply.at.asked_s, [part.reply.at for part in parts])
        if isinstance(end, ErrorBody):
            count_refusal(end.code)
        if isinstance(end, Done):
            for done in reply.dones:
                _count_tokens(done)
        for part in parts:
            self.recorder.ended(self._record(part, word, now_s), part.span, stages.AT_GATEWAY, loud=True)

    def refused(self, error: ReplyError | None, headers: Headers, took_s: float) -> None:
        """It was not let in: for `error`, or because its client left before it was read."""
        if error is not None:
            count_refusal(error.code)
        _count("cancelled" if error is None else outcome(error.body()), _class_of(headers), took_s)

    def _working(self, name: str) -> list[Record]:
        now_s, opened = outside.monotonic_s(), self._open.values()
        return [self._record(one, "", now_s) for one in opened if is_called(name, one.reply.request, one.request_id)]

    def _under_way(self, named: int) -> tuple[int, list[Record]]:
        """How many, and the oldest of them: they were let in in this order."""
        now_s = outside.monotonic_s()
        oldest = itertools.islice(self._open.values(), named)
        return len(self._open), [self._record(one, "", now_s) for one in oldest]

    def _record(self, opened: Open, word: str, now_s: float) -> Record:
        order, reply = opened.order, opened.reply
        end = reply.end
        took_s = now_s - reply.at.asked_s
        done = end if isinstance(end, Done) else None
        times = reply.at.stages(now_s, done.claim, done.stages) if done else reply.at.stages(now_s)
        return Record(
            process=self._process,
            role="gateway",
            request=reply.request,
            outcome=word,
            began_unix_s=outside.unix_s() - took_s,
            took_s=took_s,
            stages=times,
            request_id="" if opened.request_id == reply.request else opened.request_id,
            trace_id=opened.span.trace_id,
            creator=creator_as(self.recorder.settings.creators, order.creator),
            facts=_facts(order, reply, end),
        )


def outcome(end: Done | ErrorBody | None) -> str:
    """The word under which a request is counted. No end: its client had left."""
    if end is None:
        return "cancelled"
    if isinstance(end, Done):
        return "whole"
    if end.code == "deadline":
        return "expired"
    if end.status in (429, 503):
        return "rejected"
    return "invalid" if end.status < 500 else "failed"


def count_refusal(code: str) -> None:
    """Why: only of what an operator's bounds and keys decide."""
    if code in metrics.LABELS["headrace_refusals"]["reason"]:
        metrics.REFUSALS.labels(reason=code).inc()


def _class_of(headers: Headers) -> str:
    """What is no class is counted as interactive: labels are bounded."""
    try:
        return class_of(headers)
    except ReplyError:
        return "interactive"


def _count(word: str, klass: str, took_s: float, parts: Sequence[stages.AtGateway] = ()) -> None:
    metrics.REQUESTS.labels(outcome=word, klass=klass).inc()
    metrics.E2E_SECONDS.labels(outcome=word, klass=klass).observe(took_s)
    first = min((at.first_s - at.asked_s for at in parts if at.first_s is not None), default=None)
    if first is not None:
        metrics.TTFT_SECONDS.labels(outcome=word, klass=klass).observe(first)
    for attempts in (at.attempts for at in parts if at.attempts):
        metrics.ATTEMPTS.labels(attempts=str(attempts) if attempts <= metrics.ATTEMPTS_TOLD else "more").inc()


def _count_tokens(end: Done) -> None:
    metrics.PROMPT_TOKENS.inc(end.usage.prompt_tokens)
    metrics.CACHED_TOKENS.inc(end.usage.cached_tokens)
    metrics.DECODE_CACHED_TOKENS.inc(end.usage.decode_cached_tokens)
    metrics.OUTPUT_TOKENS.inc(end.usage.completion_tokens)


def _facts(order: Order, reply: Reply, end: Done | ErrorBody | None) -> Facts:
    facts: Facts = {"klass": order.klass, "attempts": reply.at.attempts}
    if reply.at.first_s is not None:
        facts |= {"ttft_ms": round(1e3 * (reply.at.first_s - reply.at.asked_s), 2), "first_of": reply.at.first_of}
    if isinstance(end, ErrorBody):
        return facts | {"code": end.code, "status": end.status}
    if end is not None:
        usage = end.usage
        facts |= {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
        facts |= {"completion_tokens": usage.completion_tokens, "prefill": usage.prefill, "decode": usage.decode}
    return facts
