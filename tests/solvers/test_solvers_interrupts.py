"""Ctrl-C while a problem is solved ends the search, wherever it comes, and the next search works."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from solver_cases import gpt_chain

from solvers import ChainPlanner, improve, interrupts, keep_everything, solve, solve_chain, walk
from solvers.chain import solvers as chain_solvers
from solvers.chain.bound import lower_bound
from solvers.interrupts import Heeded, check
from solvers.milp import milp
from solvers.work import Work

PROBLEM = gpt_chain(2)
BUDGET = walk(PROBLEM, keep_everything(PROBLEM)).peak * 6 // 10


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Python's own handler: workers of a parallel run ignore Ctrl-C. The test leaves its handler as it was."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def lose_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what is raised in a finalizer."""

    class Finalized:
        def __del__(self) -> None:
            interrupt()

    lost: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda dropped: lost.append(dropped.exc_type))
        Finalized()
    assert lost == [KeyboardInterrupt]


@pytest.fixture
def while_solving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes whenever HiGHS runs for the main thread, which waits."""
    run = milp._solve

    def interrupted(highs: Any) -> None:
        interrupt()
        run(highs)

    monkeypatch.setattr(milp, "_solve", interrupted)


def improved() -> object:
    plan = ChainPlanner(PROBLEM, options={0: ()}).best_known(BUDGET)
    assert plan is not None
    return improve(PROBLEM, plan, BUDGET, 10.0)


@pytest.mark.usefixtures("while_solving")
@pytest.mark.parametrize("search", [lambda: lower_bound(PROBLEM, BUDGET), improved], ids=["bound", "improve"])
def test_ctrl_c_in_an_integer_program(search: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            search()
    monkeypatch.undo()
    assert lower_bound(PROBLEM, BUDGET) > PROBLEM.eager_time


def test_ctrl_c_while_a_plan_is_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the whole-graph program is interrupted, which then has a schedule to return."""
    bound = lower_bound(PROBLEM, BUDGET)
    monkeypatch.setattr("solvers.chain.refine.lower_bound", lambda *_, **__: bound)
    run = milp._solve
    monkeypatch.setattr(milp, "_solve", lambda highs: (interrupt(), run(highs)))
    with pytest.raises(KeyboardInterrupt):
        improved()


@pytest.mark.usefixtures("while_solving")
def test_solve_returns_the_best_so_far() -> None:
    """Also where Ctrl-C comes while the bound is proven: one is enough."""
    for solver in ("auto", "rotor", "every_block"):
        solution = solve(PROBLEM, BUDGET, solver)
        assert solution.schedule is not None, solver
        assert chain_solvers.STOPPED in solution.reason, solver


def test_ctrl_c_while_blocks_are_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread waits for threads that solve; nothing new is begun."""
    solved = []

    def run(*_: Any) -> Any:
        solved.append(1)
        interrupt()
        raise TimeoutError

    monkeypatch.setattr("solvers.milp.memory_program.run", run)
    with pytest.raises(KeyboardInterrupt):
        solve_chain(PROBLEM, BUDGET)
    assert len(solved) < 200
    monkeypatch.undo()
    assert solve_chain(PROBLEM, BUDGET).peak <= BUDGET


def test_a_lost_interrupt_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    work = Work([go.wait])
    with pytest.raises(KeyboardInterrupt), Heeded():
        lose_interrupt(monkeypatch)
        work.start()
        while not work.look():
            pass
    assert work.ended == 0
    go.set()
    work.stop()
    assert work.results() == [True]


def test_work_raises_what_a_task_raised() -> None:
    work = Work([lambda: 1, lambda: 1 // 0, lambda: 3], 2)
    work.start()
    while not work.look():
        pass
    assert work.ended == 3
    with pytest.raises(ZeroDivisionError):
        work.results()


def test_an_interrupt_that_is_lost_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), Heeded():
        with Heeded():
            reached.append("inner")
        lose_interrupt(monkeypatch)
        reached.append("after")
    assert reached == ["inner", "after"]
    check()
    with pytest.raises(KeyboardInterrupt), Heeded():
        lose_interrupt(monkeypatch)
        check()
        reached.append("never")
    with pytest.raises(KeyboardInterrupt), Heeded():
        with Heeded():
            lose_interrupt(monkeypatch)
        reached.append("never")
    assert reached == ["inner", "after"]


def test_an_interrupt_that_becomes_another_error() -> None:
    """As native code may make of it, or a lock that a wait could not take back."""
    error = RuntimeError("cannot release un-acquired lock")
    with pytest.raises(KeyboardInterrupt) as raised, Heeded():
        try:
            interrupt()
        except KeyboardInterrupt:
            raise error from None
    assert raised.value.__cause__ is error
    with pytest.raises(SystemExit), Heeded():  # the code inside decided to end
        try:
            interrupt()
        except KeyboardInterrupt:
            sys.exit()


class Change:
    """A context that Ctrl-C finds half entered, and half left."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def __enter__(self) -> Change:
        self.interrupted("entered")
        return self

    def __exit__(self, *_: object) -> None:
        self.interrupted("left")

    def interrupted(self, done: str) -> None:
        interrupt()
        self.done.append(done)


