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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from engine.errors import EngineDeadError
from engine.server.admin.control import ask_engine, ready_server
from engine.server.admin.request_story import (
    exchange_fields,
    report_fields,
    story_text,
    timeline_fields,
)
from engine.server.cluster.peers import Peers
from engine.server.http.errors import ApiError
from engine.server.http.observe import Observation
from engine.server.state import ServerState, server_of
from instrumentation import (
    RequestReport,
    RequestTimeline,
    StepRecord,
    WorkerStepRecord,
    format_step_label,
    report_request,
)
from instrumentation.record.journal import read_journal

router = APIRouter(prefix="/debug", tags=["debug"])

MAX_LISTED = 1000
_MIN_FLIGHT_INTERVAL_S = 1.0
_NUM_FLIGHT_STEPS = 32
_NUM_IDS_NAMED = 8
_UNDER_WAY = 1 << 62
"""Added to the time of what has not ended, which comes behind all that has."""


@router.get("/requests")
async def list_requests(
    request: Request, limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 50
) -> dict[str, Any]:
    """Requests under way, and the last ones that have ended, each with where its time went; of
    several frontends, all that answer are asked."""
    server = server_of(request)
    own = listed_requests(server, _observation(request), limit)
    if server.peers is None:
        return {kind: fields_in_order(pairs) for kind, pairs in own.items()}
    others = await server.peers.ask("requests", limit)
    told = {server.peers.index: own, **others.by_index}
    first, last = slice(MAX_LISTED), slice(-limit, None)  # what has waited longest, and what is new
    parts = {"unfinished": first, "finished": last, "http": last}
    merged: dict[str, Any] = {
        kind: fields_in_order(
            (order, fields | {"frontend": index})
            for index, lists in told.items()
            for order, fields in lists[kind]
        )[part]
        for kind, part in parts.items()
    }
    return merged | {"frontends": answered(told, others.silent)}


@router.get("/requests/{request_id:path}")
async def show_request(request: Request, request_id: str) -> Response:
    """All that is known of a request, by its X-Request-Id or by an id of the engine's: the HTTP
    exchange, and for each sequence its intervals, steps, and why it waited; of several frontends,
    all that answer are asked. As a table for `Accept: text/plain`."""
    server, observation = server_of(request), _observation(request)
    as_text = request.headers.get("accept", "").startswith("text/plain")
    if server.peers is None:
        told, silent = {0: await told_of(server, observation, request_id, as_text)}, ()
    else:
        own, others = await asyncio.gather(
            told_of(server, observation, request_id, as_text),
            server.peers.ask("request", request_id, as_text),
        )
        told, silent = {server.peers.index: own, **others.by_index}, others.silent
    found = {index: one for index, one in told.items() if one["http"] or one["sequences"]}
    if not found:
        last_ids = [one for answer in told.values() for one in answer["last_ids"]]
        lost = [index for index, answer in told.items() if answer["life"]]
        message = _unknown(request_id, last_ids, silent, lost)
        raise ApiError(404, message, code="request_not_found")
    if as_text:
        text = "\n".join(one["text"] for one in found.values())
        return PlainTextResponse(text + f"\n{missing(silent)}\n" if silent else text)
    if server.peers is None:
        return JSONResponse({kind: found[0][kind] for kind in ("http", "sequences")})
    merged = {
        kind: [fields | {"frontend": index} for index, one in found.items() for fields in one[kind]]
        for kind in ("http", "sequences")
    }
    return JSONResponse(merged | {"frontends": answered(told, silent)})


