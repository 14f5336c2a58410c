"""The model of an engine, run on an event loop.

One task sleeps until the model's next event, hands its outputs to the requests' mailboxes, and lets the loop turn once: what
one step gave to all sequences is read in the same turn, so their frames travel together. An engine in a process of its own
would not slow down with our loop, so a late wake-up is made up for, up to `CATCH_UP_MAX_S`; beyond that it stood still.

Tests steer it: `fail_next`, `die`, `pause` and `resume`. Where engines of several processes share a host, the environment
variable `HEADRACE_SIMULATED_LMCACHE` names the file of their LMCache tier (`tier.py`). Without it, the engines of one process
share the tier called `lmcache.shm_name`, which lasts until the last of them is closed.
"""

import asyncio
import os
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, Literal

import msgspec

from pipeline.config import Config
from pipeline.errors import EngineDead, InvalidField, OperatorError, PromptTooLong
from pipeline.protocol.arrangement import Role
from pipeline.protocol.pieces import Echo
from workers.engines import launch
from workers.engines.port import NO_ECHO, EngineInfo, EngineUsage, Prefilled, Rendered, Step
from workers.engines.simulated.blocks import names_of, root_of
from workers.engines.simulated.cache_log import CacheFaults, CacheLog
from workers.engines.simulated.mailbox import Alarm, Mailbox
from workers.engines.simulated.model import EngineModel, Job, Output, Shape
from workers.engines.simulated.reply import Reply, first_of, sampling_of
from workers.engines.simulated.tier import ProcessTier, SharedTier, Tier
from workers.engines.simulated.words import prompt_of

Work = Literal["prefill", "decode"]

TIER_VARIABLE: Final = "HEADRACE_SIMULATED_LMCACHE"

CATCH_UP_MAX_S: Final = 0.05
"""A loop that was late by more than this was stopped, and the engine's process with it."""

TIMER_SLACK_S: Final = 0.0005
"""Event loops round their timers to a millisecond: half of one early is in time, and saves a spin."""

FAILS_WITHIN_TOKENS: Final = 8
"""A decode that fails by `failure_ratio` does so before this many tokens."""


