"""The block program against brute force, with the walker as judge."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from solver_cases import gpt_chain
from solver_strategies import problems

from solvers import (
    Backward,
    Block,
    Bwd,
    Data,
    Grid,
    Loss,
    Node,
    Problem,
    Run,
    SolverOptions,
    Step,
    block_options,
    walk,
    with_deletes,
)
from solvers.block.block import Reruns, block_view, option
from solvers.block.closure import ClosureModel
from solvers.block.ilp import least_peak
from solvers.block.ilp_model import StagedModel, leaders
from solvers.block.useful import useful_nodes

EXACT = SolverOptions(gap=0.0)
SMALL = Grid(saves=(0.5, 0.0), peaks=(0.5,), fresh_peaks=(0.3,), solver=EXACT)


def order_of(problem: Problem, runs: Reruns) -> list[Step]:
    """The whole step of a one-block problem."""
    order: list[Step] = [*(Run(i) for i in range(len(problem.nodes))), Loss()]
    for again, i in zip(runs, problem.backward_order(), strict=True):
        order += [*(Run(j) for j in again), Bwd(i)]
    return order


def walked_figures(problem: Problem, runs: Reruns) -> tuple[int, int, int, int]:
    """Save, forward peak, backward peak and time of ``runs``, by the walker, for a plain one-block problem."""
    schedule = with_deletes(problem, order_of(problem, runs))
    walked = walk(problem, schedule)
    loss = schedule.index(Loss())
    base = block_view(problem, problem.blocks[0]).base
    save = walked.timeline[loss] - problem.loss
    backward = max(walked.timeline[loss + 1 :], default=base) - base
    return save, max(walked.timeline[:loss]), backward, walked.recompute


def all_runs(problem: Problem) -> list[Reruns]:
    """Every choice of reruns, each node at most once per stage."""
    useful = useful_nodes(block_view(problem, problem.blocks[0]))
    stages = []
    for nodes, _ in useful:
        subsets = product((False, True), repeat=len(nodes))
        stages.append([tuple(i for i, take in zip(nodes, s, strict=True) if take) for s in subsets])
    return list(product(*stages))


def together(problem: Problem, runs: Reruns) -> bool:
    """Whether nodes that the model puts together run together in every stage."""
    view = block_view(problem, problem.blocks[0])
    leader = leaders(view)
    return all(
        (i in chosen) == (leader[i] in chosen)
        for chosen, (nodes, _) in zip(runs, useful_nodes(view), strict=True)
        for i in nodes
    )


def assert_optimal(problem: Problem, merge: bool) -> None:
    """The model's optimum equals that of brute force at points of the latter's figures."""
    view = block_view(problem, problem.blocks[0])
    assume(view.stages)
    every = [walked_figures(problem, runs) for runs in all_runs(problem) if not merge or together(problem, runs)]
    model = StagedModel(view, merge=merge)
    points = sorted({(save, peak) for save, _, peak, _ in every})
    for save, peak in [*points[:: max(1, len(points) // 8)], (0, 0)]:
        best = min((time for s, _, p, time in every if s <= save and p <= peak), default=None)
        solved = model.solve(save, peak, EXACT)
        assert (solved.option.time if solved else None) == best
        assert solved is None or (solved.option.optimal and solved.option.bound == best)


@settings(deadline=None, max_examples=60)
@given(problems(max_nodes=4, max_blocks=1, plain=True))
def test_optimum_is_that_of_brute_force(problem: Problem) -> None:
    assert_optimal(problem, merge=False)


@settings(deadline=None, max_examples=60)
@given(problems(max_nodes=4, max_blocks=1, plain=True))
def test_optimum_with_groups_is_that_of_brute_force_with_groups(problem: Problem) -> None:
    assert_optimal(problem, merge=True)


@settings(deadline=None, max_examples=40)
@given(problems(max_nodes=4, max_blocks=1, plain=True))
def test_optimum_with_odd_bytes(problem: Problem) -> None:
    """Sizes without a useful common divisor, so that rows are fractions and answers need the integer check."""
    data = tuple(replace(d, size=d.size * 10**8 + k) for k, d in enumerate(problem.data))
    nodes = tuple(replace(n, peak=n.peak * 10**8 + sum(n.makes)) for n in problem.nodes)
    assert_optimal(replace(problem, data=data, nodes=nodes), merge=False)


def test_a_solution_that_is_just_within() -> None:
    """HiGHS's presolve calls this program infeasible where the limits are given as they are."""
    size = 10**8
    sizes = [(size, 0), (2 * size + 1, 1), (2, 2), (2 * size + 3, 2), (4, 3), (size + 5, 3)]
    last = Backward(0, (3, 5), 0, 0, 0)
    made = [((), (0,), None), ((), (1,), None), ((0, 1), (2, 3), None), ((), (4, 5), last)]
    peaks, times = [size, 2 * size + 1, 2 * size + 5, 4 * size + 9], [1, 1, 0, 1]
    nodes = [Node("f", t, reads, makes, peak, b) for t, peak, (reads, makes, b) in zip(times, peaks, made, strict=True)]
    data = tuple(Data("a", s, owner) for s, owner in sizes)
    problem = Problem(tuple(nodes), data, frozenset(), 0, (Block(0, 4, 0),))
    model = StagedModel(block_view(problem, problem.blocks[0]), merge=False)
    solved = model.solve(2 * size + 1, 6 * size + 12, EXACT)
    assert solved is not None
    assert solved.option.time == 2


