"""Steps of several graphs that keep more than one forward and one backward do, and captures that leave something."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from models import randn
from torch import nn

from rockmate import Attachment, BudgetWarning, attach, measure_peak

ROWS, WIDTH = 320, 64


class Checked(nn.Module):
    """Blocks between which Python looks at values."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4))
        self.first, self.blocks, self.largest = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.largest = x.abs().max().item()
        for block in self.blocks:
            x = x + block(x)
            if x.isnan().any():
                print("not a number")  # noqa: T201
        return x


def planned(share: float) -> tuple[nn.Module, torch.Tensor, Attachment]:
    """A model whose steps are planned, an input and the plans."""
    torch.manual_seed(0)
    model, x = Checked(), randn(ROWS, WIDTH, seed=1)
    handle = attach(model, f"{share:.0%}")
    for _ in range(4):
        model(x).square().mean().backward()
    return model, x, handle


def test_calls_that_add_up_are_said_to_exceed_the_budget() -> None:
    model, x, _ = planned(0.7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one call and its backward at a time, and calls without a backward
        for _ in range(2):
            model(x).square().mean().backward()
            with torch.no_grad():
                model(x)
    with pytest.warns(BudgetWarning, match="was called 2 times before a backward"):
        loss = model(x).square().mean() + model(-x).square().mean()
    loss.backward()


def test_two_calls_for_which_there_is_room_are_no_reason_to_warn() -> None:
    model, x, handle = planned(0.7)
    one = measure_peak(lambda: model(x).square().mean().backward())
    handle.budget = 5 * one
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (model(x).square().mean() + model(-x).square().mean()).backward()


@pytest.mark.parametrize("what", ["retain_graph", "create_graph"])
def test_a_backward_whose_graph_stays_is_said_to_exceed_the_budget_once(what: str) -> None:
    model, x, _ = planned(0.7)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss = model(x).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), **{what: True})
        del gradients, loss
    assert [str(w.message) for w in said if "retain_graph" in str(w.message)] == [str(w.message) for w in said]
    assert len(said) == 1


def test_captures_leave_no_activation() -> None:
    torch.manual_seed(0)
    model, x = Checked(), randn(ROWS, WIDTH, seed=1)
    attach(model, "70%")
    gc.collect()
    gc.disable()  # what is left for the collector stays
    try:
        left = []
        for _ in range(4):
            y = model(x)
            y.square().mean().backward()
            del y
            left.append(sum(type(t) is torch.Tensor and t.shape == x.shape for t in gc.get_objects()))
    finally:
        gc.enable()
    assert left == [1] * 4  # the input
