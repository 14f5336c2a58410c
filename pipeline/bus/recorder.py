"""What a process says of each request that has ended there: a record that is kept, a line in the log, a span.

`headrace trace` asks for records on `control.trace.<name>`. A process that knows nothing of the name does not answer.
`headrace top` asks gateways on `control.recent` for a summary of the last ones.
"""

from collections.abc import Callable, Collection
from functools import cache
from typing import Final

import msgspec
from prometheus_client import Histogram

from pipeline import outside
from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError
from pipeline.config import Telemetry
from pipeline.protocol import subjects
from pipeline.protocol.messages import encode
from pipeline.protocol.recent import LOOKED_AT_MAX, NAMED_MAX, recent, want_recent_decoder
from pipeline.protocol.records import ANSWERED_MAX, Record, Ring
from pipeline.telemetry import logs, metrics
from pipeline.telemetry.spans import Span

_SERVED: Final = ("whole", "handed_off")

log: Final = logs.get("request")


class Recorder:
    """One process's. `working` says what is under way now under a name."""

    def __init__(self, bus: Bus, settings: Telemetry, working: Callable[[str], list[Record]]) -> None:
        self.settings: Final = settings
        self._bus = bus
        self._working = working
        self._ring = Ring(settings.kept_max)
        self._began_s = outside.monotonic_s()

    async def listen(self) -> None:
        """Answer from now on."""
        await self._bus.subscribe(subjects.trace_any(), self._asked)

    async def tell_recent(self, process: str, under_way: Callable[[int], tuple[int, list[Record]]]) -> None:
        """Say as well how requests fare, as a gateway. `under_way` says how many there are, and the oldest, up to so many."""

        most = min(LOOKED_AT_MAX, self.settings.kept_max)

        def asked(message: Message) -> None:
            try:
                want = want_recent_decoder.decode(message.data)
            except msgspec.MsgspecError as error:
                log.warning("question_unreadable", subject=message.subject, error=str(error))
                return
            count, oldest = under_way(NAMED_MAX)
            ended = self._ring.last(most)
            lived_s = outside.monotonic_s() - self._began_s
            self._answer(message, encode(recent(process, want, ended, count, oldest, outside.unix_s(), lived_s, most)))

        await self._bus.subscribe(subjects.recent(), asked)

    def ended(self, record: Record, span: Span, mine: Collection[str], *, loud: bool) -> None:
        """A request has. `mine` are the stages that are counted here. `loud`: where nobody else writes its line, or it failed."""
        self._ring.add(record)
        span.end(record, mine)
        if record.outcome in _SERVED:
            for stage, took_s in record.stages.items():
                if took_s > 0 and stage in mine:
                    _seconds(stage).observe(took_s)
        if loud and self.settings.log_requests:
            (log.warning if record.outcome == "failed" else log.info)("request", **fields(record))

    def _asked(self, message: Message) -> None:
        name = message.data.decode("utf-8", "replace") or message.subject.rpartition(".")[2]
        known = [*self._ring.find(name), *self._working(name)]
        if known:
            self._answer(message, encode(known[-ANSWERED_MAX:]))

    def _answer(self, message: Message, said: bytes) -> None:
        if not message.reply:
            return
        try:
            self._bus.post(message.reply, said)
        except BusError:
            log.warning("not_said", subject=message.reply)


@cache
def _seconds(stage: str) -> Histogram:
    """Made at its first use: no process has them all."""
    return metrics.STAGE_SECONDS.labels(stage=stage)


def fields(record: Record) -> dict[str, object]:
    """A record as a line of the log: what is empty is left out, times are milliseconds. The process is in every line already."""
    said = {
        "request": record.request,
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "outcome": record.outcome,
        "creator": record.creator,
    }
    return {
        **{name: value for name, value in said.items() if value},
        **record.facts,
        "took_ms": round(1000 * record.took_s, 2),
        "stages_ms": {stage: round(1000 * took_s, 2) for stage, took_s in record.stages.items() if took_s > 0},
    }
