"""Who a worker process is."""

import msgspec

from pipeline import outside


class Identity(msgspec.Struct, frozen=True):
    """`id` is the operator's name for the worker, one subject token; `epoch` tells one life of it from the next."""

    id: str
    epoch: str


def new_identity(worker_id: str) -> Identity:
    """An identity for this life: epochs begin with the start time in milliseconds, so that they order as text."""
    return Identity(worker_id, f"{int(outside.unix_s() * 1000):013d}-{outside.token(4)}")


def new_claim(me: Identity) -> str:
    """A claim id that nobody else will make."""
    return f"{me.id}-{outside.token(8)}"
