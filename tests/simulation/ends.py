"""What each end must be, and what is kept of it.

an end     a whole reply is the undisturbed one, token for token, or of one sampling where its samplings differ
           what an error or a leaving cut off is a part of such a reply; an error has a cause that was drawn
           a producer has an end, unless what was sent to it was lost on the way; a poison request ends as poison
at rest    the exchanges of a conversation stand in it once, in order, and each prompt held the one before
           of a malformed and of a poison request the DLQ has one copy, of a whole one none, and of no request two
           a reply for REPLIES is kept there, once
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Final

from pipeline.errors import ErrorBody
from pipeline.limits import EXPIRED_AFTER_S, SCAN_PERIOD_S
from pipeline.protocol.messages import Done
from pipeline.protocol.turns import Turn, read_turn
from tests.simulation.clients import Client, undisturbed
from tests.simulation.engine import Choices, is_stateful
from tests.simulation.fleet import Running
from tests.simulation.frames import id_of
from tests.simulation.jetstream import JetStream
from tests.simulation.plan import TIMEOUT_S, Order, Plan
from tests.simulation.producers import Keeping, Producer, Subscriber

REFUSALS: Final = {"model": "model_not_found", "max_tokens": "context_length_exceeded", "temperature": "invalid_value"}
"""What a malformed field is answered with."""

ANSWERED_WITHIN_S: Final = EXPIRED_AFTER_S + SCAN_PERIOD_S + 1.0
"""From a deadline until the keeper has answered for it, where nothing is in its way."""


class Ends:
    """Judges how requests end. `caused` counts failures that were drawn; `away` are gateways that may be taken for gone."""

    def __init__(
        self,
        plan: Plan,
        away: set[Running],
        samplings: Callable[[str], list[Choices]],
        js: Callable[[], JetStream],
    ) -> None:
        self.caused: Counter[str] = Counter()
        self.deserted = False
        """For longer than any request may wait there was nobody to serve it."""
        self._plan, self._away, self._samplings, self._js = plan, away, samplings, js
        self._failed = 0
        self._calm = {fault.kind for fault in plan.faults} <= {"absence"}

    # ---- each end

    def ended(self, client: Client) -> Iterator[str]:
        """A request is over: what is wrong with how it ended?"""
        order, end = client.order, client.end
        if not order.bad:
            yield from self._same(client)
        elif isinstance(end, Done):
            yield f"{order.id} has a bad {order.bad}, and got a reply"
        if isinstance(end, ErrorBody) and (why := self._unjust(client, end)):
            yield f"{order.id} ended with {end.code} after {client.tokens} tokens, and {why}: {end.message}"
        if (
            order.poison
            and end is not None
            and client.at not in self._away
            and not self._ends_as_poison(order, _code(end))
        ):
            yield f"{order.id} is poison, and ended otherwise: {end}"
        if isinstance(client, Producer):
            yield from self._heard(client)

    def _ends_as_poison(self, order: Order, code: str) -> bool:
        return code == "poison" or (code == "first_token_late" and self._bounded(order))

    def _bounded(self, order: Order) -> bool:
        """To a mere subscriber it may have begun before the broker died, which then delivers it for the first time again."""
        return self._plan.config.requests.first_token_s > 0 and order.klass == "interactive"

    def _same(self, client: Client) -> Iterator[str]:
        """Whether it is a part of, or the whole of, what could have been drawn in one piece."""
        order, have = client.order, client.choices
        stateful = is_stateful(order.sampling)
        wants = self._samplings(order.id) if stateful else self._undisturbed(order)
        fits = [want for want in wants if _begins(have, want)]
        if not fits and any(ids or text for ids, text in have):
            what = "is of no one sampling" if stateful else "has other tokens than the undisturbed reply"
            yield f"{order.id} {what}: {have} of {wants}"
        elif isinstance(client.end, Done) and have not in fits:
            yield f"{order.id} is called whole, with {have}, of {fits}"

    def _undisturbed(self, order: Order) -> list[Choices]:
        """What it may get: by reference, after any exchange that there is."""
        before = [None, *self.turns(order)] if order.conversation else [None]
        return [undisturbed(order, self._plan.config.simulated.seed, one) for one in before]

    def turns(self, order: Order) -> list[Turn]:
        """What has been written down of a request's conversation."""
        subject = f"turns.{order.creator}.{order.conversation}"
        return [read_turn(one.data) for one in self._js().streams["TURNS"].messages.values() if one.subject == subject]

    def _unjust(self, client: Client, error: ErrorBody) -> str:
        """Why this error has no cause that was drawn; empty where it has one."""
        order = client.order
        match error.code:
            case "deadline":
                return "" if order.timeout_s < TIMEOUT_S or self.deserted else "it had time enough"
            case "broker_unavailable":
                return "" if order.timeout_s < 2.0 else "the broker was never away so long"
            case "engine_failed":
                self._failed += 1
                return "" if self._failed <= self.caused["engine_fails"] else "no engine was told to fail"
            case "reply_lost":
                cut_short = (is_stateful(order.sampling) or order.n > 1) and client.tokens
                return "" if cut_short or client.at in self._away else "its gateway was not away"
            case "poison" | "first_token_late":
                late = self._bounded(order) and (not client.tokens or isinstance(client, Subscriber))
                return "" if (order.poison if error.code == "poison" else late) else "it is none, or may take its time"
            case _:
                return "" if error.code == REFUSALS.get(order.bad or "") else "nothing was drawn that leads to it"

    def _heard(self, client: Producer) -> Iterator[str]:
        """Never silence; and the keeper's answer comes in time. What is malformed has its class's longest to be answered in."""
        order = client.order
        if client.end is None:
            if not (isinstance(client, Subscriber) and client.shaken):
                yield f"{order.id} has never heard how it ended"
        elif self._calm and not order.bad and client.waited_s > order.timeout_s + ANSWERED_WITHIN_S:
            yield f"{order.id} waited {client.waited_s:.3f} s for its end, {order.timeout_s:.3f} s were given"

    # ---- at rest

    def kept(self, js: JetStream, clients: Iterable[Client]) -> Iterator[str]:
        """What is wrong with the dead letters and the kept replies."""
        letters: dict[str, list[str]] = {}
        for stored in js.streams["DLQ"].messages.values():
            letters.setdefault(id_of(stored.data), []).append(stored.subject.split(".")[1])
        for client in clients:
            have = letters.pop(client.order.id, [])
            if have not in _letters(client, calm=self._calm):
                yield f"{client.order.id} ended with {_code(client.end)}, and the DLQ has {have or 'nothing'} of it"
            if isinstance(client, Keeping) and not client.unsent:
                count = js.streams["REPLIES"].counts(client.subject).get(client.subject, 0)
                if count != 1:
                    yield f"{client.order.id} has {count} replies in REPLIES"
        yield from self._written(clients)
        if letters:
            yield f"the DLQ has copies of what nobody has asked: {letters}"

    def _written(self, clients: Iterable[Client]) -> Iterator[str]:
        """Each exchange stands in its conversation once, in its place, and is the one that its client has had."""
        asked = {client.order.id: client for client in clients if client.order.conversation}
        for creator in sorted({client.order.creator for client in asked.values()}):
            mine = [client for client in asked.values() if client.order.creator == creator]
            written = self.turns(mine[0].order)
            for number, (before, turn) in enumerate(pairwise([None, *written]), 1):
                assert turn is not None
                client = asked[turn.request]
                right = [choices[0][1] for choices in self._after(client.order, before)]
                if turn.number != number or turn.reply not in right:
                    yield f"turn {number} of {creator} is {turn}, not one of {right}"
                if isinstance(client.end, Done) and client.choices[0][1] != turn.reply:
                    yield f"{turn.request} got {client.choices[0][1]!r}, and {turn.reply!r} is written down"
            have = Counter(turn.request for turn in written)
            for client in mine:
                least = int(self._calm and isinstance(client.end, Done))
                if not least <= have[client.order.id] <= 1:
                    yield f"{client.order.id} ended with {_code(client.end)}, and is written down {have[client.order.id]} times"

    def _after(self, order: Order, before: Turn | None) -> list[Choices]:
        if is_stateful(order.sampling):
            return self._samplings(order.id)
        return [undisturbed(order, self._plan.config.simulated.seed, before)]


def _begins(have: Choices, want: Choices) -> bool:
    """Whether each reply is, up to where it is, what is wanted."""
    pairs = zip(have, want, strict=True)
    return all(ids == all_ids[: len(ids)] and all_text.startswith(text) for (ids, text), (all_ids, all_text) in pairs)


def _letters(client: Client, *, calm: bool) -> list[list[str]]:
    """What the DLQ may have of a request that has ended in this way. Which one gives up first, client or fleet, is not said."""
    order, code = client.order, _code(client.end)
    if code == "poison":
        return [["poison"]]
    if order.bad:
        return [["malformed"]] if code == REFUSALS[order.bad] else [[], ["malformed"], ["expired"]]
    if code == "whole":
        # Where its ack was lost, or undone by a broker's death, and nobody arbitrates, the keeper cannot know of the end.
        return [[], ["expired"]] if isinstance(client, Subscriber | Keeping) and not calm else [[]]
    return [[], ["expired"], *([["poison"]] if order.poison else [])]


def _code(end: Done | ErrorBody | None) -> str:
    if end is None:
        return "nothing"
    return "whole" if isinstance(end, Done) else end.code
