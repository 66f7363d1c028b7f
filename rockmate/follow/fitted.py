"""Followed steps at sizes that never ran, from those that were observed at a few small sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import torch

from rkgb.cost.extrapolate import fitted
from rockmate.follow.known import Known
from rockmate.follow.plan import eager_peak_of, find_least, moment_of
from solvers import Backward, Bwd, Loss, Node, Problem, Run, Schedule, Step


@dataclass
class FittedStep:
    """A step of one size, as ``rockmate.estimate.StepOfSize``; the kernels of what is followed are not known."""

    problem: Problem
    rough: tuple[str, ...]
    device: torch.device
    reserved, kernels = 0, dict[str, str]()

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
    """Steps of any size; ``known``: of the rising ``sizes`` that were observed; they are alike."""
    problems, last = [k.found.problem for k in known], known[-1]

    def at(size: int) -> FittedStep:
        problem, rough = problem_at(size, sizes, problems)
        names = dict.fromkeys(moment_of(last.found.problem, last.places, step) for step in rough)
        return FittedStep(problem, tuple(names), last.device)

    return at


def problem_at(size: int, sizes: Sequence[int], problems: Sequence[Problem]) -> tuple[Problem, tuple[Step, ...]]:
    """The problem of a step of ``size``, and the moments that follow no function of the size (see ``fitted``)."""
    last, rough, one = problems[-1], dict[Step, None](), Fraction(1)

    def at(step: Step, growth: Fraction, seen: Sequence[int]) -> int:
        found, exact = fitted(sizes, seen, size, growth)
        if not exact:
            rough[step] = None
        return found

    def backward_at(i: int, growth: Fraction) -> Backward | None:
        backs = [back for p in problems if (back := p.nodes[i].backward) is not None]
        if not backs:
            return None
        before = at(Bwd(i), growth, [back.before for back in backs])
        after = at(Bwd(i), growth, [back.after for back in backs])
        least = max(before, after)
        peak, exact = fitted(sizes, [back.peak for back in backs], size, growth)
        beside = [back.peak - max(back.before, back.after) for back in backs]
        peak = max(least, peak) if exact else least + at(Bwd(i), growth, beside)
        return replace(backs[-1], time=int(backs[-1].time * growth), before=before, peak=peak, after=after)

    def node_at(i: int, node: Node) -> Node:
        back = node.backward
        growth = max((ratios[d] for d in (*node.reads, *node.makes, *(back.reads if back else ()))), default=one)
        made = sum(data[d].size for d in node.makes)
        peak = max(made, at(Run(i), growth, [p.nodes[i].peak for p in problems]))
        return replace(node, time=int(node.time * growth), peak=peak, backward=backward_at(i, growth))

    bytes_of = [[p.data[k].size for p in problems] for k in range(len(last.data))]
    data = tuple(replace(d, size=at(Run(d.owner), one, bytes_of[k])) for k, d in enumerate(last.data))
    ratios = [Fraction(now.size, max(1, was.size)) for now, was in zip(data, last.data, strict=True)]
    nodes = tuple(node_at(i, node) for i, node in enumerate(last.nodes))
    loss = at(Loss(), max(ratios, default=one), [p.loss for p in problems])
    found = replace(last, nodes=nodes, data=data, loss=loss)
    found.verify()
    return found, tuple(rough)
