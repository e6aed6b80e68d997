"""OpenTelemetry against a real receiver: what it gets is what happened, and it can hurt nobody."""

import json
import logging
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter as Tally
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from engine import LLM, EngineDeadError, PromptError, SamplingParams, SamplingParamsError
from instrumentation import StepRecord, format_step_label
from instrumentation.metrics.types import Counter, Gauge, Histogram
from instrumentation.names import PHASES, STARTUP_PHASES
from tests.integration.conftest import SMALL
from tests.support.otlp_receiver import (
    OtlpReceiver,
    ReceivedSpan,
    attributes_of,
    grpc_receiver,
    http_receiver,
)
from tests.support.reference import random_prompts
from tests.support.scripts import ROOT
from tests.tiny_models import VOCAB_SIZE
from tests.waiting import PATIENCE_S
from traces.journal_reader import read_run

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
TRACE_A, TRACE_B = "0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319d"
SPAN_A, SPAN_B = "b7ad6b7169203331", "c7ad6b7169203332"

with_grpc = contextmanager(grpc_receiver)
with_http = contextmanager(http_receiver)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Engines of this process compute with one thread, since the receivers run here as well."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def shared_receiver() -> Iterator[OtlpReceiver]:
    """One receiver for all tests that only look at what comes."""
    yield from grpc_receiver()


@pytest.fixture
def receiver(shared_receiver: OtlpReceiver) -> OtlpReceiver:
    """The shared receiver, empty."""
    shared_receiver.clear()
    return shared_receiver


@contextmanager
def engine(model: Path, endpoint: str | None, **settings: Any) -> Iterator[LLM]:
    """An engine in this process that exports to an address."""
    llm = LLM(
        model,
        **SMALL
        | {
            "skip_tokenizer_init": True,
            "enable_multiprocessing": False,
            "otlp_traces_endpoint": endpoint,
        }
        | settings,
    )
    try:
        yield llm
    finally:
        llm.shutdown()


def prompts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    return random_prompts(seed, lengths, VOCAB_SIZE)


def covered(span: ReceivedSpan, children: list[ReceivedSpan]) -> float:
    """Which part of a span's time lies below one of its children."""
    reached, total = span.begin_ns, 0
    for child in children:
        assert span.begin_ns <= child.begin_ns <= child.end_ns <= span.end_ns
        total += max(0, child.end_ns - max(child.begin_ns, reached))
        reached = max(reached, child.end_ns)
    return total / (span.end_ns - span.begin_ns)


def linked_ids(step: ReceivedSpan) -> set[bytes]:
    return {link.span_id for link in step.proto.links}


# -- requests --------------------------------------------------------------------------------------


def test_a_request_is_a_tree_that_covers_its_life(tiny_llama: Path, receiver: OtlpReceiver) -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=9,
        ignore_eos=True,
        detokenize=False,
        seed=5,
        frequency_penalty=0.25,
    )
    with engine(tiny_llama, receiver.endpoint, max_num_batched_tokens=32) as llm:
        (prompt,) = prompts_of(90)
        llm.generate([prompt], params, use_tqdm=False)
        (again,) = llm.generate([prompt], params, use_tqdm=False)
        timeline = again.outputs[0].metrics
    assert timeline is not None
    first, span = receiver.requests()
    assert span.name == f"text_completion {tiny_llama}"
    assert span.proto.kind == span.proto.SPAN_KIND_INTERNAL
    assert not span.parent_id
    assert first.trace_id != span.trace_id
    assert span.resource["service.name"] == "isinglass"
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "isinglass",
        "gen_ai.request.model": str(tiny_llama),
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.seed": 5,
        "gen_ai.request.frequency_penalty": 0.25,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.id": again.request_id,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 90,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.usage.cache_read.input_tokens": again.num_cached_tokens,
        "isinglass.latency.e2e": timeline.e2e_ns / 1e9,
        "isinglass.latency.queue": timeline.queue_ns / 1e9,
        "isinglass.latency.prefill": timeline.prefill_ns / 1e9,
        "isinglass.latency.decode": timeline.decode_ns / 1e9,
        "gen_ai.response.time_to_first_chunk": (timeline.ttft_ns or 0) / 1e9,
    }
    assert again.num_cached_tokens == 80
    assert {name: span.attributes.get(name) for name in expected} == expected
    assert span.proto.status.code == 0
    for one, num_chunks in ((first, 3), (span, 1)):
        children = receiver.children_of(one)
        assert [child.name for child in children] == ["queue", "prefill", "decode", "deliver"]
        assert covered(one, children) >= 0.99
        chunks = children[1].proto.events
        assert [event.name for event in chunks] == ["chunk"] * num_chunks
        tokens = [attributes_of(event)["isinglass.chunk.num_tokens"] for event in chunks]
        assert sum(tokens) == 90 - one.attributes["gen_ai.usage.cache_read.input_tokens"]
        assert all(
            children[1].begin_ns <= event.time_unix_nano < children[1].end_ns for event in chunks
        )
    decode = receiver.children_of(span)[2]
    assert decode.end_ns - decode.begin_ns == timeline.decode_ns
    assert abs(time.time_ns() - span.end_ns) < 60e9


