"""The JetStream API, by subject: a table of verbs, and a function for each."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pipeline.protocol.subjects import matches
from tests.simulation.consumers import Consumer
from tests.simulation.loop import UNIX_S
from tests.simulation.streams import Stored, Stream

if TYPE_CHECKING:
    from tests.simulation.broker import SimBroker
    from tests.simulation.wire import Link, Publish

API: Final = "$JS.API."
ACK: Final = "$JS.ACK."

_NO_STREAM: Final = {"code": 404, "err_code": 10059, "description": "stream not found"}
_NO_CONSUMER: Final = {"code": 404, "err_code": 10014, "description": "consumer not found"}
_NO_SEQUENCE: Final = {"code": 400, "err_code": 10043, "description": "sequence not found"}
_NO_MESSAGE: Final = {"code": 404, "err_code": 10037, "description": "no message found"}

_AGED_WITHIN_S: Final = 0.01
"""A server looks for what is too old now and then, and not at the very moment."""

encode: Final = msgspec.json.encode


class JetStream:
    """The streams of a broker and what can be asked of them."""

    def __init__(self, broker: "SimBroker") -> None:
        self.streams: dict[str, Stream] = {}
        self.consumers: dict[str, dict[str, Consumer]] = {}
        self._broker = broker
        self._by_token: dict[str, list[Stream]] = {}
        self._aging: set[str] = set()

    def declare(self, config: Mapping[str, Any]) -> Stream:
        """Make a stream."""
        stream = self.streams[config["name"]] = Stream(config)
        self.consumers[stream.name] = {}
        for subject in stream.subjects:
            self._by_token.setdefault(subject.partition(".")[0], []).append(stream)
        return stream

    def consume(self, stream: str, config: Mapping[str, Any]) -> None:
        """Make a consumer."""
        self.consumers[stream][config["name"]] = Consumer(self._broker, self.streams[stream], config)

    def each_consumer(self) -> list[Consumer]:
        """All of them."""
        return [consumer for of_stream in self.consumers.values() for consumer in of_stream.values()]

    def stream_of(self, subject: str) -> Stream | None:
        """The stream that stores what is published there."""
        streams = self._by_token.get(subject.partition(".")[0], ())
        return next((stream for stream in streams if stream.takes(subject)), None)

    def consumer_of(self, stored: Stored, stream: Stream) -> Consumer | None:
        """The consumer that a stored message goes to."""
        for consumer in self.consumers[stream.name].values():
            if stored.subject.startswith(consumer.filter.rstrip(">")):
                return consumer
        return None

    def age(self, stream: Stream) -> None:
        """See to it that what passes `max_age` vanishes, leased or not: one timer a stream, for its oldest message."""
        oldest = next(iter(stream.messages.values()), None)
        if not stream.age_s or oldest is None or stream.name in self._aging:
            return
        self._aging.add(stream.name)
        left_s = oldest.at_s + stream.age_s - self.now_s
        self._broker.later(max(0.0, left_s) + _AGED_WITHIN_S, self._aged, stream)

    def _aged(self, stream: Stream) -> None:
        self._aging.discard(stream.name)
        for sequence in stream.expired(self.now_s):
            self.drop(stream, sequence)
        self.age(stream)

    def end(self, stream: Stream, sequence: int) -> None:
        """The time of a message that has one of its own is over."""
        self.drop(stream, sequence)

    @property
    def now_s(self) -> float:
        """Unix seconds, by the broker's clock."""
        return UNIX_S + self._broker.loop.now_s

    def call(self, link: "Link", asked: "Publish") -> None:
        """An API request."""
        place = asked.subject[len(API) :].split(".")
        for length in (3, 2):
            verb = VERBS.get(".".join(place[:length]))
            if verb is not None:
                answer = verb(self, link, asked, place[length:])
                if answer is not None:
                    self._broker.answer(asked.reply, encode(answer))
                return
        self._broker.no_responders(asked)

    def drop(self, stream: Stream, sequence: int) -> bool:
        """Delete a message, and let its consumer know."""
        stored = stream.remove(sequence)
        if stored is None:
            return False
        consumer = self.consumer_of(stored, stream)
        if consumer is not None:
            consumer.dropped(sequence)
        return True


def _pull(js: JetStream, link: "Link", asked: "Publish", place: list[str]) -> None:
    consumer = js.consumers.get(place[0], {}).get(place[1])
    if consumer is None:
        js._broker.no_responders(asked)
    else:
        consumer.pull(link, asked.reply, asked.data)


