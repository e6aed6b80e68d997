"""The requests of a run: as the frontend recorded them, else rebuilt from the core's records.

Knows how to tell a request's life from steps. Does not know any view of it. Needed for runs that
were killed, whose frontend had no time to write down what was in flight.
"""

from instrumentation.record.request_records import RequestTimeline
from instrumentation.record.step_records import StepRecord
from traces.journal_reader import Run

CUT_OFF = "the record of the run ends before the request does"


def request_timelines(run: Run) -> list[RequestTimeline]:
    """All requests of the run, by arrival; those without a recorded end are rebuilt.

    A rebuilt one that the core had finished counts as complete; another ends, with an error that
    says so, at the last instant that the core recorded.
    """
    timelines = run.timelines
    known_nums = {timeline.request_num for timeline in timelines}
    known_ids = {timeline.request_id for timeline in timelines}
    open_timelines = {
        arrival.request_num: RequestTimeline(
            request_id=arrival.request_id,
            request_num=arrival.request_num,
            arrival_ns=arrival.arrival_ns,
            num_prompt_tokens=arrival.num_prompt_tokens,
            preemptions=[],
        )
        for arrival in run.arrivals
        if arrival.request_num not in known_nums and arrival.request_id not in known_ids
    }
    if not open_timelines:
        return timelines
    rebuilt = list(open_timelines.values())
    steps = run.steps
    for step in steps:
        _apply_step(step, open_timelines)
    end_ns = max((step.end_ns for step in steps), default=0)
    for timeline in open_timelines.values():
        timeline.delivered_ns = max(end_ns, timeline.arrival_ns)
        timeline.finish_reason = "error"
        timeline.error = CUT_OFF
    return sorted(timelines + rebuilt, key=lambda timeline: timeline.arrival_ns)


def scheduled_pairs(step: StepRecord) -> list[tuple[int, int]]:
    """A step's (request_num, num_tokens) pairs."""
    return list(zip(step.scheduled[::2], step.scheduled[1::2], strict=True))


def _apply_step(step: StepRecord, open_timelines: dict[int, RequestTimeline]) -> None:
    """Move the timelines of a step's requests on; finished ones leave the dictionary."""
    for preemption in step.preempted:
        timeline = open_timelines.get(preemption.request_num)
        if timeline is not None:
            timeline.preemptions.append((step.begin_ns, 0))
    for request_num, _ in scheduled_pairs(step):
        timeline = open_timelines.get(request_num)
        if timeline is None:
            continue
        timeline.first_scheduled_ns = timeline.first_scheduled_ns or step.begin_ns
        if timeline.preemptions and not timeline.preemptions[-1][1]:
            timeline.preemptions[-1] = (timeline.preemptions[-1][0], step.begin_ns)
        if request_num in step.first_tokens:
            timeline.first_token_ns = step.end_ns
        if timeline.first_token_ns:
            timeline.last_token_ns = step.end_ns
    for request_num in step.finished:
        timeline = open_timelines.pop(request_num, None)
        if timeline is not None:
            timeline.delivered_ns = step.end_ns