def test_interleaved_requests_never_share_a_trace(tiny_llama: Path, receiver: OtlpReceiver) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    sent: dict[str, str | None] = {
        "a": f"00-{TRACE_A}-{SPAN_A}-01",
        "b": f"00-{TRACE_B}-{SPAN_B}-01",
        "not sampled": f"00-{TRACE_B}-{SPAN_A}-00",
        "malformed": "00-zz",
        "none": None,
        "none either": None,
    }
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("the caller's")
    with engine(tiny_llama, receiver.endpoint) as llm:
        core = llm.llm_engine
        for request_id, traceparent in sent.items():
            core.add_request(request_id, prompts_of(20)[0], GREEDY, traceparent=traceparent)
            core.step()
        with tracer.start_as_current_span("caller") as caller:
            core.add_request("below", prompts_of(20)[0], GREEDY)
            core.add_request("given", prompts_of(20)[0], GREEDY, traceparent=sent["a"])
        while core.has_unfinished_requests():
            core.step()
    spans = {one.attributes["gen_ai.response.id"]: one for one in receiver.requests()}
    assert set(spans) == {*sent, "below", "given"} - {"not sampled"}
    parents = {name: (one.trace_id.hex(), one.parent_id.hex()) for name, one in spans.items()}
    context = caller.get_span_context()
    assert parents["a"] == parents["given"] == (TRACE_A, SPAN_A)
    assert parents["b"] == (TRACE_B, SPAN_B)
    assert parents["below"] == (f"{context.trace_id:032x}", f"{context.span_id:016x}")
    roots = ("none", "none either", "malformed")
    assert [parents[name][1] for name in roots] == ["", "", ""]
    assert len({one.trace_id for name, one in spans.items() if name != "given"}) == 6
    for one in spans.values():
        assert {child.trace_id for child in receiver.children_of(one)} == {one.trace_id}


