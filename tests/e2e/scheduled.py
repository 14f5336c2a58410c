"""The steps that vLLM plans with our scheduler, without an engine: `python -m tests.e2e.scheduled MODEL sync|async`.

Steps of 256 tokens at most, and of 32 of a prompt beside replies. Each line is what one step computes of each request:

    read-1, read-2    prompts of 300 tokens that are only read, as a prefill worker does it
    reply             a prompt of 40 tokens with a reply of 4
    beside            a prompt of 150 tokens that comes once the reply has begun, and goes on when that has ended
"""

import json
import sys

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from workers.engines import launch

SCHEDULERS = {"sync": "YieldingScheduler", "async": "AsyncYieldingScheduler"}
BLOCK, BLOCKS = 32, 100


class Planner:
    """A scheduler whose steps are computed by nobody: each sequence gets a token where it is due one."""

    def __init__(self, model: str, kind: str) -> None:
        config = EngineArgs(
            model=model,
            max_model_len=1024,
            max_num_seqs=4,
            max_num_batched_tokens=256,
            enable_prefix_caching=False,
            block_size=BLOCK,
            scheduler_cls=f"workers.engines.scheduler.{SCHEDULERS[kind]}",
            additional_config={launch.BESIDE_REPLIES: 32},
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )

    def ask(self, name: str, prompt_tokens: int, max_tokens: int) -> None:
        """One more request."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, [7] * prompt_tokens, sampling, None))

    def step(self) -> dict[str, int]:
        """Plan one, and have it computed."""
        planned = self.scheduler.schedule()
        tokens: dict[str, int] = dict(planned.num_scheduled_tokens)
        print(json.dumps(tokens))  # noqa: T201
        names = list(tokens)
        due = [[] if self.scheduler.requests[name].is_prefill_chunk else [7] for name in names]
        computed = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, due)
        self.scheduler.update_from_output(planned, computed)
        return tokens

    def run(self) -> None:
        """Until nothing is left."""
        while self.step():
            pass


def main(model: str, kind: str) -> None:
    """Print the steps."""
    planner = Planner(model, kind)
    planner.ask("read-1", 300, 1)
    planner.ask("read-2", 300, 1)
    planner.run()
    planner.ask("reply", 40, 4)
    planner.step()
    planner.ask("beside", 150, 1)
    planner.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