def test_what_is_entered_or_left_ends_first() -> None:
    change = Change()
    with pytest.raises(KeyboardInterrupt), Heeded():
        change.__enter__()
        assert change.done == ["entered"]
        check()
    with pytest.raises(KeyboardInterrupt), Heeded():
        change.__exit__()
    assert change.done == ["entered", "left"]
    with pytest.raises(KeyboardInterrupt), Heeded(), change:  # the second time it is at once
        pass
    assert change.done == ["entered", "left", "entered"]


def test_what_is_entered_around_is_none_of_it() -> None:
    @contextmanager
    def around() -> Iterator[None]:
        with Heeded():
            interrupt()
            raise AssertionError("interrupted later")
        yield

    with pytest.raises(KeyboardInterrupt), around():
        pass


def test_a_handler_that_raises_nothing_decides() -> None:
    called = []

    def handler(*_: Any) -> None:
        called.append(1)

    signal.signal(signal.SIGINT, handler)
    with Heeded():
        interrupt()
        check()
    assert called == [1]
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is handler


def test_a_handler_that_raises_its_own() -> None:
    class StopNow(Exception):
        pass

    def handler(*_: Any) -> None:
        raise StopNow

    signal.signal(signal.SIGINT, handler)
    with pytest.raises(StopNow), Heeded(), suppress(Exception):  # as code that goes on after any error does
        interrupt()
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is handler


def test_a_handler_set_inside_stays() -> None:
    kept = []
    with Heeded():
        kept.append(signal.getsignal(signal.SIGINT))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    with Heeded():
        interrupt()
    # As a debugger does that puts back later what it found.
    signal.signal(signal.SIGINT, kept[0])
    with pytest.raises(KeyboardInterrupt), Heeded():
        interrupt()
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    check()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_handlers_that_are_not_python(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGINT, handler)
    with Heeded():
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is handler


def test_other_threads_hear_nothing() -> None:
    seen: list[object] = []

    def other() -> None:
        with Heeded():
            seen.append(signal.getsignal(signal.SIGINT))
            check()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
def test_an_interrupt_while_the_handler_changes(method: str) -> None:
    """At every line of the change, and of what it calls: handlers are put back, and the interrupt is raised."""
    code = getattr(Heeded, method).__code__
    for at in range(1, 200):
        left = [at]

        def trace(frame: Any, event: str, _: Any, left: list[int] = left) -> Any:
            inside = frame.f_code is code or (frame.f_back is not None and frame.f_back.f_code is code)
            if inside and event in ("call", "line", "return"):
                left[0] -= 1
                if left[0] == 0:
                    sys.settrace(None)
                    interrupt()
            return trace if inside else None

        before = sys.gettrace()
        raised = False
        try:
            sys.settrace(trace)
            with Heeded():
                pass
        except KeyboardInterrupt:
            raised = True
        finally:
            sys.settrace(before)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, at
        assert raised == (left[0] == 0), at
        assert not interrupts._inside, at
    assert left[0] > 0, "the last was not beyond the end"


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS says its name from some version on."""
    assert lower_bound(PROBLEM, BUDGET) > PROBLEM.eager_time
    assert capfd.readouterr() == ("", "")
