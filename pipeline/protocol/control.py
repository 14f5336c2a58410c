"""What an operator may order of a running worker, and what the worker makes of it.

    turning ◄── turn / done ──► serving ◄── resume / pause ──► paused
       └────────── drain ──────────┴──────────── drain ──────────┴──► draining ─► the process leaves

A worker turns from one role to another (`arrangement.py`) while it serves: what it had ends where it is.

An order is a request on `control.worker.<id>`, answered with how the worker stands then. What was not obeyed says why, and has
changed nothing. An order that is there already is obeyed: whoever repeats one, unsure whether it was heard, does no harm.
"""

from typing import Final, Literal

import msgspec

from pipeline.protocol.arrangement import Role

Action = Literal["look", "pause", "resume", "drain", "turn"]
State = Literal["serving", "paused", "turning", "draining"]

AFTER: Final[dict[Action, State]] = {"pause": "paused", "resume": "serving", "drain": "draining", "turn": "turning"}


class Order(msgspec.Struct, frozen=True, tag="order"):
    """Do this; `look` only asks how the worker stands, and `turn` names the `role` that it is to take."""

    action: Action
    role: Role | None = None
    v: Literal[1] = 1


class Standing(msgspec.Struct, frozen=True, kw_only=True, tag="standing"):
    """How a worker stands: `under_way` requests are worked on. `refused` says why an order was not obeyed."""

    v: Literal[1] = 1
    worker: str
    role: Role
    state: State
    under_way: int = 0
    refused: str = ""


def obey(state: State, role: Role, built_for: Role, order: Order) -> tuple[State, str]:
    """The state after an order, and why it was refused, which is empty where it was not.

    `role` is what the worker is, or is becoming; `built_for` what its engine was started for.
    """
    action = order.action
    if action == "look" or _is_so(state, role, order):
        return state, ""
    if refused := _refusal(state, role, built_for, order):
        return state, refused
    return AFTER[action], ""


def _is_so(state: State, role: Role, order: Order) -> bool:
    """Whether there is nothing to do."""
    if order.action == "turn":
        return order.role == role and state != "draining"
    return order.action == "resume" and state == "turning"


def _refusal(state: State, role: Role, built_for: Role, order: Order) -> str:
    if order.action == "drain":
        return ""
    if state == "draining":
        return "it is draining, and leaves when its requests have ended"
    if state == "turning":
        return f"it is still becoming {role}: wait until it has"
    return _why_no_turn(state, built_for, order.role) if order.action == "turn" else ""


def _why_no_turn(state: State, built_for: Role, role: Role | None) -> str:
    if role is None:
        return "the order names no role"
    if built_for != "both":
        return f"its engine was started for {built_for} alone: start one with `headrace worker both`"
    return "it is paused: resume it first" if state == "paused" else ""


order_decoder: Final = msgspec.msgpack.Decoder(Order)
standing_decoder: Final = msgspec.msgpack.Decoder(Standing)
