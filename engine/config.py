"""Every setting of the engine: frozen, documented, validated, and the source of the command line.

A setting is a field made by `option`, which carries its help text and its allowed range; the
command line and the reference pages are generated from these. What a run *measures* (number of
KV blocks, a reduced context length) is never written back here: it comes back as a value, see
`engine.types.messages.EngineCoreReadyResponse`.
"""

import difflib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from engine.errors import ConfigError
from instrumentation import ObservabilityConfig, option

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
DTYPES = ("auto", "float32", "bfloat16", "float16", "half", "float")
ATTENTION_BACKENDS = ("auto", "cpu", "native", "torch_reference")
"""The names in `engine.attention.registry`, which a caller does not import: it needs torch."""
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which model, and how it is read."""

    model: str | None = option(
        None,
        "Folder of a Transformers checkpoint, a .gguf file, or a hub name. "
        "Without it the embedded SmolLM2-135M-Instruct is used.",
    )
    tokenizer: str | None = option(
        None, "Folder, tokenizer.json or hub name of another tokenizer than the model's."
    )
    skip_tokenizer_init: bool = option(
        False, "Load no tokenizer: prompts are token ids, outputs have no text."
    )
    revision: str | None = option(None, "Branch, tag or commit of the hub repository.")
    download_dir: str | None = option(None, "Where hub downloads are kept.")
    dtype: str = option(
        "auto",
        "Number type of weights and KV cache. auto: the checkpoint's own (float16 becomes "
        "bfloat16 on a CPU).",
        choices=DTYPES,
    )
    max_model_len: int | None = option(
        None,
        "Longest sequence, prompt and output together, in tokens. Default: the model's own "
        "limit. Reduced, with a warning, when the KV cache cannot hold it.",
        minimum=1,
    )
    seed: int = option(0, "Seed of requests that bring none of their own.", minimum=0)
    generation_config: str = option(
        "auto",
        "auto: default sampling parameters come from the model's generation_config.json; "
        "vllm: the engine's neutral defaults.",
        choices=("auto", "vllm"),
    )
    max_logprobs: int = option(
        -1, "Most logprobs that a request may ask for; -1: the whole vocabulary.", minimum=-1
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        "Whether logprobs (or logits) of output tokens are reported before or after processors, "
        "penalties, temperature and masks. Prompt logprobs are always raw.",
        choices=LOGPROBS_MODES,
    )
    logits_processors: tuple[Any, ...] = option(
        (), "Logits processor classes, or their names as module:Class."
    )
    enforce_eager: bool = option(
        False, "Accepted as in vLLM: no graphs are captured yet, so that every step runs eagerly."
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N. auto: a CUDA device if there is one.")
    attention_backend: str = option(
        "auto",
        "Attention implementation; auto: the fastest for the device.",
        choices=ATTENTION_BACKENDS,
    )
    cpu_kernels: str = option(
        "auto",
        "Whose kernels run a model on a CPU. native: the engine's own (bfloat16, needs a processor "
        "with AMX and a C++ compiler), or an error; torch: PyTorch's; auto: native where they "
        "can run the model. attention_backend says 'native' where they do.",
        choices=("auto", "native", "torch"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache and its prefix cache."""

    block_size: int = option(16, "Tokens in one KV block.", minimum=1, maximum=1024)
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the device's memory that the engine may use. On a CPU: the share of the "
        "memory still available after weights and activations that the KV cache may take. "
        "Default: 0.9 on a GPU, 0.25 on a CPU.",
        minimum=0.001,
        maximum=1.0,
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Size of the KV cache in bytes; overrides gpu_memory_utilization.", minimum=1
    )
    num_gpu_blocks_override: int | None = option(
        None, "Exact number of KV blocks; overrides every budget.", minimum=1
    )
    enable_prefix_caching: bool = option(
        True, "Keep and share the KV blocks of equal prompt prefixes."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What a step may hold, and who goes first."""

    max_num_seqs: int = option(256, "Most requests running at once.", minimum=1)
    max_num_batched_tokens: int | None = option(
        None,
        "Most tokens computed in one step. Default: 2048, or max_model_len if that is longer "
        "and chunked prefill is off.",
        minimum=1,
    )
    enable_chunked_prefill: bool = option(
        True, "Split a prompt over several steps when it does not fit the step's token budget."
    )
    long_prefill_token_threshold: int = option(
        0, "Most tokens of one prompt in one step; 0: no such limit.", minimum=0
    )
    scheduling_policy: str = option(
        "fcfs",
        "fcfs: first come, first served; priority: lowest priority number first, then arrival.",
        choices=("fcfs", "priority"),
    )
    async_scheduling: bool = option(True, "Schedule the next step while this one runs.")
    structured_outputs_timeout_s: float = option(
        10.0,
        "Seconds of processor time that compiling one structured output's schema, expression or "
        "grammar may take; by the clock, four times as many.",
        minimum=0.001,
    )
    structured_outputs_cache_bytes: int = option(
        64 << 20, "Memory for compiled structured outputs that later requests may use.", minimum=0
    )

    def check_budget(self, max_model_len: int) -> None:
        """Check that the longest prompt can be scheduled.

        Raises:
            ConfigError: it has to be computed in one step, and no step may be so large.
        """
        budget = self.max_num_batched_tokens
        if not self.enable_chunked_prefill and budget is not None and budget < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) is smaller than the context of "
                f"{max_model_len} tokens with chunked prefill off, so the longest prompts could "
                "never be scheduled. Raise it, lower max_model_len, or set "
                "enable_chunked_prefill=True."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Processes and their time-outs, and how much they say."""

    enable_multiprocessing: bool = option(
        True, "Run the engine core in a process of its own; off: in the caller's (debugging)."
    )
    engine_ready_timeout_s: float = option(
        600.0, "Seconds to wait for the engine core's process to become ready.", minimum=0.001
    )
    engine_shutdown_timeout_s: float = option(
        5.0, "Seconds that the engine core's process gets to stop by itself.", minimum=0.0
    )
    log_level: str = option("info", "Least severe log line that is written.", choices=LOG_LEVELS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of one engine, by group."""

    model: ModelSettings = ModelSettings()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    process: ProcessConfig = ProcessConfig()
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "EngineConfig":
        """Sort flat settings into their groups and validate each; a path object is its text.

        Raises:
            ConfigError: an unknown name (with the nearest known one), a wrong type, a value out
                of range, or settings that contradict each other.
        """
        groups: dict[str, dict[str, Any]] = {name: {} for name in GROUPS}
        for name, value in kwargs.items():
            if name not in _GROUP_OF:
                near = difflib.get_close_matches(name, _GROUP_OF, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"unknown engine argument {name!r}.{hint}")
            if isinstance(value, os.PathLike):
                value = os.fspath(value)
            if name == "logits_processors" and isinstance(value, list):
                value = tuple(value)
            if name == "custom_histogram_buckets" and isinstance(value, Mapping) and value:
                try:
                    value = json.dumps(value)
                except (TypeError, ValueError, RecursionError) as error:
                    raise ConfigError(f"custom_histogram_buckets is no JSON: {error}") from error
            groups[_GROUP_OF[name]][name] = value
        config = cls(**{name: GROUPS[name](**values) for name, values in groups.items()})
        config.validate()
        return config

    @classmethod
    def from_dict(cls, groups: Mapping[str, Mapping[str, Any]]) -> "EngineConfig":
        """Rebuild a configuration from `to_dict`, in another process."""
        flat = {name: value for group in groups.values() for name, value in group.items()}
        return cls.from_kwargs(**flat)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values by group, ready for the wire."""
        return asdict(self)

    def validate(self) -> None:
        """Check every field's type and range, then the combinations.

        Raises:
            ConfigError: names the field, its value and what is allowed.
        """
        for name in GROUPS:
            group = getattr(self, name)
            for spec in fields(group):
                check_setting(spec.name, getattr(group, spec.name), spec.type, spec.metadata)
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.model.device) is None:
            raise ConfigError(
                f"device must be auto, cpu, cuda or cuda:N; got {self.model.device!r}"
            )
        if self.observability.custom_histogram_buckets is not None:
            self._check_buckets(self.observability.custom_histogram_buckets)
        if self.model.max_model_len is not None:
            self.scheduler.check_budget(self.model.max_model_len)
        if (
            not self.scheduler.enable_chunked_prefill
            and self.scheduler.long_prefill_token_threshold
        ):
            raise ConfigError(
                "long_prefill_token_threshold splits prompts, which enable_chunked_prefill=False "
                "forbids. Leave one of them out."
            )

    @staticmethod
    def _check_buckets(text: str) -> None:
        from instrumentation.metrics.buckets import parse_buckets

        try:
            parse_buckets(text)
        except ValueError as error:
            raise ConfigError(str(error)) from error


GROUPS: dict[str, type] = {
    "model": ModelSettings,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "process": ProcessConfig,
    "observability": ObservabilityConfig,
}
_GROUP_OF = {spec.name: name for name, group in GROUPS.items() for spec in fields(group)}


def default_of(name: str) -> Any:
    """The default value of one setting by its flat name."""
    for spec in fields(GROUPS[_GROUP_OF[name]]) if name in _GROUP_OF else ():
        if spec.name == name and spec.default is not MISSING:
            return spec.default
    raise ConfigError(f"unknown engine argument {name!r}")


def check_setting(name: str, value: Any, annotation: Any, rules: Mapping[str, Any]) -> None:
    """Check one field made by `option`: its type, its choices, its range.

    Raises:
        ConfigError: names the field, its value and what is allowed.
    """
    optional = "None" in str(annotation)
    if value is None:
        if not optional:
            raise ConfigError(f"{name} must not be None")
        return
    allowed = _allowed_types(annotation)
    if (isinstance(value, bool) and bool not in allowed) or not isinstance(value, allowed):
        expected = " or ".join(kind.__name__ for kind in allowed)
        raise ConfigError(f"{name} must be {expected}, got {value!r} ({type(value).__name__})")
    texts = value if isinstance(value, tuple) and "tuple[str" in str(annotation) else ()
    if not all(isinstance(one, str) for one in texts):
        raise ConfigError(f"{name} must be text, got {list(texts)!r}; quote it.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, got {value!r}")
    choices, low, high = rules["choices"], rules["minimum"], rules["maximum"]
    if choices and value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    if low is not None and value < low:
        raise ConfigError(f"{name} must be at least {low:g}, got {value!r}")
    if high is not None and value > high:
        raise ConfigError(f"{name} must be at most {high:g}, got {value!r}")


def _allowed_types(annotation: Any) -> tuple[type, ...]:
    text = str(annotation)
    if "bool" in text:
        return (bool,)
    if "float" in text:
        return (float, int)
    if "int" in text:
        return (int,)
    return (tuple,) if "tuple" in text else (str,)
