"""Whose turn it is to be tried out, for how long, and what a child may do to the others."""

import os
import select
import signal
import time
from collections.abc import Iterator

import pytest

from engine.frontend.compile_scheduler import CompileScheduler
from engine.frontend.grammar_worker import ChildDeathError, Worker, Workers
from engine.types.framing import MAX_MESSAGE_BYTES, Frames, framed
from engine.types.grammar_messages import CompileRequest, CompileResult, GrammarKey
from instrumentation import GrammarOutcome
from tests.waiting import PATIENCE_S

TIMEOUT_S = 10.0


def key_of(text: str) -> GrammarKey:
    return ("regex", text, False)


# -- the lanes, with workers that are none ---------------------------------------------------------


class FakeWorker:
    """Needs the processor time that the text says, in seconds, or dies of it."""

    def __init__(self, world: "World", fileno: int) -> None:
        self.world = world
        self.number = fileno
        self.is_ended = False

    def fileno(self) -> int:
        return self.number

    def ask(self, key: GrammarKey, *, processor_s: float) -> None:
        self.text = key[1]
        needs_s = float(key[1].split()[0])
        self.world.asked.append((key[1], processor_s))
        self.is_cut = needs_s > processor_s
        self.due_s = self.world.now_s + (processor_s if self.is_cut else needs_s)

    def read(self) -> CompileResult | None:
        if self.is_cut:
            raise ChildDeathError(is_out_of_time=True)
        if "crash" in self.text:
            raise ChildDeathError(is_out_of_time=False)
        return CompileResult(0, GrammarOutcome.COMPILED, num_bytes=7)

    def end(self) -> int:
        self.is_ended = True
        return 0


