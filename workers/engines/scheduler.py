"""vLLM's schedulers, with steps that are short while replies are written, and long otherwise (`steps.py`).

vLLM knows one length for all steps (`max_num_batched_tokens`), or one that a long prompt may take of them
(`long_prefill_token_threshold`), whoever waits. An engine for both roles needs the one while it only reads prompts, as a prefill
worker does, and the other beside replies; and its role changes while it runs.

Loaded by vLLM through `scheduler_cls`, in its engine's own process, and only where the operator sets a bound.
"""

from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from workers.engines.launch import BESIDE_REPLIES
from workers.engines.steps import step_tokens

ONE_TOKEN: Final = 1
"""What a prefill asks for: such a request writes no reply."""


class _Yielding(Scheduler):  # type: ignore[misc]  # vLLM is not looked into
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most = self.max_num_scheduled_tokens
        self._beside_replies = int(self.vllm_config.additional_config[BESIDE_REPLIES])

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As vLLM does it, within the step's bound."""
        writing = sum(not request.is_prefill_chunk and request.max_tokens > ONE_TOKEN for request in self.running)
        self.max_num_scheduled_tokens = step_tokens(
            self._most, self._beside_replies, writing * (1 + self.num_spec_tokens)
        )
        return super().schedule(*args, **kwargs)


class YieldingScheduler(_Yielding):
    """For engines that wait for each step before they plan the next: on CPU."""


class AsyncYieldingScheduler(_Yielding, AsyncScheduler):  # type: ignore[misc]
    """For engines that plan a step while the one before it runs."""
