"""The loops of one worker process over its one engine: which of them are open, and how the worker turns from one role to another.

A worker whose engine was started for one role has that role's loop. One whose engine was started for both has both loops for all
of its life; a closed one takes nothing and says nothing of itself. What is to be open when is `pipeline.protocol.arrangement`.
"""

from collections.abc import Callable
from typing import Final

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from msgspec.structs import replace

from pipeline import outside
from pipeline.bus.connection import Bus
from pipeline.bus.presence import Announcer
from pipeline.config import Config
from pipeline.errors import OperatorError
from pipeline.limits import DRAIN_S
from pipeline.protocol.arrangement import Now, Role, Sizes, moves, takes
from pipeline.protocol.messages import Presence
from pipeline.protocol.presence import Presences
from pipeline.telemetry import logs, metrics
from workers.decode import DecodeWorker
from workers.engines.port import Engine
from workers.identity import Identity
from workers.leases import Leases
from workers.prefill import PrefillWorker
from workers.starts import Starts

Loop = PrefillWorker | DecodeWorker

TURN_PERIOD_S: Final = 0.02
"""Between two looks at a worker that turns: well under the time of a prefill."""

log: Final = logs.get("loops")


class Loops:
    """One worker's loops. `role` is what it is, or is becoming; `built_for` what its engine was started for."""

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        config: Config,
        me: Identity,
        presences: Presences,
        built_for: Role,
        leases: Leases | None = None,
        role: Role | None = None,
    ) -> None:
        """`leases`: kept elsewhere than on this event loop. `role`: another than all that its engine was started for.

        Raises `OperatorError` where an engine for both has no room for both.
        """
        self.built_for, self.role = built_for, role or built_for
        self.turning = False
        self._leaves = False
        self.settings_version: Callable[[], int] = lambda: 0
        self._bus, self._engine, self._config = bus, engine, config
        self._sizes = sizes_of(config, engine)
        if built_for == "both":
            _check_room(self._sizes)
        adapted = self._adapted(config, self._sizes.beside)
        parts = (bus, engine, adapted, me, presences, Starts(bus, me.epoch), leases)
        self.prefill = PrefillWorker(*parts) if takes(built_for, "prefill") else None
        self.decode = DecodeWorker(*parts) if takes(built_for, "decode") else None
        if self.prefill is not None and self.decode is not None:
            self.decode.beside, self.prefill.decodes = self._beside, self.decode.presence
            self.decode.read = self.prefill.has_read
            self.prefill.slots.close()
            self.decode.ledger.close()
        self._loops: list[Loop] = [loop for loop in (self.prefill, self.decode) if loop is not None]
        self._announcers: dict[Loop, Announcer] = {}
        self._tasks: TaskGroup

    # ---- what a process does with them

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with anyio.create_task_group() as self._tasks:
                for loop in self._loops:
                    self._tasks.start_soon(loop.run)
                if self.built_for == "both":
                    await self._begin_turn()
                else:
                    await self._announce(self._loops[0])
        finally:
            with anyio.CancelScope(shield=True):
                for announcer in self._announcers.values():
                    await announcer.stop()

    @property
    def ready(self) -> bool:
        """Whether what its role runs serves."""
        return bool(self._announcers) and not self.turning and all(loop.ready for loop in self.open)

    @property
    def paused(self) -> bool:
        """By an operator's order."""
        return any(loop.paused for loop in self._loops)

    @property
    def under_way(self) -> int:
        """Requests that it works on, or has promised to."""
        return sum(loop.under_way for loop in self._loops)

    @property
    def open(self) -> list[Loop]:
        """The loops that its role runs."""
        return [loop for loop in self._loops if loop in self._announcers]

    async def pause(self) -> None:
        """Take nothing new."""
        for loop in self.open:
            await loop.pause()

    async def resume(self) -> None:
        """Take requests again."""
        for loop in self.open:
            await loop.resume()

    async def drain(self) -> None:
        """Take nothing new, and let what runs finish. The caller sets the bound.

        Prefill first: what it has read may have nowhere to go but to the decode loop beside it, which would promise nothing.
        """
        self._leaves = True
        for loop in self._loops:
            await loop.drain()

    def let_go(self) -> None:
        """The bound of the drain has passed: give every request back, alive."""
        for loop in self._loops:
            loop.let_go()

    def close_spans(self) -> None:
        """Send what is left of them. Blocks."""
        for loop in self._loops:
            loop.spans.close()

    def apply(self, config: Config) -> None:
        """The configuration has changed, in what may change while we run."""
        self._config, self._sizes = config, sizes_of(config, self._engine)
        for loop in self._loops:
            loop.apply(self._adapted(config, self.prefill.slots.capacity if self.prefill else 0))
        if self.built_for == "both" and self._announcers and not self.turning:
            self.turning = True
            self._tasks.start_soon(self._turn)

    # ---- roles

    async def turn(self, role: Role) -> None:
        """Become of that role. Returns when it has begun; `turning` until all is as it is to be."""
        self.role = role
        await self._begin_turn()

    async def _begin_turn(self) -> None:
        self.turning = True
        for loop in self.open:
            if not takes(self.role, _role_of(loop)):
                self._tasks.start_soon(loop.close)
        await anyio.lowlevel.checkpoint()  # they have begun to close
        self._tasks.start_soon(self._turn)

    async def _turn(self) -> None:
        """Make the moves until the last. What has not ended by then, in the loop that ends, is given back.

        Who is told to leave meanwhile opens nothing more.
        """
        began_s, let_go = outside.monotonic_s(), False
        while not self._leaves and not await self._move():
            if not let_go and outside.monotonic_s() - began_s > DRAIN_S:
                let_go = True
                for loop in self._loops:
                    if not takes(self.role, _role_of(loop)):
                        loop.let_go()
            await anyio.sleep(TURN_PERIOD_S)
        self.turning = False
        if self._leaves:
            return
        took_s = outside.monotonic_s() - began_s
        metrics.ROLE_CHANGE_SECONDS.observe(took_s)
        log.info("turned", role=self.role, seconds=round(took_s, 3))

    async def _move(self) -> bool:
        """What can be done now. Returns whether nothing is left to do."""
        prefill, decode = self.prefill, self.decode
        assert prefill is not None
        assert decode is not None
        wanted = moves(self.role, self._now(prefill, decode), self._sizes)
        prefill.slots.resize(wanted.slots)
        decode.ledger.withhold(wanted.withhold, for_good=wanted.done)
        if wanted.decode and decode not in self._announcers:
            await self._open(decode)
        if wanted.prefill and prefill not in self._announcers:
            await self._open(prefill)
        if not takes(self.role, "decode") and decode.ledger.idle and not decode.under_way:
            await self._fall_silent(decode)
        if not takes(self.role, "prefill") and not (prefill.under_way or prefill.slots.lingers):
            await self._fall_silent(prefill)
        return wanted.done

    def _now(self, prefill: PrefillWorker, decode: DecodeWorker) -> Now:
        return Now(
            prefill=prefill.slots.open,
            # What its last pulls bring is served as well.
            busy=max(prefill.slots.busy, prefill.slots.capacity if prefill.slots.lingers else 0),
            decode=decode.ledger.open,
            idle=decode.ledger.idle and not decode.under_way,
            withheld=decode.ledger.withheld,
        )

    async def _open(self, loop: Loop) -> None:
        while not loop.ready:  # its first run has just begun
            await anyio.sleep(TURN_PERIOD_S / 4)
        if not self._leaves:
            await loop.resume()
            await self._announce(loop)

    # ---- presence

    async def _announce(self, loop: Loop) -> None:
        announcer = self._announcers[loop] = Announcer(self._bus, lambda: self._said(loop))
        await announcer.start()

    async def _fall_silent(self, loop: Loop) -> None:
        """Say once more that nothing is taken here, and then nothing."""
        if (announcer := self._announcers.pop(loop, None)) is not None:
            announcer.now()
            await announcer.stop()

    def _said(self, loop: Loop) -> Presence:
        """What is said of us in presence is what `/ready` says, too."""
        metrics.SERVING.set(self._bus.connected and any(loop.presence().takes for loop in self.open))
        return replace(
            loop.presence(),
            settings=self.settings_version(),
            serves_as=self.role,
            built_for=self.built_for,
        )

    # ---- sizes

    def _beside(self) -> int:
        """Blocks that prefills may hold in the engine, beside what the ledger has promised."""
        assert self.prefill is not None
        slots = self.prefill.slots
        return max(slots.busy, slots.capacity if slots.open or slots.lingers else 0) * self._sizes.largest

    def _adapted(self, config: Config, slots: int) -> Config:
        """As the loops read it: an engine for both has its own table, and as many prefill slots as its role has now."""
        if self.built_for != "both":
            return config
        step_tokens = config.both.max_num_batched_tokens
        prefill = replace(config.prefill, slots=slots, max_num_batched_tokens=step_tokens)
        return replace(config, prefill=prefill, decode=config.both)


def sizes_of(config: Config, engine: Engine) -> Sizes:
    """In blocks and slots, of an engine that has started."""
    info = engine.info
    return Sizes(
        blocks=info.kv_blocks,
        largest=-(-info.max_model_len // info.block_size),
        slots=min(config.prefill.slots, config.both.slots + config.both.prefill_slots),
        beside=config.both.prefill_slots,
    )


def _check_room(sizes: Sizes) -> None:
    left = sizes.blocks - sizes.beside * sizes.largest
    if left < sizes.largest:
        raise OperatorError(
            f"both.prefill_slots ({sizes.beside}) prompts of {sizes.largest} KV blocks leave {max(0, left)} of "
            f"{sizes.blocks} to decode, less than one request may need.",
            "Raise both.kv_cache_bytes, or lower both.prefill_slots or model.max_model_len.",
        )


def _role_of(loop: Loop) -> Role:
    return "prefill" if isinstance(loop, PrefillWorker) else "decode"
