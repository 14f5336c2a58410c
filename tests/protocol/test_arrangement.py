"""Roles of a worker with both loops: what is open when, and whose the blocks are on the way from one to another."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocol.arrangement import Moves, Now, Role, Sizes, moves, takes

SIZES = Sizes(blocks=1000, largest=100, slots=4, beside=2)
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


def now(prefill: bool = False, busy: int = 0, decode: bool = False, idle: bool = True, withheld: int = 0) -> Now:
    return Now(prefill=prefill, busy=busy, decode=decode, idle=idle, withheld=withheld)


def test_a_role_runs_its_own_loop_and_both_runs_both() -> None:
    assert [(role, loop) for role in ROLES for loop in ("prefill", "decode") if takes(role, loop)] == [
        ("prefill", "prefill"),
        ("decode", "decode"),
        ("both", "prefill"),
        ("both", "decode"),
    ]


@pytest.mark.parametrize(
    ("role", "here", "expected"),
    [
        # From the start, which owes nothing and has nothing under way.
        ("prefill", now(), Moves(prefill=True, slots=4, decode=False, withhold=400, done=True)),
        ("decode", now(), Moves(prefill=False, slots=2, decode=True, withhold=0, done=True)),
        ("both", now(), Moves(prefill=False, slots=2, decode=True, withhold=200, done=False)),
        ("both", now(decode=True, withheld=200), Moves(prefill=True, slots=2, decode=True, withhold=200, done=True)),
        # Prefill ends: what its last prompts hold is withheld, and given back as they end.
        ("decode", now(busy=3), Moves(prefill=False, slots=2, decode=True, withhold=300, done=False)),
        ("decode", now(busy=1, decode=True, withheld=300), Moves(prefill=False, slots=2, decode=True, withhold=100, done=False)),
        ("decode", now(decode=True, withheld=100), Moves(prefill=False, slots=2, decode=True, withhold=0, done=True)),
        # Decode ends: prefill opens a few slots when their blocks are there, and all when no reply holds any.
        ("prefill", now(idle=False, withheld=100), Moves(prefill=False, slots=2, decode=False, withhold=200, done=False)),
        ("prefill", now(idle=False, withheld=200), Moves(prefill=True, slots=2, decode=False, withhold=200, done=False)),
        ("prefill", now(prefill=True, withheld=200), Moves(prefill=True, slots=4, decode=False, withhold=400, done=True)),
        # One loop goes on while the other begins beside it.
        ("both", now(prefill=True, busy=4), Moves(prefill=True, slots=2, decode=True, withhold=400, done=False)),
        ("both", now(prefill=True, busy=2, decode=True, idle=False, withheld=200),
         Moves(prefill=True, slots=2, decode=True, withhold=200, done=True)),
    ],
)  # fmt: skip
def test_what_is_to_be_next(role: Role, here: Now, expected: Moves) -> None:
    assert moves(role, here, SIZES) == expected


def test_a_prefill_that_would_need_more_than_there_is_is_given_all() -> None:
    small = Sizes(blocks=150, largest=100, slots=4, beside=2)
    assert moves("both", now(), small).withhold == 150


class Worker:
    """A worker that does what it is told, whose requests end one at a time."""

    def __init__(self, role: Role, busy: int, held: int) -> None:
        self.role, self.busy, self.held = role, busy, held
        self.prefill, self.decode = takes(role, "prefill"), takes(role, "decode")
        self.withheld = 0

    def move(self) -> bool:
        here = Now(
            prefill=self.prefill, busy=self.busy, decode=self.decode, idle=self.held == 0, withheld=self.withheld
        )
        wanted = moves(self.role, here, SIZES)
        self.withheld = min(wanted.withhold, SIZES.blocks - self.held)
        self.prefill, self.decode = wanted.prefill, wanted.decode
        return wanted.done

    def turn(self, role: Role) -> None:
        self.role = role
        self.prefill = self.prefill and takes(role, "prefill")
        self.decode = self.decode and takes(role, "decode")


@given(st.sampled_from(list(itertools.permutations(ROLES, 2))), st.integers(0, 4), st.integers(0, 7), st.data())
def test_every_turn_comes_to_its_end_and_no_block_is_promised_twice(
    turn: tuple[Role, Role], busy: int, hundreds: int, data: st.DataObject
) -> None:
    before, after = turn
    beside = 4 if before == "prefill" else 2
    worker = Worker(
        before,
        min(busy, beside) if takes(before, "prefill") else 0,
        100 * hundreds if takes(before, "decode") else 0,
    )
    worker.withheld = min(worker.busy * 100, SIZES.blocks - worker.held) if before == "both" else 0
    worker.turn(after)
    for _ in range(40):
        done = worker.move()
        if worker.decode:
            assert worker.busy * SIZES.largest <= worker.withheld or worker.held > 0
            assert worker.held + worker.withheld <= SIZES.blocks
        if done:
            break
        if data.draw(st.booleans()) and worker.busy:
            worker.busy -= 1
        elif worker.held:
            worker.held -= 100
        else:
            worker.busy = max(0, worker.busy - 1)
    assert worker.move()
    assert (worker.prefill, worker.decode) == (takes(after, "prefill"), takes(after, "decode"))
