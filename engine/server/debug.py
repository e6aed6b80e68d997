"""Looking into a running server: one request's story, all requests, flight records, stacks.

Knows where each is found. Nothing here changes the engine; a flight record is a new file, whose
name and place the server chooses.
"""

import asyncio
import io
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from engine.errors import EngineDeadError
from engine.server.control import ask_engine, ready_server
from engine.server.errors import ApiError
from engine.server.observe import Observation
from engine.server.request_story import (
    exchange_fields,
    report_fields,
    story_text,
    timeline_fields,
)
from engine.server.state import ServerState, server_of
from instrumentation import (
    RequestReport,
    RequestTimeline,
    StepRecord,
    WorkerStepRecord,
    format_step_label,
    report_request,
)
from instrumentation.journal import read_journal

router = APIRouter(prefix="/debug", tags=["debug"])

MAX_LISTED = 1000
_MIN_FLIGHT_INTERVAL_S = 1.0
_NUM_FLIGHT_STEPS = 32
_NUM_IDS_NAMED = 8


@router.get("/requests")
async def list_requests(
    request: Request, limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 50
) -> dict[str, Any]:
    """Requests under way, and the last ones that have ended, each with where its time went."""
    unfinished, finished = _timelines(server_of(request))
    exchanges = _observation(request).exchanges()
    return {
        "unfinished": [timeline_fields(one) for one in unfinished[:MAX_LISTED]],
        "finished": [timeline_fields(one) for one in finished[-limit:]],
        "http": [exchange_fields(one) for one in exchanges[-limit:]],
    }


@router.get("/requests/{request_id:path}")
async def show_request(request: Request, request_id: str) -> Response:
    """All that is known of a request, by its X-Request-Id or by an id of the engine's: the HTTP
    exchange, and for each sequence its intervals, steps, and why it waited. As a table for
    `Accept: text/plain`."""
    server, observation = server_of(request), _observation(request)
    exchanges = observation.find(request_id)
    ids = {request_id}.union(*(one.ids for one in exchanges))
    unfinished, finished = _timelines(server)
    found = [one for one in (*finished, *unfinished) if _belongs(one, ids)]
    if not found and not exchanges:
        raise ApiError(404, _unknown(request_id, observation), code="request_not_found")
    reports: list[RequestReport] = []
    observer = server.engine.observer
    if found:
        assert observer is not None
        history = observer.history
        names = server.engine.llm_engine.output_processor.names_by_num()
        # Each is a walk through thousands of steps.
        reports = await asyncio.to_thread(
            lambda: [report_request(one, history, names) for one in found]
        )
    if request.headers.get("accept", "").startswith("text/plain"):
        return PlainTextResponse(story_text(exchanges, reports))
    return JSONResponse(
        {
            "http": [exchange_fields(one) for one in exchanges],
            "sequences": [report_fields(one) for one in reports],
        }
    )


@router.get("/flight")
@router.post("/flight")
async def dump_flight_record(request: Request, download: bool = False) -> Response:
    """Have the core write its last steps to a file, and tell of them; `?download=1` answers with
    the file itself, for `isinglass flight show`. At most one a second."""
    server, state = ready_server(request), request.app.state
    now_s = time.monotonic()
    if now_s - getattr(state, "flight_record_s", -_MIN_FLIGHT_INTERVAL_S) < _MIN_FLIGHT_INTERVAL_S:
        raise ApiError(
            429, "at most one flight record a second is written", headers={"Retry-After": "1"}
        )
    state.flight_record_s = now_s
    try:
        path = Path(await ask_engine(request, server.engine.dump_flight_record()))
    except EngineDeadError as error:  # its message names the record of the core's end
        raise ApiError(503, str(error), code="engine_dead") from error
    if download:
        return FileResponse(path, media_type="application/octet-stream", filename=path.name)
    return JSONResponse(await asyncio.to_thread(_flight_summary, path))


@router.get("/stacks")
async def show_stacks(request: Request) -> PlainTextResponse:
    """Where each thread and each task of the server's process is, as text."""
    return PlainTextResponse("\n".join(_stacks()))


def _observation(request: Request) -> Observation:
    observation: Observation = request.app.state.observation
    return observation


def _timelines(server: ServerState) -> tuple[list[RequestTimeline], list[RequestTimeline]]:
    """Sequences that have not ended, and those that have, as far as they are remembered."""
    observer = server.engine.observer
    if observer is None:
        return [], []
    unfinished = server.engine.llm_engine.output_processor.timelines_since(-1)
    return unfinished, observer.history.finished_requests()


def _belongs(timeline: RequestTimeline, ids: set[str]) -> bool:
    """Whether a sequence is one of these requests', by an id with which its own begins: behind it
    may come the number of a prompt and that of a sample."""
    for one in (timeline.request_id, timeline.parent_id):
        if one is None:
            continue
        if one in ids:
            return True
        bare = re.sub(r"([-/]\d+)+$", "", one)
        if bare in ids or re.sub(r"^(chat)?cmpl-", "", bare) in ids:
            return True
    return False


def _unknown(request_id: str, observation: Observation) -> str:
    last = [one.request_id for one in observation.exchanges()[-_NUM_IDS_NAMED:]]
    known = f"; the last ones were {', '.join(last)}" if last else ""
    return (
        f"no request {request_id[:128]!r} is known: neither one under way nor one of the last "
        f"thousand that have ended in this server process{known}. Where several frontends serve "
        "(--api-server-count), another one may know it: ask again on a new connection"
    )


def _flight_summary(path: Path) -> dict[str, Any]:
    """What a flight record holds, its last steps one by one."""
    journal = read_journal(path)
    steps = [record for _, record in journal.frames if isinstance(record, StepRecord)]
    workers = {
        record.step: record for _, record in journal.frames if isinstance(record, WorkerStepRecord)
    }
    return {
        "path": str(path),
        "num_bytes": path.stat().st_size,
        "show": f"isinglass flight show {path}",
        "num_steps": len(steps),
        "last_steps": [
            _step_fields(one, workers.get(one.step)) for one in steps[-_NUM_FLIGHT_STEPS:]
        ],
    }


def _step_fields(step: StepRecord, worker: WorkerStepRecord | None) -> dict[str, Any]:
    return {
        "step": step.step,
        "label": format_step_label(step.label),
        "duration_s": None if worker is None else worker.duration_ns / 1e9,
        "num_running": step.num_running,
        "num_waiting": step.num_waiting,
        "admission_stop": step.admission_stop.label,
        "num_preempted": len(step.preempted),
        "num_blocks_used": step.num_blocks_used,
        "num_sampled_tokens": step.num_sampled_tokens,
    }


def _stacks() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"thread {names.get(ident, ident)}"
        yield "".join(traceback.format_stack(frame))
    for task in asyncio.all_tasks():
        text = io.StringIO()
        task.print_stack(file=text)
        yield f"task {task.get_name()}"
        yield text.getvalue()