def _stream_info(js: JetStream, _: "Link", asked: "Publish", place: list[str]) -> dict[str, Any]:
    stream = js.streams.get(place[0])
    if stream is None:
        return {"error": _NO_STREAM}
    body = msgspec.json.decode(asked.data) if asked.data else {}
    held = stream.messages.values()
    state: dict[str, Any] = {
        "messages": len(stream.messages),
        "bytes": sum(len(kept.data) for kept in held),
        "first_seq": stream.first,
        "first_ts": _spelled(min((kept.at_s for kept in held), default=0.0)),
        "last_seq": stream.last,
    }
    if pattern := body.get("subjects_filter"):
        state["subjects"] = stream.counts(pattern)
    return {"config": stream.config, "created": _spelled(0.0), "state": state, "ts": _spelled(js.now_s)}


def _consumer_info(js: JetStream, _: "Link", __: "Publish", place: list[str]) -> dict[str, Any]:
    consumer = js.consumers.get(place[0], {}).get(place[1])
    if consumer is None:
        return {"error": _NO_CONSUMER}
    return {
        "config": consumer.config,
        "delivered": consumer.delivered,
        "num_pending": len(consumer.todo),
        "num_ack_pending": len(consumer.pending),
        "num_waiting": len(consumer.pulls),
    }


def _message(js: JetStream, _: "Link", asked: "Publish", place: list[str]) -> dict[str, Any]:
    stream = js.streams.get(place[0])
    if stream is None:
        return {"error": _NO_STREAM}
    body = msgspec.json.decode(asked.data)
    if "last_by_subj" in body:
        found = stream.last_of(body["last_by_subj"])
    elif "next_by_subj" in body:
        found = stream.next_from(body["seq"], body["next_by_subj"])
    else:
        found = stream.messages.get(body["seq"])
    if found is None:
        return {"error": _NO_MESSAGE}
    said = {"subject": found.subject, "seq": found.sequence, "data": found.data, "time": _spelled(found.at_s)}
    return {"message": {**said, "hdrs": _written(found.headers)} if found.headers else said}


def _delete(js: JetStream, link: "Link", asked: "Publish", place: list[str]) -> dict[str, Any]:
    stream = js.streams.get(place[0])
    if stream is None:
        return {"error": _NO_STREAM}
    sequence = msgspec.json.decode(asked.data)["seq"]
    if (stored := stream.messages.get(sequence)) is None:
        return {"error": _NO_SEQUENCE}
    js._broker.watch.deleted(link, stream.name, stored)
    js.drop(stream, sequence)
    return {"success": True}


def _purge(js: JetStream, _: "Link", asked: "Publish", place: list[str]) -> dict[str, Any]:
    stream = js.streams.get(place[0])
    if stream is None:
        return {"error": _NO_STREAM}
    pattern = (msgspec.json.decode(asked.data) if asked.data else {}).get("filter", ">")
    gone = [sequence for sequence, stored in stream.messages.items() if matches(pattern, stored.subject)]
    for sequence in gone:
        js.drop(stream, sequence)
    return {"success": True, "purged": len(gone)}


def _direct(js: JetStream, _: "Link", asked: "Publish", place: list[str]) -> None:
    """The newest message of a subject, or those of one from a sequence on, as messages with headers; or a status 404."""
    stream = js.streams.get(place[0])
    if stream is not None and len(place) == 1:
        _batch(js, stream, asked)
        return
    found = stream.last_of(".".join(place[1:])) if stream else None
    if found is None:
        js._broker.status(asked.reply, 404, "Message Not Found")
        return
    js._broker.answer(asked.reply, found.data, _place(found))


def _batch(js: JetStream, stream: Stream, asked: "Publish") -> None:
    """All of them, and then a status that says how many are left."""
    body = msgspec.json.decode(asked.data)
    pattern, first, most = body["next_by_subj"], body["seq"], body["batch"]
    found = [one for at, one in stream.messages.items() if at >= first and matches(pattern, one.subject)]
    if not found:
        js._broker.status(asked.reply, 404, "Message Not Found")
        return
    end = {"Status": "204", "Description": "EOB", "Nats-Num-Pending": str(max(0, len(found) - most))}
    js._broker.answer_all(asked.reply, [*((one.data, _place(one)) for one in found[:most]), (b"", end)])


def _place(stored: Stored) -> dict[str, str]:
    return {**(stored.headers or {}), "Nats-Subject": stored.subject, "Nats-Sequence": str(stored.sequence)}


def _spelled(unix_s: float) -> str:
    """A time as the server writes it. It counts nanoseconds; ours are whole microseconds, here as in ack subjects."""
    seconds, micros = divmod(int(unix_s * 1e6), 1_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{micros:06d}000Z"


def _written(headers: Mapping[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode()


Verb = Callable[[JetStream, "Link", "Publish", list[str]], dict[str, Any] | None]

VERBS: Final[dict[str, Verb]] = {
    "CONSUMER.MSG.NEXT": _pull,
    "CONSUMER.INFO": _consumer_info,
    "STREAM.INFO": _stream_info,
    "STREAM.PURGE": _purge,
    "STREAM.MSG.GET": _message,
    "STREAM.MSG.DELETE": _delete,
    "DIRECT.GET": _direct,
}