@settings(deadline=None, max_examples=100)
@given(problems(max_nodes=12, max_blocks=1, plain=True))
def test_the_least_peak_is_an_option_where_nothing_is_kept(problem: Problem) -> None:
    """The smallest budget of a chain rests on it."""
    view = block_view(problem, problem.blocks[0])
    assume(any(nodes for nodes, _ in useful_nodes(view)))
    assume(StagedModel(view, fresh=True).solve(0, least_peak(view), EXACT))
    assert any(o.fresh and o.backward_peak == least_peak(view) for o in block_options(problem, problem.blocks[0]))


@settings(deadline=None, max_examples=60)
@given(problems(max_nodes=4, max_blocks=1, plain=True))
def test_options_have_the_figures_the_walker_sees(problem: Problem) -> None:
    for o in block_options(problem, problem.blocks[0], SMALL):
        save, forward, backward, time = walked_figures(problem, o.runs)
        assert (o.save, o.forward_peak, o.time) == (save, forward, time)
        # A walk has Del steps too, and a block without backwards has a peak of 0.
        assert o.backward_peak >= backward or not o.runs


@settings(deadline=None, max_examples=40)
@given(problems(max_nodes=5, max_blocks=2))
def test_options_are_a_pareto_set_with_both_ends(problem: Problem) -> None:
    for block in problem.blocks:
        options = block_options(problem, block, SMALL)
        assert options[0].time == 0
        assert any(o.fresh for o in options)
        for o in options:
            assert not any(
                (k.time, k.save, k.backward_peak) != (o.time, o.save, o.backward_peak)
                and k.fresh >= o.fresh
                and k.time <= o.time
                and k.save <= o.save
                and k.backward_peak <= o.backward_peak
                for k in options
            )
            assert option(block_view(problem, block), o.runs).save == o.save


@pytest.mark.filterwarnings("ignore:PULP_CBC_CMD is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["PULP_CBC_CMD"])
def test_other_solvers_by_name(name: str) -> None:
    problem = gpt_chain(1)
    view = block_view(problem, problem.blocks[0])
    keep = option(view, view.no_runs)
    answers = []
    for solver in ("HiGHS", name):
        solved = StagedModel(view).solve(keep.save // 5, keep.backward_peak, SolverOptions(solver, gap=0.0))
        assert solved and solved.option.optimal
        answers.append(solved.option.time)
    assert answers[0] == answers[1]


@settings(deadline=None, max_examples=60)
@given(problems(max_nodes=5, max_blocks=1, plain=True))
def test_without_a_limit_on_the_peak_all_models_agree(problem: Problem) -> None:
    view = block_view(problem, problem.blocks[0])
    assume(view.stages)
    closure, merged, whole = ClosureModel(view), StagedModel(view), StagedModel(view, merge=False)
    anything = 1000 * (sum(view.sizes) + sum(n.peak for n in view.nodes) + sum(s.peak for s in view.stages))
    for save in sorted({0, sum(view.sizes) // 3, sum(view.sizes)}):
        best = closure.solve(save, EXACT)
        assert best.option.save <= save
        assert best.option.bound == best.option.time
        for model in (merged, whole):
            solved = model.solve(save, anything, EXACT)
            assert solved
            assert solved.option.time == best.option.time
