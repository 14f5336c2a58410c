"""What a fleet says to those who record, and that it says nothing to nobody."""

import anyio

from pipeline.bus.connection import Bus, Message
from pipeline.protocol import subjects
from pipeline.protocol.messages import encode
from pipeline.protocol.traces import Traced, TraceWanted, traced_decoder
from tests.nats_server import NatsServer
from tests.workers.fleet import config_for, fleet, until


class Recorder:
    """Somebody who listens on all of `trace.record`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.heard: list[tuple[str, Traced]] = []

    async def listen(self) -> None:
        await self._bus.subscribe("trace.record.*", self._record)
        await self._bus.barrier()

    async def ask(self, name: str, secret: bytes = b"secret") -> None:
        await self._bus.publish(subjects.trace_ask(), encode(TraceWanted(recorder=name, secret=secret)))
        await self._bus.barrier()

    def _record(self, message: Message) -> None:
        self.heard.append((message.subject.rpartition(".")[2], traced_decoder.decode(message.data)))


def test_a_fleet_says_nothing_until_somebody_records(broker: NatsServer) -> None:
    async def serve() -> None:
        async with fleet(config_for(broker.url)) as made:
            recorder = Recorder(made.bus)
            await recorder.listen()
            await made.ask()
            await until(lambda: not made.decode()._jobs._jobs)
            assert recorder.heard == []
            await recorder.ask("r1")
            reply = await made.ask()
            await until(lambda: recorder.heard)
            [(name, traced)] = recorder.heard
            assert name == "r1"
            assert traced.output_length == len(reply.ids)
            assert traced.input_length == reply.end.usage.prompt_tokens  # type: ignore[union-attr]
            assert len(traced.blocks) == 8

    anyio.run(serve)


def test_recorders_hear_of_the_same_prefix_under_different_hashes(broker: NatsServer) -> None:
    async def serve() -> None:
        async with fleet(config_for(broker.url), decode=2) as made:
            recorder = Recorder(made.bus)
            await recorder.listen()
            await recorder.ask("r1", b"one")
            await recorder.ask("r2", b"two")
            for creator in ("ada", "ada", "bob"):
                await made.ask(creator=creator)
            await until(lambda: len(recorder.heard) == 6)
        blocks = {name: [traced.blocks for who, traced in recorder.heard if who == name] for name in ("r1", "r2")}
        for ada, ada_again, bob in blocks.values():
            assert ada == ada_again != bob, "another creator's cache is another"
        assert not {*blocks["r1"]} & {*blocks["r2"]}

    anyio.run(serve)


def test_a_reply_that_its_client_gave_up_counts_with_what_there_was_of_it(broker: NatsServer) -> None:
    async def serve() -> None:
        from tests.workers.fleet import Caller

        async with fleet(config_for(broker.url, default_max_tokens=400, step_s=0.02)) as made:
            recorder = Recorder(made.bus)
            await recorder.listen()
            await recorder.ask("r1")
            caller = Caller(made.bus, "given-up")
            await caller.listen()
            await caller.publish("ada", ignore_eos=True)
            await until(lambda: caller.frames > 3)
            caller.leave()
            await until(lambda: recorder.heard)
            assert 3 < recorder.heard[0][1].output_length < 400

    anyio.run(serve)
