"""An engine core of fakes with the hook `vllm` attached, and what it has recorded.

Knows how the hook is attached and how its journals are closed. Does not know what is recorded.
"""

import time
from pathlib import Path
from typing import Any

from instrumentation.hooks import recording
from instrumentation.hooks.vllm_engine import install
from tests.support.vllm_fakes import FakeRequest, fake_modules
from traces.journal_reader import Run, read_run


def close_and_read(hooks_dir: Path) -> Run:
    """The run so far."""
    for instrument in recording._instruments.values():
        instrument.close()
    return read_run(hooks_dir)


def hooked_core(**kwargs: Any) -> Any:
    """An engine core of fakes with the hook attached."""
    core_module, worker_module = fake_modules()
    install(worker_module)
    install(core_module)
    return core_module.EngineCore(**kwargs)


def request(number: int, *, prompt: int, output: int) -> FakeRequest:
    """A request that arrived a tenth of a second ago."""
    return FakeRequest(f"request-{number}", prompt, output, arrival_time=time.time() - 0.1)


def run_until_done(core: Any) -> list[dict[str, int]]:
    """Run all steps; what each scheduled, by the scheduler's own word."""
    plans = []
    while core.scheduler.requests:
        update = core.scheduler.update_from_output

        def keep(plan: Any, sampled: Any, update: Any = update) -> Any:
            plans.append(dict(plan.num_scheduled_tokens))
            return update(plan, sampled)

        core.scheduler.update_from_output = keep
        core.step_fn()
        core.scheduler.update_from_output = update
    return plans
