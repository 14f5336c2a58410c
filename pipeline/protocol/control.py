"""What an operator may order of a running worker, and what the worker makes of it.

    serving ◄── resume / pause ──► paused
       └──────────── drain ──────────┴──► draining ─► the process leaves

An order is a request on `control.worker.<id>`, answered with how the worker stands then. What was not obeyed says why, and has
changed nothing. An order that is there already is obeyed: whoever repeats one, unsure whether it was heard, does no harm.
"""

from typing import Final, Literal

import msgspec

Action = Literal["look", "pause", "resume", "drain"]
State = Literal["serving", "paused", "draining"]

AFTER: Final[dict[Action, State]] = {"pause": "paused", "resume": "serving", "drain": "draining"}


class Order(msgspec.Struct, frozen=True, tag="order"):
    """Do this; `look` only asks how the worker stands."""

    action: Action
    v: Literal[1] = 1


class Standing(msgspec.Struct, frozen=True, kw_only=True, tag="standing"):
    """How a worker stands: `under_way` requests are worked on. `refused` says why an order was not obeyed."""

    v: Literal[1] = 1
    worker: str
    role: str
    state: State
    under_way: int = 0
    refused: str = ""


def obey(state: State, action: Action) -> tuple[State, str]:
    """The state after an order, and why it was refused, which is empty where it was not."""
    if action == "look":
        return state, ""
    if state == "draining" and action != "drain":
        return state, "it is draining, and leaves when its requests have ended"
    return AFTER[action], ""


order_decoder: Final = msgspec.msgpack.Decoder(Order)
standing_decoder: Final = msgspec.msgpack.Decoder(Standing)
