"""The exception tree of the engine.

    IsinglassError
    ├── ConfigError (ValueError)          an engine argument is wrong or contradicts another
    ├── ModelError
    │   ├── ModelNotFoundError            no such file, folder or hub repository
    │   ├── CheckpointError               a file is missing, cut off, or its shapes disagree
    │   ├── UnsupportedModelError         an architecture or feature that no model class covers
    │   └── TokenizerError                no tokenizer, or one that cannot be read
    ├── RequestError (ValueError)         bad input; found in the caller, never reaches the core
    │   ├── SamplingParamsError           a sampling parameter out of range
    │   ├── PromptError                   an empty or too long prompt, a token id out of range
    │   └── QueueFullError                more would wait for the engine than may
    ├── LogitsProcessorError              a logits processor that the user brought has failed
    ├── ProfilerError                     a profile cannot be started or stopped as things are
    ├── EventLoopError (RuntimeError)     awaited on another event loop, or by two tasks at once
    ├── EngineStartError                  the core did not come up: time-out, version, exception
    └── EngineDeadError                   the core has died; every pending and later call gets this

Messages say what was wrong, what is allowed, and what to do.
"""


class IsinglassError(Exception):
    """Root of every error that the engine raises on purpose."""

    is_counted = False
    """Whether the request that it refused has been counted; it may pass several who would."""


class _InputError(ValueError):
    """What the caller has given is wrong.

    Attributes:
        param: the field of a request that it is about, maybe with the place in it, such as `top_p`
            or `messages[0].role`; None where it is not about one.
        code: a word for programs; None for most.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ConfigError(IsinglassError, _InputError):
    """An engine argument is out of range, unknown, or contradicts another."""


class ModelError(IsinglassError):
    """The model could not be found, read or built."""


class ModelNotFoundError(ModelError):
    """No file, folder or hub repository answers to the given name."""


class CheckpointError(ModelError):
    """A checkpoint file is missing, cut off, or disagrees with the configuration."""


class UnsupportedModelError(ModelError):
    """The checkpoint's architecture, or a feature of it, is not supported."""


class TokenizerError(ModelError):
    """The tokenizer is missing or unreadable, or is asked for where there is none."""


class RequestError(IsinglassError, _InputError):
    """A request is malformed; nothing of it has reached the engine core."""


class SamplingParamsError(RequestError):
    """A sampling parameter is out of range or contradicts another."""


class PromptError(RequestError):
    """A prompt is empty, too long, of the wrong type, holds an invalid token id, or is text for an
    engine without a tokenizer."""


class QueueFullError(RequestError):
    """More requests, or more of their tokens, would wait for the engine than may.

    Attributes:
        retry_after_s: after how many seconds there should be room.
    """

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LogitsProcessorError(IsinglassError):
    """A logits processor raised, or returned something that is not the logits; the message names
    its class. One that serves the whole batch ends the engine."""


class ProfilerError(IsinglassError):
    """A torch profile cannot be started or stopped: one is running already, or none, or its folder
    cannot be written to."""


class EventLoopError(IsinglassError, RuntimeError):
    """An `AsyncLLM`, or one of its streams, is awaited where that would never end: on another event
    loop than the one that it was started on, or by a second task at the same time."""


class EngineStartError(IsinglassError):
    """The engine core did not become ready."""


class EngineDeadError(IsinglassError):
    """The engine core has died.

    Attributes:
        exit_code: the process's exit code, negative for a signal; None if unknown.
        log_tail: the last lines that the core logged, oldest first.
    """

    def __init__(
        self, message: str, *, exit_code: int | None = None, log_tail: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.log_tail = log_tail
