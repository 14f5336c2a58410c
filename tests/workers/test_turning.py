"""A worker that turns from one role to another, while it also gets too much, is told to drain, or has its settings changed."""

from collections.abc import Hashable

import anyio
import pytest

from pipeline.bus import acks
from pipeline.bus.connection import Bus
from pipeline.limits import LEASE_SILENT_MAX_S
from pipeline.protocol import subjects
from pipeline.protocol.control import Order, standing_decoder
from pipeline.protocol.messages import encode
from tests.nats_server import NatsServer
from tests.workers.fleet import fleet, until
from tests.workers.test_both import all_whole, config, many, turn, turned

pytestmark = pytest.mark.anyio


async def test_what_a_reopened_prefill_loop_has_no_slot_for_goes_back_at_once(
    broker: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said nothing of itself while it was closed, and heard nothing back: that is no standstill of the process."""
    returned: list[str] = []
    nak = acks.nak

    async def counted(bus: Bus, subject: str, delay_s: float | None = None) -> None:
        returned.append(subject)
        await nak(bus, subject, delay_s)

    monkeypatch.setattr(acks, "nak", counted)
    async with fleet(config(broker.url, prefill_overhead_s=0.03), prefill=0, decode=1, both=1) as made:
        await turned(made, "both-1", "decode")
        await anyio.sleep(1.5 * LEASE_SILENT_MAX_S)
        asked = await many(made, 30, max_tokens=2)
        slots, too_many = made.prefill("both-1").slots, list[Hashable]()
        surplus = slots.surplus

        def noted(now_s: float) -> list[Hashable]:
            late = surplus(now_s)
            too_many.extend(late)
            return late

        monkeypatch.setattr(slots, "surplus", noted)
        await turned(made, "both-1", "prefill")
        await all_whole(asked)
        assert too_many
        assert len(returned) == len(too_many)


async def test_a_worker_that_is_told_to_drain_while_it_turns_opens_nothing_more(broker: NatsServer) -> None:
    slow = config(broker.url, kv_blocks=160, step_s=0.002)
    async with fleet(slow, prefill=1, decode=0, both=1) as made, anyio.create_task_group() as tasks:
        await turned(made, "both-1", "decode")
        asked = await many(made, 4, max_tokens=700)
        await until(lambda: made.decode("both-1").under_way == 4)
        await turn(made, "both-1", "prefill")
        assert made.workers["both-1"].loops.turning, "there is no room for prefills yet"
        made.workers["both-1"].leave(tasks)
        opened: list[bool] = []
        while not made.workers["both-1"].scope.cancel_called:
            opened.append(made.prefill("both-1").slots.open)
            await anyio.sleep(0.005)
        assert not any(opened)
        await all_whole(asked)


async def test_a_paused_worker_resumes_also_while_it_follows_a_changed_setting(broker: NatsServer) -> None:
    async with fleet(config(broker.url), prefill=0, decode=0, both=1) as made:
        loops, at = made.workers["both-1"].loops, subjects.control("both-1")
        await made.bus.request(at, encode(Order("pause")), 5.0)
        loops.turning = True  # as `apply` leaves it until blocks have come back
        standing = standing_decoder.decode(await made.bus.request(at, encode(Order("resume")), 5.0))
        assert (standing.refused, loops.paused) == ("", False)


async def test_what_waits_for_a_decode_worker_that_is_not_there_does_not_hold_up_a_drain(broker: NatsServer) -> None:
    """It would wait for the bound of the drain, while others could take it, or nobody: then it waits in its stream."""
    async with fleet(config(broker.url), prefill=0, decode=0, both=1) as made, anyio.create_task_group() as tasks:
        await turned(made, "both-1", "prefill")
        asked = await many(made, 3, max_tokens=2)
        await until(lambda: made.prefill("both-1").under_way == 3)
        made.workers["both-1"].leave(tasks)
        await until(lambda: made.workers["both-1"].scope.cancel_called)
        assert not any(caller.ended for caller in asked)
        await made.add("both", "both-2")
        await all_whole(asked)
