"""What is promised is measured: ``measure_peak`` itself, then every plan of the zoo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ZOO, case, outputs_of
from torch import nn
from training import QUARTERS, budget_of

from rockmate import Rockmate, frontier, measure_peak
from solvers import Frontier

KIB = 1024
# The loss itself, its count, and its gradient: a number each.
LOSS_SCALARS = 16
# The model returns one tensor of logits, so that cross entropy is its usual loss.
NAMES = [c.name for c in ZOO if len(outputs_of(c.model()(*c.call(1)[0], **c.call(1)[1]))) == 1]


# ----------------------------------------------------------------------------------------- measure_peak


def test_one_tensor() -> None:
    assert measure_peak(lambda: torch.ones(256), "cpu") == KIB


def test_nothing() -> None:
    assert measure_peak(lambda: None, "cpu") == 0


def test_a_temporary_counts_at_the_worst_moment() -> None:
    def run() -> torch.Tensor:
        a = torch.ones(256)  # 1 KiB
        b = torch.ones(512)  # 3 KiB
        del a
        return torch.ones(256) if b is None else b

    assert measure_peak(run, "cpu") == 3 * KIB


def test_what_is_freed_before_the_next_does_not_add() -> None:
    def run() -> None:
        for _ in range(5):
            torch.ones(256)

    assert measure_peak(run, "cpu") == KIB


def test_views_and_in_place_operations_cost_nothing() -> None:
    assert measure_peak(lambda: torch.ones(256).view(16, 16).t().add_(1), "cpu") == KIB


def test_releases_of_older_blocks_do_not_count() -> None:
    held = [torch.ones(4096)]

    def run() -> torch.Tensor:
        held.clear()
        return torch.ones(256)

    assert measure_peak(run, "cpu") == KIB


def test_saved_tensors_and_gradients_count() -> None:
    x = torch.ones(256, requires_grad=True)

    def run() -> None:
        y = x.exp()  # 1 KiB, saved by itself
        del y
        y = x.exp()  # 1 KiB
        y.backward(torch.ones(256))  # and the gradient of y 1 KiB, that of x 1 KiB

    run()
    x.grad = None
    assert measure_peak(run, "cpu") == 3 * KIB


# ------------------------------------------------------------------------------------------------- plans


def cross_entropy(result: Any) -> torch.Tensor:
    """The mean loss on 2-d logits. Above the logits: their log-softmax and two gradients, of their size."""
    logits = outputs_of(result)[0].flatten(0, -2)
    return F.cross_entropy(logits, targets(*logits.shape))


@functools.cache
def targets(count: int, high: int) -> torch.Tensor:
    """Labels, made outside of what is measured."""
    return torch.arange(count) % high


class Training:
    """One case, with gradients absent or present before each step."""

    def __init__(self, name: str, present: bool) -> None:
        self.case, self.present = case(name), present
        self.model = self.case.model()
        self.call = self.case.call(1)
        self.reset()

    def reset(self) -> None:
        for p in (p for p in self.model.parameters() if p.requires_grad):
            p.grad = torch.zeros_like(p) if self.present else None
        for t in outputs_of(self.call):
            t.grad = None

    def frontier(self) -> Frontier:
        return frontier(self.model, self.call[0], sample_kwargs=self.call[1], costs="flops")

    def rockmate(self, budget: int) -> Rockmate:
        return Rockmate(self.model, self.call[0], budget, sample_kwargs=self.call[1], costs="flops")

    def held(self, module: nn.Module, loss: Callable[[Any], torch.Tensor]) -> Any:
        result = module(*self.call[0], **self.call[1])
        loss(result).backward()
        return result

    def not_held(self, module: nn.Module, loss: Callable[[Any], torch.Tensor]) -> None:
        loss(module(*self.call[0], **self.call[1])).backward()

    def peak(
        self,
        step: Callable[[nn.Module, Callable[[Any], torch.Tensor]], Any],
        module: nn.Module,
        loss: Any = cross_entropy,
    ) -> int:
        """The measured peak of one step, after one to warm up."""
        self.reset()
        step(module, loss)
        self.reset()
        return measure_peak(lambda: step(module, loss), "cpu")


@functools.cache
def planned(name: str, present: bool, quarter: int) -> tuple[Training, Rockmate]:
    """A training and its plan, made once."""
    training, found = frontier_of(name, present)
    training.reset()
    return training, training.rockmate(budget_of(found, quarter))


@functools.cache
def frontier_of(name: str, present: bool) -> tuple[Training, Frontier]:
    training = Training(name, present)
    return training, training.frontier()


every_plan = pytest.mark.parametrize(
    ("name", "present", "quarter"),
    [(name, present, quarter) for name in NAMES for present in (False, True) for quarter in QUARTERS],
)


@every_plan
def test_measured_peak_is_within_the_budget(name: str, present: bool, quarter: int) -> None:
    training, rk = planned(name, present, quarter)
    assert training.peak(training.held, rk) <= rk.budget
    assert training.peak(training.not_held, rk) <= rk.budget
    assert rk.plans_made == 1


@every_plan
def test_measured_peak_is_the_predicted_one(name: str, present: bool, quarter: int) -> None:
    training, rk = planned(name, present, quarter)
    measured = training.peak(training.held, rk)
    assert abs(measured - rk.plan.predicted_peak) <= LOSS_SCALARS


def test_prediction_holds_for_each_budget_at_the_second_step_too() -> None:
    training, rk = planned("mlp", False, 0)
    first, second = (training.peak(training.held, rk) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", ["two_in_two_out", "dict_out"])
@pytest.mark.parametrize("quarter", QUARTERS)
def test_several_outputs_with_the_memory_of_their_loss_given(name: str, quarter: int) -> None:
    training = Training(name, present=False)
    args, kwargs = training.call

    def loss(result: Any) -> torch.Tensor:
        first, second = outputs_of(result)
        return first.sum() + second.sum()  # their gradients are expanded numbers, which take no memory

    found = frontier(training.model, args, sample_kwargs=kwargs, costs="flops", loss_memory=0)
    training.reset()
    budget = budget_of(found, quarter)
    rk = Rockmate(training.model, args, budget, sample_kwargs=kwargs, costs="flops", loss_memory=0)
    assert training.peak(training.held, rk, loss) <= budget
    assert training.peak(training.not_held, rk, loss) <= budget


def test_a_bigger_loss_within_the_room_given_for_it() -> None:
    training = Training("mlp", present=False)
    (x,), _ = training.call
    size = 128 * 8 * 4
    # Above the output: its exponential, the product, and gradients of product, factor and output.
    found = frontier(training.model, x, costs="flops", loss_memory=8 * size)
    training.reset()
    rk = Rockmate(training.model, x, found.min_budget, costs="flops", loss_memory=8 * size)
    assert training.peak(training.held, rk, lambda y: (y.exp() * y).mean()) <= rk.budget


def test_gradients_that_go_missing_are_planned_for() -> None:
    training = Training("mlp", present=True)
    found = training.frontier()
    rk = training.rockmate(found.max_budget)
    training.present = False
    training.reset()
    budget_without = training.frontier().min_budget
    rk = training.rockmate(max(found.min_budget, budget_without))
    assert training.peak(training.held, rk) <= rk.budget


def test_gradients_that_appear_need_no_new_plan() -> None:
    training = Training("mlp", present=False)
    rk = training.rockmate(training.frontier().min_budget)
    training.present = True
    assert training.peak(training.held, rk) <= rk.budget
    assert rk.plans_made == 1


def test_planning_itself_stays_below_the_step_without_recomputation() -> None:
    training = Training("resnet_basic", present=False)
    training.rockmate(10**9)
    eager = training.peak(training.held, training.model)
    assert measure_peak(lambda: training.rockmate(10**9), "cpu") <= eager


@pytest.mark.parametrize("name", ["mlp", "resnet_basic", "gpt"])
def test_memory_is_given_back(name: str) -> None:
    training, rk = planned(name, False, 0)
    training.peak(training.held, rk)

    def steps() -> None:
        for _ in range(3):
            training.reset()
            training.not_held(rk, cross_entropy)

    training.reset()
    assert measure_peak(steps, "cpu") <= rk.budget
