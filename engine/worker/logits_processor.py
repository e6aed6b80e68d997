"""The interface through which logits are changed before a token is selected.

Knows what a processor is told about the batch and how a user's class is found. Knows neither how
the batch keeps its rows (`engine.worker.batch_update`) nor how tokens are selected.
"""

import enum
import importlib
import inspect
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from engine.errors import ConfigError
from engine.log import get_logger
from engine.types.sampling import SamplingParams

logger = get_logger(__name__)

State = TypeVar("State")


class MoveDirectionality(enum.Enum):
    """What a move does to the row that the request leaves."""

    UNIDIRECTIONAL = enum.auto()
    """The source row becomes empty; whatever the destination held is gone."""
    SWAP = enum.auto()
    """The two rows exchange their requests."""


AddedRequest: TypeAlias = tuple[int, SamplingParams, list[int] | None, list[int]]
"""(row, parameters, prompt token ids, live list of output token ids)."""

MovedRequest: TypeAlias = tuple[int, int, MoveDirectionality]
"""(source row, destination row, direction)."""


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """How the rows of the batch changed since the previous step.

    Apply `removed`, then `added`, then `moved`, each in its order. A row that is added to is not
    also listed as removed, so that adding first gives the same result. The output token ids of an
    added request are the runner's own list: it grows as tokens are generated. The prompt token ids
    are None unless custom processors are loaded.
    """

    batch_size: int
    """Requests in the batch after the update: rows 0 to batch_size - 1."""
    removed: Sequence[int] = ()
    added: Sequence[AddedRequest] = ()
    moved: Sequence[MovedRequest] = ()


class LogitsProcessor(ABC):
    """Changes the logits of the whole batch; one instance lives in each worker.

    Subclasses take `(config, device, is_pin_memory)` in their constructor.
    """

    @classmethod  # noqa: B027 - an optional hook: doing nothing is the default
    def validate_params(cls, params: SamplingParams) -> None:
        """Check what this processor reads of a request's parameters, such as `extra_args`.

        Raises:
            ValueError: the parameters make no sense to this processor.
        """

    @abstractmethod
    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Build the processor.

        Args:
            config: the engine's configuration.
            device: where the logits live.
            is_pin_memory: whether host buffers should be pinned.
        """

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the most likely token always stays the most likely one.

        Such processors are skipped for greedy rows and run after the division by temperature.
        """

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take note of a new step; `batch_update` is None if no row changed."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the changed logits, which may be the same tensor changed in place.

        Args:
            logits: float32 [batch_size, vocab_size].
        """

    def take_failures(self) -> dict[int, str]:
        """Rows whose requests have failed since the last call, each with the reason.

        A processor that serves single requests names them here, and only they end; what `apply`
        and `update_state` raise ends the engine.
        """
        return {}


class TensorKind(NamedTuple):
    """What the result of a processor must agree with."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorKind":
        """The kind of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def complaint_about(self, result: object) -> str | None:
        """What is wrong with a result, None if nothing is."""
        if isinstance(result, torch.Tensor):
            kind = TensorKind.of(result)
            if kind == self:
                return None
            got = f"a tensor of {kind}"
        else:
            got = "None" if result is None else f"a {type(result).__name__}"
        return f"returned {got}; it must return the logits, changed in place or a tensor of {self}"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {list(self.shape)} on {self.device}"


def told(error: BaseException) -> str:
    """An exception of foreign code in one line: kind, message and place."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


