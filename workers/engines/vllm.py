"""The real engine: vLLM's `AsyncLLM` in this process, with LMCache between the pools.

vLLM adds two processes to ours, for the scheduler and for the model. The prefill engine is a producer: it loads prefixes from
LMCache and stores what it computes. The decode engine is a consumer: it only loads.

Importing this module is cheap. `start` sets the environment and only then imports vLLM, which reads it at import.
"""

import asyncio
import re
import secrets
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from pipeline import garbage
from pipeline.config import Config
from pipeline.errors import EngineDead, OperatorError, ReplyLost
from pipeline.protocol.arrangement import Role
from pipeline.protocol.completions import prompt_logprobs
from pipeline.protocol.pieces import Echo
from workers.engines import launch
from workers.engines.port import NO_ECHO, CacheEvents, EngineInfo, EngineUsage, Prefilled, Rendered, Step

SALT: Final = re.compile(r"[0-9a-f]{1,128}")
"""LMCache allows 128 characters. One it does not allow ends the scheduler, so nothing but hex passes here."""

WARM_UP_CHUNKS: Final = 4
REACH_TIMEOUT_S: Final = 5.0
"""For a TCP connection to LMCache, before 20 s of start-up are spent on an engine that cannot work."""

CLOSE_S: Final = 15.0
"""For vLLM's processes to end by themselves: about 5 s, most of it LMCache's clients. Then they are killed."""


class _Usage:
    """vLLM's stat logger, as far as `EngineUsage` goes. vLLM calls `record` once a step, in our event loop."""

    def __init__(self) -> None:
        self.latest = EngineUsage(running=0, waiting=0, kv_usage_ratio=0.0, preemptions=0)

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_args: Any, **_kwargs: Any) -> None:
        """`iteration_stats` is None for a step without output. Requests that load are among the skipped."""
        preemptions = self.latest.preemptions + (iteration_stats.num_preempted_reqs if iteration_stats else 0)
        if scheduler_stats is None:
            return
        self.latest = EngineUsage(
            running=scheduler_stats.num_running_reqs,
            waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
            kv_usage_ratio=scheduler_stats.kv_cache_usage,
            preemptions=preemptions,
        )

    def log_engine_initialized(self) -> None:
        """Part of vLLM's interface; nothing to do."""

    def log(self) -> None:
        """Part of vLLM's interface; nothing to do."""


