"""Whether anything is left behind when all is quiet: blocks without a request, slots that are not free, messages nobody acks."""

import re
import time
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import msgspec

from pipeline.bus.errors import BusError
from pipeline.cli import http
from pipeline.protocol import subjects
from pipeline.protocol.messages import Account, Audit, account_decoder, encode
from pipeline.protocol.subjects import CLASSES, Shard
from tests.chaos.stack import Part, Stack

QUIET_S_MAX: Final = 20.0
"""Until the last message is acked and the last grant has ended: leases and asks run for a second, a deadline's grace for 5 s."""

LOOK_S: Final = 0.1


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """What is left. `blocks` are not free although nobody may hold any; `requests` are still in REQUESTS."""

    blocks: int = 0
    slots: int = 0
    requests: int = 0
    accusations: int = 0


async def rest(stack: Stack) -> Rest:
    """Wait until nothing is left, or for `QUIET_S_MAX`; then say what is."""
    requests = await _settled(lambda: left_requests(stack))
    blocks = await _settled(lambda: _held_blocks(stack))
    slots = await _settled(lambda: _slots_taken(stack))
    return Rest(blocks=blocks, slots=slots, requests=requests, accusations=await _accusations(stack))


async def left_requests(stack: Stack) -> int:
    """Messages in the REQUESTS streams, leased ones included."""
    total = 0
    for klass in CLASSES:
        info = msgspec.json.decode(await stack.bus.request(f"$JS.API.STREAM.INFO.{Shard(klass, 0).stream}", b"", 2.0))
        total += int(info["state"]["messages"])
    return total


async def audit(stack: Stack, decode: str) -> Account:
    """The books of one decode worker."""
    return account_decoder.decode(await stack.bus.request(subjects.credit(decode), encode(Audit()), 2.0))


def held(account: Account) -> int:
    """Blocks that are not free, or that books which do not add up have lost."""
    ended = account.released + account.returned + account.expired
    whole = account.granted == ended + account.granted_now + account.consumed_now
    if not whole or account.preemptions:
        return account.blocks
    return max(account.blocks - account.free, account.engine_blocks)


async def _held_blocks(stack: Stack) -> int:
    return sum([held(await audit(stack, worker.name)) for worker in stack.ledgers()])


async def _slots_taken(stack: Stack) -> int:
    return stack.slots_taken()


async def _settled(count: Callable[[], Awaitable[int]]) -> int:
    """What is counted in the end. Nobody answers while a broker comes back: that is asked again."""
    until_s, left = time.monotonic() + QUIET_S_MAX, -1
    while left != 0 and time.monotonic() < until_s:
        try:
            left = await count()
        except BusError:
            left = -1
        if left:
            await anyio.sleep(LOOK_S)
    if left < 0:
        raise TimeoutError(f"nobody could be asked what is left, within {QUIET_S_MAX:g} s")
    return left


async def _accusations(stack: Stack) -> int:
    """How often the gateways, in their present lives, have taken a worker for dead."""
    return sum([await _accused(gateway) for gateway in stack.gateways()])


async def _accused(gateway: Part) -> int:
    _, body = await http.get(f"{gateway.url}/metrics", 5.0)
    found = re.search(rb"^headrace_accusations_total (\d+)", body, re.MULTILINE)
    return int(found[1]) if found else 0
