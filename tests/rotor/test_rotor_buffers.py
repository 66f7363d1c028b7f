"""rotor with layers that change buffers or attributes in some calls only, or count in Python."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rockmate import InfeasibleBudgetError, measure_peak, rotor
from rockmate.rotor import Fck, Fn


def x(length: int = 4) -> torch.Tensor:
    return torch.randn(8, length, 32, generator=torch.Generator().manual_seed(length))


def chain(layer: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(5)))


def tight(m: nn.Module, sample: Any, room: int = 0) -> rotor.Checkpointable:
    """With the smallest limit that the sample fits, and ``room`` bytes."""
    chk = rotor.Checkpointable(m, sample, costs="flops")
    with pytest.raises(InfeasibleBudgetError) as error:
        chk.compute_sequence(100)
    chk.compute_sequence(error.value.min_budget + room)
    return chk


def recomputes(chk: rotor.Checkpointable) -> bool:
    return any(isinstance(operation, (Fck, Fn)) for operation in chk.sequence or ())


def state(m: nn.Module) -> tuple[list[Any], list[torch.Tensor]]:
    """Python's numbers, and all tensors."""
    numbers = [v for layer in m.modules() for v in vars(layer).values() if isinstance(v, (int, float))]
    return numbers, [*(p.grad for p in m.parameters() if p.grad is not None), *m.buffers()]


def assert_same(ours: nn.Module, eager: nn.Module) -> None:
    (numbers, tensors), (wanted, others) = state(ours), state(eager)
    assert numbers == wanted
    assert all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def assert_steps(chk: rotor.Checkpointable, m: nn.Module, eager: nn.Module, inputs: list[torch.Tensor]) -> None:
    """The same gradients, buffers and attributes as in eager mode after each of some steps."""
    assert_same(m, eager)  # measuring has changed nothing
    for sample in inputs:
        for run, owner in ((chk, m), (eager, eager)):
            owner.zero_grad()
            run(sample).square().sum().backward()
        assert_same(m, eager)


class Codebook(nn.Module):
    """Updated in every third step; ``count`` says where steps are counted."""

    def __init__(self, count: str, size: int = 32) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(32, 32), 0
        self.register_buffer("code", torch.ones(size))
        if count == "buffer":
            del self.steps
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        y = torch.tanh(self.layer(x) + self.code[:32])
        if int(self.steps) % 3 == 0:
            self.code.mul_(0.9).add_(0.1 * y.detach().mean())
        return y


@pytest.mark.parametrize("count", ["buffer", "attribute"])
def test_a_buffer_that_changes_in_some_steps(count: str) -> None:
    m = chain(lambda: Codebook(count))
    eager, chk = copy.deepcopy(m), tight(m, x(), 2000)
    assert recomputes(chk)
    assert_steps(chk, m, eager, [x()] * 7)
    assert recomputes(chk)


def test_copies_of_a_buffer_that_changed_count_from_the_next_call_on() -> None:
    """The call in which it first changes is not planned for its copies; the next one is measured anew."""
    m = chain(lambda: Codebook("buffer", 5_000))
    inputs = x(32)
    chk = tight(m, inputs, 90_000)
    before = chk.chain

    def step() -> None:
        chk(inputs).square().sum().backward()
        m.zero_grad()

    for _ in range(3):
        step()
    assert chk.chain is before
    step()
    assert chk.chain is not before
    step()
    assert chk.mem_limit is not None and recomputes(chk)
    assert measure_peak(step) <= chk.mem_limit  # it changes here for the second time


def test_copies_of_a_buffer_that_changed_may_not_fit() -> None:
    m = chain(lambda: Codebook("buffer", 10_000))
    chk = tight(m, x(32))
    for _ in range(3):
        chk(x(32)).sum().backward()
    with pytest.raises(InfeasibleBudgetError, match=r"no sequence .* fits .* the smallest limit that one fits is"):
        chk(x(32))


class Rotary(nn.Module):
    """A table that grows with the longest input; ``known`` says how the layer knows its length."""

    def __init__(self, known: str) -> None:
        super().__init__()
        self.layer, self.known, self.length = nn.Linear(32, 32), known, 0
        self.register_buffer("table", None if known == "absent" else torch.ones(0, 32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        have = self.length if self.known == "attribute" else 0 if self.table is None else self.table.shape[0]
        if length > have:
            angles = torch.arange(float(length))[:, None] * torch.arange(32)
            self.register_buffer("table", angles.cos(), persistent=False)
            self.length = length
        return torch.tanh(self.layer(x) * self.table[:length])


@pytest.mark.parametrize("known", ["shape", "attribute", "absent"])
def test_a_table_that_grows(known: str) -> None:
    """Also in a call whose sizes were measured before, by a plan that did not see the table grow."""
    m = chain(lambda: Rotary(known))
    eager, chk = copy.deepcopy(m), tight(m, x(9), 200)
    assert recomputes(chk)
    assert_steps(chk, m, eager, [x(n) for n in (4, 3, 6, 9, 5)])


def test_attributes_are_those_of_the_first_run() -> None:
    """Where another call, or the caller, changes them before the backward."""
    m = chain(lambda: nn.Sequential(Codebook("attribute"), nn.Dropout(0.5)))
    eager, chk = copy.deepcopy(m), tight(m, x(), 20_000)
    chk.mem_limit = 2**20
    for run, owner in ((chk, m), (eager, eager)):
        torch.manual_seed(0)
        first, second = run(x()).sum(), run(2 * x()).sum()
        owner.eval()
        second.backward()
        first.backward()
    assert_same(m, eager)


class Remembers(nn.Module):
    """Leaves a tensor with history behind, as layers with a loss of their own do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x))
        self.last = y.square().mean()
        return y


def test_a_recompute_leaves_attributes_as_they_are() -> None:
    m = chain(Remembers)
    chk = tight(m, x())
    assert not hasattr(m[0], "last")
    loss = chk(x()).sum()
    left = [layer.last for layer in m]
    loss.backward()
    assert all(layer.last is t for layer, t in zip(m, left, strict=True))