def test_every_arrival_ends_exactly_one_span(tiny_llama: Path, receiver: OtlpReceiver) -> None:
    drawn = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=5, detokenize=False)
    (prompt,) = prompts_of(10)
    llm = LLM(
        tiny_llama,
        **SMALL,
        skip_tokenizer_init=True,
        enable_multiprocessing=False,
        async_scheduling=False,
        otlp_traces_endpoint=receiver.endpoint,
    )
    core = llm.llm_engine
    llm.generate([prompt], GREEDY, use_tqdm=False)  # id "0"
    core.add_request("samples", prompt, drawn)
    with pytest.raises(PromptError):
        core.add_request("samples", prompt, GREEDY)
    with pytest.raises(PromptError):
        core.add_request("empty", [], GREEDY)
    with pytest.raises(SamplingParamsError):
        core.add_request("params", prompt, None)  # type: ignore[arg-type]
    with pytest.raises(PromptError):
        llm.generate([prompt, [VOCAB_SIZE]], GREEDY, use_tqdm=False)
    while core.has_unfinished_requests():
        core.step()
    core.add_request("aborted", prompt, GREEDY)
    core.step()
    core.abort_request(["aborted"])
    while core.has_unfinished_requests():
        core.step()
    core.add_request("discarded", prompt, GREEDY)
    core.discard_request(["discarded"])
    core.add_request("lost", prompt, drawn)

    def fail() -> Any:
        raise RuntimeError("the step failed")

    core.engine_core._core.step = fail  # type: ignore[attr-defined]
    core.step()  # the discarded request's last output
    with pytest.raises(EngineDeadError):
        core.step()
    with pytest.raises(EngineDeadError):
        core.add_request("too late", prompt, GREEDY)
    llm.shutdown()
    spans = receiver.requests()
    ids = Tally(one.attributes.get("gen_ai.response.id") for one in spans)
    assert ids == {
        "0": 1,
        "samples": 2,
        "empty": 1,
        "params": 1,
        None: 1,
        "aborted": 1,
        "discarded": 1,
        "lost": 1,
        "too late": 1,
    }
    outcome = {
        (one.attributes.get("gen_ai.response.id"), one.attributes.get("error.type")): (
            tuple(one.attributes["gen_ai.response.finish_reasons"]),
            one.proto.status.code == one.proto.status.STATUS_CODE_ERROR,
        )
        for one in spans
    }
    assert outcome == {
        ("0", None): (("length",), False),
        ("samples", None): (("length",) * 3, False),
        ("samples", "PromptError"): (("error",), True),
        ("empty", "PromptError"): (("error",), True),
        ("params", "SamplingParamsError"): (("error",), True),
        (None, "PromptError"): (("error",), True),
        ("aborted", None): (("abort",), False),
        ("discarded", None): (("abort",), False),
        ("lost", "engine_error"): (("error",) * 3, True),
        ("too late", "engine_error"): (("error",), True),
    }
    (whole,) = (one for one in spans if one.attributes.get("gen_ai.usage.output_tokens") == 15)
    samples = receiver.children_of(whole)
    assert sorted(one.name for one in samples) == ["sample 0", "sample 1", "sample 2"]
    for sample in samples:
        assert covered(sample, receiver.children_of(sample)) >= 0.99
    lost = next(one for one in spans if one.attributes.get("gen_ai.response.id") == "lost")
    assert "the step failed" in lost.proto.status.message


def test_what_the_engine_was_shut_down_over_ends_too(
    tiny_llama: Path, receiver: OtlpReceiver
) -> None:
    with engine(tiny_llama, receiver.endpoint, async_scheduling=False) as llm:
        llm.llm_engine.add_request("open", prompts_of(10)[0], GREEDY)
        llm.llm_engine.step()
    (span,) = receiver.requests()
    assert span.attributes["error.type"] == "shutdown"
    assert span.proto.status.code == span.proto.status.STATUS_CODE_ERROR


# -- steps and start-up ----------------------------------------------------------------------------


class StepWatch:
    """All step records and ended requests of an engine, and their span ids by number."""

    def __init__(self, llm: LLM) -> None:
        self.steps: list[StepRecord] = []
        self.preempted: set[int] = set()
        self.numbers: dict[bytes, int] = {}
        telemetry = llm.llm_engine.tracer.telemetry  # type: ignore[attr-defined]
        observe = telemetry.observe

        def watch(step: Any, worker: Any, timelines: Any) -> None:
            if step is not None:
                self.steps.append(step)
            for timeline in timelines:
                span_id = bytes.fromhex(timeline.traceparent.split("-")[2])
                self.numbers[span_id] = timeline.request_num
                if timeline.preemptions:
                    self.preempted.add(timeline.request_num)
            observe(step, worker, timelines)

        telemetry.observe = watch


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_all_steps_with_their_phases_and_links(
    tiny_llama: Path, receiver: OtlpReceiver, is_async: bool
) -> None:
    with engine(tiny_llama, receiver.endpoint, trace_steps="all", async_scheduling=is_async) as llm:
        watch = StepWatch(llm)
        llm.generate(prompts_of(30, 9, 50), GREEDY, use_tqdm=False)
    spans = {one.attributes["isinglass.step"]: one for one in receiver.steps()}
    assert sorted(spans) == [record.step for record in watch.steps]
    labels = {phase.label for phase in PHASES}
    for record in watch.steps:
        span = spans[record.step]
        assert span.name == format_step_label(record.label)
        assert not span.parent_id
        served = {watch.numbers[span_id] for span_id in linked_ids(span)}
        assert served == set(record.scheduled[::2])
        names = [child.name for child in receiver.children_of(span)]
        assert set(names) <= labels
        assert sorted(names) == sorted(set(names))  # each at most once
        wanted = {"schedule", "execute", "update", "prepare", "forward", "sample"}
        assert wanted <= set(names)
        covered(span, receiver.children_of(span))  # all lie within
    assert len({one.trace_id for one in spans.values()}) == len(spans)


