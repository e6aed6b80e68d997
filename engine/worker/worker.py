"""One rank: its device, its weights, its KV tensors, and the runner that uses them."""

import math
import time
from typing import Any

import msgspec
import numpy as np
import torch

from engine.attention.base import BatchLayout
from engine.checkpoint.architecture import read_model_config
from engine.checkpoint.locate import resolve_model
from engine.config import EngineConfig
from engine.errors import ConfigError, ProfilerError
from engine.log import get_logger
from engine.models.kernels import select_kernels
from engine.models.loader import load_model
from engine.types.kv_cache import KVCacheSpec
from engine.types.plan import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from engine.worker.device import resolve_device, resolve_dtype
from engine.worker.input_batch import InputBatch
from engine.worker.memory import (
    PeakMemory,
    allocating,
    available_bytes,
    model_bytes,
    total_bytes,
)
from engine.worker.model_runner import ModelRunner
from engine.worker.processor_guard import build_logits_processors
from engine.worker.sampler import Sampler
from engine.worker.sampling_state import SamplingState
from instrumentation import (
    Instrument,
    LayerRanges,
    ProfileError,
    ProfileOptions,
    ProfileStatus,
    TorchProfiler,
)

logger = get_logger(__name__)

_GPU_UTILIZATION = 0.9
_CPU_KV_SHARE = 0.25
_ALIGNMENT_BYTES = 64  # a cache line; NumPy aligns to 16


