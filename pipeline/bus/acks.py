"""What a holder says about a delivered message, on the `$JS.ACK…` subject that came with it.

Any connection may say it, so the ack travels with the work. The confirmed forms are requests. The consumer's answer shows that
the broker lives and has heard us, and no more: it answers a holder whose lease has passed to another just the same. They
raise `Unanswered`, `NoResponders` (the consumer is not up, as right after a restart, or gone) and `Disconnected`; the
unconfirmed forms only `Disconnected`.
"""

from typing import Final

import msgspec

from pipeline.bus.connection import Bus

ACK_TIMEOUT_S: Final = 1.0


async def ack(bus: Bus, subject: str, timeout_s: float = ACK_TIMEOUT_S) -> None:
    """Done for good; returns when the broker has removed the message."""
    await bus.request(subject, b"+ACK", timeout_s)


async def ack_unconfirmed(bus: Bus, subject: str) -> None:
    """Done for good. Where this is lost, the message comes back."""
    await bus.publish(subject, b"+ACK")


async def nak(bus: Bus, subject: str, delay_s: float | None = None) -> None:
    """Give it back: to be delivered at once, or after `delay_s`."""
    wait = b"" if delay_s is None else b" " + msgspec.json.encode({"delay": int(delay_s * 1e9)})
    await bus.publish(subject, b"-NAK" + wait)


async def in_progress(bus: Bus, subject: str, timeout_s: float = ACK_TIMEOUT_S) -> None:
    """Renew the lease: it ends one `ack_wait` after the broker has heard this."""
    await bus.request(subject, b"+WPI", timeout_s)


async def in_progress_unconfirmed(bus: Bus, subject: str) -> None:
    """Renew the lease without knowing whether the broker has heard it."""
    await bus.publish(subject, b"+WPI")


async def term(bus: Bus, subject: str, reason: str = "") -> None:
    """Never deliver it again. `reason` appears in the broker's advisory."""
    await bus.publish(subject, f"+TERM {reason}".rstrip().encode())
