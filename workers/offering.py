"""A handoff on its way: offered to a decode worker under one grant until that answers, or may have it without our knowing."""

from typing import Final

import anyio

from pipeline.bus.errors import BusError, NoResponders
from pipeline.limits import ACCUSE_SILENT_S, HANDOFF_PATIENCE_S, REPEAT_PERIOD_S
from pipeline.protocol import subjects
from pipeline.protocol.messages import Handoff, HandoffAnswer, encode, handoff_answer_decoder
from workers.prefill_desk import Desk

AWAY: Final = HandoffAnswer(state="refused")
"""Nobody listens there: the handoff has reached no one."""


async def offered(desk: Desk, decode: str, handoff: Handoff) -> HandoffAnswer | None:
    """What `decode` says. None where it is silent: then it may have it."""
    payload = encode(handoff)
    began_s, heard_of = desk.clock(), False
    while True:
        try:
            answer = await desk.bus.request(subjects.handoff(decode), payload, REPEAT_PERIOD_S)
            return handoff_answer_decoder.decode(answer)
        except NoResponders:
            return None if heard_of else AWAY
        except BusError:
            heard_of = True
        await anyio.sleep(REPEAT_PERIOD_S / 4)
        waited_s = desk.clock() - began_s
        if desk.silence_s(decode) > ACCUSE_SILENT_S or waited_s > HANDOFF_PATIENCE_S:
            return None
