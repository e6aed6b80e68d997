"""`AsyncLLM`: many tasks on one loop, the same outputs as `LLM`, aborts, ends."""

import asyncio
import contextlib
import gc
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineDeadError,
    EventLoopError,
    IsinglassError,
    ModelNotFoundError,
    PromptError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    SamplingParamsError,
)
from engine.frontend.input_processor import ProcessedParams
from tests.integration.conftest import SMALL
from tests.support.reference import varied_text
from tests.support.scripts import is_running
from tests.waiting import PATIENCE_S, SOON_S, until

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
LONG = SamplingParams(temperature=0, max_tokens=30_000, ignore_eos=True, output_kind=DELTA)


OnEngine = Callable[[Callable[[AsyncLLM], Awaitable[Any]]], Any]


def on_loop(work: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine function to its end, within a time that shows a hang."""

    async def run() -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await work()

    return asyncio.run(run())


def requests(num: int) -> list[tuple[str, SamplingParams]]:
    """Varied prompts and parameters."""
    generator = random.Random(1)
    made = []
    for number in range(num):
        temperature = generator.choice([0.0, 0.7, 1.3])
        params = SamplingParams(
            temperature=temperature,
            seed=number,
            max_tokens=generator.randint(1, 40),
            n=generator.choice([1, 2]) if temperature else 1,
            logprobs=generator.choice([None, 0, 3]),
            stop=generator.choice([None, ["e", "q"]]),
        )
        made.append((varied_text(number, generator.randint(3, 12))[:200], params))
    return made


async def gather_deltas(stream: AsyncIterator[RequestOutput]) -> dict[int, Any]:
    """Text, ids and end of each sample, put together from deltas."""
    samples: dict[int, Any] = {}
    async for output in stream:
        for completion in output.outputs:
            text, ids, logprobs, _ = samples.get(completion.index, ("", [], 0, None))
            samples[completion.index] = (
                text + completion.text,
                ids + list(completion.token_ids),
                logprobs + len(completion.logprobs or ()),
                completion.finish_reason,
            )
    return samples


def total(llm: AsyncLLM, name: str, **labels: str) -> float:
    """Sum of a metric's values over all labels that are not given."""
    return sum(
        m.value
        for m in llm.get_metrics()
        if m.name == f"isinglass_{name}" and labels.items() <= m.labels.items()
    )


async def become_idle(llm: AsyncLLM) -> None:
    """Nothing may be left soon: neither here, nor in the core, which says so."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (
        llm.num_unfinished
        or llm.llm_engine.has_unfinished_requests()
        or llm.llm_engine.queue.num_requests
        or total(llm, "requests_in_flight")
        or not await llm.reset_prefix_cache()  # as long as requests hold blocks
    ):
        assert time.monotonic() < deadline_s, "requests are left"
        await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def shared(text_llama: Path) -> Iterator[tuple[asyncio.Runner, AsyncLLM]]:
    """An engine on an event loop of its own, which stands still between two tests."""
    with asyncio.Runner() as runner:
        llm = AsyncLLM(text_llama, **SMALL)
        runner.run(llm.start())
        yield runner, llm
        runner.run(llm.shutdown())


@pytest.fixture
def on_engine(shared: tuple[asyncio.Runner, AsyncLLM]) -> Iterator[OnEngine]:
    """Runs a coroutine function of the shared engine, which has to be idle afterwards."""
    runner, llm = shared

    async def within_a_minute(work: Callable[[AsyncLLM], Awaitable[Any]]) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await work(llm)

    def run(work: Callable[[AsyncLLM], Awaitable[Any]]) -> Any:
        return runner.run(within_a_minute(work))

    yield run
    run(become_idle)


@pytest.fixture(scope="module")
def offline(text_llama: Path) -> list[RequestOutput]:
    """What `LLM` makes of the requests."""
    with LLM(text_llama, **SMALL) as llm:
        prompts, params = zip(*requests(24), strict=True)
        return llm.generate(list(prompts), list(params), use_tqdm=False)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_the_same_outputs_as_offline(
    on_engine: OnEngine,
    offline: list[RequestOutput],
    kind: RequestOutputKind,
) -> None:
    async def run(llm: AsyncLLM) -> list[dict[int, Any]]:
        async def one(prompt: str, params: SamplingParams) -> dict[int, Any]:
            outputs = llm.generate(prompt, params.clone(output_kind=kind))
            if kind is DELTA:
                return await gather_deltas(outputs)
            samples: dict[int, Any] = {}
            async for output in outputs:
                for c in output.outputs:
                    num_logprobs = len(c.logprobs or ())
                    samples[c.index] = (
                        c.text,
                        list(c.token_ids),
                        num_logprobs,
                        c.finish_reason,
                    )
            return samples

        results = await asyncio.gather(*[one(*request) for request in requests(24)])
        assert llm.num_unfinished == 0
        return results

    for output, samples in zip(offline, on_engine(run), strict=True):
        expected = {
            c.index: (c.text, list(c.token_ids), len(c.logprobs or ()), c.finish_reason)
            for c in output.outputs
        }
        assert samples == expected


def test_leaving_a_stream_aborts_its_request_and_no_other(on_engine: OnEngine) -> None:
    async def run(llm: AsyncLLM) -> None:
        other = asyncio.create_task(
            gather_deltas(llm.generate("Another", LONG.clone(max_tokens=200)))
        )
        for leave in ("aclose", "cancel", "close"):
            if leave == "close":
                stream = await llm.submit("Once", LONG)
                await anext(stream)
                stream.close()
            elif leave == "aclose":
                async with contextlib.aclosing(llm.generate("Once", LONG)) as outputs:
                    async for _ in outputs:
                        break
            else:
                task = asyncio.create_task(gather_deltas(llm.generate("Once", LONG)))
                await asyncio.sleep(0.1)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        samples = await other
        assert len(samples[0][1]) == 200

    on_engine(run)


def test_abort_by_id_ends_the_stream_with_what_there_is(on_engine: OnEngine) -> None:
    async def run(llm: AsyncLLM) -> None:
        stream = await llm.submit("Once", LONG, "mine")
        first = await anext(stream)
        await llm.abort("mine")
        await llm.abort("nobody's")
        last = [output async for output in stream][-1]
        assert (first.finished, last.finished) == (False, True)
        assert last.outputs[0].finish_reason == "abort"

    on_engine(run)


def test_bad_requests_are_refused_before_they_are_sent(on_engine: OnEngine) -> None:
    errors = ("PromptError", "SamplingParamsError")

    async def run(llm: AsyncLLM) -> None:
        before = [total(llm, "requests_rejected_total", error=error) for error in errors]
        with pytest.raises(PromptError):
            await llm.submit("")
        with pytest.raises(PromptError, match="1000000"):
            await llm.submit([1, 10**6])
        with pytest.raises(SamplingParamsError):
            await llm.submit("a", SamplingParams(logprobs=10_000))
        stream = await llm.submit("a", LONG, "mine")
        with pytest.raises(PromptError, match="unfinished"):
            await llm.submit("a", LONG, "mine")
        assert len([o async for o in llm.generate("a", SamplingParams(max_tokens=3))]) >= 1
        stream.close()
        after = [total(llm, "requests_rejected_total", error=error) for error in errors]
        assert [new - old for new, old in zip(after, before, strict=True)] == [3, 1]

    on_engine(run)


def test_the_cores_death_ends_every_stream_soon_and_later_calls_too(text_llama: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(text_llama, **SMALL) as llm:
            streams = [await llm.submit("Once", LONG) for _ in range(5)]
            await asyncio.gather(*[anext(stream) for stream in streams])
            utility = asyncio.create_task(llm.stop_profile())
            killed_s = time.monotonic()
            os.kill(llm.llm_engine.engine_core.core_pid, signal.SIGKILL)

            async def read(stream: AsyncIterator[RequestOutput]) -> None:
                async for _ in stream:
                    pass

            errors = await asyncio.gather(*map(read, streams), return_exceptions=True)
            assert time.monotonic() - killed_s < SOON_S
            assert {type(error) for error in errors} == {EngineDeadError}
            assert "signal 9" in str(errors[0])
            for _ in range(2):  # no raise leaves its frames in the error for the next one
                with pytest.raises(EngineDeadError) as caught:
                    await llm.submit("Once", LONG)
                assert len(caught.traceback) < 6
            with pytest.raises(EngineDeadError):
                await llm.start()
            with pytest.raises(IsinglassError):
                await utility
            assert not llm.is_running
            assert (await llm.wait_for_death()) is llm.dead_error

    on_loop(run)


def test_shutdown_ends_streams_and_leaves_nothing(
    text_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def run() -> int:
        llm = AsyncLLM(text_llama, **SMALL)
        stream = await llm.submit("Once", LONG)
        pid = llm.llm_engine.engine_core.core_pid
        leaving = asyncio.create_task(llm.shutdown())
        await asyncio.sleep(0)
        leaving.cancel()  # who asked has gone, and what has begun is brought to its end
        await asyncio.gather(leaving, llm.shutdown(), llm.shutdown(), return_exceptions=True)
        assert not is_running(pid)
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass
        assert total(llm, "requests_in_flight") == 0
        for call in (llm.start, llm.__aenter__, lambda: anext(llm.generate("Once"))):
            with pytest.raises(EngineDeadError, match="shut down"):
                await call()
        return pid

    assert not is_running(on_loop(run))
    assert not list(tmp_path.glob("isinglass-*"))


def test_wrong_settings_and_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        AsyncLLM(max_num_seq=3)
    with pytest.raises(IsinglassError, match="process of its own"):
        AsyncLLM(enable_multiprocessing=False)

    async def run() -> None:
        llm = AsyncLLM(tmp_path / "nothing")
        for _ in range(2):
            with pytest.raises(ModelNotFoundError):
                await llm.start()
        await llm.shutdown()

    on_loop(run)


def test_views_while_requests_run(on_engine: OnEngine, tmp_path: Path) -> None:
    async def run(llm: AsyncLLM) -> None:
        stream = await llm.submit("Once", LONG, "seen")
        await anext(stream)
        folder = await llm.start_trace(tmp_path)
        await llm.start_profile(max_steps=3)
        await anext(stream)
        assert llm.request_timeline("seen").timeline.num_prompt_tokens > 0
        assert Path(await llm.dump_flight_record()).is_file()
        with contextlib.suppress(IsinglassError):  # it may have ended by itself
            await llm.stop_profile()
        assert await llm.stop_trace() == folder
        stream.close()
        journals = {path.name.split(".")[0] for path in Path(folder).glob("*.journal")}
        assert {"caller", "core"} <= journals

    on_engine(run)


def test_chat_is_generate_behind_the_template(on_engine: OnEngine) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    messages = [{"role": "user", "content": "Hello " * 900}]
    params = SamplingParams(temperature=0, max_tokens=5, output_kind=FINAL_ONLY)

    async def run(llm: AsyncLLM) -> list[RequestOutput]:
        chat = [o async for o in llm.chat(messages, params, chat_template=template)]
        text = "user: " + "Hello " * 900 + "\n"
        ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
        plain = [o async for o in llm.generate(ids, params)]
        return [chat[-1], plain[-1]]

    chat, plain = on_engine(run)
    assert chat.prompt_token_ids == plain.prompt_token_ids
    assert chat.outputs[0].token_ids == plain.outputs[0].token_ids


def test_an_engine_that_is_idle_after_aborts_says_so(on_engine: OnEngine) -> None:
    async def run(llm: AsyncLLM) -> None:
        streams = [await llm.submit("Once upon a time", LONG) for _ in range(3)]
        await asyncio.gather(*[anext(stream) for stream in streams])
        assert total(llm, "requests_running") > 0
        for stream in streams:
            stream.close()
        await until(
            lambda: not total(llm, "requests_running") and not total(llm, "kv_blocks", state="used")
        )
        assert total(llm, "kv_blocks", state="cached_free") > 0
        assert await llm.reset_prefix_cache()

    on_engine(run)


def test_an_id_is_in_use_until_its_last_output_has_been_read(on_engine: OnEngine) -> None:
    async def run(llm: AsyncLLM) -> None:
        few = SamplingParams(temperature=0, max_tokens=2, output_kind=FINAL_ONLY)
        before = total(llm, "requests_rejected_total", error="PromptError")
        stalled = await llm.submit("Once", few, "mine")
        while "mine" in llm.llm_engine.output_processor:
            await asyncio.sleep(0.01)
        assert llm.has_request("mine")
        with pytest.raises(PromptError, match="unfinished"):
            await llm.submit("Once", few, "mine")
        assert (await anext(stalled)).finished
        assert not llm.has_request("mine")
        # Two that come at the same time, and are tokenized beside the loop.
        both = await asyncio.gather(
            *[llm.submit("long " * 500, few, "mine") for _ in range(2)], return_exceptions=True
        )
        (error,) = [one for one in both if isinstance(one, Exception)]
        assert isinstance(error, PromptError)
        (stream,) = [one for one in both if not isinstance(one, BaseException)]
        assert (await anext(stream)).finished
        assert llm.num_unfinished == 0
        assert total(llm, "requests_rejected_total", error="PromptError") - before == 2

    on_engine(run)


def test_texts_that_are_long_in_sum_leave_the_loop_together(
    on_engine: OnEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(llm: AsyncLLM) -> None:
        processor = llm.llm_engine.input_processor
        threads: list[str] = []
        process = processor.process_prompt

        def recorded(prompt: Any, params: SamplingParams) -> Any:
            threads.append(threading.current_thread().name)
            return process(prompt, params)

        monkeypatch.setattr(processor, "process_prompt", recorded)
        short: list[Any] = ["Once upon a time", [1, 2, 3], {"prompt": "Once"}]
        for prompts, is_beside in (
            (short, False),
            (["a" * 1500], False),
            (["a" * 1500] * 2, True),
            ([{"prompt": "a" * 1500}, {"prompt_token_ids": [1] * 4000}], True),
            ([{"prompt": "a" * 9000, "prompt_token_ids": [1, 2]}], False),
        ):
            threads.clear()
            made = await llm.process_prompts(prompts, SamplingParams())
            assert len(made) == len(threads) == len(prompts)
            assert {name.startswith("tokenizer") for name in threads} == {is_beside}
        # What has been processed is not processed again.
        own = ProcessedParams(processor.process_params(SamplingParams(max_tokens=1)))
        monkeypatch.setattr(processor, "process_params", None)
        threads.clear()
        stream = await llm.submit(made[0], own)
        assert [output.finished async for output in stream][-1]
        assert not threads

    on_engine(run)


def test_a_loop_whose_threads_are_all_busy_can_be_left(text_llama: Path) -> None:
    async def run() -> None:
        busy = threading.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        llm = AsyncLLM(text_llama, **SMALL)
        assert (llm.run_dir, llm.observer) == (None, None)
        with pytest.raises(IsinglassError, match="has not started"):
            llm.get_metrics()
        await llm.start()
        try:
            held = loop.run_in_executor(None, busy.wait, PATIENCE_S)
            assert await llm.reset_prefix_cache()
            assert await llm.with_texts(threading.current_thread, "a" * 5000) is not (
                threading.current_thread()
            )
            await llm.shutdown()
        finally:
            busy.set()
        await held
        assert not is_running(llm.llm_engine.engine_core.core_pid)
        with pytest.raises(EngineDeadError):
            await llm.submit("a" * 5000)

    on_loop(run)


def test_a_death_while_a_prompt_is_tokenized_leaves_no_stream_behind(text_llama: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(text_llama, **SMALL) as llm:
            is_dead = threading.Event()
            processor = llm.llm_engine.input_processor
            process = processor.process_prompt

            def slow(prompt: Any, params: SamplingParams) -> Any:
                assert is_dead.wait(PATIENCE_S)
                return process(prompt, params)

            processor.process_prompt = slow  # type: ignore[method-assign]
            submitting = asyncio.create_task(llm.submit("a" * 5000, LONG, "late"))
            await asyncio.sleep(0)
            os.kill(llm.llm_engine.engine_core.core_pid, signal.SIGKILL)
            death = await llm.wait_for_death()
            is_dead.set()
            with pytest.raises(EngineDeadError) as caught:
                await submitting
            assert caught.value is death
            assert llm.num_unfinished == 0
            assert not llm.has_request("late")

    on_loop(run)


def test_an_output_handler_that_fails_leaves_no_work_in_the_core(text_llama: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(text_llama, **SMALL) as llm:
            streams = [await llm.submit("Once", LONG) for _ in range(2)]
            await asyncio.gather(*map(anext, streams))

            def take(message: Any) -> Any:
                raise RuntimeError("a bug")

            llm.llm_engine.take = take  # type: ignore[method-assign]
            for stream in streams:
                with pytest.raises(EngineDeadError, match="a bug"):
                    async for _ in stream:
                        pass
            assert not llm.is_running
            while not await llm.reset_prefix_cache():  # as long as requests hold blocks
                await asyncio.sleep(0.02)

    on_loop(run)


def test_a_second_reader_is_told_so_at_once_and_the_first_reads_on(on_engine: OnEngine) -> None:
    async def run(llm: AsyncLLM) -> None:
        stream = await llm.submit("Once", LONG.clone(max_tokens=100), "shared")
        reading = asyncio.create_task(gather_deltas(stream))
        await asyncio.sleep(0)
        with pytest.raises(EventLoopError, match=r"another task is reading .*'shared'"):
            await anext(stream)
        outputs = llm.generate("Once", LONG)
        waiting = asyncio.create_task(anext(outputs))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="already running"):
            await anext(outputs)
        await waiting
        await outputs.aclose()
        assert len((await reading)[0][1]) == 100
        # One that has given up waiting is no reader any more.
        stream = await llm.submit("Once", LONG)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anext(stream)
        assert (await anext(stream)).outputs
        # Who waits for a stream that another task closes sees its end.
        waiting = asyncio.create_task(gather_deltas(stream))
        await asyncio.sleep(0)
        stream.close()
        await waiting

    on_engine(run)


def test_a_generator_sends_nothing_before_its_first_output_is_asked_for(
    on_engine: OnEngine,
) -> None:
    async def run(llm: AsyncLLM) -> None:
        before = total(llm, "requests_arrived_total")
        held = [llm.generate("Once", LONG), llm.chat([{"role": "user", "content": "Once"}])]
        llm.generate("dropped", LONG)
        await asyncio.sleep(0.05)
        for outputs in held:
            await outputs.aclose()
        assert total(llm, "requests_arrived_total") == before
        assert llm.num_unfinished == 0

    on_engine(run)


def test_what_is_dropped_ends_and_what_is_awaited_does_not(on_engine: OnEngine) -> None:
    async def unread_stream(llm: AsyncLLM) -> None:
        await llm.submit("Once", LONG)

    async def stream(llm: AsyncLLM) -> None:
        await anext(await llm.submit("Once", LONG))

    async def stream_with_an_end(llm: AsyncLLM) -> None:
        stream = await llm.submit("Once", LONG.clone(max_tokens=2))
        while stream.request_id in llm.llm_engine.output_processor:
            await asyncio.sleep(0.005)
        assert llm.num_unfinished == 2

    async def generator(llm: AsyncLLM) -> None:
        await anext(llm.generate("Once", LONG))

    async def cycle(llm: AsyncLLM) -> None:
        garbage: list[Any] = [await llm.submit("Once", LONG), llm.generate("Once", LONG)]
        await anext(garbage[1])
        garbage.append(garbage)
        del garbage
        await asyncio.to_thread(gc.collect)  # the garbage's thread may be any

    async def run(llm: AsyncLLM) -> None:
        num_tokens: list[int] = []

        async def read() -> None:
            samples = await gather_deltas(llm.generate("Other", LONG, "other"))
            num_tokens.append(len(samples[0][1]))

        # Nobody but the engine holds this task, as nobody but a socket holds one that reads.
        asyncio.get_running_loop().create_task(read())
        await asyncio.sleep(0.01)
        for drop in (unread_stream, stream, stream_with_an_end, generator, cycle):
            await drop(llm)
            await until(lambda: llm.num_unfinished <= 1, f"{drop.__name__}: still counted")
        assert llm.num_unfinished == 1
        await llm.abort("other")
        while not num_tokens:
            await asyncio.sleep(0.005)
        assert num_tokens[0] > 3

    on_engine(run)


def test_a_task_may_be_cancelled_wherever_it_waits(on_engine: OnEngine) -> None:
    async def run(llm: AsyncLLM) -> None:
        num_ended = 0
        for prompt in ("Once", "Once upon a time " * 200):  # the second is tokenized in a thread
            for num_turns in range(16):
                task = asyncio.create_task(gather_deltas(llm.generate(prompt, LONG)))
                for _ in range(num_turns):
                    await asyncio.sleep(0.001 if num_turns > 8 else 0)
                num_ended += not task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                assert llm.num_unfinished == 0
        assert num_ended == 0

    on_engine(run)


def test_another_event_loop_is_an_error_that_says_what_to_do(
    on_engine: OnEngine, shared: tuple[asyncio.Runner, AsyncLLM]
) -> None:
    llm = shared[1]
    stream = on_engine(lambda llm: llm.submit("Once", LONG.clone(max_tokens=3)))
    calls: list[Callable[[], Awaitable[Any]]] = [
        llm.start,
        llm.wait_for_death,
        lambda: llm.submit("Once"),
        lambda: anext(llm.generate("Once")),
        lambda: anext(llm.chat([{"role": "user", "content": "Once"}])),
        lambda: llm.abort("any"),
        lambda: anext(stream),
        llm.kv_block_map,
        llm.reset_prefix_cache,
        llm.profile_status,
        llm.shutdown,
    ]

    async def elsewhere() -> None:
        for call in calls:
            with pytest.raises(EventLoopError, match="event loop"):
                await call()

    on_loop(elsewhere)  # while the engine's own loop stands still

    async def at_home(llm: AsyncLLM) -> None:
        calls.remove(llm.profile_status)  # which threads may ask while the loop runs
        await asyncio.to_thread(on_loop, elsewhere)
        assert await asyncio.to_thread(asyncio.run, llm.profile_status()) is not None
        with pytest.raises(EventLoopError, match="waits for the event loop that makes it"):
            llm.llm_engine.reset_prefix_cache()
        assert [output.finished async for output in stream][-1]

    on_engine(at_home)


def test_an_engine_that_is_dropped_ends_though_its_loop_goes_on(text_llama: Path) -> None:
    async def run() -> None:
        llm = AsyncLLM(text_llama, **SMALL)
        stream = await llm.submit("Once", LONG)
        await anext(stream)
        pid = llm.llm_engine.engine_core.core_pid
        generating = asyncio.create_task(anext(llm.generate("Once", LONG)))
        del llm
        assert (await generating).outputs, "a generator keeps its engine"
        del generating
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in stream:
                pass
        while is_running(pid):
            await asyncio.sleep(0.02)

    on_loop(run)


def test_an_engine_whose_loop_is_gone_can_still_be_shut_down(text_llama: Path) -> None:
    llm = AsyncLLM(text_llama, **SMALL)
    streams = []

    async def begin() -> int:
        streams.append(await llm.submit("Once", LONG))
        await anext(streams[0])
        return llm.llm_engine.engine_core.core_pid

    pid = on_loop(begin)
    assert is_running(pid)
    assert "event loop" in str(llm.dead_error)

    async def end() -> None:
        with pytest.raises(EventLoopError, match=r"asyncio\.run"):
            await llm.start()
        await llm.shutdown()
        await llm.shutdown()

    on_loop(end)
    assert not is_running(pid)
    assert total(llm, "requests_in_flight") == 0
    streams.clear()  # nobody is there any more who could be told
