"""The balancer: what it measures, whom it moves, and that it comes to rest, in virtual time."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.protocol.arrangement import Role, takes
from pipeline.protocol.balancer import (
    Balancer,
    Member,
    Part,
    Pressure,
    Rules,
    Turn,
    arrangement,
    bottleneck,
    choose,
    left_to_both,
    pressure,
)

RULES = Rules()


def member(
    worker: str,
    role: Role,
    busy: int = 0,
    used: int = 0,
    waiting: int = 0,
    built_for: Role = "both",
    reads_ratio: float | None = None,
) -> Member:
    """4 slots and 100 blocks, where it has any. Its engine reads for as much of its time as it has busy slots, or as is said, and
    it is as full as its blocks are, or as asks wait.
    """
    slots, blocks = 4 * takes(role, "prefill"), 100 * takes(role, "decode")
    return Member(
        worker=worker,
        role=role,
        built_for=built_for,
        slots=slots,
        slots_free=slots - busy,
        reads_ratio=busy / 4 if reads_ratio is None else reads_ratio,
        blocks=blocks,
        blocks_free=blocks - used,
        full_ratio=(1.0 if waiting else used / 100) if blocks else 0.0,
    )


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([], Pressure(0.0, 0.0)),
        ([member("p", "prefill", busy=4), member("d", "decode", used=50)], Pressure(1.0, 0.5)),
        (
            [member("p", "prefill", busy=4, reads_ratio=0.25), member("d", "decode", used=50, waiting=3)],
            Pressure(0.25, 1.0),
        ),
        ([member("p", "prefill", busy=1, reads_ratio=1.0), member("d", "decode")], Pressure(1.0, 0.0)),
        ([member("p", "prefill", busy=1), member("b", "both", busy=3, used=50)], Pressure(0.5, 0.5)),
    ],
)
def test_prefill_is_pressed_while_engines_read_and_decode_while_it_is_full(
    members: list[Member], expected: Pressure
) -> None:
    assert pressure(members) == expected


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (0.9, 0.3, "prefill"),
        (0.3, 0.9, "decode"),
        (0.9, 0.9, None),
        (0.7, 0.9, None),
        (0.8, 0.1, None),
        (0.1, 0.1, None),
    ],
)
def test_a_part_is_the_bottleneck_only_where_the_other_has_room(
    prefill: float, decode: float, expected: Part | None
) -> None:
    assert bottleneck(Pressure(prefill, decode), RULES, [member("p", "prefill"), member("d", "decode")]) == expected


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (["prefill", "decode"], None),
        (["both", "both"], None),
        (["prefill", "both"], "decode"),
        (["both", "decode", "decode"], "prefill"),
        (["prefill", "both", "decode"], None),
        ([], None),
    ],
)
def test_who_does_all_of_one_part_and_some_of_the_other_is_helped_where_the_fleet_is_full(
    roles: list[Role], expected: Part | None
) -> None:
    members = [member(f"w{number}", role) for number, role in enumerate(roles)]
    assert left_to_both(arrangement(members)) == expected
    assert bottleneck(Pressure(0.9, 0.9), RULES, members) == expected
    assert bottleneck(Pressure(0.7, 0.7), RULES, members) is None
    if expected == "decode":
        assert bottleneck(Pressure(0.9, 0.7), RULES, members) is None, "its own pressure counts"


@pytest.mark.parametrize(
    ("members", "towards", "expected"),
    [
        # Who does nothing of it yet helps first, the one with the least to do.
        (
            [member("a", "prefill", busy=2), member("b", "prefill", busy=1), member("c", "both")],
            "decode",
            Turn("b", "both", "decode"),
        ),
        ([member("a", "decode", used=9), member("b", "decode", used=8)], "prefill", Turn("b", "both", "prefill")),
        # Then those that do both do it alone, but for the last of the other part.
        ([member("a", "both"), member("b", "both", busy=1)], "decode", Turn("a", "decode", "decode")),
        ([member("a", "both"), member("b", "both", used=1)], "prefill", Turn("a", "prefill", "prefill")),
        ([member("a", "both"), member("b", "decode")], "decode", None),
        # Engines that were built for one role stay what they are.
        ([member("a", "prefill", built_for="prefill"), member("b", "decode", built_for="decode")], "decode", None),
        ([member("a", "decode"), member("b", "decode")], "decode", None),
    ],
)
def test_who_takes_a_step(members: list[Member], towards: Part, expected: Turn | None) -> None:
    assert choose(members, towards, RULES) == expected


def test_a_bottleneck_has_to_last_and_the_fleet_is_left_alone_after_a_step() -> None:
    made = Balancer(RULES)
    pressed = [member("a", "prefill"), member("b", "prefill"), member("d", "decode", waiting=2)]
    calm = [member("a", "prefill"), member("b", "prefill"), member("d", "decode")]
    assert made.step(0.0, pressed) is None
    assert made.step(2.0, calm) is None
    assert made.step(3.0, pressed) is None, "patience begins anew"
    assert made.step(6.0, pressed) == Turn("a", "both", "decode")
    assert made.step(15.9, pressed) is None
    assert made.step(16.0, pressed) == Turn("a", "both", "decode")


class Fluid:
    """A fleet as water: each part serves at the rate of those who do it, and what is not served waits."""

    def __init__(self, roles: dict[str, Role]) -> None:
        self.roles = roles
        self.turns: list[Turn] = []

    def capacity(self, part: Part) -> float:
        """Workers for this part; one that does both does half of each."""
        return sum(0.5 if role == "both" else 1.0 for role in self.roles.values() if takes(role, part))

    def members(self, prefill_load: float, decode_load: float) -> list[Member]:
        """`…_load`: workers' worth of work that comes."""
        prefill = prefill_load / self.capacity("prefill")
        decode = decode_load / self.capacity("decode")
        flow = min(1.0, 1.0 / max(prefill, decode, 1e-9))
        return [
            member(
                worker,
                role,
                busy=round(4 * min(1.0, prefill)) if takes(role, "prefill") else 0,
                reads_ratio=prefill * flow if takes(role, "prefill") else 0.0,
                used=round(90 * min(1.0, decode)) if takes(role, "decode") else 0,
                waiting=2 if takes(role, "decode") and decode > 1.0 else 0,
            )
            for worker, role in self.roles.items()
        ]

    def live(self, balancer: Balancer, from_s: int, until_s: int, prefill_load: float, decode_load: float) -> None:
        for now_s in range(from_s, until_s):
            turn = balancer.step(float(now_s), self.members(prefill_load, decode_load))
            if turn is not None:
                self.roles[turn.worker] = turn.role
                self.turns.append(turn)


