"""What an `AsyncLLM` lets one see: calls that wait are made beside the loop, as `LLM`'s are."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.api.async_views import AsyncViews
from engine.config import EngineConfig
from engine.errors import ConfigError, IsinglassError, ProfilerError
from instrumentation import RequestTimeline, StepHistory
from tests.support.async_core import PlayedCore
from tests.waiting import PATIENCE_S


class Controls:
    """Notes each call with its thread; answers what it is told to."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.threads: set[int] = set()
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.made.append((name, args, options))
            self.threads.add(threading.get_ident())
            answer = self.answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


class Views(AsyncViews):
    """An engine as far as it is looked at, with a core that is played."""

    def __init__(self, *, observer: Any = None, run_dir: str | None = None) -> None:
        self.core = PlayedCore()
        self.controls = Controls()
        self.host: Any = SimpleNamespace(
            llm_engine=SimpleNamespace(
                engine_core=self.core.client(),
                controls=self.controls,
                config=EngineConfig.from_kwargs(),
            ),
            run_dir=run_dir,
            observer=observer,
            metrics_server=None,
        )

    def begin(self) -> None:
        self._begin_views(self.host)

    async def answer_next(self, result: Any) -> tuple[str, list[Any]]:
        """Answer the core's next utility call; returns what was called."""
        while not (calls := self.core.calls()):
            await asyncio.sleep(0.001)
        ((call_id, method, args),) = calls
        self.core.answer(call_id, result)
        return method, args


def on_loop(views: Views, work: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await work()

    try:
        asyncio.run(run())
    finally:
        views.core.close()


def test_before_the_start_there_is_nothing_to_see_and_each_call_says_so() -> None:
    views = Views(run_dir="runs/run-1", observer=object())

    async def run() -> None:
        assert (views.run_dir, views.observer) == (None, None)
        for call in (
            views.kv_block_map,
            views.reset_prefix_cache,
            views.start_trace,
            views.stop_trace,
            views.start_profile,
            views.stop_profile,
            views.profile_status,
            views.dump_flight_record,
            views.warm_up_structured_outputs,
            lambda: views.join_recording("runs"),
            views.leave_recording,
        ):
            with pytest.raises(IsinglassError, match=r"has not started yet: await start\(\)"):
                await call()
        for look in (views.get_metrics, lambda: views.request_timeline("r")):
            with pytest.raises(IsinglassError, match="has not started yet"):
                look()
        views.begin()
        assert (views.run_dir, views.observer) == ("runs/run-1", views.host.observer)

    on_loop(views, run)


def test_calls_that_wait_are_made_beside_the_loop_with_what_they_were_given() -> None:
    views = Views(run_dir="runs/run-1")
    answers = {
        "start_profile": ["begun"],
        "stop_profile": ["ended"],
        "profile_status": ["idle"],
        "dump_flight_record": "flight.jsonl",
    }
    views.controls.answers = dict(answers)

    async def run() -> None:
        views.begin()
        assert await views.start_profile(max_steps=3, with_stack=True) == ["begun"]
        assert await views.stop_profile() == ["ended"]
        assert await views.profile_status() == ["idle"]
        assert await views.dump_flight_record() == "flight.jsonl"
        assert [name for name, *_ in views.controls.made] == list(answers)
        assert views.controls.made[0][2] == {
            "folder": "runs/run-1",  # where a recording's pictures look for it
            "max_steps": 3,
            "max_bytes": None,
            "with_stack": True,
            "record_shapes": False,
        }
        assert threading.get_ident() not in views.controls.threads
        views.controls.answers["stop_profile"] = ProfilerError("none is running")
        with pytest.raises(ProfilerError, match="none is running"):
            await views.stop_profile()
        with pytest.raises(TypeError, match="max_step"):
            await views.start_profile(max_step=3)

    on_loop(views, run)


def test_a_trace_has_a_folder_of_its_own_unless_it_cannot_begin(tmp_path: Path) -> None:
    views = Views()

    async def run() -> None:
        views.begin()
        views.controls.answers["start_recording"] = IsinglassError("one is being written already")
        with pytest.raises(IsinglassError, match="already"):
            await views.start_trace(tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert views.run_dir is None
        del views.controls.answers["start_recording"]
        folder = await views.start_trace(tmp_path)
        assert [str(path) for path in tmp_path.iterdir()] == [folder] == [views.run_dir]
        assert views.controls.made[-1] == ("start_recording", (folder,), {})
        views.controls.answers["stop_recording"] = True
        assert await views.stop_trace() == folder
        views.controls.answers["stop_recording"] = False
        assert await views.stop_trace() is None
        with pytest.raises(ConfigError, match="must be a path"):
            await views.start_trace(3)  # type: ignore[arg-type]

    on_loop(views, run)


def test_a_part_in_anothers_recording_leaves_the_core_alone() -> None:
    views = Views()
    views.host.llm_engine.obs = obs = Controls()

    async def run() -> None:
        views.begin()
        obs.answers["start_recording"] = False
        assert not await views.join_recording("runs/run-2")
        assert views.run_dir is None
        obs.answers["start_recording"] = True
        assert await views.join_recording("runs/run-2")
        assert views.run_dir == "runs/run-2"
        obs.answers["stop_recording"] = True
        assert await views.leave_recording()
        begin = ("start_recording", ("runs/run-2",), {})
        assert obs.made == [begin, begin, ("stop_recording", (), {})]
        assert threading.get_ident() not in obs.threads
        assert not views.controls.made
        assert not views.core.calls()

    on_loop(views, run)


def test_the_cores_own_views_are_awaited_on_the_loop() -> None:
    views = Views()

    async def run() -> None:
        views.begin()
        views.host.llm_engine.engine_core.attach()
        map_of_blocks = {"num_blocks": 4, "states": [0, 1, 1, 2]}
        asked = asyncio.create_task(views.kv_block_map())
        assert await views.answer_next(map_of_blocks) == ("kv_block_map", [])
        assert await asked == map_of_blocks
        for was_reset in (True, False):
            asking = asyncio.create_task(views.reset_prefix_cache())
            assert await views.answer_next(was_reset) == ("reset_prefix_cache", [])
            assert await asking is was_reset
        warming = asyncio.create_task(views.warm_up_structured_outputs())
        assert await views.answer_next(None) == ("warm_up_structured_outputs", [])
        await warming
        assert not views.controls.made
        views.host.llm_engine.engine_core.detach()

    on_loop(views, run)


def test_metrics_and_time_lines_are_there_at_once() -> None:
    class Metrics:
        def snapshot(self) -> list[str]:
            return ["requests_running"]

    views = Views(observer=SimpleNamespace(metrics=Metrics()))
    timeline = RequestTimeline(request_id="r", num_prompt_tokens=7)
    views.controls.answers["find_request"] = (timeline, StepHistory(), {})

    async def run() -> None:
        views.begin()
        assert views.get_metrics() == ["requests_running"]
        assert views.request_timeline("r").timeline.num_prompt_tokens == 7
        assert views.controls.made == [("find_request", ("r",), {})]
        views.controls.answers["find_request"] = IsinglassError("no request 'q'")
        with pytest.raises(IsinglassError, match="'q'"):
            views.request_timeline("q")

    on_loop(views, run)
    blind = Views()
    blind.begin()
    blind.core.close()
    with pytest.raises(IsinglassError, match="disable_log_stats"):
        blind.get_metrics()
