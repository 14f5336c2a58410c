"""The connection, against a real nats-server, under both event loops. P1 to P20 are traps of nats-py and nats-server."""

import asyncio
import time
from typing import Any

import anyio
import pytest

from pipeline.bus import connection
from pipeline.bus.connection import Bus
from pipeline.bus.errors import BadSubject, Disconnected, NoResponders, Unanswered
from pipeline.errors import BodyTooLarge, OperatorError
from pipeline.limits import MESSAGE_BYTES_MAX
from pipeline.telemetry.metrics import REGISTRY
from tests.bus.support import Heard, eventually
from tests.nats_server import NatsServer
from tests.ports import free_port

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return ("asyncio", {"use_uvloop": request.param})


async def test_a_message_arrives_with_its_subject_reply_and_headers(bus: Bus, other: Bus) -> None:
    heard = Heard()
    await bus.subscribe("talk.*", heard)
    await bus.barrier()
    await other.publish("talk.a", b"hello", reply="back", headers={"Trace": "é"})
    await other.publish("talk.b", b"")
    await eventually(lambda: len(heard.messages) == 2)
    assert heard.messages[0] == ("talk.a", "back", b"hello", {"Trace": "é"})
    assert heard.messages[1] == ("talk.b", "", b"", None)


async def test_p1_a_subscription_behind_a_barrier_misses_nothing(bus: Bus, other: Bus) -> None:
    heard = Heard()
    for number in range(300):
        await bus.subscribe(f"late.{number}", heard)
        await bus.barrier()
        await other.publish(f"late.{number}", b"")
        await other.barrier()
    await bus.barrier()
    assert len(heard.messages) == 300


@pytest.mark.parametrize(
    ("size", "headers"), [(MESSAGE_BYTES_MAX + 1, None), (MESSAGE_BYTES_MAX - 10, {"Name": "100"})]
)
async def test_p2_a_message_over_the_limit_is_refused_and_the_connection_stays(
    bus: Bus, size: int, headers: dict[str, str] | None
) -> None:
    with pytest.raises(BodyTooLarge):
        await bus.publish("large", b"x" * size, headers=headers)
    await bus.barrier()


async def test_p2_a_message_of_the_largest_size_passes(bus: Bus) -> None:
    heard = Heard()
    await bus.subscribe("large", heard)
    headers = {"Name": "100"}
    await bus.publish("large", b"x" * (MESSAGE_BYTES_MAX - 12 - 11), headers=headers)
    await eventually(lambda: len(heard.messages) == 1)


async def test_p2_a_protocol_error_does_not_close_the_connection_for_good(bus: Bus, other: Bus) -> None:
    heard = Heard()
    await bus.subscribe("after", heard)
    await bus.client._send_command(b"NONSENSE\r\n")  # the server says -ERR, and hangs up
    with pytest.raises(Disconnected):
        await bus.barrier()
    await bus.wait_connected(5.0)
    await other.publish("after", b"")
    await eventually(lambda: len(heard.messages) == 1)