class World:
    """Time, workers and lanes; `run` lets both go on until something is settled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asked: list[tuple[str, float]] = []
        self.workers: list[FakeWorker] = []
        self.num_given_back = self.num_new = 0
        self.scheduler = CompileScheduler(
            self, timeout_s=TIMEOUT_S, clock=lambda: int(self.now_s * 1e9)
        )

    def take(self, *, is_new: bool = False) -> FakeWorker:
        self.num_new += is_new
        self.workers.append(FakeWorker(self, len(self.workers)))
        return self.workers[-1]

    def give_back(self, worker: object) -> None:
        self.num_given_back += 1

    def want(self, *texts: str, first: int = 0) -> None:
        for number, text in enumerate(texts, first):
            self.scheduler.take(CompileRequest(number, key_of(text)))

    def run(self, until_s: float) -> dict[int, tuple[float, CompileResult]]:
        """What has been settled by then, and when."""
        settled: dict[int, tuple[float, CompileResult]] = {}
        ready: list[int] = []
        while True:
            for result in self.scheduler.advance(ready):
                assert result.number not in settled
                settled[result.number] = (self.now_s, result)
            at_work = self.scheduler.filenos
            assert len(at_work) <= 2
            left_s = self.scheduler.seconds_left()
            ends = [self.workers[fileno].due_s for fileno in at_work]
            if left_s is not None:
                ends.append(self.now_s + left_s)
            if not ends or min(ends) > until_s:
                return settled
            self.now_s = min(ends)
            ready = [fileno for fileno in at_work if self.workers[fileno].due_s <= self.now_s]


@pytest.mark.parametrize("num_slow", [1, 5, 100])
def test_a_quick_constraint_does_not_wait_for_the_slow_ones(num_slow: int) -> None:
    world = World()
    world.want(*["60"] * num_slow)
    world.run(0.1)
    world.want("0.1", first=num_slow)
    settled = world.run(2.0)
    assert list(settled) == [num_slow]
    ended_s, result = settled[num_slow]
    assert ended_s < 0.7
    assert (result.outcome, result.num_bytes) == (GrammarOutcome.COMPILED, 7)
    assert result.duration_ns == 100_000_000, "it has waited, but that is not what it took"
    # Neither does one that comes when all of them have had their slices.
    world.run(60.0)
    world.now_s = 60.0
    world.want("0.1", first=num_slow + 1)
    assert world.run(60.4)[num_slow + 1][0] < 60.4


def test_all_that_came_at_once_get_their_turn() -> None:
    world = World()
    world.want(*["0.15"] * 20)
    settled = world.run(20 * 0.15 + 0.01)
    assert sorted(settled) == list(range(20))
    assert world.num_given_back == 20
    assert not any(worker.is_ended for worker in world.workers)


def test_what_takes_longer_is_compiled_all_the_same_and_one_after_the_other() -> None:
    world = World()
    world.want("8", "0.9", "5", "12")
    settled = world.run(60.0)
    assert [settled[number][1].outcome for number in range(4)] == [
        *[GrammarOutcome.COMPILED] * 3,
        GrammarOutcome.TIMED_OUT,
    ]
    assert settled[1][0] < 4.0, "a longer slice of the quick lane was enough"
    assert "longer than 10 s" in settled[3][1].failure
    assert settled[3][1].duration_ns > TIMEOUT_S * 1e9
    assert world.scheduler.num_waiting == 0
    assert max(ended_s for ended_s, _ in settled.values()) < 8 + 5 + 10 + 2


def test_a_longer_slice_gives_way_to_a_newcomer_and_is_not_lost() -> None:
    world = World()
    world.want("0.9", "60")
    world.run(0.5)  # one in the slow lane, the other in its longer slice
    assert world.asked[-1] == ("0.9", 1.0)
    world.now_s = 0.8
    world.want("0.1", first=2)
    settled = world.run(3.0)
    assert settled[2][0] == pytest.approx(0.9)
    assert settled[0][1].outcome is GrammarOutcome.COMPILED
    assert settled[0][0] == pytest.approx(0.9 + 0.9)


def test_what_is_withdrawn_makes_room_at_once_and_gets_no_verdict() -> None:
    world = World()
    world.want("60", "60", "60", "60")
    world.run(1.0)
    world.now_s = 1.0
    at_work = [world.workers[fileno] for fileno in world.scheduler.filenos]
    for number in range(4):
        world.scheduler.take(CompileRequest(number))
    assert all(worker.is_ended for worker in at_work)
    assert not world.scheduler.filenos
    assert world.scheduler.num_waiting == 0
    world.scheduler.take(CompileRequest(99))  # whose result is on its way
    world.want("0.1", first=100)
    assert world.run(2.0)[100][0] == pytest.approx(1.1, abs=0.11)


def test_a_worker_that_dies_costs_a_second_try_and_no_more() -> None:
    world = World()
    world.want("0.1 crash", "0.1")
    settled = world.run(5.0)
    assert settled[0][1].outcome is GrammarOutcome.CRASHED
    assert "crashed on it twice" in settled[0][1].failure
    assert settled[1][1].outcome is GrammarOutcome.COMPILED
    assert [text for text, _ in world.asked].count("0.1 crash") == 2
    assert world.num_new == 1, "what has killed the first may have killed all that were idle"


def test_a_worker_that_does_nothing_is_ended_too() -> None:
    world = World()
    world.want("0.1", "0.1")
    world.scheduler.advance(())
    (stuck,) = world.scheduler.filenos
    world.workers[stuck].due_s = 1e9  # as one that is stopped
    settled = world.run(30.0)
    assert sorted(settled) == [0, 1], "the one that was stuck has a second try"


def test_a_limit_below_the_first_slice_is_kept() -> None:
    world = World()
    world.scheduler = CompileScheduler(world, timeout_s=0.1, clock=lambda: int(world.now_s * 1e9))
    world.want("0.15", "0.05")
    settled = world.run(5.0)
    assert settled[0][1].outcome is GrammarOutcome.TIMED_OUT
    assert settled[1][1].outcome is GrammarOutcome.COMPILED
    assert world.asked == [("0.05", 0.1), ("0.15", 0.1)]


def test_messages_are_cut_out_of_whatever_comes() -> None:
    result = CompileResult(3, GrammarOutcome.COMPILED, grammar="x" * 300)
    data = framed(result) + framed(CompileRequest(4)) * 2
    for size in (1, 7, 1000):
        frames = Frames()
        bodies = [
            body
            for begin in range(0, len(data), size)
            for body in frames.feed(data[begin : begin + size])
        ]
        assert len(bodies) == 3
        assert framed(result).endswith(bodies[0])
    with pytest.raises(EOFError):  # rather than wait for it
        list(Frames().feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little")))


# -- the children ----------------------------------------------------------------------------------


def work(key: GrammarKey) -> CompileResult:
    """What a text says is what is done."""
    name = key[1]
    if name == "spin":
        while True:
            time.monotonic()
    if name == "sleep":
        time.sleep(2 * PATIENCE_S)
    if name == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "raise":
        raise MemoryError
    if name == "niceness":
        return CompileResult(
            0, GrammarOutcome.COMPILED, num_bytes=os.getpriority(os.PRIO_PROCESS, 0)
        )
    if name == "niceness of a child":
        child = Worker(work)
        told = answer(child, "niceness")
        child.end()
        return told
    if name == "hoard":
        try:
            bytearray(4 << 30)
        except MemoryError:
            return CompileResult(0, GrammarOutcome.INVALID, "too much")
    return CompileResult(0, GrammarOutcome.COMPILED, grammar=name * 100_000, num_bytes=os.getpid())


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(work)
    yield made
    if made.fileno() >= 0:
        made.end()


def answer(worker: Worker, text: str, *, processor_s: float = 5.0) -> CompileResult:
    worker.ask(key_of(text), processor_s=processor_s)
    while True:
        assert select.select([worker], [], [], PATIENCE_S)[0], "no answer"
        if (result := worker.read()) is not None:
            return result


def test_a_child_answers_one_question_after_the_other(worker: Worker) -> None:
    for text in ("ab", "cde", "f"):
        result = answer(worker, text)
        assert result.grammar == text * 100_000
        assert result.num_bytes == worker.pid != os.getpid()
    assert answer(worker, "hoard").failure == "too much"


def test_children_of_a_process_in_the_background_are_no_nicer_than_others(worker: Worker) -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert answer(worker, "niceness").num_bytes == max(5, ours)
    assert answer(worker, "niceness of a child").num_bytes == max(5, ours), "it adds up"


@pytest.mark.parametrize(("text", "is_out_of_time"), [("spin", True), ("die", False)])
def test_how_a_child_has_died_is_known(worker: Worker, text: str, is_out_of_time: bool) -> None:
    with pytest.raises(ChildDeathError) as death:
        answer(worker, text, processor_s=0.1)
    assert death.value.is_out_of_time is is_out_of_time
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_a_child_that_fails_says_so_and_is_gone(capfd: pytest.CaptureFixture[str]) -> None:
    worker = Worker(work)
    with pytest.raises(ChildDeathError) as death:
        answer(worker, "raise")
    assert not death.value.is_out_of_time
    assert "MemoryError" in capfd.readouterr().err


def test_a_child_that_is_ended_leaves_nothing(worker: Worker) -> None:
    worker.ask(key_of("sleep"), processor_s=1.0)
    worker.end()
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_who_was_killed_while_idle_is_missed_when_it_is_asked() -> None:
    workers = Workers(work)
    workers.prepare()
    killed = workers.take()
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(ChildDeathError) as death:
        answer(killed, "a")
    assert not death.value.is_out_of_time
    made = [workers.take() for _ in range(3)]
    for one in made:
        workers.give_back(one)
    assert workers.take() is made[-1], "the one whose pages are warmest"
    workers.give_back(made[-1])
    with pytest.raises(ProcessLookupError):
        os.kill(made[0].pid, 0)
    for one in made[1:]:
        one.end()
