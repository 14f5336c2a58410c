"""What every prefill job of a worker shares."""

from collections.abc import Callable, Sequence

import anyio
import msgspec

from pipeline.bus.connection import Bus
from pipeline.config import Config
from pipeline.limits import UNREAD_MAX
from pipeline.protocol.asking import Grant
from pipeline.protocol.intake import Rules
from pipeline.protocol.messages import Presence
from pipeline.protocol.promptness import Promptness
from pipeline.telemetry.spans import Spans
from workers.engines.port import Engine
from workers.identity import Identity
from workers.leases import Leases
from workers.referred import Shelf
from workers.starts import Starts
from workers.visits import Visits


class Desk(msgspec.Struct, kw_only=True):
    """Its parts, and what a job asks of its worker. `config` may be replaced while jobs run.

    `weigh` is told of prompt tokens in progress, more or fewer, and `rendered` of each prompt: creator, salt, packed tokens.
    `expects` says how many tokens of a prompt (salt, token ids) the engine's own cache holds, `visits` lets prompts into the
    engine, and `silence_s` says how long a decode worker has not been heard. `leaves` says whether this one takes nothing more,
    for good: then others may do what here only waits. `suspects` lets in one request at a time that
    workers have died with. `shelf`: what they refer to.
    """

    bus: Bus
    engine: Engine
    config: Config
    me: Identity
    rules: Rules
    leases: Leases
    verdicts_at: str
    starts: Starts
    decoders: Callable[[], list[Presence]]
    living: Callable[[], set[str]]
    silence_s: Callable[[str], float]
    leaves: Callable[[], bool]
    weigh: Callable[[int], None]
    rendered: Callable[[str, str, bytes], None]
    expects: Callable[[str, Sequence[int]], int]
    visits: Visits
    suspects: anyio.Semaphore
    shelf: Shelf
    spans: Spans
    clock: Callable[[], float]
    promptness: Promptness

    def goes_direct(self, missing: int, grant: Grant | None) -> bool:
        """Whether decode reads a prompt that lacks so many tokens: few, and who decodes it has not enough to read already.

        Without a grant that may be anybody.
        """
        if missing >= self.config.requests.direct_tokens_max:
            return False
        unread = (peer.unread for peer in self.decoders() if grant is None or grant.decode == peer.id)
        return max(unread, default=0) < UNREAD_MAX