async def test_p3_a_read_loop_that_dies_is_replaced_at_once(
    bus: Bus, other: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    await bus.subscribe("deaf", heard)
    await bus.barrier()
    with monkeypatch.context() as patch:
        patch.setattr(bus.client, "_process_msg", None)  # parsing raises
        await other.publish("deaf", b"lost")
        await eventually(lambda: not bus.connected)
    await bus.wait_connected(1.0)
    await other.publish("deaf", b"heard")
    await eventually(lambda: heard.data == [b"heard"], within_s=1.0)


async def test_p3_a_handler_that_raises_is_counted_and_disturbs_nobody(bus: Bus) -> None:
    before = REGISTRY.get_sample_value("headrace_handler_errors_total") or 0.0
    heard = Heard()

    def fails(_: object) -> None:
        raise ValueError("a handler's own mistake")

    await bus.subscribe("both", fails)
    await bus.subscribe("both", heard)
    await bus.publish("both", b"")
    await bus.barrier()
    assert len(heard.messages) == 1
    assert REGISTRY.get_sample_value("headrace_handler_errors_total") == before + 1


async def test_a_barrier_that_is_cancelled_does_not_end_the_read_loop(bus: Bus) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await bus.barrier()
    await bus.barrier()
    assert bus.connected


async def test_p5_what_is_published_before_close_arrives(server: NatsServer, bus: Bus) -> None:
    heard = Heard()
    await bus.subscribe("last.words", heard)
    await bus.barrier()
    async with await Bus.connect(server.url, "leaves") as leaving:
        for number in range(100):
            await leaving.publish("last.words", str(number).encode())
    await eventually(lambda: len(heard.messages) == 100)


async def test_p13_headers_of_the_caller_are_not_changed(bus: Bus) -> None:
    headers = {"A": "1"}
    await bus.publish("plain", b"", headers=headers)
    assert headers == {"A": "1"}


async def test_an_answer_comes_back_and_has_no_header_of_the_request(bus: Bus, other: Bus) -> None:
    heard = Heard()
    await bus.subscribe("echo", lambda message: bus.post(message.reply, message.data + b"!"))
    await bus.barrier()
    await other.subscribe(f"{other._inbox_prefix}.r.*", heard)
    assert await other.request("echo", b"hello", 1.0, headers={"Authorization": "secret"}) == b"hello!"
    assert [message.headers for message in heard.messages] == [None]


async def test_a_request_that_nobody_can_hear_fails_at_once(bus: Bus) -> None:
    began_s = time.monotonic()
    with pytest.raises(NoResponders):
        await bus.request("nobody", b"", 5.0)
    assert time.monotonic() - began_s < 0.5


async def test_a_request_that_nobody_answers_fails_in_time(bus: Bus) -> None:
    await bus.subscribe("silent", Heard())
    with pytest.raises(Unanswered):
        await bus.request("silent", b"", 0.05)
    assert not bus._calls._open


async def test_a_subject_that_nats_cannot_carry_is_refused(bus: Bus) -> None:
    with pytest.raises(BadSubject):
        await bus.publish("two words", b"")
    with pytest.raises(BadSubject):
        await bus.subscribe("a..b", Heard())
    with pytest.raises(BadSubject):
        await bus.publish("fine", b"", headers={"not a name": "x"})


async def test_an_answer_that_nobody_has_asked_for_does_not_end_the_connection(bus: Bus) -> None:
    lost: list[bool] = []
    bus.on_disconnect(lambda: lost.append(True))
    with pytest.raises(BadSubject):
        bus.post("", b"an answer")
    await bus.barrier()
    assert not lost


async def test_a_drained_subscription_hands_over_what_was_in_flight(bus: Bus, other: Bus) -> None:
    heard = Heard()
    subscription = await bus.subscribe("flow", heard)
    await bus.barrier()
    for number in range(2000):
        await other.publish("flow", str(number).encode())
    await other.barrier()
    await subscription.drain()
    assert len(heard.messages) == 2000
    await other.publish("flow", b"late")
    await other.barrier()
    await bus.barrier()
    assert len(heard.messages) == 2000


async def test_inboxes_are_unique_over_processes_of_one_name(server: NatsServer, bus: Bus) -> None:
    async with await Bus.connect(server.url, "test") as twin:
        inboxes = {bus.inbox(), bus.inbox(), twin.inbox(), twin.inbox()}
    assert len(inboxes) == 4
    assert all(inbox.startswith("_INBOX.test.") for inbox in inboxes)


async def test_a_broker_that_is_not_there_is_an_operators_error_in_time() -> None:
    began_s = time.monotonic()
    with pytest.raises(OperatorError, match=r"Cannot reach NATS at nats://127\.0\.0\.1"):
        await Bus.connect(f"nats://me:secret@127.0.0.1:{free_port()}", "test", connect_timeout_s=0.3)
    assert time.monotonic() - began_s < 1.0


async def test_p12_a_connection_waits_for_a_broker_that_starts_later(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.kill9()
    refused: list[Exception] = []
    buses: list[Bus] = []

    async def remember(_: Bus, error: Exception) -> None:
        refused.append(error)

    async def connect() -> None:
        buses.append(await Bus.connect(broker.url, "early", connect_timeout_s=5.0))

    monkeypatch.setattr(Bus, "_on_error", remember)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connect)
        await eventually(lambda: len(refused) == 2)
        broker.start()
    await buses[0].barrier()
    await buses[0].close()


class TestABrokerThatDies:
    """Each with a broker of its own."""

    @pytest.fixture
    def quick_watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connection, "_WATCH_PERIOD_S", 0.1)
        monkeypatch.setattr(connection, "_WATCH_GRACE_S", 0.1)

    async def test_subscriptions_and_callbacks_come_back_with_it(self, broker: NatsServer) -> None:
        heard, lost, back = Heard(), [0], [0]
        async with await Bus.connect(broker.url, "test") as bus:
            await bus.subscribe("again", heard)
            bus.on_disconnect(lambda: lost.append(1))
            bus.on_reconnect(lambda: back.append(1))
            bus.on_reconnect(lambda: back.append(2))()  # taken back
            broker.kill9()
            await eventually(lambda: not bus.connected)
            broker.start()
            await bus.wait_connected(1.0)
            await bus.publish("again", b"")
            await eventually(lambda: len(heard.messages) == 1)
        assert (lost, back) == ([0, 1], [0, 1])

    async def test_nothing_is_sent_late(self, broker: NatsServer) -> None:
        heard = Heard()
        async with await Bus.connect(broker.url, "test") as bus:
            await bus.subscribe("now", heard)
            await bus.barrier()
            broker.kill9()
            await bus.publish("now", b"stale")  # not yet noticed: it waits for the socket
            await eventually(lambda: not bus.connected)
            with pytest.raises(Disconnected):
                await bus.publish("now", b"refused")
            with pytest.raises(Disconnected):
                bus.post("now", b"refused")
            broker.start()
            await bus.wait_connected(1.0)
            await bus.publish("now", b"fresh")
            await bus.barrier()
        assert heard.data == [b"fresh"]

    async def test_open_requests_and_barriers_end_with_it(self, broker: NatsServer) -> None:
        ended: list[str] = []

        async def ends(bus: Bus, kind: str) -> None:
            with pytest.raises(Disconnected):
                await (bus.request("silent", b"", 30.0) if kind == "request" else bus.barrier(30.0))
            ended.append(kind)

        async with await Bus.connect(broker.url, "test") as bus:
            await bus.subscribe("silent", Heard())
            await bus.barrier()
            broker.pause()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ends, bus, "request")
                tasks.start_soon(ends, bus, "barrier")
                await eventually(lambda: len(bus._calls._open) == 1 and len(bus._pongs) == 1)
                broker.kill9()
        assert sorted(ended) == ["barrier", "request"]

    async def test_who_waits_for_a_full_socket_is_cancelled_at_the_first_word(self, broker: NatsServer) -> None:
        async with await Bus.connect(broker.url, "test") as bus:
            broker.pause()

            async def pour() -> None:
                for _ in range(100):
                    await bus.publish("poured", bytes(MESSAGE_BYTES_MAX // 2))

            pouring = asyncio.create_task(pour())
            await anyio.sleep(0.3)
            assert not pouring.done(), "the socket is full"
            pouring.cancel()
            done, _ = await asyncio.wait({pouring}, timeout=1.0)
            broker.kill9()
            assert done == {pouring}
            assert pouring.cancelled()

    @pytest.mark.usefixtures("quick_watch")
    async def test_p3_a_connection_that_falls_silent_is_replaced(self, broker: NatsServer) -> None:
        async with await Bus.connect(broker.url, "test") as bus:
            await bus.barrier()
            broker.pause()
            await eventually(lambda: not bus.connected)
            broker.resume()
            await bus.wait_connected(5.0)
            await bus.barrier()
