"""A bell that one task waits for."""

import anyio
import pytest

from workers.bell import Bell

pytestmark = pytest.mark.anyio


async def test_a_ring_wakes_who_waits_and_one_that_came_before_is_kept_once() -> None:
    bell, heard = Bell(), list[bool]()

    async def wait() -> None:
        heard.append(await bell.heard(5.0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        bell.ring()
        bell.ring()
    assert heard == [True]
    bell.ring()
    assert await bell.heard(0.0)
    assert not await bell.heard(0.0)


async def test_without_a_ring_the_time_passes_and_who_is_cancelled_leaves_nothing() -> None:
    bell = Bell()
    began_s = anyio.current_time()
    assert not await bell.heard(0.02)
    assert anyio.current_time() - began_s >= 0.02
    with anyio.move_on_after(0.01):
        await bell.heard(5.0)
    bell.ring()
    assert await bell.heard(0.0)
