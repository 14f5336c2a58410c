"""What hardware can do at most, and what of it engines reach."""

from pathlib import Path
from typing import Annotated, Final

import msgspec

from pipeline.planning import data

Positive = Annotated[float, msgspec.Meta(gt=0)]

FLOPS_REACHED: Final = 0.55
"""Of the peak, in prefill. Published: 50 to 60 % for dense models of this size on Hopper in bf16; an assumption elsewhere."""

BANDWIDTH_REACHED: Final = 0.75
"""Of the peak, in decode steps: weights and KV. `aiconfigurator` takes 0.8 for a single kernel, and a step is many."""

STEP_OVERHEAD_S: Final = 0.0005
"""Of each step, beside kernels: scheduling and sampling, overlapped in part. An assumption."""

MEMORY_USED: Final = 0.9
"""vLLM's `gpu_memory_utilization`."""

ACTIVATIONS: Final = 0.05
"""Of the memory: activations, CUDA graphs, communication buffers."""

SPLIT_REACHED: Final = 0.9
"""Of compute and bandwidth together, per doubling of tensor parallelism: what the all-reduces cost. An assumption."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator, by its data sheet: bytes, bytes/s, dense FLOP/s, bytes/s to another one in one direction."""

    memory_bytes: Positive
    memory_bytes_per_s: Positive
    bf16_flops: Positive
    link_bytes_per_s: Positive
    fp8_flops: Positive | None = None

    def flops(self, weights: str) -> float:
        """Peak for weights of this type; what the tensor cores have no type for, they compute in bf16."""
        return self.fp8_flops if weights in ("fp8", "fp4") and self.fp8_flops else self.bf16_flops


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """`size` accelerators that one engine splits each layer over."""

    gpu: Gpu
    size: int

    def peak_flops(self, weights: str) -> float:
        """All tensor cores, all the time."""
        return self.size * self.gpu.flops(weights)

    @property
    def peak_bytes_per_s(self) -> float:
        """All memory, all the time."""
        return self.size * self.gpu.memory_bytes_per_s

    @property
    def split_reached(self) -> float:
        """What is left after communication."""
        return SPLIT_REACHED ** (self.size.bit_length() - 1)

    def kv_room_bytes(self, weight_bytes: float) -> float:
        """Memory that is left for KV; negative where the weights alone do not fit."""
        return self.size * self.gpu.memory_bytes * (MEMORY_USED - ACTIVATIONS) - weight_bytes


def known(name: str) -> Gpu:
    """By its name in `configs/planning/hardware.toml`, or by the path of a TOML file. Raises `OperatorError`."""
    if name.endswith(".toml"):
        return data.own(Path(name).expanduser(), Gpu)
    return data.entry("hardware.toml", name, Gpu)
