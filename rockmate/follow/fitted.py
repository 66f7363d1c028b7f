"""Followed steps at sizes that never ran, from those that were observed at a few small sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property, partial

import torch

from rkgb.cost.extrapolate import fitted
from rockmate.follow.known import Known
from rockmate.follow.plan import eager_peak_of, find_least, moment_of
from solvers import Bwd, Loss, Node, Problem, Run, Schedule, Step


class FittedStep:
    """A step of one size, as ``rockmate.estimate.StepOfSize``; the kernels of what is followed are not known."""

    reserved, kernels = 0, dict[str, str]()

    def __init__(self, problem: Problem, rough: tuple[str, ...], device: torch.device) -> None:
        self.problem, self.rough, self.device = problem, rough, device

    @cached_property
    def eager_peak(self) -> int:
        return eager_peak_of(self.problem)

    @property
    def peak(self) -> int:
        return self.eager_peak

    @cached_property
    def least(self) -> tuple[int, Schedule]:
        """What planning such a call says, too."""
        found = find_least(self.problem)
        return found.walk.peak, found.schedule


def fitted_steps(sizes: Sequence[int], known: Sequence[Known]) -> Callable[[int], FittedStep]:
    """Steps of any size; ``known``: of the rising ``sizes`` that were observed; they are ``alike``."""
    problems, last = [k.found.problem for k in known], known[-1]

    def at(size: int) -> FittedStep:
        problem, rough = problem_at(size, sizes, problems)
        names = dict.fromkeys(moment_of(last.found.problem, last.places, step) for step in rough)
        return FittedStep(problem, tuple(names), last.device)

    return at


def alike(a: Known, b: Known) -> bool:
    """Whether two sizes are of one forward."""
    return a.found.is_like(b.found)


def problem_at(size: int, sizes: Sequence[int], problems: Sequence[Problem]) -> tuple[Problem, tuple[Step, ...]]:
    """The problem of a step of ``size``, and the moments that follow no function of the size (see ``fitted``)."""
    last, rough, one = problems[-1], dict[Step, None](), Fraction(1)

    def at(step: Step, growth: Fraction, figure: Callable[[Problem], int]) -> int:
        found, exact = fitted(sizes, [figure(p) for p in problems], size, growth)
        if not exact:
            rough[step] = None
        return found

    def most_at(i: int, least: int, growth: Fraction) -> int:
        """What gradients take at most in a backward: ``least`` at least. It is fitted, or what is beside ``least``."""
        found, exact = fitted(sizes, [_of_gradients(i, 2, p) for p in problems], size, growth)
        return max(least, found) if exact else least + at(Bwd(i), growth, partial(_of_gradients, i, 3))

    data = tuple(replace(d, size=at(Run(d.owner), one, partial(_bytes_of, k))) for k, d in enumerate(last.data))
    ratios = [Fraction(now.size, max(1, was.size)) for now, was in zip(data, last.data, strict=True)]

    def node_at(i: int, node: Node) -> Node:
        back = node.backward
        growth = max((ratios[d] for d in (*node.reads, *node.makes, *(back.reads if back else ()))), default=one)
        made = sum(data[d].size for d in node.makes)
        own = replace(
            node,
            time=int(node.time * growth),
            peak=max(made, at(Run(i), growth, lambda p: p.nodes[i].peak)),
        )
        if back is None:
            return own
        before, after = (at(Bwd(i), growth, partial(_of_gradients, i, k)) for k in range(2))
        peak, time = most_at(i, max(before, after), growth), int(back.time * growth)
        return replace(own, backward=replace(back, time=time, before=before, peak=peak, after=after))

    nodes = tuple(node_at(i, node) for i, node in enumerate(last.nodes))
    loss = at(Loss(), max(ratios, default=one), lambda p: p.loss)
    found = replace(last, nodes=nodes, data=data, loss=loss)
    found.verify()
    return found, tuple(rough)


def _bytes_of(k: int, problem: Problem) -> int:
    return problem.data[k].size


def _of_gradients(i: int, k: int, problem: Problem) -> int:
    """Bytes of gradients before and after the backward of node ``i``, at most, and at most beside both of these."""
    back = problem.nodes[i].backward
    assert back is not None
    return (back.before, back.after, back.peak, back.peak - max(back.before, back.after))[k]
