"""Problems, schedules and solvers written by hand: what is wrong with them is said, and what they are is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from solvers import (
    Answer,
    Backward,
    Block,
    Data,
    GraphNode,
    GraphProblem,
    Node,
    Problem,
    ProblemError,
    Request,
    Run,
    ScheduleError,
    SolverError,
    format_schedule,
    keep_everything,
    parse_schedule,
    register,
    solve,
    solver_names,
    walk,
    walk_graph,
    write_problem,
)
from solvers.solve import KINDS


def chain(n: int = 6) -> Problem:
    """Each node makes 100 bytes, and its backward reads what the node read and made."""
    nodes = tuple(
        Node(
            f"n{i}", 10, (i - 1,) if i else (), (i,), 100, Backward(20, (*range(max(0, i - 1), i + 1),), 100, 200, 100)
        )
        for i in range(n)
    )
    blocks = tuple(Block(i, i + 2, 0) for i in range(0, n, 2))
    return Problem(nodes, tuple(Data(f"d{i}", 100, i) for i in range(n)), frozenset({n - 1}), 100, blocks)


SKIP = GraphProblem((GraphNode("a", 1, 1, ()), GraphNode("b", 2, 2, (0,)), GraphNode("a", 3, 3, (1,))))


def first(problem: Problem, **changes: Any) -> Problem:
    return replace(problem, nodes=(replace(problem.nodes[0], **changes), *problem.nodes[1:]))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "time": (lambda: first(chain(), time=1.5), r"node 0 \(n0\): time is 1\.5; expected an int"),
    "large": (
        lambda: first(chain(), time=2**60),
        r"node 0 \(n0\): time is 1152921504606846976; expected at most 2\*\*53",
    ),
    "peak": (lambda: first(chain(), peak=True), r"node 0 \(n0\): peak is True; expected an int"),
    "size": (lambda: replace(chain(), data=(Data("d0", 99.5, 0), *chain().data[1:])), r"data 0 \(d0\): size is 99\.5"),  # type: ignore[arg-type]
    "loss": (lambda: replace(chain(), loss=-1), "the problem has a negative loss, -1"),
    "backward": (
        lambda: first(chain(), backward=Backward(-5, (0,), 100, 200, 100)),
        r"the backward of node 0 \(n0\) has a negative time, -5",
    ),
    "reference": (lambda: first(chain(), reads=("d0",)), "n0: reference is 'd0'; expected an int"),
    "kinds": (
        lambda: replace(chain(), blocks=(Block(0, 1, 0), Block(1, 6, 0))),
        r"Block\(start=1.* and Block\(start=0.* are of one kind, but their nodes or backwards do not match",
    ),
    "graph": (lambda: GraphProblem((GraphNode("a", 1, 1.5, ()),)), r"node 0 \(a\): size is 1\.5"),  # type: ignore[arg-type]
    "name": (
        lambda: GraphProblem((GraphNode("a", 1, 1, ()), GraphNode("b", 1, 1, ("a",)))),  # type: ignore[arg-type]
        r"node 1 \(b\): reference is 'a'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_problems_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    make, message = WRONG[name]
    with pytest.raises(ProblemError, match=message):
        solve(make(), 600)
    with pytest.raises(ProblemError, match=message):
        write_problem(make(), tmp_path / "p.json")


@pytest.mark.parametrize("argument", [{"time_limit": "3"}, {"gap": "x"}])
def test_arguments_that_are_no_numbers(argument: dict[str, Any]) -> None:
    with pytest.raises(ProblemError, match="give a"):
        solve(chain(), 600, **argument)


def test_the_schedule_of_a_graph_is_a_program_too() -> None:
    schedule = solve(SKIP, 100).schedule
    assert schedule is not None
    text = format_schedule(SKIP, schedule)
    assert [line.split("#")[0].strip() for line in text.splitlines()] == [
        "def step():",
        "a_0 = fwd.a_0()",
        "b = fwd.b(a_0)",
        "del a_0",
        "a_2 = fwd.a_2(b)",
        "del b",
        "del a_2",
    ]
    assert "# peak 5 B at a_2 = fwd.a_2(b), time +0.0 %" in text
    assert parse_schedule(SKIP, text) == schedule
    with pytest.raises(
        ScheduleError, match=r"line 1: cannot read 'b = fwd\.b\(a_2\)'; this problem has: b = fwd\.b\(a_0\)"
    ):
        parse_schedule(SKIP, "b = fwd.b(a_2)")


def test_steps_that_are_none() -> None:
    schedule = (*keep_everything(chain()), "again")
    with pytest.raises(ScheduleError, match="is 'again': a schedule has Run, Del, Loss and Bwd steps only"):
        walk(chain(), schedule)  # type: ignore[arg-type]
    assert "    ?'again'" in format_schedule(chain(), schedule).splitlines()  # type: ignore[arg-type]


def test_each_walker_names_the_other() -> None:
    with pytest.raises(ProblemError, match=r"walk takes a Problem; for a GraphProblem .* walk_graph"):
        walk(SKIP, ())  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match=r"walk_graph takes a GraphProblem; for a Problem .* walk"):
        walk_graph(chain(), ())  # type: ignore[arg-type]


@pytest.fixture
def solver() -> Iterator[Callable[[Any], None]]:
    """Makes a function known that returns what it is given, under the name "mine"."""
    yield lambda answer: register(Problem, "mine")(lambda problem, request: answer)  # type: ignore[misc]
    KINDS[Problem].solvers.pop("mine", None)


def test_a_solver_that_returns_no_answer(solver: Callable[[Any], None]) -> None:
    for answer in (None, keep_everything(chain())):
        solver(answer)
        with pytest.raises(SolverError, match=r"mine returned a \w+: a solver returns Answer"):
            solve(chain(), 1000, "mine")


def test_a_schedule_over_the_budget_proves_nothing(solver: Callable[[Any], None]) -> None:
    solver(Answer(keep_everything(chain())))
    found = solve(chain(), 700, "mine")
    assert (found.status, found.cost) == ("unknown", None) and "needs 800 B (800 bytes)" in found.reason
    assert solve(chain(), 700).status == "optimal"
    assert solve(SKIP, 4, "keep_all").status == "unknown"


def test_a_solver_for_what_is_no_kind_of_problem() -> None:
    def mine(problem: Any, request: Request) -> Answer:
        return Answer((Run(0),))

    with pytest.raises(ProblemError, match="no solver for a"):
        register(int, "mine")(mine)
    assert "mine" not in solver_names(Problem)


def test_names_and_answers_of_solvers_are_checked() -> None:
    def mine(problem: Any, request: Request) -> Answer:
        return Answer(None, bound=None)  # type: ignore[arg-type]

    with pytest.raises(ProblemError, match="give the solver's name, as text"):
        register(Problem, 3)  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="is the name of a solver of this package"):
        register(Problem, "auto")(mine)
    with pytest.raises(ProblemError, match="a int is no solver"):
        register(Problem, "mine")(3)  # type: ignore[arg-type]
    register(Problem, "mine")(mine)
    try:
        with pytest.raises(SolverError, match="mine returned the bound None"):
            solve(chain(), 700, "mine")
    finally:
        del KINDS[Problem].solvers["mine"]