@router.get("/flight")
@router.post("/flight")
async def dump_flight_record(request: Request, download: bool = False) -> Response:
    """Have the core write its last steps to a file, and tell of them; `?download=1` answers with
    the file itself, for `isinglass flight show`. Within a second of a record, the answer is that
    one."""
    server = ready_server(request)
    path, is_fresh = server.flight_record, time.monotonic() < server.flight_record_until_s
    if path is None or not is_fresh or not path.is_file():
        try:
            path = Path(await ask_engine(request, server.engine.dump_flight_record()))
        except EngineDeadError as error:  # its message names the record of the core's end
            raise ApiError(503, str(error), code="engine_dead") from error
        server.flight_record = path
        server.flight_record_until_s = time.monotonic() + _MIN_FLIGHT_INTERVAL_S
    if download:
        return FileResponse(path, media_type="application/octet-stream", filename=path.name)
    return JSONResponse(await asyncio.to_thread(_flight_summary, path))


@router.get("/stacks")
async def show_stacks(request: Request) -> PlainTextResponse:
    """Where each thread and each task of the server's process is, as text."""
    return PlainTextResponse("\n".join(_stacks()))


def answer_peers(peers: Peers, server: ServerState, observation: Observation) -> None:
    """Let the other frontends ask for what this one knows."""

    async def requests(limit: int) -> dict[str, Any]:
        return listed_requests(server, observation, limit)

    async def request(request_id: str, as_text: bool) -> dict[str, Any]:
        return await told_of(server, observation, request_id, as_text)

    peers.answerers |= {"requests": requests, "request": request}


def _observation(request: Request) -> Observation:
    return server_of(request).observation


def listed_requests(
    server: ServerState, observation: Observation, limit: int
) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """This frontend's requests by kind, each behind the number that it is to be sorted by."""
    unfinished, finished = _timelines(server)
    exchanges = observation.exchanges()
    return {
        "unfinished": [(one.arrival_ns, timeline_fields(one)) for one in unfinished[:MAX_LISTED]],
        "finished": [(one.end_ns, timeline_fields(one)) for one in finished[-limit:]],
        "http": [
            (one.end_ns if one.outcome else _UNDER_WAY + one.arrival_ns, exchange_fields(one))
            for one in exchanges[-limit:]
        ],
    }


async def told_of(
    server: ServerState, observation: Observation, request_id: str, as_text: bool
) -> dict[str, Any]:
    """What this frontend knows of a request, which may be nothing: then it names the last ones."""
    exchanges = observation.find(request_id)
    ids = {request_id}.union(*(one.ids for one in exchanges))
    unfinished, finished = _timelines(server)
    found = [one for one in (*finished, *unfinished) if _belongs(one, ids)]
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
    return {
        "http": [exchange_fields(one) for one in exchanges],
        "sequences": [report_fields(one) for one in reports],
        "text": story_text(exchanges, reports) if as_text and (exchanges or reports) else "",
        "life": 0 if server.engine.attachment is None else server.engine.attachment.life,
        "last_ids": [one.request_id for one in observation.exchanges()[-_NUM_IDS_NAMED:]],
    }


def fields_in_order(pairs: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    """The fields of pairs of a number and fields, by the number."""
    return [fields for _, fields in sorted(pairs, key=lambda pair: pair[0])]


def answered(told: Iterable[int], silent: Sequence[int]) -> dict[str, Any]:
    """Of several frontends, whose requests an answer has, and whose it lacks."""
    fields: dict[str, Any] = {"answered": sorted(told), "silent": list(silent)}
    return fields | {"note": missing(silent)} if silent else fields


def missing(silent: Sequence[int]) -> str:
    """What an answer lacks because these have not answered."""
    names = ", ".join(map(str, silent))
    frontends = f"frontend {names} has" if len(silent) == 1 else f"frontends {names} have"
    return f"{frontends} not answered in time; what only they know is missing"


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


def _unknown(
    request_id: str, last_ids: Sequence[str], silent: Sequence[int], lost: Sequence[int]
) -> str:
    known = f"; the last ones were {', '.join(last_ids)}" if last_ids else ""
    rest = f". But {missing(silent)}" if silent else ""
    if lost:
        names = ", ".join(map(str, sorted(lost)))
        rest += f". What frontend {names} knew before it died and was replaced is gone with it"
    return (
        f"no request {request_id[:128]!r} is known: neither one under way nor one of the last "
        f"thousand that have ended{known}{rest}"
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
