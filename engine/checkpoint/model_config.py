"""`ModelConfig`: what a checkpoint says about its model, in one vocabulary."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's hyperparameters and defaults; the same for every checkpoint format."""

    architecture: str
    """Transformers' class name, such as LlamaForCausalLM."""
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    """Longest sequence in tokens, rope scaling included."""
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """Transformers' keys (rope_type, factor, ...); None for plain rotary positions."""
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Bias of the query, key and value projections."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...]
    """Per layer the sliding window: a token sees itself and the `window - 1` before it."""
    hidden_act: str = "silu"
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters that the model's authors recommend."""
    raw: dict[str, Any] = field(default_factory=dict)
    """config.json as it is, or the scalar GGUF metadata."""
