"""The engine as a machine in virtual time: every call is given the time, in seconds, and nothing here reads a clock.

    submit ─► waiting ──────────────► running ──► storing ──► Prefilled      (prefill)
                 │  ▲                  ▲   │ └──────────────► Step, Step, …  (decode)
                 │  └── preempted ─────│───┘
                 └────► loading ───────┘

One step at a time, as vLLM does it: the running sequences in order get the tokens that they lack (one in decode, in prefill as
many as are left of the step, `steps.py`); then waiting ones are admitted while tokens, seats and blocks last. A step takes

    step_s + step_per_sequence_s × (sequences that get a token)     if anyone decodes
  + prompt tokens computed / prefill_tokens_per_s
  + prefill_overhead_s × (prefills that begin)

Prompts are found in HBM (`blocks.py`) or loaded from the tier over a link of `lmcache_blocks_per_s`, which also carries what
prefill stores; loads and stores run beside the steps. Of a prompt of N tokens N - 1 can be cached: the last one must be
computed, to have something to sample from. As in vLLM with LMCache, of 2,210 tokens 2,208 are loaded, and of 2,208 2,207.
A sequence that needs a block when none is left makes the youngest one start over: a preemption.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import msgspec

from pipeline.config import Simulated
from pipeline.errors import EngineFailed
from pipeline.protocol.warmth import Event, Removed, Stored
from workers.engines.port import EngineUsage, Prefilled, Step
from workers.engines.simulated.blocks import BlockPool, names_of, root_of
from workers.engines.simulated.reply import Reply
from workers.engines.simulated.tier import Tier
from workers.engines.steps import step_tokens

Outcome = Prefilled | Step | EngineFailed


class Output(msgspec.Struct, frozen=True, gc=False):
    """News for the request `key`; the last of it is a `Prefilled`, a failure, or a `Step` with a finish reason."""

    key: str
    what: Outcome


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The fixed sizes of one engine. `seats` is the number of sequences that may run at a time.

    `beside_replies`: prompt tokens of a step in which replies are written, where they are bounded.
    """

    block_size: int
    chunk_size: int
    seats: int
    tokens_per_step: int
    beside_replies: int = 0

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks that travel together."""
        return self.chunk_size // self.block_size


class Job(msgspec.Struct, kw_only=True):
    """What is asked: to read `token_ids` (u32), and with `reply` to go on from there for at most `tokens_max` tokens.

    It fails once `fails_after` tokens of the reply are out; a prefill, where this is set at all. `choice`: which of several
    replies to one prompt it is. `here`: nothing of it is loaded from the tier, or stored there.
    """

    key: str
    token_ids: "array[int]"
    salt: str
    reply: Reply | None = None
    tokens_max: int = 1
    fails_after: int | None = None
    choice: int = 0
    here: bool = False


class _Sequence:
    """A job under way. `ids` are the prompt and what was generated; KV exists for the first `computed` of them.

    It holds blocks for all of `ids`: the full ones under the first `held` of `names`, and `private` others.
    """

    __slots__ = (
        "arrived_s", "begun", "cached", "computed", "computed_s", "ended", "held", "ids", "job", "names", "private",
        "prompt_tokens", "ready_s", "reply", "root", "started_s", "stored",
    )  # fmt: skip

    def __init__(self, job: Job, block_size: int, arrived_s: float) -> None:
        self.job = job
        self.reply = job.reply
        self.ids = job.token_ids
        self.prompt_tokens = len(self.ids)
        self.root = root_of(job.salt)
        self.names = names_of(self.ids.tobytes(), block_size, self.root)
        self.held = 0
        self.private = 0
        self.stored = 0
        self.computed = 0
        self.cached: int | None = None
        self.begun = False
        self.ended = False
        self.arrived_s = arrived_s
        self.ready_s = arrived_s
        self.started_s: float | None = None
        self.computed_s = arrived_s

    @property
    def waited_s(self) -> float:
        """From its arrival until something was computed for it."""
        return max(0.0, (self.started_s or self.arrived_s) - self.arrived_s)


class _Step(msgspec.Struct, gc=False):
    """A step under way: who gets how many tokens."""

    ends_s: float
    shares: list[tuple[_Sequence, int]]


class EngineModel:
    """One engine. Times given to it never go back by more than a step. With `records` it tells cache events."""

    def __init__(self, timing: Simulated, shape: Shape, tier: Tier, *, records: bool = False) -> None:
        self._timing = timing
        self._shape = shape
        self._tier = tier
        self._records = records
        self._cache_events: list[Event] = []
        self._pool = BlockPool(timing.kv_blocks, self._evicted if records else None)
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._loading: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._storing: deque[_Sequence] = deque()
        self._step: _Step | None = None
        self._link_free_s = 0.0
        self._tried_s = float("-inf")
        self._preemptions = 0

    # ------------------------------------------------------------------------------------------------------
    # What the edge calls

    def submit(self, job: Job, now_s: float) -> None:
        """Take a job. Raises `EngineFailed` for one that can never run, or whose key is in use."""
        needed = self._blocks_for(len(job.token_ids) + job.tokens_max - 1)
        if needed > self._pool.total:
            raise EngineFailed(f"The request needs {needed} KV blocks; the engine has {self._pool.total}.")
        if job.key in self._sequences:
            raise EngineFailed(f"The key {job.key!r} is in use.")
        sequence = _Sequence(job, self._shape.block_size, now_s)
        self._sequences[job.key] = sequence
        self._waiting.append(sequence)
        if self._step is None:
            self._begin(now_s)

    def abort(self, key: str, now_s: float) -> None:
        """Forget a job, and free its blocks at once. The step under way takes its time all the same."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        for place in (self._waiting, self._loading, self._running, self._storing):
            if sequence in place:
                place.remove(sequence)
        self._end(sequence)
        if self._step is None:
            self._begin(now_s)

    def next_at(self) -> float | None:
        """When the next thing happens, if nobody submits or aborts."""
        times = [self._storing[0].ready_s] if self._storing else []
        if self._step is not None:
            times.append(self._step.ends_s)
        else:
            times.extend(sequence.ready_s for sequence in self._loading)
            if self._waiting and self._waiting[0].arrived_s > self._tried_s:
                times.append(self._waiting[0].arrived_s)
        return min(times, default=None)

    def advance(self, now_s: float) -> list[Output]:
        """The next thing that happens until `now_s`, which may have no output. Call it again while `next_at` has passed."""
        at_s = self.next_at()
        if at_s is None or at_s > now_s:
            return []
        outputs: list[Output] = []
        if self._storing and self._storing[0].ready_s <= at_s:
            self._stored(self._storing.popleft(), outputs)
        elif self._step is not None:
            self._end_step(self._step, outputs)
        if self._step is None:
            self._begin(max(at_s, self._tried_s))  # a load may have ended while there was no seat for it
        return outputs

    def postpone(self, seconds: float) -> None:
        """All that is under way ends so much later: the engine stood still."""
        self._link_free_s += seconds
        if self._step is not None:
            self._step.ends_s += seconds
        for sequence in (*self._loading, *self._storing):
            sequence.ready_s += seconds

    def usage(self) -> EngineUsage:
        """The figures now."""
        return EngineUsage(
            running=len(self._running) + len(self._storing),
            waiting=len(self._waiting) + len(self._loading),
            kv_usage_ratio=self._pool.used / self._pool.total,
            preemptions=self._preemptions,
        )

    def take_cache_events(self) -> list[Event]:
        """What has entered and left the HBM cache since the last call."""
        taken, self._cache_events = self._cache_events, []
        return taken

    def cached_names(self, names: Sequence[int]) -> int:
        """How many of `names`, from the first on, are in the HBM cache."""
        return self._pool.match(names)

    # ------------------------------------------------------------------------------------------------------
    # A step

    def _begin(self, at_s: float) -> None:
        """Begin a step, where there is anything to compute."""
        self._tried_s = at_s
        self._join_loaded(at_s)
        preemptions = self._preemptions
        shares: list[tuple[_Sequence, int]] = []
        writing = sum(len(sequence.ids) > sequence.prompt_tokens for sequence in self._running)
        budget = step_tokens(self._shape.tokens_per_step, self._shape.beside_replies, writing)
        while len(shares) < len(self._running) and budget:
            sequence = self._running[len(shares)]
            if not self._grow(sequence):
                break
            budget -= self._share(sequence, budget, shares)
        while self._waiting and budget and len(self._running) < self._shape.seats and self._preemptions == preemptions:
            sequence = self._waiting[0]
            if sequence.arrived_s > at_s or not self._admit(sequence, at_s):
                break
            self._waiting.popleft()
            if sequence.ready_s > at_s:
                self._loading.append(sequence)
                continue
            self._running.append(sequence)
            budget -= self._share(sequence, budget, shares)
        if shares:
            self._step = _Step(at_s + self._duration_s(shares), shares)

    def _share(self, sequence: _Sequence, budget: int, shares: list[tuple[_Sequence, int]]) -> int:
        """Give `sequence` its tokens of this step. Blocks that they fill can be found from now on, as in vLLM."""
        tokens = min(len(sequence.ids) - sequence.computed, budget)
        if sequence.started_s is None:
            sequence.started_s = self._tried_s
        self._name(sequence, sequence.computed + tokens)
        shares.append((sequence, tokens))
        return tokens

    def _duration_s(self, shares: list[tuple[_Sequence, int]]) -> float:
        decoding = sampled = computed = beginning = 0
        for sequence, tokens in shares:
            if sequence.reply is None:
                beginning += not sequence.begun
                sequence.begun = True
                computed += tokens
                continue
            decoding += 1
            sampled += sequence.computed + tokens == len(sequence.ids)
            if tokens > 1 or len(sequence.ids) == sequence.prompt_tokens:
                computed += tokens
        timing = self._timing
        step_s = timing.step_s + sampled * timing.step_per_sequence_s if decoding else 0.0
        return step_s + computed / timing.prefill_tokens_per_s + beginning * timing.prefill_overhead_s

    def _end_step(self, step: _Step, outputs: list[Output]) -> None:
        self._step = None
        for sequence, tokens in step.shares:
            if sequence.ended:
                continue
            sequence.computed += tokens
            if sequence.computed < len(sequence.ids):
                continue
            if sequence.reply is None:
                self._store(sequence, step.ends_s, outputs)
            else:
                self._sample(sequence, sequence.reply, outputs)

    def _sample(self, sequence: _Sequence, reply: Reply, outputs: list[Output]) -> None:
        job = sequence.job
        if job.fails_after == len(sequence.ids) - sequence.prompt_tokens:
            self._fail(sequence, outputs)
            return
        token_id, text, finish_reason = reply.next()
        sequence.ids.append(token_id)
        first = len(sequence.ids) == sequence.prompt_tokens + 1
        if first and not job.here:
            self._store_beside(sequence)
        step = Step(
            token_ids=(token_id,),
            text=text,
            cached_tokens=sequence.cached or 0,
            finish_reason=finish_reason,
            choice=job.choice,
            load_s=sequence.waited_s if first else 0.0,
        )
        outputs.append(Output(job.key, step))
        if finish_reason is not None:
            self._running.remove(sequence)
            self._end(sequence)

    def _fail(self, sequence: _Sequence, outputs: list[Output]) -> None:
        outputs.append(Output(sequence.job.key, EngineFailed("The simulated engine failed, as it was told to.")))
        self._running.remove(sequence)
        self._end(sequence)

    # ------------------------------------------------------------------------------------------------------
    # Blocks and the tier

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._shape.block_size)

    def _chunks(self, sequence: _Sequence) -> list[int]:
        """The names of the full chunks: each is called after its last block."""
        blocks = self._shape.blocks_per_chunk
        return sequence.names[blocks - 1 :: blocks]

    def _admit(self, sequence: _Sequence, at_s: float) -> bool:
        """Find what is cached, take blocks for all of `ids`, and start the load. False where there is no room."""
        tokens, block_size = len(sequence.ids), self._shape.block_size
        resident = self._pool.match(sequence.names[: (tokens - 1) // block_size])
        private = self._blocks_for(tokens) - resident
        if not self._pool.take(sequence.names[:resident], private):
            return False
        sequence.held, sequence.private = resident, private
        chunks = 0 if sequence.job.here else self._tier.match(self._chunks(sequence))
        sequence.stored = chunks * self._shape.blocks_per_chunk
        sequence.computed = min(max(resident, sequence.stored) * block_size, tokens - 1)
        if sequence.stored > resident:
            sequence.ready_s = self._linked_s(sequence.stored - resident, at_s)
        if sequence.cached is None:
            sequence.cached = sequence.computed
        return True

    def _join_loaded(self, at_s: float) -> None:
        for sequence in [loading for loading in self._loading if loading.ready_s <= at_s]:
            if len(self._running) == self._shape.seats:
                break
            self._loading.remove(sequence)
            self._name(sequence, sequence.stored * self._shape.block_size)
            self._running.append(sequence)

    def _store(self, sequence: _Sequence, at_s: float, outputs: list[Output]) -> None:
        if sequence.job.fails_after is not None:
            self._fail(sequence, outputs)
            return
        chunks = self._chunks(sequence)
        missing = len(chunks) - self._tier.match(chunks)
        sequence.computed_s = at_s
        sequence.ready_s = self._linked_s(missing * self._shape.blocks_per_chunk, at_s)
        self._running.remove(sequence)
        self._storing.append(sequence)

    def _store_beside(self, sequence: _Sequence) -> None:
        """What decode has computed of a prompt is stored, too. It waits for nothing."""
        chunks = self._chunks(sequence)
        missing = len(chunks) * self._shape.blocks_per_chunk - sequence.stored
        if missing > 0:
            self._linked_s(missing, self._tried_s)
            self._tier.put(chunks)

    def _stored(self, sequence: _Sequence, outputs: list[Output]) -> None:
        self._tier.put(self._chunks(sequence))
        done = Prefilled(
            cached_tokens=sequence.cached or 0,
            generated_tokens=1,
            wait_s=sequence.waited_s,
            store_s=sequence.ready_s - sequence.computed_s,
        )
        outputs.append(Output(sequence.job.key, done))
        self._end(sequence)

    def _linked_s(self, blocks: int, at_s: float) -> float:
        """When `blocks` have passed the link, behind all that wait for it."""
        self._link_free_s = max(at_s, self._link_free_s) + blocks / self._timing.lmcache_blocks_per_s
        return self._link_free_s

    def _name(self, sequence: _Sequence, tokens: int) -> None:
        """The blocks of the first `tokens` are full."""
        size, names, held = self._shape.block_size, sequence.names, sequence.held
        full = tokens // size
        if full <= held:
            return
        if full > len(names):
            packed = sequence.ids[len(names) * size : full * size].tobytes()
            names.extend(names_of(packed, size, names[-1] if names else sequence.root))
        new = [self._pool.name(name) for name in names[held:full]]
        sequence.private -= full - held
        sequence.held = full
        if self._records:
            self._named(sequence, held, new)

    def _named(self, sequence: _Sequence, first: int, new: list[bool]) -> None:
        """The blocks from `first` on have got their names, and some of these are new: an event for each run of them."""
        size, names = self._shape.block_size, sequence.names
        for is_new, run in groupby(enumerate(new, first), key=itemgetter(1)):
            if not is_new:
                continue
            at = [number for number, _ in run]
            start, stop = at[0], at[-1] + 1
            ids = sequence.ids[start * size : stop * size].tobytes()
            parent = names[start - 1] if start else None
            self._cache_events.append(Stored(names[start:stop], parent, ids, "" if start else sequence.job.salt))

    def _evicted(self, name: int) -> None:
        self._cache_events.append(Removed((name,)))

    def _grow(self, sequence: _Sequence) -> bool:
        """Blocks for the token to come. False where `sequence` itself was the youngest and had to go."""
        lacking = self._blocks_for(len(sequence.ids)) - sequence.held - sequence.private
        while lacking > 0 and not self._pool.take((), lacking):
            victim = self._running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.private += max(0, lacking)
        return True

    def _preempt(self, sequence: _Sequence) -> None:
        self._preemptions += 1
        self._release(sequence)
        sequence.computed = 0
        self._waiting.appendleft(sequence)

    def _release(self, sequence: _Sequence) -> None:
        self._pool.release(sequence.names[: sequence.held], sequence.private)
        sequence.held = sequence.private = 0

    def _end(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.job.key]
        self._release(sequence)
        sequence.ended = True
