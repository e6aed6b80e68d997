"""Engine cores over a fake executor."""

from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from instrumentation.testing import Recorder
from tests.fakes import (
    FakeExecutor,
)

MAX_MODEL_LEN = 48


def make_core(
    model: Path,
    *,
    executor: type[FakeExecutor] = FakeExecutor,
    obs: Recorder | None = None,
    **settings: Any,
) -> EngineCore:
    defaults = {"max_model_len": MAX_MODEL_LEN, "block_size": 4, "max_num_seqs": 4}
    config = EngineConfig.from_kwargs(model=str(model), **(defaults | settings))
    return EngineCore(config, executor, obs=obs or Recorder())
