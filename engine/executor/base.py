"""The executor's contract: bring workers up, run steps on them, take them down."""

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.types.kv_cache import KVCacheSpec
from engine.types.plan import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from instrumentation import Instrument


class Executor(ABC):
    """Runs steps in the order given; each step is `execute_model`, then `sample_tokens`."""

    @abstractmethod
    def __init__(self, config: EngineConfig, *, obs: Instrument) -> None:
        """Make the workers, without weights."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, str]:
        """What the workers decided: dtype, device, attention_backend."""

    @property
    @abstractmethod
    def model_config(self) -> ModelConfig:
        """What the workers read from the checkpoint's configuration."""

    @property
    @abstractmethod
    def memory_bytes(self) -> dict[str, int]:
        """Memory by component once the KV cache is allocated; `EngineCoreReadyResponse` defines it.

        Keys: weights, kv_cache, graphs, activations, other.
        """

    @abstractmethod
    def load_model(self) -> None:
        """Load the weights. Raises ModelError."""

    @abstractmethod
    def get_kv_cache_spec(self) -> KVCacheSpec:
        """What one KV block costs on a worker."""

    @abstractmethod
    def determine_available_memory(self, *, max_model_len: int, max_num_batched_tokens: int) -> int:
        """Build the runner, run the largest batch, return the bytes that the KV cache may take."""

    @abstractmethod
    def initialize_cache(self, num_blocks: int) -> None:
        """Allocate the KV tensors."""

    @abstractmethod
    def warm_up(self) -> None:
        """Run what would otherwise be slow the first time."""

    @abstractmethod
    def execute_model(self, plan: SchedulerOutput) -> None:
        """Hand over a step; returns at once."""

    @abstractmethod
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Future[ModelRunnerOutput]:
        """Result of the step handed over last. A worker's exception comes out of the future.

        Args:
            grammar_output: which tokens the grammars of this step's requests allow; None for no
                grammars.
        """

    @abstractmethod
    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker in its own thread, between steps; results by rank.

        Waits for the steps that were handed over before. A worker's exception comes out.
        """

    def start_profile(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        """Begin a torch profile in every worker; returns their status, by rank."""
        return self.collective_rpc("start_profile", options)

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers; harmless when called twice."""
