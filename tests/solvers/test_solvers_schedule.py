"""Schedules print, parse back, and are judged by the walker."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_cases import MIB, lin_relu_lin
from solver_strategies import problems

from solvers import (
    Bwd,
    Del,
    Loss,
    Problem,
    ProblemError,
    Run,
    Schedule,
    ScheduleError,
    Step,
    all_baselines,
    checkpoint_blocks,
    drop_useless_runs,
    format_schedule,
    keep_everything,
    parse_schedule,
    walk,
    with_deletes,
)

KEEP = """\
def step():                                       # peak 8.0 MiB at bwd.relu(h2), time +0.0 %
    x = fwd.input()                               # 1.0 MiB
    h1 = fwd.lin1(x)                              # 3.0 MiB
    h2 = fwd.relu(h1)                             # 5.0 MiB
    del h1                                        # 3.0 MiB
    y = fwd.lin2(h2)                              # 4.0 MiB
    loss()                                        # 5.0 MiB
    bwd.lin2(h2)                                  # 7.0 MiB
    bwd.relu(h2)                                  # 8.0 MiB
    del h2                                        # 4.0 MiB
    bwd.lin1(x)                                   # 5.0 MiB
    del x                                         # 1.0 MiB
"""

CHECKPOINTS = """\
def step():                                       # peak 7.0 MiB at bwd.relu(h2), time +2.1 %
    x = fwd.input()                               # 1.0 MiB
    h1 = fwd.lin1(x)                              # 3.0 MiB
    del x                                         # 2.0 MiB
    h2 = fwd.relu(h1)                             # 4.0 MiB
    y = fwd.lin2(h2)                              # 5.0 MiB
    del h2                                        # 3.0 MiB
    loss()                                        # 4.0 MiB
    h2 = fwd.relu(h1)                             # 6.0 MiB  recompute
    del h1                                        # 4.0 MiB
    bwd.lin2(h2)                                  # 6.0 MiB
    bwd.relu(h2)                                  # 7.0 MiB
    del h2                                        # 3.0 MiB
    x = fwd.input()                               # 4.0 MiB  recompute
    bwd.lin1(x)                                   # 5.0 MiB
    del x                                         # 1.0 MiB
"""


@st.composite
def orders(draw: st.DrawFn, problem: Problem) -> list[Step]:
    """A valid order with random reruns."""
    order: list[Step] = [*(Run(i) for i in range(len(problem.nodes))), Loss()]
    again = [i for i, n in enumerate(problem.nodes) if n.rerun]
    for i in problem.backward_order():
        if again:
            order += [Run(j) for j in draw(st.lists(st.sampled_from(again), max_size=3))]
        order.append(Bwd(i))
    return order


def test_keep_everything_prints_as_a_program() -> None:
    problem = lin_relu_lin()
    assert format_schedule(problem, keep_everything(problem)) == KEEP


def test_recomputation_is_marked() -> None:
    problem = lin_relu_lin()
    assert format_schedule(problem, checkpoint_blocks(problem)) == CHECKPOINTS


def test_walk_of_keep_everything() -> None:
    walked = walk(lin_relu_lin(), keep_everything(lin_relu_lin()))
    assert (walked.peak, walked.time, walked.overhead) == (8 * MIB, 470, 0.0)


FORBIDDEN = [
    ("run run", (Run(0), Run(0)), "step 1 (fwd.input) reruns before the loss"),
    ("skip", (Run(1),), "step 0 (fwd.lin1) is out of order: the forward phase is at input"),
    ("early loss", (Run(0), Loss()), "step 1 (loss) comes before the forward phase is complete: fwd.lin1 is missing"),
    ("not live", (Run(0), Del(0), Run(1)), "step 2 (fwd.lin1) reads x, which is not live"),
    ("del twice", (Run(0), Del(0), Del(0)), "step 2 (del x) deletes x, which is not live"),
    ("no end", (Run(0),), "step 1 (end): the schedule ends before the loss"),
    ("bwd first", (Run(0), Bwd(1)), "step 1 (bwd.lin1) comes before the loss"),
    ("no node", (Run(9),), "step 0: no node 9"),
    ("no data", (Del(-1),), "step 0: no data -1"),
]
FORWARD = (Run(0), Run(1), Run(2), Run(3))
FORBIDDEN += [
    ("held", (*FORWARD, Del(3)), "step 4 (del y) deletes y, which the caller holds"),
    ("missing", (*FORWARD, Loss()), "step 5 (end): bwd.lin2 is missing"),
    ("order", (*FORWARD, Loss(), Bwd(2)), "step 5 (bwd.relu) is out of order: expected bwd.lin2"),
    ("none", (*FORWARD, Loss(), Bwd(0)), "step 5 (bwd.input): this node has no backward"),
    ("twice", (*FORWARD, Loss(), Loss()), "step 5 (loss): there is only one loss"),
    ("dead", (*FORWARD, Del(2), Loss(), Bwd(3)), "step 6 (bwd.lin2) reads h2, which is not live"),
]


@pytest.mark.parametrize(("steps", "message"), [case[1:] for case in FORBIDDEN], ids=[case[0] for case in FORBIDDEN])
def test_walker_rejects(steps: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        walk(lin_relu_lin(), steps)
    assert str(error.value) == message
    assert "not valid: " + message in format_schedule(lin_relu_lin(), steps)


def test_parse_errors_name_the_line() -> None:
    with pytest.raises(ScheduleError, match=r"line 2: cannot read 'h1 = fwd.lin1\(h2\)'; this problem has: h1 = fwd"):
        parse_schedule(lin_relu_lin(), "x = fwd.input()\nh1 = fwd.lin1(h2)\n")
    with pytest.raises(ScheduleError, match="line 1: cannot read 'nonsense'"):
        parse_schedule(lin_relu_lin(), "nonsense")


@settings(deadline=None)
@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    problem = data.draw(problems())
    schedule = with_deletes(problem, data.draw(orders(problem)))
    assert parse_schedule(problem, format_schedule(problem, schedule)) == schedule


@settings(deadline=None)
@given(st.data())
def test_any_order_is_valid_and_useless_runs_only_cost(data: st.DataObject) -> None:
    problem = data.draw(problems())
    order = data.draw(orders(problem))
    full = walk(problem, with_deletes(problem, order))
    lean_order = drop_useless_runs(problem, order)
    lean = walk(problem, with_deletes(problem, lean_order))
    assert lean.time <= full.time
    assert lean.peak <= full.peak
    assert drop_useless_runs(problem, lean_order) == lean_order


@settings(deadline=None)
@given(problems())
def test_baselines_are_valid(problem: Problem) -> None:
    for schedule in all_baselines(problem).values():
        walk(problem, schedule)


def test_a_node_runs_again_before_the_backwards_that_it_is_limited_to() -> None:
    problem = lin_relu_lin()
    nodes = (problem.nodes[0], replace(problem.nodes[1], within=(2, 1)), *problem.nodes[2:])
    problem = replace(problem, nodes=nodes)
    forward = [Run(0), Run(1), Run(2), Del(1), Run(3), Loss()]
    assert walk(problem, (*forward, Bwd(3), Run(1), Bwd(2), Bwd(1))).recompute == nodes[1].time
    with pytest.raises(ScheduleError, match="outside of the backwards before which it may"):
        walk(problem, (*forward, Run(1), Bwd(3), Bwd(2), Bwd(1)))
    with pytest.raises(ProblemError, match="no backwards in order"):
        replace(problem, nodes=(replace(nodes[0], within=(0, 1)), *nodes[1:])).verify()
