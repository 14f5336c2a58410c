"""What seeds have found, as the shortest stories that show it."""

import msgspec

from tests.simulation.plan import Fault, Kind, Order, Plan, draw
from tests.simulation.world import Outcome, simulate_plan

FLEET = {"prefill": 2, "decode": 1, "gateways": 1}


def order(number: int, at_s: float, creator: str = "c0", max_tokens: int = 5) -> Order:
    """One request that is in no hurry."""
    return Order(
        number=number,
        id=f"r{number:02d}",
        at_s=at_s,
        klass="interactive",
        creator=creator,
        question="Which river?",
        max_tokens=max_tokens,
        timeout_s=20.0,
    )


def fault(kind: Kind, at_s: float, of: tuple[str, int], for_s: float) -> Fault:
    """One thing that goes wrong."""
    return Fault(at_s=at_s, kind=kind, of=of, for_s=for_s, share=0.99)


def live(orders: list[Order], faults: list[Fault], **fleet: int) -> Outcome:
    """A world of one slot a prefill worker and room enough, with these requests and these faults."""
    drawn: Plan = draw(2)
    prefill = msgspec.structs.replace(drawn.config.prefill, slots=1)
    simulated = msgspec.structs.replace(drawn.config.simulated, kv_blocks=200, step_s=0.02)
    config = msgspec.structs.replace(drawn.config, prefill=prefill, simulated=simulated)
    return simulate_plan(
        msgspec.structs.replace(drawn, config=config, orders=orders, faults=faults, **{**FLEET, **fleet})
    )


def test_a_worker_whose_engine_has_died_takes_nothing_more() -> None:
    orders = [order(number, 0.1 + 0.02 * number, f"c{number}") for number in range(10)]
    for role in ("prefill", "decode"):
        outcome = live(orders, [fault("engine_dies", 0.15, (role, 0), 0.3)], prefill=1)
        assert not outcome.broken
        assert outcome.whole == 10


def test_a_gateway_that_comes_back_after_it_was_given_up_is_served_again() -> None:
    early = [order(number, 0.1, max_tokens=40) for number in range(4)]
    later = [order(number, 1.0 + 0.05 * number) for number in range(4, 40)]
    # Its connection breaks, too: what it publishes the moment it has another comes before its next presence.
    outcome = live(
        [*early, *later], [fault("freeze", 0.3, ("gateway", 0), 3.0), fault("cut", 0.5, ("gateway", 0), 1.0)]
    )
    assert not outcome.broken
    assert outcome.whole >= 36


def test_the_backlog_of_a_dead_gateway_does_not_keep_slots_from_the_living() -> None:
    dead = [msgspec.structs.replace(order(number, 0.1), gateway=1) for number in range(20)]
    orders = [*dead, *(order(number, 0.3) for number in range(20, 30))]
    outcome = live(orders, [fault("kill", 0.12, ("gateway", 1), 1.0)], gateways=2)
    assert not outcome.broken
    assert (outcome.whole, outcome.left) == (10, 20)
    assert outcome.virtual_s < 9.0, "two seconds each would be twenty"
