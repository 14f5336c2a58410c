"""What goes wrong: each kind of fault as one function, struck at its time and mended after it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final

from pipeline.bus.errors import BusError
from pipeline.limits import RECEIVER_SILENT_MAX_S
from pipeline.protocol import subjects
from pipeline.protocol.arrangement import Role
from pipeline.protocol.control import Order, standing_decoder
from pipeline.protocol.messages import encode
from tests.simulation.broker import CLEAR, Weather
from tests.simulation.fleet import Running
from tests.simulation.plan import Fault
from tests.simulation.wire import RECONNECT_WAIT_S

if TYPE_CHECKING:
    from tests.simulation.world import World


async def strike(world: "World", fault: Fault, begun_s: float) -> None:
    """Wait for its time, and let it happen."""
    await asyncio.sleep(max(0.0, begun_s + fault.at_s - world.loop.now_s))
    if await KINDS[fault.kind](world, fault):
        world.struck[fault.kind] += 1


SILENT_S: Final = RECEIVER_SILENT_MAX_S - 0.3
"""A gateway that says nothing for so long may be taken for gone: its last presence may be a period old."""


BACK_WITHIN_S: Final = 2 * RECONNECT_WAIT_S
"""A process whose connection broke has another by then, if the broker is there."""


def _silent(world: "World", running: Running, for_s: float) -> None:
    if for_s > SILENT_S:
        world.checks.away.add(running)


def _tell(world: "World", who: object, verb: str, detail: str = "") -> None:
    world.story.tell(str(who), "⚡", verb, "", detail)


async def _kill(world: "World", fault: Fault) -> bool:
    running = world.fleet.kill(fault.of)
    if running is None:
        return False
    _tell(world, running, "killed", f"back in {fault.for_s:.3f} s")
    await _back(world, fault)
    return True


async def _back(world: "World", fault: Fault) -> None:
    """Whoever supervises it starts it anew, once."""
    await asyncio.sleep(fault.for_s)
    if world.fleet.alive(fault.of) is None:
        running = world.fleet.start(fault.of)
        _tell(world, running, "starts")


async def _freeze(world: "World", fault: Fault) -> bool:
    running = world.fleet.alive(fault.of)
    if running is None or running.process.frozen is not None:
        return False
    _tell(world, running, "frozen", f"for {fault.for_s:.3f} s")
    _silent(world, running, fault.for_s)
    world.loop.freeze(running.process)
    await asyncio.sleep(fault.for_s)
    if not running.process.dead:
        _tell(world, running, "thaws")
        world.checks.ill(running.process)
        world.loop.thaw(running.process)
    return True


async def _drain(world: "World", fault: Fault) -> bool:
    running = world.fleet.alive(fault.of)
    if running is None or running.draining or running.loops is None:
        return False
    _tell(world, running, "drains")
    task = world.loop.create_task(world.fleet.drain(fault.of, running), context=running.process.context)
    await asyncio.wait({task})
    await _back(world, fault)
    return True


async def _cut(world: "World", fault: Fault) -> bool:
    running = world.fleet.alive(fault.of)
    if running is None:
        return False
    _tell(world, running, "cut", "its connection breaks")
    world.checks.ill(running.process, BACK_WITHIN_S)
    for link in world.broker.links_of(running.process):
        world.broker.cut(link)
    return True


async def _stall(world: "World", fault: Fault) -> bool:
    running = world.fleet.alive(fault.of)
    if running is None:
        return False
    _tell(world, running, "stalled", f"nothing passes its connection for {fault.for_s:.3f} s")
    _silent(world, running, fault.for_s)
    for link in world.broker.links_of(running.process):
        link.stalled_until_s = world.loop.now_s + fault.for_s
    world.checks.ill(running.process, fault.for_s)
    await asyncio.sleep(fault.for_s)
    return True


async def _broker(world: "World", fault: Fault) -> bool:
    if not world.broker.up:
        return False
    _tell(world, "broker", "killed", f"back in {fault.for_s:.3f} s")
    world.broker.kill()
    world.checks.ill(None, fault.for_s + BACK_WITHIN_S)
    await asyncio.sleep(fault.for_s)
    _tell(world, "broker", "back")
    world.broker.restart()
    return True


async def _weather(world: "World", fault: Fault) -> bool:
    if world.broker.weather is not CLEAR:
        return False
    share = 0.02 + 0.2 * fault.share
    weather = Weather(lost=share * 0.5, repeated=share * 0.5, late=share)
    _tell(world, "weather", "rough", f"{weather.lost:.0%} lost, {weather.late:.0%} late, for {fault.for_s:.3f} s")
    world.broker.weather = weather
    world.checks.ill(None, fault.for_s)
    await asyncio.sleep(fault.for_s)
    _tell(world, "weather", "clear")
    world.broker.weather = CLEAR
    return True


async def _engine_fails(world: "World", fault: Fault) -> bool:
    running = world.fleet.alive(fault.of)
    if running is None or running.engine is None:
        return False
    count = 1 + int(3 * fault.share)
    _tell(world, running, "fails", f"its engine, {count} times")
    prefills = running.role == "prefill" or (running.role == "both" and count % 2)
    running.engine.fail_next("prefill" if prefills else "decode", count)
    world.checks.ends.caused["engine_fails"] += count
    return True


async def _engine_dies(world: "World", fault: Fault) -> bool:
    """The worker notices within its health period, and ends; its supervisor starts it anew."""
    running = world.fleet.alive(fault.of)
    if running is None or running.engine is None:
        return False
    _tell(world, running, "engine dies")
    running.engine.die()
    await asyncio.sleep(0.5 * fault.share)
    if world.fleet.alive(fault.of) is running:
        return await _kill(world, fault)
    return True


async def _engine_stalls(world: "World", fault: Fault) -> bool:
    running = world.fleet.alive(fault.of)
    if running is None or running.engine is None:
        return False
    _tell(world, running, "slow", f"its engine stands still for {fault.for_s:.3f} s")
    running.engine.pause()
    await asyncio.sleep(fault.for_s)
    running.engine.resume()
    return True


async def _cache_lost(world: "World", fault: Fault) -> bool:
    del fault
    _tell(world, "lmcache", "cleared")
    world.fleet.tier.clear()
    return True


async def _absence(world: "World", fault: Fault) -> bool:
    """Every worker that may prefill goes, and comes back when all who were in a hurry have stopped waiting."""
    everyone = [("prefill", number) for number in range(world.plan.prefill)]
    everyone += [("both", number) for number in range(world.plan.both)]
    for of in everyone:
        world.fleet.kill(of)
    world.checks.ends.deserted = True
    _tell(world, "prefill", "absent", f"all of them, for {fault.for_s:.3f} s")
    await asyncio.sleep(fault.for_s)
    for of in everyone:
        if world.fleet.alive(of) is None:
            _tell(world, world.fleet.start(of), "starts")
    return True


async def _turn(world: "World", fault: Fault) -> bool:
    """An operator orders a worker to take another role, and later to be for both again."""
    running = world.fleet.alive(fault.of)
    if running is None or running.loops is None:
        return False
    role = _ROLES[int(fault.share * len(_ROLES))]
    _tell(world, running, "ordered", f"to be {role}, for {fault.for_s:.3f} s")
    await _order(world, fault.of, running, role)
    await asyncio.sleep(fault.for_s)
    await _order(world, fault.of, running, "both")
    return True


_ROLES: Final[tuple[Role, ...]] = ("prefill", "decode", "both")

ORDERS_MAX: Final = 300
"""A turn ends within the bound of a drain: by then an order has been obeyed, or its worker has gone."""

ORDER_WAIT_S: Final = 0.1


async def _order(world: "World", of: tuple[str, int], running: Running, role: Role) -> None:
    """As `headrace role` gives it: said again until it is obeyed, as long as this life of the worker lasts."""
    operator = world.fleet.running["operator", 0]
    for _ in range(ORDERS_MAX):
        if world.fleet.alive(of) is not running or running.draining:
            return
        asked = world.loop.create_task(_ask(operator, running, Order("turn", role)), context=operator.process.context)
        if await asked:
            return
        await asyncio.sleep(ORDER_WAIT_S)
    world.checks.wrong(f"{running} has not obeyed the order to be {role}")


async def _ask(operator: Running, worker: Running, order: Order) -> bool:
    """Whether it is obeyed. What is lost on the way, either way, is asked once more."""
    if operator.bus is None:
        return False
    try:
        answer = await operator.bus.request(subjects.control(worker.process.name), encode(order), 5.0)
    except BusError:
        return False
    return not standing_decoder.decode(answer).refused


KINDS: Final[Mapping[str, Callable[["World", Fault], Awaitable[bool]]]] = {
    "kill": _kill,
    "freeze": _freeze,
    "drain": _drain,
    "cut": _cut,
    "stall": _stall,
    "broker": _broker,
    "weather": _weather,
    "engine_fails": _engine_fails,
    "engine_dies": _engine_dies,
    "engine_stalls": _engine_stalls,
    "cache_lost": _cache_lost,
    "absence": _absence,
    "turn": _turn,
}
