"""What a model costs by its shape alone: bytes of KV and of weights, FLOPs. All of it follows from a Hugging Face `config.json`.

KV of a token, per layer that keeps any (values, times the bytes of a value):

    multi-head, grouped-query attention     2 × KV heads × head size                    (Llama, Qwen, Mixtral, gpt-oss)
    multi-head latent attention             latent rank + rotary part, once for all     (DeepSeek: 512 + 64)
    a sliding window of W                   as above, but of the last W tokens only     (gpt-oss: every second layer, 128)

Weights are counted from the matrices; norms and biases, about a thousandth of them, are left out. A mixture of experts computes
with `experts_per_token` of its experts, but a batch reads all that any of its tokens chose.
"""

from pathlib import Path
from typing import Annotated, Final

import msgspec

from pipeline.errors import OperatorError
from pipeline.planning import data

UNGATED: Final = frozenset({"gpt_neox", "nemotron", "opt", "phi", "starcoder2"})
"""Model types whose MLP has two matrices. All others have a third, the gate."""

BYTES: Final = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5}
"""Bytes of a value. The scales of quantised weights, a few per cent at most, are left out."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """`layers` alike. Each keeps `kv_values` of a token, of all tokens or of the last `window`.

    `head_values` is heads × (size of a key + size of a value): 2 FLOPs each for every token that a token attends to.
    """

    layers: int
    kv_values: int
    head_values: int
    window: int | None = None


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model's shape. Parameters: `body` of all layers without routed experts, `experts_total` of all routed experts."""

    name: str
    attention: tuple[Attention, ...]
    body: int
    embedding: int
    head: int
    tied: bool = False
    experts_total: int = 0
    experts: int = 0
    experts_per_token: int = 0
    context_max: int | None = None

    @property
    def params(self) -> int:
        """All parameters."""
        return self.embedding + (0 if self.tied else self.head) + self.body + self.experts_total

    @property
    def active(self) -> int:
        """Parameters that one token computes with, embedding and head included."""
        return self.params - self.experts_total + self._routed

    @property
    def _routed(self) -> int:
        return self.experts_total * self.experts_per_token // self.experts if self.experts else 0

    def kv_bytes_per_token(self, value_bytes: float) -> float:
        """Bytes of KV that one more token adds, where no window is full."""
        return sum(group.layers * group.kv_values for group in self.attention) * value_bytes

    def kv_bytes(self, tokens: float, value_bytes: float) -> float:
        """Bytes of KV of a sequence: of layers with a window, no more than that."""
        return value_bytes * sum(
            group.layers * group.kv_values * min(tokens, group.window or tokens) for group in self.attention
        )

    def weight_bytes_read(self, tokens: float, value_bytes: float) -> float:
        """Bytes of weights that a step over `tokens` reads: of experts, those that it can be expected to choose."""
        chosen = 1 - (1 - self.experts_per_token / self.experts) ** max(1.0, tokens) if self.experts else 0.0
        return (self.body + self.head + self.experts_total * chosen) * value_bytes

    def prefill_flops(self, tokens: float, cached: float = 0.0) -> float:
        """FLOPs of the forward pass over the last `tokens - cached` of a prompt of `tokens`; the head for the last one."""
        new = tokens - cached
        linear = 2.0 * (self.body + self._routed) * new + 2.0 * self.head
        return linear + sum(
            group.layers * 2.0 * group.head_values * _pairs(tokens, cached, group) for group in self.attention
        )

    def decode_flops(self, context: float) -> float:
        """FLOPs of one further token behind `context` tokens."""
        attended = sum(
            group.layers * 2.0 * group.head_values * min(context, group.window or context) for group in self.attention
        )
        return 2.0 * (self.body + self._routed + self.head) + attended


def _pairs(tokens: float, cached: float, group: Attention) -> float:
    """Pairs of a computed token and one that it attends to, itself included, in one layer."""

    def up_to(length: float) -> float:
        window = group.window or length
        inside = min(length, window)
        return inside * (inside + 1) / 2 + max(0.0, length - window) * window

    return up_to(tokens) - up_to(cached)


# --------------------------------------------------------------------------------------------------------------
# From config.json


class HfConfig(msgspec.Struct, kw_only=True):
    """The entries of a `config.json` that decide sizes. Others are not looked at."""

    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    vocab_size: Count
    intermediate_size: Count
    model_type: str = ""
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: Count | None = None
    sliding_window: Count | None = None
    use_sliding_window: bool = True
    max_window_layers: int = 0
    sliding_window_pattern: Count | None = None
    layer_types: list[str] | None = None
    num_kv_shared_layers: int = 0
    attention_chunk_size: Count | None = None
    num_local_experts: Count | None = None
    num_experts: Count | None = None
    n_routed_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    n_shared_experts: int | None = None
    shared_expert_intermediate_size: int | None = None
    first_k_dense_replace: int = 0
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] = []
    kv_lora_rank: Count | None = None
    q_lora_rank: Count | None = None
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Count | None = None
    v_head_dim: Count | None = None
    global_head_dim: Count | None = None


UNKNOWN: Final = ("attention_chunk_size", "global_head_dim")
"""Entries that change what KV is kept in ways that are not modelled here."""


def known(name: str) -> Model:
    """A model by its name in `configs/planning/models.toml`, or by the path of a `config.json` or its folder."""
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        return read(path)
    return model(name, data.entry("models.toml", name, HfConfig))


