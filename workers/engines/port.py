"""What the two loops know of an engine. Everything model-specific hides behind this.

An engine computes; it decides nothing. It is asked to prefill (read the prompt, leave its KV where any decode worker can load it)
or to decode (load or recompute that KV, then generate). Two engines implement it: `vllm.py`, the real one, and
`simulated.py`, which has no model and models only time, caches and failures.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from pipeline.protocol.pieces import Echo
from pipeline.protocol.warmth import Batch

NO_ECHO: Final = Echo()

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is, fixed once it has started.

    `kv_blocks` blocks of `block_size` tokens can be held by requests (vLLM's null block is not among them). Only full chunks of
    `chunk_size` tokens travel through LMCache. `fingerprint` is hex over all that changes KV bytes (weights, dtype, block
    size, ISA, versions): two engines may exchange KV only where it is equal.
    """

    model: str
    max_model_len: int
    block_size: int
    chunk_size: int
    kv_blocks: int
    fingerprint: str


class Rendered(msgspec.Struct, frozen=True):
    """A prompt as the engine reads it, and the text of it that the reply is to begin with, where that is asked for."""

    token_ids: list[int]
    echo: str = ""


class Prefilled(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's KV is computed and stored. `cached_tokens` were found in HBM or LMCache, not computed.

    `prompt_logprobs` (as in `Done`) and `echo_logprobs` (as in `Echo`) are what the request asks of its prompt.
    `generated_tokens` is what the engine made on the way, always 1. Where the reply was to begin with it, it is `first_id`, and
    `first_text` is what it adds; else it is thrown away, and decode samples it anew. No engine says of a
    request which part came from where: `hbm_tokens` of the cached ones are those that its cache held by its own events.
    `wait_s` of its time it waited in the engine, for a place and for KV that was loaded; `store_s` went into storing, after
    the prompt was computed. 0 where the engine does not tell.
    """

    cached_tokens: int
    generated_tokens: int
    hbm_tokens: int = 0
    prompt_logprobs: str = ""
    echo_logprobs: str = ""
    wait_s: float = 0.0
    store_s: float = 0.0
    first_id: int | None = None
    first_text: str = ""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step added to a reply.

    `token_ids` are new tokens; `text` is what they add, which is empty while a character or a stop string is incomplete.
    `cached_tokens` of the prompt were loaded, not computed. `finish_reason` is set in the last step, which may have no tokens.
    `before` is set in the first step of a continued reply: the text that the tokens delivered before have given.
    `choice`: which of several replies goes on; each has its own last step, with its `stop_reason`: what string or token ended it.
    `logprobs` and `message`: as `pipeline.protocol.pieces` has them. `reasoning_tokens` of a choice are told in its last step,
    where a parser of reasoning counts them.
    `load_s` is set in the first step: so long KV was loaded, and a seat waited for, before anything was computed.
    """

    token_ids: Sequence[int]
    text: str
    cached_tokens: int
    finish_reason: FinishReason | None = None
    before: str = ""
    choice: int = 0
    stop_reason: int | str | None = None
    logprobs: str = ""
    message: str = ""
    reasoning_tokens: int | None = None
    load_s: float = 0.0


class EngineUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own view, as of its last step: for metrics and for reconciling the ledger."""

    running: int
    waiting: int
    kv_usage_ratio: float
    preemptions: int


class CacheEvents(Protocol):
    """What enters and leaves an engine's prefix cache, in batches numbered from 0. Any may be lost, come twice, or come late."""

    async def read(self) -> Batch:
        """The next batch that comes. Cancelling it loses none."""

    async def replay(self, start: int) -> list[Batch]:
        """The batches from the number `start` on that are still kept, in order. Raises `EngineFailed` where no answer comes."""


class Engine(Protocol):
    """One engine in this process. Keys are unique per attempt; prompts are token ids; salts are hex."""

    @property
    def info(self) -> EngineInfo:
        """Valid once `start` has returned."""

    async def start(self) -> None:
        """Load the model and make ready. Raises `OperatorError` where the set-up cannot work."""

    async def warm_up(self) -> None:
        """Compute something small, so that the first request is not the slow one."""

    async def render(self, chat: Mapping[str, Any]) -> Rendered:
        """The chat's template applied, or a completion's prompt as it is, and tokenised, once. `chat` is the request as sent.

        Raises `RequestError` where the template, the messages or the prompt do not fit.
        """

    async def prefill(
        self,
        key: str,
        token_ids: Sequence[int],
        salt: str,
        chat: Mapping[str, Any] | None = None,
        trace: Mapping[str, str] | None = None,
        begins: int = 0,
    ) -> Prefilled:
        """Compute the prompt's KV with `max_tokens=1`. Returns when the KV is stored and any decode worker can load it.

        `begins`: the tokens that the reply may have which the generated one is to begin, under the sampling parameters of
        `chat`; 0: it is thrown away. Where what has begun cannot be continued elsewhere, it is as well.
        Of a `chat` that asks for logprobs of the prompt, nothing of that is taken from a cache.
        `trace`: the trace context under which the engine's own spans hang, where it makes any.

        Raises `EngineFailed`, or `EngineDead` where the process must be restarted. Cancelling it aborts it.
        """

    def decode(
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
        """Generate up to `max_tokens` after the prompt, under the sampling parameters of `chat`, which needs no messages.

        Each reply begins with `echo`, which is none of its tokens.
        `delivered` tokens of this reply are with the receiver already, and count: the reply continues after them, its stop
        strings and half characters begun in them. Where they are the whole reply, there is one step, which says so.
        `here`: the prompt was prefilled in this engine, or lacks little in its cache. Then nothing of it is looked up elsewhere,
        and nothing stored.

        Raises as `prefill`. Closing the iterator aborts the request.
        """

    def cache_events(self) -> CacheEvents | None:
        """The events of its prefix cache, for one reader, once it has started. None where it tells none: so a decode engine."""

    async def check(self) -> None:
        """Raises `EngineDead` where the engine cannot go on."""

    def usage(self) -> EngineUsage:
        """What the engine last said of itself."""

    async def close(self) -> None:
        """End the engine and every process it has started."""
