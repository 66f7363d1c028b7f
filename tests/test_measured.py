"""What a step takes, operation by operation: measured by the allocator, it is what the plan predicts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from models import SEVERAL, part_way
from torch import nn

import rockmate
from rkgb.device import Cpu
from rockmate import (
    InputError,
    MeasuredStep,
    MeasureError,
    Plan,
    Rockmate,
    attach,
    frontier,
    measure_peak,
    measure_step,
)
from rockmate.demo.gpt import GPT
from solvers import Del, Loss, step_name, walk

TOKENS = torch.arange(64).view(2, 32) % 50


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))))


def gpt_step(call: nn.Module) -> Callable[[], None]:
    def step() -> None:
        for p in call.parameters():
            p.grad = None
        F.cross_entropy(call(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()

    return step


def mlp_step(call: nn.Module) -> Callable[[], None]:
    x = torch.randn(512, 32)

    def step() -> None:
        for p in call.parameters():
            p.grad = None
        call(x).square().mean().backward()

    return step


def assert_as_predicted(plan: Plan, measured: MeasuredStep) -> None:
    """At each operation the bytes of the plan's walk; behind the loss its numbers may be there, too."""
    problem = plan.problem_with_usual_loss()
    levels = walk(problem, plan.schedule).timeline
    predicted = [(s, size) for s, size in zip(plan.schedule, levels, strict=True) if not isinstance(s, Del)]
    assert [s for s, _ in predicted] == list(measured.steps)
    turn = measured.steps.index(Loss())
    for k, ((s, size), seen) in enumerate(zip(predicted, measured.bytes, strict=True)):
        scalars = 0 if k < turn else Cpu.scalars
        assert size <= seen <= size + scalars, f"{step_name(problem, s)}: {seen} bytes, predicted {size}"


@pytest.mark.parametrize("budget", ["45%", "100%"])
def test_each_operation_takes_what_the_plan_predicts(budget: str) -> None:
    rk = Rockmate(layers(), torch.randn(512, 32), budget, costs="flops")
    step = mlp_step(rk)
    step()
    step()
    measured = measure_step(step)
    assert bool(rk.plan.recomputed) == (budget == "45%")
    assert_as_predicted(rk.plan, measured)
    assert measured.peak <= rk.plan.predicted_peak + Cpu.scalars <= rk.budget + Cpu.scalars
    assert repr(measured) == f"<MeasuredStep: {len(measured.steps)} operations, peak {measured.peak} bytes>"


def test_an_attached_model_is_measured_as_a_whole_step_is() -> None:
    torch.manual_seed(0)
    model = GPT(3, 32, 4, 32, 50, dropout=0.0)
    handle = attach(model, "65%", costs="flops")
    step = gpt_step(model)
    for _ in range(3):
        step()
    measured = measure_step(step)
    assert isinstance(handle.plan, Plan) and handle.plan.recomputed
    assert_as_predicted(handle.plan, measured)
    step()
    for p in model.parameters():
        p.grad = None
    assert measured.peak == measure_peak(step)


def test_the_figure_has_both_curves_on_one_axis() -> None:
    rk = Rockmate(layers(), torch.randn(512, 32), "45%", costs="flops")
    step = mlp_step(rk)
    step()
    step()
    measured = measure_step(step)
    axes = rk.plan.plot_memory(measured=measured).axes
    assert len(axes) == 1
    drawn = {patch.get_label(): patch.get_data() for patch in axes[0].patches}
    turn = measured.steps.index(Loss())
    sizes = [size / 2**20 for k, size in enumerate(measured.bytes) if k != turn]
    assert list(drawn["measured"].values) == sizes
    assert list(drawn["measured"].edges) == list(drawn["run again"].edges)
    without = rk.plan.plot_memory().axes[0].patches
    assert "measured" not in {patch.get_label() for patch in without}


def test_a_measurement_of_another_plan_is_refused() -> None:
    x = torch.randn(512, 32)
    rk, other = (Rockmate(layers(), x, budget, costs="flops") for budget in ("45%", "60%"))
    for each in (rk, other):
        mlp_step(each)()
    measured = measure_step(mlp_step(other))
    with pytest.raises(InputError, match=r"operations that are not the .* of this plan.*rk.plan after the step"):
        rk.plan.plot_memory(measured=measured)
    with pytest.raises(InputError, match=r"measured is of type int: give what rockmate.measure_step\(step\) returned"):
        rk.plan.plot_memory(measured=3)  # type: ignore[arg-type]