def read(path: Path) -> Model:
    """The model of a `config.json`; that of its text part, where it is of several. Raises `OperatorError`."""
    try:
        tree = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise OperatorError(f"Cannot read {path}: {error.strerror}.", "Give a model's config.json.") from None
    except msgspec.DecodeError as error:
        raise OperatorError(f"{path} is not JSON: {error}.", "Give a model's config.json.") from None
    if isinstance(tree, dict) and isinstance(tree.get("text_config"), dict):
        tree = tree["text_config"]
    name = path.parent.name if path.name == "config.json" else path.stem
    return model(name, data.convert(tree, HfConfig, str(path)))


def model(name: str, config: HfConfig) -> Model:
    """The shape that a configuration describes. Raises `OperatorError` where it is of a kind that is not modelled."""
    for field in UNKNOWN:
        if getattr(config, field):
            raise OperatorError(
                f"{name} sets {field}, which changes what KV its layers keep, and plan does not model that.",
                "Give the rates with --measured, and a config.json without it for the sizes.",
            )
    hidden, layers = config.hidden_size, config.num_hidden_layers
    sparse = _sparse_layers(config)
    matrices = 2 if config.model_type in UNGATED else 3
    mlp = (layers - sparse) * matrices * hidden * config.intermediate_size
    expert = 3 * hidden * (config.moe_intermediate_size or config.intermediate_size)
    shared = expert * (config.n_shared_experts or 0) + 3 * hidden * (config.shared_expert_intermediate_size or 0)
    experts = _experts(config)
    return Model(
        name=name,
        attention=_attention(name, config),
        body=layers * _attention_params(config) + mlp + sparse * (shared + hidden * experts),
        embedding=config.vocab_size * hidden,
        head=config.vocab_size * hidden,
        tied=config.tie_word_embeddings,
        experts_total=sparse * experts * expert,
        experts=experts,
        experts_per_token=config.num_experts_per_tok or 0,
        context_max=config.max_position_embeddings,
    )


def _experts(config: HfConfig) -> int:
    return config.num_local_experts or config.num_experts or config.n_routed_experts or 0


def _sparse_layers(config: HfConfig) -> int:
    """Layers whose MLP is a mixture of experts."""
    if not _experts(config):
        return 0
    return sum(
        number >= config.first_k_dense_replace
        and number not in config.mlp_only_layers
        and (number + 1) % config.decoder_sparse_step == 0
        for number in range(config.num_hidden_layers)
    )


def _attention_params(config: HfConfig) -> int:
    """Of one layer."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.kv_lora_rank is None:
        size, kv_heads = _head_size(config), config.num_key_value_heads or heads
        return 2 * hidden * heads * size + 2 * hidden * kv_heads * size
    nope, rope, value = config.qk_nope_head_dim or 0, config.qk_rope_head_dim or 0, config.v_head_dim or 0
    queries = heads * (nope + rope)
    rank = config.q_lora_rank
    query = hidden * rank + rank * queries if rank else hidden * queries
    latent = hidden * (config.kv_lora_rank + rope) + config.kv_lora_rank * heads * (nope + value)
    return query + latent + heads * value * hidden


def _head_size(config: HfConfig) -> int:
    return config.head_dim or config.hidden_size // config.num_attention_heads


def _attention(name: str, config: HfConfig) -> tuple[Attention, ...]:
    heads = config.num_attention_heads
    if config.kv_lora_rank is not None:
        nope, rope, value = config.qk_nope_head_dim or 0, config.qk_rope_head_dim or 0, config.v_head_dim or 0
        values = config.kv_lora_rank + rope
        return (
            Attention(layers=config.num_hidden_layers, kv_values=values, head_values=heads * (nope + rope + value)),
        )
    size = _head_size(config)
    values, head_values = 2 * (config.num_key_value_heads or heads) * size, 2 * heads * size
    windows = _windows(name, config)
    keeping = windows[: len(windows) - config.num_kv_shared_layers]
    groups = [
        Attention(layers=keeping.count(window), kv_values=values, head_values=head_values, window=window)
        for window in dict.fromkeys(keeping)
    ]
    sharing = windows[len(keeping) :]
    groups += [
        Attention(layers=sharing.count(window), kv_values=0, head_values=head_values, window=window)
        for window in dict.fromkeys(sharing)
    ]
    return tuple(groups)


def _windows(name: str, config: HfConfig) -> list[int | None]:
    """The window of each layer; None where it attends to everything."""
    layers, window = config.num_hidden_layers, config.sliding_window
    if config.layer_types:
        kinds = set(config.layer_types) - {"full_attention", "sliding_attention"}
        if kinds:
            raise OperatorError(
                f"{name} has layers of {', '.join(sorted(kinds))}, whose state plan does not model.",
                "Plan with a model of full or sliding attention.",
            )
        return [window if kind == "sliding_attention" else None for kind in config.layer_types]
    if window is None or not config.use_sliding_window:
        return [None] * layers
    if config.sliding_window_pattern:  # Gemma 3: the last of each so many attends to everything
        return [None if (number + 1) % config.sliding_window_pattern == 0 else window for number in range(layers)]
    if config.model_type == "gemma2":  # the first of each two has the window
        return [window if number % 2 == 0 else None for number in range(layers)]
    return [None if number < config.max_window_layers else window for number in range(layers)]