def test_tail_sampling_exports_the_steps_of_preempted_requests(
    tiny_llama: Path, receiver: OtlpReceiver
) -> None:
    with engine(
        tiny_llama,
        receiver.endpoint,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=14,
        max_model_len=200,
    ) as llm:
        watch = StepWatch(llm)
        llm.generate(prompts_of(20, seed=7), GREEDY, use_tqdm=False)
        num_before = len(watch.steps)
        params = GREEDY.clone(max_tokens=25)
        llm.generate(prompts_of(40, 3, 61, 90, 17, 52), params, use_tqdm=False)
    assert watch.preempted
    numbers = [one.attributes["isinglass.step"] for one in receiver.steps()]
    assert len(numbers) == len(set(numbers))
    # What a request's last step overlaps with ends after it, and is not its own.
    expected = {
        record.step
        for record in watch.steps
        if watch.preempted
        & {*record.scheduled[::2], *(one.request_num for one in record.preempted)}
    }
    tail = {
        one.attributes["isinglass.step"]
        for one in receiver.steps()
        if one.attributes["isinglass.step.sampled_by"] == "tail"
    }
    assert tail <= expected
    void = expected - tail - set(range(0, 10_000, 100))
    assert len(void) <= len(watch.preempted)  # one step in flight at the end of each
    assert not {record.step for record in watch.steps[:num_before]} & tail
    preempted = [
        one for one in receiver.requests() if one.attributes["isinglass.request.num_preemptions"]
    ]
    assert len(preempted) == len(watch.preempted)
    for one in preempted:
        children = receiver.children_of(one)
        stages = Tally(child.name for child in children)
        assert stages["preempted"] == one.attributes["isinglass.request.num_preemptions"]
        assert covered(one, children) >= 0.99
        seconds = sum(c.end_ns - c.begin_ns for c in children if c.name == "preempted") / 1e9
        assert seconds == pytest.approx(one.attributes["isinglass.latency.preempted"])


def test_slow_requests_have_their_steps_and_others_do_not(
    tiny_llama: Path, receiver: OtlpReceiver
) -> None:
    for limit_s, mode in ((0.0, "sampled"), (3600.0, "sampled"), (0.0, "off")):
        receiver.clear()
        with engine(
            tiny_llama, receiver.endpoint, trace_slow_request_s=limit_s, trace_steps=mode
        ) as llm:
            llm.generate(prompts_of(8), GREEDY, use_tqdm=False)
        (request,) = receiver.requests()
        tail = [one for one in receiver.steps() if request.span_id in linked_ids(one)]
        assert len(tail) == (GREEDY.max_tokens if (limit_s, mode) == (0.0, "sampled") else 0)