RequestLogitsProcessor: TypeAlias = (
    Callable[[list[int], torch.Tensor], torch.Tensor]
    | Callable[[list[int], list[int], torch.Tensor], torch.Tensor]
)
"""(output ids, logits row) or (prompt ids, output ids, logits row) to logits row."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Runs one callable for each request that wants it, on that request's row of logits.

    A callable that raises, or returns anything but a row of logits, ends its own request with
    finish reason error; so does a `new_req_logits_processor` that raises.
    """

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Start without requests; subclasses with a constructor of their own must call this."""
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        self._failures: dict[int, str] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the callable for a new request, or None if the request needs none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keep each callable at its request's row."""
        apply_update(self.req_info, batch_update, self._bind)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Replace each concerned row by what its callable returns; [batch_size, vocab_size]."""
        for row, process in self.req_info.items():
            before = logits[row]
            kind = TensorKind.of(before)
            try:
                after = process(before)
            except (Exception, SystemExit) as error:
                self._fail(row, f"raised {told(error)}", error)
                continue
            if complaint := kind.complaint_about(after):
                self._fail(row, complaint)
            elif after is not before:
                logits[row] = after
        for row in self._failures:
            self.req_info.pop(row, None)
        return logits

    def take_failures(self) -> dict[int, str]:
        """Rows whose callable has failed since the last call, each with the reason."""
        failures, self._failures = self._failures, {}
        return failures

    def _fail(self, row: int, what: str, error: BaseException | None = None) -> None:
        message = f"logits processor {type(self).__qualname__}: the request's callable {what}"
        logger.error("%s", message, exc_info=error)
        self._failures[row] = message

    def _bind(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output: list[int]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        try:
            return self._made_for(params, prompt_token_ids, output)
        except (Exception, SystemExit) as error:
            # It fails with its first logits, where the row is known to be the request's.
            return partial(_raise, error)

    def _made_for(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output: list[int]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        # Typed by hand: which of the two forms it is shows only in the signature.
        process: Callable[..., torch.Tensor] | None = self.new_req_logits_processor(params)
        if process is None:
            return None
        num_arguments = len(inspect.signature(process).parameters)
        if num_arguments == 2:
            return partial(process, output)
        if num_arguments == 3:
            return partial(process, prompt_token_ids or [], output)
        raise TypeError(
            f"{type(self).__name__}.new_req_logits_processor must return a callable of "
            "(output_ids, logits) or (prompt_ids, output_ids, logits), got one of "
            f"{num_arguments} arguments."
        )


def _raise(error: BaseException, logits: torch.Tensor) -> torch.Tensor:
    raise error


def apply_update(
    state: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Bring a dictionary from row to state up to date; return whether anything changed.

    Args:
        state: rows that concern the processor.
        batch_update: what happened, None for nothing.
        new_state: state of an added request, None if the request does not concern the processor.
    """
    if batch_update is None:
        return False
    changed = False
    for row in batch_update.removed:
        changed |= state.pop(row, None) is not None
    for row, params, prompt_token_ids, output_token_ids in batch_update.added:
        changed |= state.pop(row, None) is not None
        added = new_state(params, prompt_token_ids, output_token_ids)
        if added is not None:
            state[row] = added
            changed = True
    for source, destination, direction in batch_update.moved:
        from_source, from_destination = state.pop(source, None), state.pop(destination, None)
        if from_source is not None:
            state[destination] = from_source
        if from_destination is not None and direction is MoveDirectionality.SWAP:
            state[source] = from_destination
        changed |= from_source is not None or from_destination is not None
    return changed


def load_logits_processors(
    specs: Sequence[str | type[LogitsProcessor]],
) -> list[type[LogitsProcessor]]:
    """Resolve classes and "package.module:Class" strings to classes.

    Raises:
        ConfigError: no such module or class, or not a subclass of `LogitsProcessor`.
    """
    return [_load(spec) for spec in specs]


def _load(spec: str | type[LogitsProcessor]) -> type[LogitsProcessor]:
    loaded: object = _import(spec) if isinstance(spec, str) else spec
    if not (isinstance(loaded, type) and issubclass(loaded, LogitsProcessor)):
        raise ConfigError(
            f"logits_processors must name subclasses of LogitsProcessor, got {spec!r}; "
            "give the class itself or 'package.module:Class'."
        )
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(loaded.__abstractmethods__))
        raise ConfigError(f"The logits processor {spec!r} does not implement {missing}.")
    return loaded


def _import(spec: str) -> object:
    module_name, separator, qualified_name = spec.partition(":")
    if not (separator and module_name and qualified_name):
        raise ConfigError(
            f"logits_processors entries must look like 'package.module:Class', got {spec!r}."
        )
    try:
        loaded: object = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"The logits processor {spec!r} cannot be loaded: importing {module_name!r} failed "
            f"with {type(error).__name__}: {error}. The module must be importable in the engine "
            "core's process."
        ) from error
    for name in qualified_name.split("."):
        if not hasattr(loaded, name):
            if module_name == "__mp_main__":
                raise ConfigError(
                    f"The logits processor {qualified_name!r} is defined in the script itself, "
                    "and the engine core, which loads the script without running what stands "
                    'under `if __name__ == "__main__"`, does not find it. Put it in a module '
                    "that can be imported."
                )
            raise ConfigError(
                f"The logits processor {spec!r} cannot be loaded: {module_name!r} has no "
                f"{qualified_name!r}."
            )
        loaded = getattr(loaded, name)
    return loaded
