"""How a frontend comes up: model, core, tracer and tokenizer; each phase timed.

Knows the order, in which tracer and tokenizer load while the core boots. Knows no request.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from engine.checkpoint.architecture import read_model_config
from engine.checkpoint.locate import ModelSource, resolve_model
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.frontend.observer import EngineObserver
from engine.frontend.request_tracer import RequestTracer
from engine.resolve import resolve_limits
from engine.text.tokenizer import Tokenizer, get_tokenizer
from engine.transport.client import EngineCoreClient
from engine.types.messages import EngineCoreReadyResponse
from engine.version import __version__
from instrumentation import Instrument, SinkName, StartupPhase


class StartedEngine(NamedTuple):
    """What a frontend is made of once its core is ready."""

    config: EngineConfig
    """The settings, with the `max_model_len` that the core has settled on."""
    model: str
    model_config: ModelConfig
    engine_core: EngineCoreClient
    ready: EngineCoreReadyResponse
    tokenizer: Tokenizer | None
    """None with `skip_tokenizer_init`."""
    tracer: RequestTracer
    spans_ns: dict[StartupPhase, tuple[int, int]]
    """Begin and end of the frontend's own phases."""

    def announce(self, observer: EngineObserver | None) -> None:
        """Tell statistics and traces that the engine is ready."""
        if observer is not None:
            startup_ns = {
                phase.label: end_ns - begin_ns
                for phase, (begin_ns, end_ns) in self.spans_ns.items()
            }
            observer.engine_is_ready(
                self.config,
                self.ready,
                version=__version__,
                model=self.model,
                startup_ns=startup_ns | self.ready.startup_ns,
            )
        self.tracer.engine_is_ready(self.ready, self.spans_ns)


class _Phases:
    """Begin and end of each phase; one begins where the one before it ends."""

    def __init__(self, obs: Instrument) -> None:
        self._obs = obs
        self._begin_ns = time.monotonic_ns()
        self.spans_ns: dict[StartupPhase, tuple[int, int]] = {}

    def end(self, phase: StartupPhase) -> None:
        """What has been going on was that phase."""
        end_ns = time.monotonic_ns()
        self.spans_ns[phase] = (self._begin_ns, end_ns)
        self._obs.startup(phase, self._begin_ns, end_ns)
        self._begin_ns = end_ns


def start_engine(
    config: EngineConfig,
    *,
    obs: Instrument,
    run_dir: str | None,
    observer: EngineObserver | None,
    open_tracer: Callable[..., RequestTracer] | None,
    make_client: Callable[..., EngineCoreClient],
) -> StartedEngine:
    """Start a core, or reach one that runs, and load what the frontend needs beside it.

    Raises:
        IsinglassError: the model or the settings are no good, or the core did not come up.
    """
    phases = _Phases(obs)
    source = resolve_model(config.model.model, config.model.revision, config.model.download_dir)
    _check_revision(config, source)
    model_config = read_model_config(source)
    resolve_limits(config, model_config)  # a wrong setting fails before a core is spawned
    phases.end(StartupPhase.RESOLVE_CONFIG)
    engine_core = make_client(
        config,
        run_dir=run_dir,
        obs=obs,
        # At once, since an idle engine's caller would notice only with its next request.
        on_death=None if observer is None else observer.engine_died,
    )
    tracer = RequestTracer()
    try:
        phases.end(StartupPhase.SPAWN)
        if open_tracer is not None:
            tracer = open_tracer(model=source.name)
            if observer is not None:
                observer.metrics.engine.watch(SinkName.OPENTELEMETRY, tracer)
        tokenizer: Tokenizer | None = None
        if not config.model.skip_tokenizer_init:
            tokenizer = get_tokenizer(
                source, name=config.model.tokenizer, download_dir=config.model.download_dir
            )
        phases.end(StartupPhase.TOKENIZER)
        ready = engine_core.wait_ready()
        phases.end(StartupPhase.WAIT_READY)
    except BaseException:
        engine_core.shutdown()
        tracer.close()
        raise
    model = dataclasses.replace(config.model, max_model_len=ready.max_model_len)
    return StartedEngine(
        config=dataclasses.replace(config, model=model),
        model=source.name,
        model_config=model_config,
        engine_core=engine_core,
        ready=ready,
        tokenizer=tokenizer,
        tracer=tracer,
        spans_ns=phases.spans_ns,
    )


def _check_revision(config: EngineConfig, source: ModelSource) -> None:
    """Refuse a revision that would have no effect.

    Raises:
        ConfigError: the model is not fetched from the hub.
    """
    revision = config.model.revision
    if revision is None:
        return
    if source.kind != "folder" or Path(source.name).expanduser().is_dir():
        raise ConfigError(
            f"revision={revision!r} chooses a version of a hub repository, but the model "
            f"{source.name!r} is a local one; leave revision out, or give a hub name."
        )
