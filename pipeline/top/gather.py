"""Asking a pipeline for a snapshot. Only what is wanted is asked for; what is not answered in time is missing, and said to be."""

import asyncio
from collections.abc import Collection
from typing import Final

import msgspec

from pipeline import outside
from pipeline.bus.connection import Bus, Message
from pipeline.bus.errors import BusError
from pipeline.cli.credits import account_of
from pipeline.cli.shards import Row, survey
from pipeline.config import Config
from pipeline.errors import OperatorError
from pipeline.protocol import subjects
from pipeline.protocol.messages import encode
from pipeline.protocol.presence import Presences
from pipeline.protocol.recent import Recent, WantRecent, recent_decoder
from pipeline.top.snapshot import (
    NAMED,
    RECENT_S,
    SILENT_TOLD_S,
    Fare,
    Ledger,
    Part,
    Snapshot,
    fare,
    ledgers,
    processes,
    silent,
)

ANSWER_S: Final = 1.0
"""Gateways answer within milliseconds. One that takes longer is shown as one that did not."""


class Watch:
    """One onlooker: takes snapshots over a connection on which presences are heard."""

    def __init__(self, bus: Bus, presences: Presences, config: Config) -> None:
        self._bus = bus
        self._presences = presences
        self._config = config
        self._nats = ", ".join(url.rpartition("@")[2].removeprefix("nats://") for url in config.nats.url.split(","))
        self._last = Snapshot(unix_s=outside.unix_s(), nats=self._nats, connected=True, processes=[], silent=[])

    async def look(self, wanted: Collection[Part]) -> Snapshot:
        """Now. Without a connection, what was seen last."""
        if not self._bus.connected:
            self._last = msgspec.structs.replace(self._last, connected=False)
            return self._last
        self._presences.forget_silent(outside.monotonic_s(), SILENT_TOLD_S)
        errors: list[str] = []
        queues, books, fared = await asyncio.gather(
            self._queues(wanted, errors), self._ledgers(wanted), self._fare(wanted, errors)
        )
        now_s, unix_s = outside.monotonic_s(), outside.unix_s()
        self._last = Snapshot(
            unix_s=unix_s,
            nats=self._nats,
            connected=True,
            processes=processes(self._presences, now_s, unix_s),
            silent=silent(self._presences, now_s),
            queues=None if queues is None else queues[0],
            ledgers=None if books is None else books[0],
            fare=None if fared is None else fared[0],
            errors=errors,
            messages=sum(asked[1] for asked in (queues, books, fared) if asked is not None),
        )
        return self._last

    async def _queues(self, wanted: Collection[Part], errors: list[str]) -> tuple[list[Row], int] | None:
        """A question and an answer for each class, and with `served` for each prefill worker."""
        if "queues" not in wanted and "served" not in wanted:
            return None
        served = "served" in wanted
        try:
            report = await survey(self._bus, self._presences, self._config.requests.shards, served=served)
        except OperatorError as error:
            errors.append(str(error))
            return None
        errors += [
            f"{one} does not say what it has served." for one, warm in report.warm_creators.items() if warm is None
        ]
        return report.shards, 2 * len(subjects.CLASSES) + 2 * len(report.warm_creators)

    async def _ledgers(self, wanted: Collection[Part]) -> tuple[list[Ledger], int] | None:
        """A question and an answer for each decode worker."""
        if "ledgers" not in wanted:
            return None
        workers = [presence.id for presence in self._presences.live("decode", outside.monotonic_s())]
        accounts = await asyncio.gather(*(account_of(self._bus, worker) for worker in workers))
        return ledgers(dict(zip(workers, accounts, strict=True))), 2 * len(workers)

    async def _fare(self, wanted: Collection[Part], errors: list[str]) -> tuple[Fare, int] | None:
        """One question to all gateways, and an answer of each."""
        if "recent" not in wanted:
            return None
        gateways = {presence.id for presence in self._presences.live("gateway", outside.monotonic_s())}
        answers: list[Recent] = []
        try:
            if gateways:
                await self._ask(gateways, answers)
        except BusError as error:
            errors.append(f"Gateways cannot be asked how requests fare: {error}")
        return fare(answers, gateways), len(answers) + bool(gateways)

    async def _ask(self, gateways: Collection[str], answers: list[Recent]) -> None:
        missing, complete = set(gateways), asyncio.Event()

        def answered(message: Message) -> None:
            if message.data:  # else it is the broker, which says that nobody listens
                answers.append(recent_decoder.decode(message.data))
                missing.discard(answers[-1].process)
            if not (missing and message.data):
                complete.set()

        inbox = self._bus.inbox()
        subscription = await self._bus.subscribe(inbox, answered)
        try:
            await self._bus.publish(subjects.recent(), encode(WantRecent(since_s=RECENT_S, named=NAMED)), inbox)
            async with asyncio.timeout(ANSWER_S):
                await complete.wait()
        except TimeoutError:
            pass  # who is missing shows
        finally:
            await subscription.unsubscribe()
