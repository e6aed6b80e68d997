"""The step-time budget against cases worked out by hand, and its sum over random histories."""

import random

from instrumentation import Phase, StepRecord, WorkerStepRecord
from instrumentation.explain.step_budget import step_budgets


def test_overlapping_steps_are_counted_once() -> None:
    steps = [
        StepRecord(step=1, begin_ns=0, end_ns=100, phases=(Phase.SCHEDULE, 0, 8)),
        StepRecord(step=2, begin_ns=40, end_ns=180, phases=(Phase.UPDATE, 172, 180)),
        StepRecord(step=3, begin_ns=300, end_ns=360, phases=(Phase.SCHEDULE, 300, 305)),
    ]
    workers = [
        WorkerStepRecord(step=1, begin_ns=10, end_ns=90, phases=(Phase.FORWARD, 10, 90)),
        WorkerStepRecord(step=2, begin_ns=92, end_ns=170, phases=(Phase.FORWARD, 92, 170)),
        WorkerStepRecord(step=3, begin_ns=310, end_ns=350, phases=(Phase.FORWARD, 310, 350)),
    ]
    first, second, third = step_budgets(steps, workers)
    assert first.phases_ns == {Phase.SCHEDULE: 8, Phase.FORWARD: 80}
    assert (first.duration_ns, first.unexplained_ns) == (90, 2)
    assert second.phases_ns == {Phase.FORWARD: 78, Phase.UPDATE: 8}
    assert (second.duration_ns, second.unexplained_ns) == (90, 4)
    assert third.phases_ns == {Phase.SCHEDULE: 5, Phase.FORWARD: 40}
    assert (third.duration_ns, third.unexplained_ns) == (60, 15)
    assert second.slowest == "forward"
    assert step_budgets([], []) == []


def test_budgets_add_up_to_the_time_with_work() -> None:
    chance = random.Random(7)
    for _ in range(100):
        steps, workers = [], []
        now_ns, worker_ns, busy_ns, begun_ns = 1000, 0, 0, 1000
        for number in range(1, 30):
            if steps and chance.random() < 0.2:  # idle
                now_ns = steps[-1].end_ns + chance.randrange(1, 500)
                busy_ns += steps[-1].end_ns - begun_ns
                begun_ns = now_ns
            begin_ns = max(now_ns, worker_ns + chance.randrange(5))
            worker_ns = begin_ns + chance.randrange(50, 100)
            end_ns = worker_ns + chance.randrange(1, 20)
            steps.append(StepRecord(step=number, begin_ns=now_ns, end_ns=end_ns))
            workers.append(
                WorkerStepRecord(
                    step=number,
                    begin_ns=begin_ns,
                    end_ns=worker_ns,
                    phases=(Phase.FORWARD, begin_ns, worker_ns),
                )
            )
            now_ns += chance.randrange(1, 40)  # the next is planned while this one runs
        budgets = step_budgets(steps, workers)
        busy_ns += steps[-1].end_ns - begun_ns
        assert sum(budget.duration_ns for budget in budgets) == busy_ns
        for budget in budgets:
            parts = sum(budget.phases_ns.values()) + budget.unexplained_ns
            assert parts == budget.duration_ns