def tier_of(config: Config) -> Tier:
    """The LMCache tier that engines of this configuration share. Raises `OperatorError` where its file cannot be used."""
    blocks_per_chunk = config.lmcache.chunk_size // config.lmcache.block_size
    capacity = max(1, config.simulated.lmcache_blocks // blocks_per_chunk)
    path = os.environ.get(TIER_VARIABLE)
    if path:
        return SharedTier(path, capacity)
    return ProcessTier(config.lmcache.shm_name, capacity)


def fingerprint_of(config: Config) -> str:
    """Hex over all on which KV would depend, had we any."""
    parts = (
        config.model.served_name, config.model.dtype, config.lmcache.block_size, config.lmcache.chunk_size,
        config.simulated.seed,
    )  # fmt: skip
    return blake2b(repr(("simulated", *parts)).encode(), digest_size=16).hexdigest()


class SimulatedEngine:
    """The `Engine` without a model. Timing is `config.simulated`; seats and step size are those of `role`."""

    def __init__(
        self, config: Config, role: Role, tier: Tier | None = None, cache_faults: CacheFaults | None = None
    ) -> None:
        self._config = config
        self._log = CacheLog(cache_faults or CacheFaults(), config.simulated.seed) if role != "decode" else None
        self._role = role
        self._seats = launch.seats(config, role)
        self._tier = tier
        self._owns_tier = tier is None
        self._info = EngineInfo(
            model=config.model.served_name,
            max_model_len=config.model.max_model_len,
            block_size=config.lmcache.block_size,
            chunk_size=config.lmcache.chunk_size,
            kv_blocks=config.simulated.kv_blocks,
            fingerprint=fingerprint_of(config),
        )
        self._model: EngineModel | None = None
        self._task: asyncio.Task[None] | None = None
        self._alarm = Alarm()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._mailboxes: dict[str, Mailbox] = {}
        self._to_fail: Counter[Work] = Counter()
        self._death: str | None = "The engine has not been started."

    # ------------------------------------------------------------------------------------------------------
    # The port

    @property
    def info(self) -> EngineInfo:
        """What this engine is."""
        return self._info

    async def start(self) -> None:
        """Ready at once. Raises `OperatorError` for chunks that are no multiple of a block, or a tier that cannot be used."""
        if self._info.chunk_size % self._info.block_size:
            raise OperatorError(
                f"lmcache.chunk_size {self._info.chunk_size} is no multiple of the block size {self._info.block_size}.",
                "Correct it.",
            )
        if self._tier is None:
            self._tier = tier_of(self._config)
        shape = Shape(
            block_size=self._info.block_size,
            chunk_size=self._info.chunk_size,
            seats=self._seats,
            tokens_per_step=launch.settings(self._config, self._role).max_num_batched_tokens,
            beside_replies=launch.beside_replies(self._config, self._role),
        )
        self._model = EngineModel(self._config.simulated, shape, self._tier, records=self._log is not None)
        self._death = None
        self._task = asyncio.create_task(self._run(self._model), name="simulated-engine")

    async def warm_up(self) -> None:
        """Generate two tokens, which no injected failure meets."""
        ids = array("I", range(self._info.block_size))
        reply = Reply(0, ids.tobytes(), (), sampling_of({"ignore_eos": True}), 2)
        job = Job(key="warm-up", token_ids=ids, salt="warm-up", reply=reply, tokens_max=2)
        mailbox = self._submit(job)
        try:
            while (await mailbox.step()).finish_reason is None:
                pass
        finally:
            self._forget(job)

    async def render(self, chat: Mapping[str, Any]) -> Rendered:
        """See `words.py`. Raises `InvalidField` for a prompt or parameters that do not fit, `PromptTooLong`."""
        sampling_of(chat)
        token_ids = prompt_of(chat)
        self._check_length(len(token_ids))
        return Rendered(token_ids, _echo_of(chat))

    async def prefill(
        self,
        key: str,
        token_ids: Sequence[int],
        salt: str,
        chat: Mapping[str, Any] | None = None,
        trace: Mapping[str, str] | None = None,
        begins: int = 0,
    ) -> Prefilled:
        """See `Engine`; it makes no spans. The KV is in the tier when this returns."""
        self._check_length(len(token_ids))
        job = Job(key=f"prefill/{key}", token_ids=array("I", token_ids), salt=salt)
        job.fails_after = 0 if self._fails("prefill", key) else None
        mailbox = self._submit(job)
        try:
            done = await mailbox.done()
        finally:
            self._forget(job)
        if not begins:
            return done
        first_id, first_text = first_of(
            self._config.simulated.seed, job.token_ids.tobytes(), sampling_of(chat or {}), begins
        )
        return msgspec.structs.replace(done, first_id=first_id, first_text=first_text)

    async def decode(
        self,
        key: str,
        token_ids: Sequence[int],
        salt: str,
        chat: Mapping[str, Any],
        max_tokens: int,
        delivered: Sequence[int] = (),
        echo: Echo = NO_ECHO,
        here: bool = False,
        trace: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Step, None]:
        """See `Engine`."""
        jobs = self._decode_jobs(key, token_ids, salt, chat, max_tokens, delivered)
        for job in jobs:
            job.here = here
        first = jobs[0].reply
        assert first is not None
        if first.over is not None:
            yield Step(
                token_ids=(), text=first.last_words, cached_tokens=0, finish_reason=first.over, before=first.before
            )
            return
        before, unended = first.before, len(jobs)
        unbegun = dict.fromkeys(range(len(jobs)), echo.text)
        mailbox = self._submit(*jobs)
        try:
            while unended:
                step = await mailbox.step()
                begins = unbegun.pop(step.choice, "")
                if before or begins:
                    step = msgspec.structs.replace(step, before=before, text=begins + step.text)
                yield step
                before = ""
                unended -= step.finish_reason is not None
        finally:
            self._forget(*jobs)

    def cache_events(self) -> CacheLog | None:
        """Of an engine that prefills."""
        return self._log

    async def check(self) -> None:
        """Raises `EngineDead` where the engine cannot go on."""
        if self._death is not None:
            raise EngineDead(self._death)

    def usage(self) -> EngineUsage:
        """The figures now. A dead engine holds nothing."""
        if self._model is None:
            return EngineUsage(running=0, waiting=0, kv_usage_ratio=0.0, preemptions=0)
        return self._model.usage()

    async def close(self) -> None:
        """End the step loop. Requests under way end with `EngineDead`."""
        self.die("The engine has been closed.")
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._owns_tier and self._tier is not None:
            self._tier.close()
            self._tier = None

    # ------------------------------------------------------------------------------------------------------
    # What tests do to it

    def fail_next(self, work: Work, count: int = 1) -> None:
        """The next `count` prefills or decodes raise `EngineFailed`: a prefill at its end, a decode after a few tokens."""
        self._to_fail[work] += count

    def die(self, why: str = "The engine has died.") -> None:
        """From now on everything raises `EngineDead`, what is under way included."""
        self._death = why
        self._model = None
        for mailbox in self._mailboxes.values():
            mailbox.put(EngineDead(why))
        self._alarm.ring()

    def pause(self) -> None:
        """No step ends until `resume`; requests are still taken."""
        self._resumed.clear()

    def resume(self) -> None:
        """Go on where `pause` has stopped."""
        self._resumed.set()

    def truly_cached_tokens(self, salt: str, token_ids: Sequence[int]) -> int:
        """Leading tokens of a prompt that its HBM cache holds now, by whole blocks; a dead engine holds none."""
        size = self._info.block_size
        full = array("I", token_ids[: (len(token_ids) - 1) // size * size])
        names = names_of(full.tobytes(), size, root_of(salt))
        return self._model.cached_names(names) * size if self._model is not None else 0

    # ------------------------------------------------------------------------------------------------------
    # The step loop

    async def _run(self, model: EngineModel) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._model is model:
                await self._resumed.wait()
                at_s, now_s = model.next_at(), loop.time()
                if at_s is None or at_s > now_s + TIMER_SLACK_S:
                    await self._alarm.sleep(at_s)
                    continue
                if now_s - at_s > CATCH_UP_MAX_S:
                    model.postpone(now_s - at_s - CATCH_UP_MAX_S)
                self._deliver(model.advance(now_s + TIMER_SLACK_S))
                self._write_log(model)
                await asyncio.sleep(0)  # the readers run now, all in one turn of the loop
        except Exception as error:  # a bug of ours must not leave requests waiting for ever
            self.die(f"The simulated engine broke: {error!r}.")

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            mailbox = self._mailboxes.get(output.key)
            if mailbox is not None:
                mailbox.put(output.what)

    def _write_log(self, model: EngineModel) -> None:
        if self._log is not None:
            self._log.write(model.take_cache_events())

    def _submit(self, *jobs: Job) -> Mailbox:
        """What these say comes to one mailbox."""
        if self._model is None:
            raise EngineDead(self._death or "")
        loop = asyncio.get_running_loop()
        before_s = self._model.next_at()
        mailbox = Mailbox(loop)
        for job in jobs:
            self._model.submit(job, loop.time())
            self._mailboxes[job.key] = mailbox
        self._write_log(self._model)
        self._ring_if_not(before_s, self._model)
        return mailbox

    def _forget(self, *jobs: Job) -> None:
        """The request has ended, or its caller has gone."""
        for job in jobs:
            del self._mailboxes[job.key]
        if self._model is not None:
            before_s = self._model.next_at()
            for job in jobs:
                self._model.abort(job.key, asyncio.get_running_loop().time())
            self._write_log(self._model)
            self._ring_if_not(before_s, self._model)

    def _ring_if_not(self, before_s: float | None, model: EngineModel) -> None:
        """Wake the step loop where the time it sleeps until has changed."""
        if model.next_at() != before_s:
            self._alarm.ring()

    # ------------------------------------------------------------------------------------------------------
    # Jobs

    def _check_length(self, tokens: int) -> None:
        longest = self._info.max_model_len - 1
        if tokens > longest:
            raise PromptTooLong(
                f"The prompt has {tokens} tokens; with one for the reply the model takes {longest}.", param="messages"
            )

    def _decode_jobs(
        self,
        key: str,
        token_ids: Sequence[int],
        salt: str,
        chat: Mapping[str, Any],
        max_tokens: int,
        delivered: Sequence[int],
    ) -> list[Job]:
        """One for each choice. Only one choice can be continued."""
        prompt = array("I", token_ids)
        self._check_length(len(prompt))
        ids = array("I", [*token_ids, *delivered])
        seed, sampling = self._config.simulated.seed, sampling_of(chat)
        assert sampling.n == 1 or not delivered
        reply_max = min(max_tokens, self._info.max_model_len - len(prompt))
        tokens_max = reply_max - len(delivered)
        jobs = [
            Job(
                key=f"decode/{key}/{choice}",
                token_ids=ids[:],
                salt=salt,
                reply=Reply(seed, prompt.tobytes(), delivered, sampling, reply_max, choice),
                tokens_max=tokens_max,
                choice=choice,
            )
            for choice in range(sampling.n)
        ]
        assert jobs[0].reply is not None
        if jobs[0].reply.over is None and self._fails("decode", key):
            jobs[0].fails_after = min(_drawn(seed, f"after/{key}") % FAILS_WITHIN_TOKENS, tokens_max - 1)
        return jobs

    def _fails(self, work: Work, key: str) -> bool:
        if self._to_fail[work]:
            self._to_fail[work] -= 1
            return True
        simulated = self._config.simulated
        return _drawn(simulated.seed, f"{work}/{key}") < simulated.failure_ratio * 2**64


def _echo_of(chat: Mapping[str, Any]) -> str:
    """A completion's own text, where it is to be echoed. Of tokens there is none, and a chat ends with no turn of ours."""
    if chat.get("type") != "completion" or not chat.get("echo"):
        return ""
    if not isinstance(chat["prompt"], str):
        raise InvalidField("echo: the simulated engine cannot turn token ids into text.", param="echo")
    return str(chat["prompt"])


def _drawn(seed: int, what: str) -> int:
    """A number below 2**64 for `what`, the same in every process."""
    return int.from_bytes(blake2b(f"{seed}/{what}".encode(), digest_size=8).digest(), "little")
