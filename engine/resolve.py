"""Pure derivation of the numbers that settings and checkpoint decide together."""

from dataclasses import dataclass

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.errors import ConfigError

_DEFAULT_BATCHED_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Limits:
    """Context length and step budget before the KV cache is known."""

    max_model_len: int
    max_num_batched_tokens: int


def resolve_limits(config: EngineConfig, model: ModelConfig) -> Limits:
    """Apply the model's own limits and the defaults that depend on them.

    Raises:
        ConfigError: a longer context is asked for than the model has, or a budget that could
            never hold the longest prompt with chunked prefill off.
    """
    own = model.max_position_embeddings
    asked = config.model.max_model_len
    if asked is not None and asked > own:
        raise ConfigError(
            f"max_model_len ({asked}) exceeds the model's context of {own} tokens "
            f"({model.architecture}). Ask for {own} or less."
        )
    max_model_len = asked or own
    config.scheduler.check_budget(max_model_len)
    budget = config.scheduler.max_num_batched_tokens
    if budget is None:
        budget = _DEFAULT_BATCHED_TOKENS
        if not config.scheduler.enable_chunked_prefill:
            budget = max(budget, max_model_len)
    return Limits(max_model_len, budget)
