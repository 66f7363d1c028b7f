"""Rockmate and eager side by side: ready modules at a choice of budgets, steps, and what they are compared by."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from models import Case, case, outputs_of, square_loss
from torch import nn

from rockmate import Rockmate, frontier
from solvers import Frontier

QUARTERS = (0, 1, 2, 3, 4)
"""Budgets between the smallest feasible (0) and the one without recomputation (4)."""


@functools.cache
def frontier_of(name: str) -> Frontier:
    """The frontier of a case, planned with gradients absent."""
    c = case(name)
    args, kwargs = c.call(1)
    return frontier(c.model(), args, sample_kwargs=kwargs, costs="flops")


def budget_of(found: Frontier, quarter: int) -> int:
    """The budget at this quarter of the range."""
    return found.min_budget + (found.max_budget - found.min_budget) * quarter // 4


@functools.cache
def _planned(name: str, quarter: int) -> tuple[Rockmate, dict[str, Any]]:
    c = case(name)
    args, kwargs = c.call(1)
    model = c.model()
    start = copy.deepcopy(model.state_dict())
    budget = budget_of(frontier_of(name), quarter)
    return Rockmate(model, args, budget, sample_kwargs=kwargs, costs="flops"), start


@dataclass(frozen=True)
class Pair:
    """The same model twice, from the same state: as it is, and under a budget."""

    case: Case
    eager: nn.Module
    rk: Rockmate

    def both(self, run: Callable[[nn.Module], Iterable[torch.Tensor | None]]) -> None:
        """Assert that ``run`` gives the same for both, bit for bit, from the same random state, and leaves the same."""
        results = []
        for model in (self.eager, self.rk):
            torch.manual_seed(7)
            results.append(flatten(run(model)))
        assert_same(*results)
        assert_same(state(self.eager), state(self.rk.original))


def pair(name: str, quarter: int) -> Pair:
    """A fresh start for both; the plan itself is made once per process."""
    rk, start = _planned(name, quarter)
    rk.original.load_state_dict(start)
    rk.zero_grad(set_to_none=True)
    rk.train()
    return Pair(case(name), case(name).model(), rk)


def recomputing(name: str, quarter: int) -> bool:
    """Whether the frontier says that this budget needs recomputation."""
    return any(budget > budget_of(frontier_of(name), quarter) for budget, _ in frontier_of(name).points)


def state(model: nn.Module) -> list[torch.Tensor | None]:
    """Parameters, gradients, buffers, and the random state."""
    grads = [p.grad for p in model.parameters()]
    return [*model.parameters(), *grads, *model.buffers(), torch.get_rng_state()]


def step(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[torch.Tensor | None]:
    """Forward, loss and backward: outputs, loss, and gradients of inputs."""
    args, kwargs = call
    result = model(*args, **kwargs)
    loss = square_loss(result)
    loss.backward()
    return [*(t.detach() for t in outputs_of(result)), loss.detach(), *input_grads(call)]


def input_grads(call: Any) -> list[torch.Tensor | None]:
    """The gradients that a call's tensors got."""
    return [t.grad for t in outputs_of(call) if t.requires_grad]


def flatten(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Copies, as they are now."""
    return [None if t is None else t.detach().clone() for t in tensors]


def assert_same(ours: Sequence[torch.Tensor | None], theirs: Sequence[torch.Tensor | None]) -> None:
    """Equal, bit for bit, tensor by tensor."""
    assert len(ours) == len(theirs)
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            assert a is None and b is None, f"tensor {k} is there for one only"
        else:
            assert a.dtype == b.dtype and torch.equal(a, b), f"tensor {k} of shape {list(a.shape)} differs"