class Worker:
    """Brings a model up on a device and runs its steps."""

    def __init__(self, config: EngineConfig, *, obs: Instrument) -> None:
        self.config = config
        self.obs = obs
        self.source = resolve_model(
            config.model.model, config.model.revision, config.model.download_dir
        )
        self.model_config = read_model_config(self.source)
        self.device = resolve_device(config.model.device)
        asked = config.observability.enable_layerwise_nvtx_tracing
        self._layer_ranges = obs.ranges if asked else None
        self.dtype = resolve_dtype(config.model.dtype, self.model_config.dtype, self.device)
        self.attention = select_kernels(
            config.model,
            self.model_config,
            dtype=self.dtype,
            device=self.device,
            block_size=config.cache.block_size,
            is_gguf=self.source.is_gguf,
            has_module_hooks=self._layer_ranges is not None,
        )
        self.runner: ModelRunner | None = None
        self._profiler: TorchProfiler | None = None

    def load_model(self) -> None:
        """Read the weights. Raises ModelError for anything wrong with the checkpoint."""
        began = time.monotonic()
        self._model = load_model(
            self.source,
            self.model_config,
            dtype=self.dtype,
            device=self.device,
            attention_backend=self.attention,
        )
        logger.info(
            "loaded %s (%s, %s on %s) in %.2f s",
            self.source.name,
            self.model_config.architecture,
            str(self.dtype).removeprefix("torch."),
            self.device,
            time.monotonic() - began,
        )
        if self._layer_ranges is not None:
            LayerRanges(self._model.named_modules(), self._layer_ranges)

    def get_kv_cache_spec(self) -> KVCacheSpec:
        """What one KV block costs over all layers."""
        layers = self._model.attention_layers
        return KVCacheSpec(
            block_size=self.config.cache.block_size,
            num_layers=len(layers),
            num_kv_heads=tuple(layer.num_kv_heads for layer in layers),
            head_dim=tuple(layer.head_dim for layer in layers),
            element_bytes=self.dtype.itemsize,
        )

    def build_runner(self, *, max_model_len: int, max_num_batched_tokens: int) -> None:
        """Make the runner and its persistent batch, without a KV cache yet."""
        model, vocab_size = self.config.model, self.model_config.vocab_size
        max_num_reqs = self.config.scheduler.max_num_seqs
        processors = build_logits_processors(model.logits_processors, self.config, self.device)
        with allocating(f"max_num_seqs={max_num_reqs}", f"max_model_len={max_model_len}"):
            num_bytes, total = 4 * max_num_reqs * max_model_len, total_bytes(torch.device("cpu"))
            if num_bytes > total:  # before lists of that length are made
                raise MemoryError(f"the batch's tokens take {num_bytes} bytes, of {total}")
            batch = InputBatch(
                max_num_reqs=max_num_reqs,
                max_model_len=max_model_len,
                block_size=self.config.cache.block_size,
                sampling=SamplingState(
                    max_num_reqs=max_num_reqs,
                    vocab_size=vocab_size,
                    device=self.device,
                    logits_processors=processors,
                ),
            )
        self.runner = ModelRunner(
            self._model,
            self.attention,
            Sampler(model.logprobs_mode),
            batch,
            device=self.device,
            obs=self.obs,
        )
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len

    def determine_available_memory(self) -> int:
        """Bytes that the KV cache may take, after a forward pass of the largest batch.

        CPU: `gpu_memory_utilization` (default 0.25) of the memory that is then still available.
        GPU: `gpu_memory_utilization` (default 0.9) of the device, less what is in use at the peak.
        """
        seqs, tokens = self.config.scheduler.max_num_seqs, self._max_num_batched_tokens
        with (
            PeakMemory(self.device) as memory,
            allocating(f"max_num_seqs={seqs}", f"max_num_batched_tokens={tokens}"),
        ):
            cache_bytes = self._run_largest_batch()
        self._used_before_bytes = memory.used_before_bytes
        self._activation_bytes = max(0, memory.peak_bytes - cache_bytes)
        cache = self.config.cache
        explicit, share = cache.kv_cache_memory_bytes, cache.gpu_memory_utilization
        free = available_bytes(self.device)
        if explicit is not None:
            budget = explicit
        elif self.device.type == "cpu":
            budget = int((free - memory.peak_bytes) * (share or _CPU_KV_SHARE))
        else:
            total = total_bytes(self.device)
            used = total - free + memory.peak_bytes
            budget = int(total * (share or _GPU_UTILIZATION)) - used
        logger.info(
            "memory: %.2f GiB free, largest batch peaks at %.2f GiB, KV cache gets %.2f GiB",
            free / 2**30,
            memory.peak_bytes / 2**30,
            budget / 2**30,
        )
        return budget

    def memory_bytes(self) -> dict[str, int]:
        """Memory by component, as `EngineCoreReadyResponse` defines it; once the cache is there."""
        assert self.runner is not None, "build_runner() comes first"
        weights = model_bytes(self._model)
        return {
            "weights": weights,
            "kv_cache": sum(cache.nbytes for cache in self.runner.kv_caches),
            "graphs": 0,
            "activations": self._activation_bytes,
            "other": max(0, self._used_before_bytes - weights),
        }

    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV tensors, one per layer."""
        assert self.runner is not None, "build_runner() comes first"
        cache = self.config.cache
        name = "kv_cache_memory_bytes"
        if cache.num_gpu_blocks_override is not None:
            name = "num_gpu_blocks_override"
        setting = f"{name}={getattr(cache, name)}"
        num_bytes, total = (
            num_blocks * self.get_kv_cache_spec().block_bytes,
            total_bytes(self.device),
        )
        if num_bytes > total:
            raise ConfigError(
                f"{setting} makes a KV cache of {num_bytes / 2**30:.1f} GiB, and the device has "
                f"{total / 2**30:.1f} GiB of memory. Lower it, or leave it out."
            )
        with allocating(setting):
            self.runner.kv_caches = self._allocate(num_blocks)

    def warm_up(self) -> None:
        """Run a small decode batch, so that the first request pays for no lazy initialisation."""
        assert self.runner is not None
        self.runner.dummy_run(_layout([1, 1], [1, 2], self.config.cache.block_size))

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Launch a step's forward pass."""
        assert self.runner is not None
        self.runner.execute_model(plan)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample from the step that was launched."""
        assert self.runner is not None
        output = self.runner.sample_tokens(grammar_output)
        if self._profiler is not None:
            self._profiler.step()
        return output

    # -- profiling -------------------------------------------------------------------------------

    @property
    def has_profile(self) -> bool:
        """Whether there ever was a torch profile."""
        return self._profiler is not None

    def start_profile(self, options: dict[str, Any]) -> dict[str, Any]:
        """Profile from the next step on, with `ProfileOptions`; returns the status.

        Raises:
            ProfilerError: one is running already, or the folder cannot be written to.
        """
        assert self.runner is not None
        if self._profiler is None:
            self._profiler = TorchProfiler(self.obs, rank=0, world_size=1, backend=self.device.type)
            self.runner.obs = self._profiler.obs
        try:
            self._profiler.start(msgspec.convert(options, ProfileOptions))
        except ProfileError as error:
            raise ProfilerError(str(error)) from error
        return self.profile_status()

    def stop_profile(self) -> dict[str, Any]:
        """End the profile, whose file is then written while steps go on; returns the status.

        Raises:
            ProfilerError: none is running.
        """
        if self._profiler is None:
            raise ProfilerError("no profile is running (there has been none); start one")
        try:
            self._profiler.stop()
        except ProfileError as error:
            raise ProfilerError(str(error)) from error
        return self.profile_status()

    def profile_status(self) -> dict[str, Any]:
        """The `ProfileStatus` of the last profile."""
        status = ProfileStatus() if self._profiler is None else self._profiler.status()
        return msgspec.to_builtins(status)

    def finish_profile(self, timeout_s: float) -> bool:
        """End a running profile and wait for its file; False on time-out."""
        return self._profiler is None or self._profiler.close(timeout_s)

    # -- inside ----------------------------------------------------------------------------------

    def _allocate(self, num_blocks: int) -> list[torch.Tensor]:
        size = self.config.cache.block_size
        return [
            _zeros(
                self.attention.kv_cache_shape(num_blocks, size, layer.num_kv_heads, layer.head_dim),
                self.dtype,
                self.device,
            )
            for layer in self._model.attention_layers
        ]

    def _run_largest_batch(self) -> int:
        """Forward the most tokens and sequences that a step can hold, over a throw-away cache.

        Returns the bytes of that cache.
        """
        assert self.runner is not None
        size, budget = self.config.cache.block_size, self._max_num_batched_tokens
        num_seqs = min(self.config.scheduler.max_num_seqs, budget)
        longest = max(1, min(self._max_model_len, budget - num_seqs + 1))
        lengths = [longest] + [1] * (num_seqs - 1)
        layout = _layout(lengths, lengths, size)
        self.runner.kv_caches = self._allocate(int(layout.block_table.max()) + 1)
        self.runner.dummy_run(layout)
        num_bytes = sum(cache.nbytes for cache in self.runner.kv_caches)
        self.runner.kv_caches = []
        return num_bytes


def _layout(query_lens: list[int], seq_lens: list[int], block_size: int) -> BatchLayout:
    """A made-up batch; every sequence reads and writes the same first blocks."""
    num_blocks = -(-max(seq_lens) // block_size)
    slots = [np.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)]
    return BatchLayout(
        query_start_loc=np.cumsum([0, *query_lens], dtype=np.int32),
        seq_lens=np.array(seq_lens, dtype=np.int32),
        block_table=np.tile(np.arange(num_blocks, dtype=np.int32), (len(seq_lens), 1)),
        slot_mapping=np.concatenate(slots).astype(np.int64),
        block_size=block_size,
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU as untouched pages, which cost no time and no memory until written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = np.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
    start = -pages.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(pages[start : start + num_bytes]).view(dtype).view(shape)