@pytest.mark.filterwarnings(SEVERAL)
def test_what_cannot_be_measured_is_refused() -> None:
    model = layers()
    x = torch.randn(512, 32)
    rk = Rockmate(model, x, "45%", costs="flops")
    mlp_step(rk)()

    def twice() -> None:
        (rk(x).sum() + rk(x).sum()).backward()

    lengths = iter(range(8, 120, 8))
    cases: list[tuple[Callable[[], object], str]] = [
        (mlp_step(model), "no forwards under a plan ran within the step"),
        (twice, "2 forwards under a plan ran within the step"),
        (lambda: rk(x), "no backward of the planned model ran within the step"),
        (lambda: rk(x[: next(lengths)]), "memory is being measured already, so that no plan can be made meanwhile"),
        (lambda: measure_peak(lambda: None), "memory is being measured already"),
    ]
    for wrong, why in cases:
        with pytest.raises(MeasureError, match=re.escape(why)):
            measure_step(wrong)
    with (
        torch.profiler.profile(),
        pytest.raises(MeasureError, match="a profiler session is open"),
        pytest.warns(RuntimeWarning, match="the running profiler session ends"),
    ):
        measure_step(mlp_step(rk))
    step = mlp_step(rk)  # nothing is left of all these
    for _ in range(2):  # the first time, another call may follow as in ``twice``
        step()
    assert_as_predicted(rk.plan, measure_step(step))


def test_an_error_within_the_step_is_the_steps_own() -> None:
    with pytest.raises(ZeroDivisionError):
        measure_step(lambda: 1 / 0)
    assert measure_peak(lambda: torch.ones(1000)) == 4000
    assert rockmate.measure_step is measure_step


class Branches(nn.Module):
    """Its Python reads from the input which way to go."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y * 2 if x.sum() > 0 else self.layers(y)


def test_a_followed_step_is_refused() -> None:
    x = torch.ones(256, 32)
    rk = Rockmate(Branches(), x, "60%", costs="flops")
    with pytest.raises(MeasureError, match=r"a followed step cannot be measured so: rk\.reason says why"):
        measure_step(lambda: rk(x).square().mean().backward())


class Spectral(nn.Module):
    """A Fourier layer: some modes are mixed, and written into zeros that are shaped like all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 9, dtype=torch.cfloat))
        self.beside = nn.Conv1d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfft(x)
        mixed = torch.zeros_like(modes)
        mixed[:, :, :9] = torch.einsum("bif,iof->bof", modes[:, :, :9], self.weight)
        return nn.functional.gelu(torch.fft.irfft(mixed, n=64) + self.beside(x))


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_result_whose_gradient_never_comes(part: float) -> None:
    """``zeros_like`` reads it and has no gradient for it, though what is then written there has one."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Spectral() for _ in range(4))), torch.randn(32, 8, 64)
    budget = part_way(frontier(model, x, costs="flops", loss_memory=0), part)
    rk, gradient = Rockmate(model, x, budget, costs="flops", loss_memory=0), torch.randn(32, 8, 64)

    def step() -> None:
        rk(x).backward(gradient)
        model.zero_grad()

    step()
    assert measure_peak(step, "cpu") == rk.plan.predicted_peak <= budget


def test_a_profiler_that_warms_up_goes_on_behind_the_planning() -> None:
    """Its session was prepared: torch crashed where it began, after planning had ended it."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6))), torch.randn(64, 16)
    traces: list[int] = []
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=lambda p: traces.append(len(p.events()))) as profiler:
        handle = rockmate.attach(model, "90%", costs="flops")
        for _ in range(3):
            model(x).sum().backward()
            profiler.step()
    assert handle.plan is not None
    assert len(traces) == 1
    assert traces[0] > 0
    with torch.profiler.profile() as profiler:
        model(x).sum().backward()
    assert profiler.events()