class VllmEngine:
    """One role's engine. Implements `workers.engines.port.Engine`."""

    def __init__(self, config: Config, role: Role, model_path: str) -> None:
        self._config = config
        self._role = role
        self._model_path = model_path
        self._usage = _Usage()
        self._engine: Any = None
        self._chat: Any = None  # the modules `vllm_chat` and `vllm_completions`, once vLLM may be imported
        self._completions: Any = None
        self._renderer: Any = None
        self._defaults: Mapping[str, Any] = {}  # sampling parameters that the model's generation_config.json sets
        self._info: EngineInfo | None = None
        self._events: Any = None  # a `VllmCacheEvents`, once zmq may be imported
        self._sockets: tempfile.TemporaryDirectory[str] | None = None

    @property
    def info(self) -> EngineInfo:
        """Valid once `start` has returned."""
        assert self._info is not None, "the engine has not started"
        return self._info

    async def start(self) -> None:
        """Load the model and make ready: 15 to 20 s on two cores, in a thread. Raises `OperatorError`."""
        await self._reach_lmcache()
        self._sockets = tempfile.TemporaryDirectory(prefix="headrace-")  # which nobody else may read
        await asyncio.to_thread(self._load)
        garbage.settle()
        self._listen()

    async def _reach_lmcache(self) -> None:
        host, port = self._config.lmcache.host, self._config.lmcache.port
        try:
            async with asyncio.timeout(REACH_TIMEOUT_S):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as error:
            raise OperatorError(
                f"No LMCache server answers at {host}:{port} ({error or 'timed out'}).",
                "Start one with `lmcache server`, or correct lmcache.host and lmcache.port.",
            ) from error
        writer.close()

    def _load(self) -> None:
        assert self._sockets is not None
        sockets_at = Path(self._sockets.name)
        launch.apply_environment(self._config, self._role)
        launch.keep_sockets(sockets_at)
        from workers.engines import vllm_chat, vllm_completions, vllm_setup

        self._chat, self._completions = vllm_chat, vllm_completions
        events_at = None if self._role == "decode" else sockets_at
        self._engine = vllm_setup.build(self._config, self._role, self._model_path, lambda *_: self._usage, events_at)
        self._info = vllm_setup.describe(self._engine, self._config, self._model_path)
        model = self._config.model
        self._renderer = vllm_chat.renderer(self._engine, model.tool_parser, model.reasoning_parser)
        self._defaults = self._engine.model_config.get_diff_sampling_param()

    def _listen(self) -> None:
        """To the events of the prefix cache, where the engine tells them: `extra` may say otherwise."""
        told = self._engine.vllm_config.kv_events_config
        if told is not None and told.enable_kv_cache_events and told.replay_endpoint:
            from workers.engines.vllm_events import VllmCacheEvents

            self._events = VllmCacheEvents(told.endpoint, told.replay_endpoint, self.info.block_size)

    def cache_events(self) -> CacheEvents | None:
        """Of an engine that prefills."""
        return cast("CacheEvents | None", self._events)

    async def warm_up(self) -> None:
        """Touch the kernels and LMCache's look-up; in prefill also its store and load. Under a salt that nobody else has."""
        salt = secrets.token_hex(16)
        length = min(WARM_UP_CHUNKS * self.info.chunk_size + 1, self.info.max_model_len - WARM_UP_CHUNKS)
        tokens = [token % self._engine.model_config.get_vocab_size() for token in range(length)]
        if self._role != "prefill":
            async for _ in self.decode(f"warm-up-{salt}", tokens, salt, {"messages": []}, WARM_UP_CHUNKS):
                pass
        if self._role == "decode":
            return
        await self.prefill(f"warm-up-{salt}-0", tokens, salt)
        await self._engine.reset_prefix_cache()  # so that the second time it must load
        await self.prefill(f"warm-up-{salt}-1", tokens, salt)

    def _kind(self, chat: Mapping[str, Any]) -> Any:
        """The module that knows vLLM's words for such a request."""
        return self._completions if chat.get("type") == "completion" else self._chat

    async def render(self, chat: Mapping[str, Any]) -> Rendered:
        """vLLM's own template code and tokeniser, in its thread. Raises `RequestError`."""
        rendered = await self._kind(chat).render(self._engine, self._renderer, chat, self._defaults)
        return cast("Rendered", rendered)

    async def prefill(
        self,
        key: str,
        token_ids: Sequence[int],
        salt: str,
        chat: Mapping[str, Any] | None = None,
        trace: Mapping[str, str] | None = None,
        begins: int = 0,
    ) -> Prefilled:
        """Compute and store. Raises `EngineFailed`, `EngineDead`, or `RequestError` for tokens that cannot be a prompt.

        On CPU the worker stores a step's chunks before it reports the step, so the KV is there when the token is. On GPU
        LMCache stores beside the next steps: there the connector's worker would have to say when (`finished_sending`
        of this request), and this method to wait for it. That is not built, because it cannot be tried on CPU: until
        then a decode engine on GPU may look too early, and computes the chunks that it does not find.
        """
        asked = prompt_logprobs(chat) if chat is not None else None
        whole = self._sampled_here(chat, token_ids, begins) if chat is not None and begins else None
        parameters = self._chat.prefill_sampling(asked) if whole is None else self._chat.first_sampling(whole)
        async with aclosing(self._generate(key, token_ids, salt, parameters, {}, trace=trace)) as outputs:
            async for output in outputs:
                last = output
        told, first_id, first_text = ("", ""), None, ""
        if whole is not None:
            first_id = last.outputs[0].token_ids[0]
            first_text = self._text_of_first(token_ids, whole, first_id)
        if chat is not None and asked is not None:
            told = self._kind(chat).told_of_prompt(self._engine, chat, token_ids, last.prompt_logprobs)
        return Prefilled(
            cached_tokens=last.num_cached_tokens or 0,
            generated_tokens=len(last.outputs[0].token_ids),
            prompt_logprobs=told[0],
            echo_logprobs=told[1],
            wait_s=_waited_s(last),
            first_id=first_id,
            first_text=first_text,
        )

    def _sampled_here(self, chat: Mapping[str, Any], token_ids: Sequence[int], max_tokens: int) -> Any:
        """The sampling parameters of a reply that can begin here. None where a parser would have to read it from its start."""
        kind = self._kind(chat)
        how = kind.sampling(self._renderer, chat, token_ids, max_tokens, self._defaults)
        said = kind.Said(self._engine, self._renderer, how.request, token_ids, NO_ECHO, streamed=True)
        return None if said.is_parsed else how.parameters

    def _text_of_first(self, token_ids: Sequence[int], parameters: Any, first_id: int) -> str:
        """What decode will find that it has given."""
        from workers.engines.vllm_resume import Continuation

        return Continuation(self._engine, token_ids, parameters, [first_id]).before

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
        """Generate. A step may be several of the engine's, where the caller is slower than it.

        Raises as `prefill`, and `RequestError` for sampling parameters that vLLM refuses.
        """
        kind, streamed = self._kind(chat), bool(chat.get("stream"))
        how = kind.sampling(self._renderer, chat, token_ids, max_tokens, self._defaults)
        said = kind.Said(self._engine, self._renderer, how.request, token_ids, echo, streamed=streamed)
        parameters = self._chat.stays(how.parameters) if here else how.parameters
        if delivered:
            if said.is_parsed and streamed:
                raise ReplyLost("A worker was lost, and a parser has read a part of its reply: send it again.")
            async with aclosing(self._continue(key, token_ids, salt, parameters, delivered, said, trace)) as steps:
                async for step in steps:
                    yield step
            return
        priority = int(chat.get("priority") or 0)  # which a scheduler heeds whose policy it is: see `extra`
        outputs_of = self._generate(key, token_ids, salt, parameters, how.arguments, priority, trace)
        async with aclosing(outputs_of) as outputs:
            async for output in outputs:
                for choice in output.outputs:
                    step = await said.step(choice, output.num_cached_tokens or 0)
                    yield msgspec.structs.replace(step, load_s=_waited_s(output))

    async def _continue(
        self,
        key: str,
        token_ids: Sequence[int],
        salt: str,
        parameters: Any,
        delivered: Sequence[int],
        said: Any,
        trace: Mapping[str, str] | None,
    ) -> AsyncGenerator[Step, None]:
        """The rest of a reply of which `delivered` has been sent. See `vllm_resume`."""
        from workers.engines.vllm_resume import Continuation

        rest = Continuation(self._engine, token_ids, parameters, delivered)
        if rest.over is not None:
            yield await said.continued(rest.nothing_left(), delivered)
            return
        prompt, unread = [*token_ids, *delivered], delivered
        async with aclosing(self._generate(key, prompt, salt, rest.parameters(), {}, trace=trace)) as outputs:
            async for output in outputs:
                choice = output.outputs[0]
                reason = self._chat.finish_reason(choice.finish_reason)
                step = rest.step(list(choice.token_ids), reason, output.num_cached_tokens or 0, choice.stop_reason)
                step = msgspec.structs.replace(step, load_s=_waited_s(output))
                yield await said.continued(step, unread)
                unread = ()
                if step.finish_reason is not None:
                    return

    async def _generate(
        self,
        key: str,
        token_ids: Sequence[int],
        salt: str,
        parameters: Any,
        arguments: Mapping[str, Any],
        priority: int = 0,
        trace: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """vLLM's outputs for one request, with our errors. Closing it aborts the request."""
        assert SALT.fullmatch(salt), "a salt is hex"
        prompt = {"type": "token", "prompt_token_ids": list(token_ids), "cache_salt": salt}
        outputs = self._engine.generate(
            prompt, parameters, key, priority=priority, trace_headers=self._traced(trace), **arguments
        )
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    yield output
            except Exception as error:
                raise self._chat.blame(error) from error

    def _traced(self, trace: Mapping[str, str] | None) -> Mapping[str, str] | None:
        """Only where vLLM sends its spans anywhere: it logs a warning else."""
        return trace if trace and self._config.telemetry.otlp_endpoint else None

    async def check(self) -> None:
        """Raises `EngineDead` where vLLM's processes have ended or its output has stopped."""
        try:
            await self._engine.check_health()
        except Exception as error:
            raise EngineDead("The engine has died.") from error

    def usage(self) -> EngineUsage:
        """As of the last step. An idle engine takes none, so what an aborted request held would stay in its last word."""
        latest = self._usage.latest
        if self._engine is None or self._engine.get_num_unfinished_requests() == 0:
            return EngineUsage(running=0, waiting=0, kv_usage_ratio=0.0, preemptions=latest.preemptions)
        return latest

    async def close(self) -> None:
        """End vLLM's processes, in a thread. Again does nothing."""
        engine, self._engine = self._engine, None
        if self._events is not None:
            self._events.close()
        if engine is not None:
            await asyncio.to_thread(engine.shutdown, CLOSE_S)
        if self._sockets is not None:
            launch.forget_sockets(Path(self._sockets.name))
            self._sockets.cleanup()


def _waited_s(output: Any) -> float:
    """From vLLM's queue to the first step in which something was computed: loading KV, and waiting for a seat."""
    times = output.metrics
    return max(0.0, times.scheduled_ts - times.queued_ts) if times is not None and times.queued_ts else 0.0