def test_steps_are_sampled_independently_of_requests(
    tiny_llama: Path, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with engine(tiny_llama, receiver.endpoint, trace_steps="all") as llm:
        llm.generate(prompts_of(8), GREEDY, use_tqdm=False)
    assert not receiver.requests()
    assert len(receiver.steps()) >= 12
    assert not any(linked_ids(one) for one in receiver.steps())


# -- the real core, HTTP, metrics ------------------------------------------------------------------


def test_over_http_from_a_spawned_core(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=fish")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "glue")
    with with_http() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        with engine(tiny_llama, None, enable_multiprocessing=True, trace_dir=tmp_path) as llm:
            llm.generate(prompts_of(12), GREEDY, use_tqdm=False)
            metrics = llm.get_metrics()
            llm.llm_engine.tracer.telemetry.self_test.join()  # type: ignore[attr-defined]
        assert llm.llm_engine.tracer.num_errors == 0
        assert receiver.encodings == {"gzip"}
        assert receiver.headers["x-tenant"] == "fish"
        (request,) = receiver.requests()
        assert request.resource["service.name"] == "glue"
        assert request.resource["deployment.environment"] == "test"
        (startup,) = (one for one in receiver.spans() if one.name == "isinglass.startup")
        phases = receiver.children_of(startup)
        roles = {(one.attributes["isinglass.process.role"], one.name) for one in phases}
        by_name = {phase.label: role.value for phase, (role, _) in STARTUP_PHASES.items()}
        assert {role for role, _ in roles} == {"caller", "core"}
        assert all(by_name[name] == role for role, name in roles)
        covered(startup, phases)  # all lie within
        # The recording, the metrics and the spans tell of the same phases and times.
        assert llm.run_dir is not None
        recorded = read_run(llm.run_dir).startups
        in_journal = {one.phase.label: one.end_ns - one.begin_ns for one in recorded}
        assert set(in_journal) == set(by_name)
        assert {one.name: one.end_ns - one.begin_ns for one in phases} == in_journal
        assert {
            metric.labels["phase"]: round(metric.value * 1e9)
            for metric in metrics
            if isinstance(metric, Gauge) and metric.name == "isinglass_startup_phase_seconds"
        } == in_journal
        assert "isinglass_requests_finished_total" in receiver.last_metrics()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
@pytest.mark.slow
def test_tls_and_what_it_takes_to_trust_the_receiver(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=receiver",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key)]
    subprocess.run([*command, "-out", str(certificate)], check=True, capture_output=True)
    pair = (key.read_bytes(), certificate.read_bytes())
    with with_grpc(grpc.ssl_server_credentials([pair])) as receiver:
        assert receiver.endpoint.startswith("https://")
        with engine(tiny_llama, receiver.endpoint) as llm:
            timed_run(llm)
            llm.llm_engine.tracer.telemetry.self_test.join()  # type: ignore[attr-defined]
        assert llm.llm_engine.tracer.num_errors >= 1  # nobody vouches for the certificate
        assert not receiver.trace_requests
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(certificate))
        with engine(tiny_llama, receiver.endpoint) as llm:
            timed_run(llm)
            llm.llm_engine.tracer.telemetry.self_test.join()  # type: ignore[attr-defined]
        assert llm.llm_engine.tracer.num_errors == 0
        assert len(receiver.requests()) == 1
        assert receiver.last_metrics()


def otlp_values(metric: Any) -> dict[tuple[tuple[str, str], ...], Any]:
    """A metric's points by their attributes: number, or count, sum, bounds and counts."""
    kind = metric.WhichOneof("data")
    points = getattr(metric, kind).data_points
    if kind == "histogram":
        return {
            tuple(sorted(attributes_of(point).items())): (
                point.count,
                point.sum,
                list(point.explicit_bounds),
                list(point.bucket_counts),
            )
            for point in points
        }
    return {
        tuple(sorted(attributes_of(point).items())): getattr(point, point.WhichOneof("value"))
        for point in points
    }


def test_metrics_equal_those_that_prometheus_reads(
    tiny_llama: Path, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    with engine(tiny_llama, receiver.endpoint) as llm:
        llm.generate(prompts_of(12, 30), GREEDY, use_tqdm=False)
        receiver.wait_for(lambda: len(receiver.metric_requests) > 3)
        taken: list[Any] = []
        metrics = llm.llm_engine.tracer.telemetry._metrics  # type: ignore[attr-defined]
        collect = metrics._collect

        def keep() -> Any:
            taken[:] = collect()
            return taken

        metrics._collect = keep
    received = receiver.last_metrics()
    assert len(taken) > 50
    names = {one.name for one in taken}
    aliases = {name for name in received if name.startswith("gen_ai.server.")}
    assert set(received) - aliases == names
    assert len(aliases) == 3
    for series in taken:
        metric = received[series.name]
        value = otlp_values(metric)[tuple(sorted(series.labels.items()))]
        assert metric.description
        if isinstance(series, Histogram):
            bounds = [float(bound) for bound in series.buckets]
            counts = list(series.buckets.values())
            between = [b - a for a, b in zip([0, *counts], counts, strict=False)]
            assert value == (series.count, series.sum, bounds[:-1], between)
            assert metric.histogram.aggregation_temporality == 2
        elif isinstance(series, Counter):
            assert value == series.value
            assert metric.sum.is_monotonic
            assert metric.sum.aggregation_temporality == 2
        else:
            assert value == series.value
            assert metric.WhichOneof("data") == "gauge"
    duration = received["gen_ai.server.request.duration"]
    assert duration.unit == "s"
    ((attributes, value),) = otlp_values(duration).items()
    assert ("gen_ai.provider.name", "isinglass") in attributes
    assert value[0] == 2
    assert value in otlp_values(received["isinglass_request_e2e_seconds"]).values()
    traced = {(one.trace_id, one.span_id) for one in receiver.requests()}
    exemplars = [one for point in duration.histogram.data_points for one in point.exemplars]
    assert exemplars
    assert {(one.trace_id, one.span_id) for one in exemplars} <= traced


# -- receivers that do not receive -----------------------------------------------------------------


def timed_run(llm: LLM) -> None:
    (output,) = llm.generate(prompts_of(12), GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 12


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("trouble", ["down", "slow", "refusing"])
def test_a_bad_receiver_harms_nobody(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
    protocol: str,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(4 * PATIENCE_S))
    monkeypatch.setattr("instrumentation.otel.selftest.TIMEOUT_S", 0.5)
    with with_grpc() if protocol == "grpc" else with_http() as receiver:
        receiver.delay_s = 4 * PATIENCE_S if trouble == "slow" else 0.0
        receiver.refuses = trouble == "refusing"
        endpoint = receiver.endpoint
        if trouble == "down":
            endpoint = f"http://127.0.0.1:{free_port()}"
        caplog.set_level(logging.WARNING, logger="isinglass.telemetry")
        began_s = time.monotonic()
        with engine(tiny_llama, endpoint, trace_steps="all") as llm:
            timed_run(llm)
            tracer = llm.llm_engine.tracer
            tracer.telemetry.self_test.join()  # type: ignore[attr-defined]
            assert tracer.num_errors >= 1
            timed_run(llm)
        assert time.monotonic() - began_s < PATIENCE_S, "neither steps nor the end wait for it"
        assert tracer.num_drops > 0
        assert not receiver.trace_requests
    warnings = [one.getMessage() for one in caplog.records if "cannot be exported" in one.message]
    assert len(warnings) == 2  # one for each signal, however often it failed
    assert any("traces cannot be exported" in one and endpoint in one for one in warnings)
    if trouble == "down":
        assert "refused" in warnings[0]
    if trouble == "refusing" and protocol == "grpc":
        assert "wants nobody's spans" in warnings[0]


def test_a_receiver_that_comes_up_later_gets_what_follows(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    caplog.set_level(logging.INFO, logger="isinglass.telemetry")
    with with_grpc() as receiver:
        receiver.refuses = True
        with engine(tiny_llama, receiver.endpoint) as llm:
            timed_run(llm)
            llm.llm_engine.tracer.telemetry.self_test.join()  # type: ignore[attr-defined]
            receiver.refuses = False
            llm.generate(prompts_of(12, seed=3), GREEDY, use_tqdm=False)
            receiver.wait_for(lambda: bool(receiver.requests()))
    assert "traces are exported again" in caplog.text


# -- not configured, disabled, the application's own -----------------------------------------------

SCRIPT = """
import json, os, sys
from engine import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, log_level="warning", log_format="json",
          kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=256)
llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
llm.shutdown()
print(json.dumps([name for name in sys.modules if name.startswith(("opentelemetry", "grpc"))]))
"""


def test_without_a_receiver_nothing_is_imported(tiny_llama: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_llama)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_S,
        check=True,
    )
    assert json.loads(done.stdout) == []


APPLICATION = """
import json, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)

from engine import LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, log_level="warning", enable_multiprocessing=False,
          kv_cache_memory_bytes=32 << 20, max_num_batched_tokens=256)
with trace.get_tracer("application").start_as_current_span("outer"):
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
llm.shutdown()
spans = exporter.get_finished_spans()
names = {span.context.span_id: span.name for span in spans}
print(json.dumps([[span.name, names.get(span.parent.span_id) if span.parent else None]
                  for span in spans]))
"""


def test_the_applications_own_provider_is_used(tiny_llama: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", APPLICATION, str(tiny_llama)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_S,
        check=True,
    )
    parents = dict(json.loads(done.stdout))
    assert parents[f"text_completion {tiny_llama}"] == "outer"
    assert parents["decode"] == f"text_completion {tiny_llama}"
    assert parents["isinglass.startup"] is None
