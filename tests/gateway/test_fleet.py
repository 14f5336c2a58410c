"""What the gateway takes the fleet for, when it could not hear it."""

import anyio
import pytest

from gateway.fleet import Lookout, survey
from pipeline.bus.connection import Bus
from pipeline.limits import PRESENCE_SILENT_MAX_S
from pipeline.protocol.messages import Presence
from pipeline.protocol.presence import Presences
from pipeline.protocol.subjects import CLASSES
from tests.gateway.stack import HELLO, config_for, serving, stack
from tests.gateway.worker_double import WorkerDouble, saying
from tests.nats_server import NatsServer

pytestmark = pytest.mark.anyio


async def test_the_first_request_of_a_new_gateway_is_served_where_workers_were_there_before(broker: NatsServer) -> None:
    async with await Bus.connect(broker.url, "double") as bus:
        double = WorkerDouble(bus)
        await double.listen()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(double.run)
            async with serving(config_for(broker.url), double) as served:
                double.script = saying("at once")
                assert (await served.ask()).status_code == 200
            tasks.cancel_scope.cancel()


async def test_a_request_during_a_restart_of_the_broker_waits_for_it(broker: NatsServer) -> None:
    async with stack(broker.url) as served:
        served.double.script = saying("after all")
        broker.kill9()
        await anyio.sleep(PRESENCE_SILENT_MAX_S + 0.4)
        async with anyio.create_task_group() as tasks:

            async def restart() -> None:
                await anyio.sleep(0.3)
                broker.start()

            tasks.start_soon(restart)
            response = await served.client.post("/v1/chat/completions", json=HELLO)
        assert response.status_code == 200, response.text


class World:
    """A clock, and who is heard."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.presences = Presences()
        self.lookout = Lookout(self.presences, lambda: self.now_s)

    def say(self, worker: str) -> None:
        said = Presence(role="decode", id=worker, epoch="1", ready=True, model="m", max_model_len=1)
        self.presences.heard(said, self.now_s)

    def counted(self, after_s: float = 0.0) -> int:
        self.now_s += after_s
        return self.lookout.fleet().decode


@pytest.mark.parametrize(
    ("slots_free", "batch", "saturated"),
    [(2, None, []), (2, 1, []), (2, 0, ["batch"]), (0, 0, ["interactive", "batch"])],
)
def test_a_fleet_may_be_full_for_one_class_and_not_for_the_other(
    slots_free: int, batch: int | None, saturated: list[str]
) -> None:
    presences = Presences()
    said = Presence(role="prefill", id="p", epoch="1", ready=True, slots_free=slots_free, batch_slots_free=batch)
    presences.heard(said, 1.0)
    fleet = survey(presences, 1.0)
    assert [klass for klass in CLASSES if fleet.saturated(klass)] == saturated


def test_the_silent_are_gone_where_they_could_have_been_heard() -> None:
    world = World()
    world.say("a")
    assert world.counted(0.1) == 1
    assert world.counted(PRESENCE_SILENT_MAX_S) == 0


def test_who_was_live_when_the_broker_was_lost_has_time_to_come_back() -> None:
    world = World()
    world.say("a")
    world.say("b")
    world.lookout.deaf()
    assert world.counted(5.0) == 2
    world.lookout.hearing()
    world.say("b")
    assert world.counted(PRESENCE_SILENT_MAX_S - 0.1) == 2
    assert world.counted(0.2) == 0
    world.say("b")
    assert world.counted(0.1) == 1


def test_a_broker_that_is_lost_again_at_once_does_not_make_workers_silent() -> None:
    world = World()
    world.say("a")
    world.lookout.deaf()
    world.now_s += 1.0
    world.lookout.hearing()
    world.now_s += 0.2
    world.lookout.deaf()
    assert world.counted(5.0) == 1
