"""The simulated engine of this world: it can be killed by what it reads, and of what it samples no two samplings are alike.

`SimulatedEngine` draws token `i` of a reply from the prompt and `i` alone, so that a reply spliced from two samplings would look
as if nothing had happened. Here a reply that hangs on state which dies with its worker is drawn anew for every claim. What was
drawn is kept, so that the checkers can tell whether a client's reply is of one sampling.
"""

from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import anyio

from pipeline.config import Config
from pipeline.protocol.arrangement import Role
from tests.simulation.plan import POISON
from workers.engines.port import Prefilled, Step
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.model import Job
from workers.engines.simulated.reply import Reply, Sampling, sampling_of
from workers.engines.simulated.tier import Tier
from workers.engines.simulated.words import tokenise

Drawn = tuple[list[int], str]
"""The ids and the text of a reply, or of what there is of it."""

Choices = list[Drawn]
"""One sampling: all replies to a request, mostly one."""

_POISON: Final = tokenise(POISON)[0]


def is_stateful(chat: Mapping[str, Any]) -> bool:
    """Whether a reply hangs on more than its tokens, by what samplers are and not by what the product takes them for.

    Penalties count the reply's own tokens, and a seed's stream has been used up to where it stands.
    """
    if any(chat.get(name) for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")):
        return True
    return chat.get("seed") is not None and chat.get("temperature") != 0


def drawn(seed: int, prompt: Sequence[int], sampling: Sampling, max_tokens: int) -> Choices:
    """Whole replies, from their first tokens."""
    return [_drawn(seed, prompt, sampling, max_tokens, choice) for choice in range(sampling.n)]


def _drawn(seed: int, prompt: Sequence[int], sampling: Sampling, max_tokens: int, choice: int) -> Drawn:
    reply = Reply(seed, array("I", prompt).tobytes(), (), sampling, max_tokens, choice)
    ids, text, finish = [], "", None
    while finish is None:
        token_id, new, finish = reply.next()
        ids.append(token_id)
        text += new
    return ids, text


class SimEngine(SimulatedEngine):
    """One process's engine. `samplings` are those of stateful replies, by request; `killed` is called when it reads poison."""

    def __init__(
        self, config: Config, role: Role, tier: Tier, samplings: dict[str, list[Choices]], killed: Callable[[], None]
    ) -> None:
        super().__init__(config, role, tier)
        self._samplings = samplings
        self._killed = killed

    async def prefill(
        self,
        key: str,
        token_ids: Sequence[int],
        salt: str,
        chat: Mapping[str, Any] | None = None,
        trace: Mapping[str, str] | None = None,
        begins: int = 0,
    ) -> Prefilled:
        """As the engine's. Of poison its process dies, and does nothing more."""
        if _POISON in token_ids:
            self._killed()
            await anyio.sleep_forever()
        return await super().prefill(key, token_ids, salt, chat, trace=trace, begins=begins)

    async def decode(self, key: str, token_ids: Sequence[int], *args: Any, **names: Any) -> AsyncGenerator[Step, None]:
        """As the engine's, which reads the prompt where nobody has."""
        if _POISON in token_ids:
            self._killed()
            await anyio.sleep_forever()
        steps = super().decode(key, token_ids, *args, **names)
        async with aclosing(steps):
            async for step in steps:
                yield step

    def _decode_jobs(
        self,
        key: str,
        token_ids: Sequence[int],
        salt: str,
        chat: Mapping[str, Any],
        max_tokens: int,
        delivered: Sequence[int],
    ) -> list[Job]:
        jobs = super()._decode_jobs(key, token_ids, salt, chat, max_tokens, delivered)
        if is_stateful(chat):
            # A claim is a sampling: its id stands for the state of the sampler that began with it.
            seed, sampling = int.from_bytes(key.encode(), "little"), sampling_of(chat)
            for job in jobs:
                job.reply = Reply(seed, array("I", token_ids).tobytes(), delivered, sampling, max_tokens, job.choice)
            self._samplings.setdefault(chat["id"], []).append(drawn(seed, token_ids, sampling, max_tokens))
        return jobs