def test_a_fleet_follows_a_load_that_turns_from_prefill_to_decode() -> None:
    fleet, balancer = Fluid({"w1": "prefill", "w2": "prefill", "w3": "prefill", "w4": "decode"}), Balancer(RULES)
    fleet.live(balancer, 0, 60, prefill_load=2.0, decode_load=0.5)
    assert fleet.turns == [], "a fleet that fits its load is left alone"
    fleet.live(balancer, 60, 200, prefill_load=0.5, decode_load=2.8)
    assert fleet.capacity("decode") >= 2.8
    assert 2 <= len(fleet.turns) <= 5
    settled = len(fleet.turns)
    fleet.live(balancer, 200, 400, prefill_load=0.5, decode_load=2.8)
    assert len(fleet.turns) == settled, "and comes to rest"


def test_a_step_that_was_taken_back_is_not_taken_again_until_it_is_forgotten() -> None:
    fleet, balancer = Fluid({"p": "prefill", "d": "decode"}), Balancer(RULES)
    fleet.live(balancer, 0, 600, prefill_load=1.0, decode_load=0.625)
    assert fleet.turns[0] == Turn("d", "both", "prefill")
    rested = len(fleet.turns)
    assert rested < 10, "each arrangement lacks one or the other"
    fleet.live(balancer, 600, 800, prefill_load=1.0, decode_load=0.625)
    assert len(fleet.turns) > rested, "the load may be another by now"


def test_it_does_not_rest_where_a_part_is_left_to_workers_for_both() -> None:
    """Two workers for both lack prefill, and decode where one of them only prefills: it rests at two for both."""
    balancer = Balancer(RULES)
    half_way = [member("p", "prefill", busy=4), member("b", "both", busy=4, waiting=1)]
    shared = [member("b", "both", busy=4, used=30), member("p", "both", busy=4, used=30)]
    split = [member("p", "prefill", busy=4), member("b", "decode", used=30)]
    assert lived(balancer, 0, split) == Turn("b", "both", "prefill")
    assert lived(balancer, 20, half_way) == Turn("p", "both", "decode")
    assert lived(balancer, 40, shared) is None, "though prefill is the bottleneck"
    assert lived(balancer, 640, shared) == Turn("b", "prefill", "prefill"), "the load may be another by now"


def lived(balancer: Balancer, from_s: int, members: list[Member]) -> Turn | None:
    """The first turn of 20 seconds."""
    turns = (balancer.step(float(now_s), members) for now_s in range(from_s, from_s + 20))
    return next((turn for turn in turns if turn is not None), None)


@example(prefill_load=1.0, decode_load=0.625, others=[])
@given(st.floats(0.0, 4.0), st.floats(0.0, 4.0), st.lists(st.sampled_from(["prefill", "decode", "both"]), max_size=4))
def test_under_any_steady_load_it_comes_to_rest_and_leaves_somebody_for_each_part(
    prefill_load: float, decode_load: float, others: list[Role]
) -> None:
    roles: dict[str, Role] = {"p": "prefill", "d": "decode"}
    roles |= {f"w{number}": role for number, role in enumerate(others)}
    fleet, balancer = Fluid(roles), Balancer(RULES)
    fleet.live(balancer, 0, 300, prefill_load, decode_load)
    assert min(fleet.capacity("prefill"), fleet.capacity("decode")) >= 0.5
    moved = len(fleet.turns)
    fleet.live(balancer, 300, 500, prefill_load, decode_load)
    assert len(fleet.turns) == moved
