"""Followed steps at sizes that never ran, from those that were observed at a few small sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property, partial

import torch

from rkgb.cost.extrapolate import fitted
from rockmate.follow.known import Known
from rockmate.follow.plan import eager_peak_of, find_least
from solvers import Node, Problem, Schedule


class FittedStep:
    """A step of one size, as ``rockmate.estimate.StepOfSize``."""

    reserved = 0

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.problem, self.device = problem, device

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


class FittedSteps:
    """Steps of one forward at any size, as ``rockmate.estimate.Fitted``."""

    def __init__(self, sizes: Sequence[int], known: Sequence[Known]) -> None:
        """``known``: of the rising ``sizes`` that were observed; their steps are ``alike``."""
        self.sizes, self.device = tuple(sizes), known[-1].device
        self._problems = [k.found.problem for k in known]
        self._names = _names_of(known[-1])
        self._found: dict[int, tuple[Problem, tuple[str, ...]]] = {}

    def at(self, size: int) -> FittedStep:
        return FittedStep(self._at(size)[0], self.device)

    def rough(self, size: int) -> tuple[str, ...]:
        return self._at(size)[1]

    def kernels(self, size: int) -> dict[str, str]:
        """Not known of what is followed."""
        return {}

    def _at(self, size: int) -> tuple[Problem, tuple[str, ...]]:
        if size not in self._found:
            self._found[size] = problem_at(size, self.sizes, self._problems, self._names)
        return self._found[size]


def alike(a: Known, b: Known) -> bool:
    """Whether two sizes are of one forward."""
    return a.found.is_like(b.found)


def _names_of(known: Known) -> list[str]:
    """What each node computes, and at which of the user's lines; a backward is that of what it reads first."""
    problem, ops_of = known.found.problem, known.found.ops_of
    names: list[str] = []
    for i, node in enumerate(problem.nodes):
        if node.backward is None:
            op, _, number = node.name.rpartition("_")
            line = known.observed.places[ops_of[i][-1]] if ops_of[i] else ""
            names.append(f"{op if number.isdigit() else node.name} at {line}" if line else node.name)
        else:
            read = min((problem.data[d].owner for d in node.backward.reads), default=0)
            names.append(f"the backward of {names[read]}")
    return names


def problem_at(
    size: int, sizes: Sequence[int], problems: Sequence[Problem], names: Sequence[str]
) -> tuple[Problem, tuple[str, ...]]:
    """The problem of a step of ``size``, and the ``names`` of nodes that follow no function of the size (see
    ``fitted``).
    """
    last, rough, one = problems[-1], dict[str, None](), Fraction(1)

    def at(name: str, growth: Fraction, figure: Callable[[Problem], int]) -> int:
        found, exact = fitted(sizes, [figure(p) for p in problems], size, growth)
        if not exact:
            rough[name] = None
        return found

    def most_at(i: int, least: int, growth: Fraction) -> int:
        """What gradients take at most in a backward: ``least`` at least. It is fitted, or what is beside ``least``."""
        found, exact = fitted(sizes, [_of_gradients(i, 2, p) for p in problems], size, growth)
        return max(least, found) if exact else least + at(names[i], growth, partial(_of_gradients, i, 3))

    data = tuple(replace(d, size=at(names[d.owner], one, partial(_bytes_of, k))) for k, d in enumerate(last.data))
    ratios = [Fraction(now.size, max(1, was.size)) for now, was in zip(data, last.data, strict=True)]

    def node_at(i: int, node: Node) -> Node:
        back = node.backward
        growth = max((ratios[d] for d in (*node.reads, *node.makes, *(back.reads if back else ()))), default=one)
        made = sum(data[d].size for d in node.makes)
        own = replace(
            node,
            time=int(node.time * growth),
            peak=max(made, at(names[i], growth, lambda p: p.nodes[i].peak)),
        )
        if back is None:
            return own
        before, after = (at(names[i], growth, partial(_of_gradients, i, k)) for k in range(2))
        peak, time = most_at(i, max(before, after), growth), int(back.time * growth)
        return replace(own, backward=replace(back, time=time, before=before, peak=peak, after=after))

    nodes = tuple(node_at(i, node) for i, node in enumerate(last.nodes))
    loss = at("the loss", max(ratios, default=one), lambda p: p.loss)
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
