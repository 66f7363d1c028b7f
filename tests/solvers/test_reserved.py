"""A schedule as allocations: the bytes asked for are the walk's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_allocator import Allocator
from solver_cases import MIB, gpt_chain, lin_relu_lin
from solver_strategies import problems

from rockmate.planning.reserved import Alloc, Free, predict_reserved, step_events
from solvers import (
    Backward,
    Block,
    Bwd,
    Data,
    Del,
    Loss,
    Node,
    Problem,
    Run,
    ScheduleError,
    all_baselines,
    keep_everything,
    recompute_all,
    walk,
    with_deletes,
)


@settings(max_examples=300, deadline=None)
@given(problems(), st.data())
def test_bytes_asked_for_are_those_of_the_walk(problem: Problem, data: st.DataObject) -> None:
    reruns = [Run(i) for i in range(len(problem.nodes)) if problem.nodes[i].rerun]
    order = [*(Run(i) for i in range(len(problem.nodes))), Loss()]
    for i in problem.backward_order():
        # All that can run again, in order, then any more: copies are replaced while they are live.
        order += [run for run in reruns if run.node <= i and data.draw(st.booleans())]
        order.append(Bwd(i))
    try:
        schedule = with_deletes(problem, order)
        peak = walk(problem, schedule).peak
    except ScheduleError:  # something was dropped that does not run again
        schedule = keep_everything(problem)
        peak = walk(problem, schedule).peak
    assert predict_reserved(problem, schedule).requested == peak


@settings(deadline=None)
@given(problems())
def test_every_baseline(problem: Problem) -> None:
    for schedule in all_baselines(problem).values():
        events = step_events(problem, schedule)
        assert predict_reserved(problem, schedule).requested == walk(problem, schedule).peak
        names = [event.name for event in events if isinstance(event, Alloc)]
        assert len(set(names)) == len(names)


def test_gradients_that_differ_between_backwards() -> None:
    """The walk takes what the next backward begins with, from the next step on."""
    nodes = tuple(
        Node(f"n{i}", 1, (), (i,), 1, Backward(1, (i,), *figures)) for i, figures in enumerate([(7, 9, 3), (2, 5, 4)])
    )
    problem = Problem(nodes, (Data("a", 1, 0), Data("b", 1, 1)), frozenset(), 0, (Block(0, 2, 0),))
    problem.verify()
    schedule = keep_everything(problem)
    assert predict_reserved(problem, schedule).requested == walk(problem, schedule).peak == 10


def test_recomputation_holds_less() -> None:
    problem = gpt_chain(4)
    least, most = (predict_reserved(problem, s(problem)) for s in (recompute_all, keep_everything))
    assert least.requested < least.allocated + MIB and least.reserved < most.reserved
    expandable = predict_reserved(problem, keep_everything(problem), Allocator(expandable=True))
    assert most.requested <= expandable.allocated <= expandable.reserved <= most.reserved


def test_what_is_there_before_counts() -> None:
    problem, schedule = lin_relu_lin(), keep_everything(lin_relu_lin())
    alone = predict_reserved(problem, schedule)
    device = Allocator()
    device.malloc(40 * MIB)
    assert predict_reserved(problem, schedule, device) == tuple(n + 40 * MIB for n in alone)


def two_nodes() -> Problem:
    nodes = (
        Node("a", 1, (), (0,), 10, Backward(1, (0,), 4, 8, 0)),
        Node("b", 1, (0,), (1,), 12, Backward(1, (1,), 4, 8, 4)),
    )
    return Problem(nodes, (Data("a", 8, 0), Data("b", 8, 1)), frozenset({1}), 6, (Block(0, 2, 0),))


def test_events_by_the_figures() -> None:
    """Data, then what a node takes beyond them; gradients of the outputs stay behind the loss."""
    schedule = (Run(0), Run(1), Loss(), Run(0), Bwd(1), Bwd(0), Del(0))
    assert step_events(two_nodes(), schedule) == (
        *(Alloc(8, 0), Alloc(2, 1), Free(1)),
        *(Alloc(8, 2), Alloc(4, 3), Free(3)),
        *(Alloc(2, 4), Alloc(4, 5), Free(4)),
        *(Alloc(8, 6), Alloc(2, 7), Free(7), Free(0)),
        *(Alloc(4, 8), Free(8)),
        *(Alloc(4, 9), Free(5), Free(9)),
        Free(6),
    )


def test_events_of_a_schedule_that_is_none_are_refused() -> None:
    problem, schedule = two_nodes(), keep_everything(two_nodes())
    with pytest.raises(ScheduleError):
        step_events(problem, schedule[:-2])
