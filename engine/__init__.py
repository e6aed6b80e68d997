"""Isinglass: an LLM inference engine built to be seen through."""

from typing import Any

from engine.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    EngineStartError,
    EventLoopError,
    IsinglassError,
    LogitsProcessorError,
    ModelError,
    ModelNotFoundError,
    ProfilerError,
    PromptError,
    QueueFullError,
    RequestError,
    SamplingParamsError,
    TokenizerError,
    UnsupportedModelError,
)
from engine.version import __version__ as __version__

__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "AsyncLLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "EngineStartError",
    "EventLoopError",
    "IsinglassError",
    "LLMEngine",
    "LogitsProcessor",
    "LogitsProcessorError",
    "Logprob",
    "ModelError",
    "ModelNotFoundError",
    "ProfilerError",
    "PromptError",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingParamsError",
    "StructuredOutputsParams",
    "TokenizerError",
    "UnsupportedModelError",
]

_HOME = {
    "LLM": "engine.api.llm",
    "AsyncLLM": "engine.api.async_llm",
    "LLMEngine": "engine.frontend.llm_engine",
    "EngineConfig": "engine.config",
    "SamplingParams": "engine.types.sampling",
    "RequestOutputKind": "engine.types.sampling",
    "StructuredOutputsParams": "engine.structured.forms.params",
    "RequestOutput": "engine.types.outputs",
    "CompletionOutput": "engine.types.outputs",
    "Logprob": "engine.types.logprobs",
    "LogitsProcessor": "engine.worker.logits_processor",
    "AdapterLogitsProcessor": "engine.worker.logits_processor",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the caller needs no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
