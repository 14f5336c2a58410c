"""The story of a seed: one dense line an event, that a person can follow from the top.

0.412083 prefill-1   → claim      r07  prefill-1-5c0e begins, delivery 1
0.413377 gateway-1   → go         r07  prefill-1-5c0e has 0
0.500000 broker      ⚡ kill            back in 0.31 s
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from pipeline.bus.client import Message
from pipeline.protocol.messages import (
    Ask,
    Audit,
    Claim,
    Done,
    Failed,
    Go,
    Handoff,
    HandoffAnswer,
    Notice,
    Return,
    Tokens,
    Verdict,
    answer_decoder,
    claim_decoder,
    credit_decoder,
    handoff_answer_decoder,
    handoff_decoder,
    notice_decoder,
    verdict_decoder,
)
from pipeline.protocol.subjects import parse_ack
from tests.simulation.frames import frames_of, id_of
from tests.simulation.loop import VirtualLoop
from tests.simulation.streams import Stored
from tests.simulation.wire import Publish

Said = tuple[str, str, str]
"""Verb, request, detail."""


class Story:
    """Lines, where they are wanted."""

    def __init__(self, loop: VirtualLoop, wanted: bool) -> None:
        self._loop = loop
        self.wanted = wanted
        self.lines: list[str] = []
        self._requests: dict[tuple[str, int], str] = {}
        self._asked: dict[str, str] = {}

    def tell(self, who: str, symbol: str, verb: str, request: str = "", detail: str = "") -> None:
        """One event."""
        if self.wanted:
            line = f"{self._loop.now_s:11.6f} {who:<11} {symbol} {verb:<10} {request:<4} {detail}"
            self.lines.append(line.rstrip())

    def sent(self, who: str, what: Publish) -> None:
        """A message has left a process."""
        if self.wanted and (said := self._read(what.subject, what.reply, what.data)) is not None:
            self.tell(who, "→", *said)

    def missed(self, how: str, message: Message) -> None:
        """The weather has got at a message."""
        if self.wanted and (said := self._read(message.subject, message.reply, message.data)) is not None:
            self.tell("weather", "☁", how, said[1], f"{said[0]} {said[2]}")

    def delivered(self, to: str, message: Message) -> None:
        """A stream has handed out a message."""
        if not self.wanted or not message.reply.startswith("$JS.ACK."):
            return
        ack = parse_ack(message.reply)
        request = self._requests.get((ack.stream, ack.sequence), "")
        detail = f"delivery {ack.delivered} of {ack.stream}/{ack.consumer}#{ack.sequence}, {ack.pending} behind"
        self.tell("broker", "←", "deliver", request, f"to {to}: {detail}")

    def stored(self, stream: str, stored: Stored) -> None:
        """A stream has a new message."""
        if self.wanted and stream.startswith("REQUESTS"):
            self._requests[stream, stored.sequence] = id_of(stored.data)

    def _read(self, subject: str, reply: str, data: bytes) -> Said | None:
        if subject.startswith("$JS.ACK."):
            ack = parse_ack(subject)
            request = self._requests.get((ack.stream, ack.sequence), "?")
            return data.decode().split()[0] or "+ACK", request, f"of delivery {ack.delivered}, #{ack.sequence}"
        if subject.startswith(("$JS.", "presence.")):
            return None
        return self._stored(subject, data) or self._ours(reply, subject, data)

    def _stored(self, subject: str, data: bytes) -> Said | None:
        """A message that says by its subject what it is."""
        if subject.startswith("requests.in."):
            return "publish", id_of(data), subject
        if subject.startswith("control.cancel."):
            return "cancel", subject.rpartition(".")[2], ""
        if subject.startswith("keeper.expired."):
            _, _, stream, sequence = subject.split(".")
            return "expired", self._requests.get((stream, int(sequence)), "?"), f"#{sequence} of {stream}"
        if subject.startswith("dlq."):
            return "dead", id_of(data), subject
        return None

    def _ours(self, reply: str, subject: str, data: bytes) -> Said | None:
        """A message of our own protocol: its type says what it is."""
        for read in _READERS:
            try:
                said = read(data)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if reply and said[1]:
                self._asked[reply] = said[1]
            return (said[0], said[1] or self._asked.get(subject, ""), said[2])
        return None


def _frames(data: bytes) -> Said:
    frames = frames_of(data)
    verbs = {Tokens: "tokens", Done: "done", Failed: "error"}
    details = []
    for frame in frames:
        if isinstance(frame, Tokens):
            details.append(f"{frame.request}[{frame.index}:{frame.index + len(frame.ids) // 4}]")
        elif isinstance(frame, Failed):
            details.append(f"{frame.error.code}: {frame.error.message}")
        else:
            details.append(f"{frame.index} tokens, {frame.finish_reason}")
    first = frames[0]
    return verbs[type(first)], first.request, f"{first.claim}: {', '.join(details)}"


def _claim(claim: Claim) -> Said:
    delivery = parse_ack(claim.ack).delivered
    begins = f"follows {claim.follows}" if claim.follows else f"begins, delivery {delivery}"
    return "claim", claim.request, f"{claim.claim} {begins}"


def _answer(answer: Any) -> Said:
    detail = f"has {len(answer.ids) // 4}" if isinstance(answer, Go) else str(getattr(answer, "index", ""))
    return type(answer).__name__.lower(), "", detail


def _notice(notice: Notice) -> Said:
    verb, _, detail = _answer(notice.answer)
    return verb, notice.request, f"{detail} (notice to {notice.claim})".strip()


def _credit(said: Ask | Return | Audit) -> Said:
    if isinstance(said, Ask):
        return "ask", said.request, f"{said.ask}, {said.blocks} blocks"
    return "return", "", said.ask if isinstance(said, Return) else ""


def _verdict(verdict: Verdict) -> Said:
    return verdict.state, verdict.request, f"{verdict.ask} {verdict.reason}"


def _handoff(handoff: Handoff) -> Said:
    return "handoff", handoff.request, f"grant {handoff.ask}, claim {handoff.claim}"


def _handoff_answer(answer: HandoffAnswer) -> Said:
    return answer.state, "", answer.reason


_READERS: Final[tuple[Callable[[bytes], Said], ...]] = (
    _frames,
    lambda data: _claim(claim_decoder.decode(data)),
    lambda data: _answer(answer_decoder.decode(data)),
    lambda data: _notice(notice_decoder.decode(data)),
    lambda data: _credit(credit_decoder.decode(data)),
    lambda data: _verdict(verdict_decoder.decode(data)),
    lambda data: _handoff(handoff_decoder.decode(data)),
    lambda data: _handoff_answer(handoff_answer_decoder.decode(data)),
)
