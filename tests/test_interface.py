"""What users pass and get: arguments, fields of the plan, and the error for each thing that cannot be used."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import case, part_way
from torch import nn

import rockmate
from rkgb import make_all_graphs
from rkgb.cost import memory
from rkgb.device import Cpu
from rockmate import (
    InfeasibleBudgetError,
    InputError,
    MeasureError,
    PlanError,
    Rockmate,
    UnsupportedError,
    attach,
    frontier,
    measure_peak,
)
from rockmate.budget import Budget, parse_budget, parse_bytes, show_at_least
from rockmate.demo.compare import main as demo
from rockmate.demo.text import batches, load_tokens
from rockmate.errors import BudgetError


def mlp() -> nn.Sequential:
    return case("mlp").model()


X = torch.ones(128, 16)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2 GiB", 2 * 2**30),
        ("8 GIB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("3g", 3 * 2**30),
        ("1.5M", 3 * 2**19),
        ("500 MB", 500 * 10**6),
        ("500mb", 500 * 10**6),
        ("1.5kib", 1536),
        ("7 bytes", 7),
        ("1_000_000", 10**6),
        ("0.3 GB", 3 * 10**8),
        (300, 300),
        (3e6, 3 * 10**6),
        (2**60 + 1, 2**60 + 1),
        (np.int64(2048), 2048),
        (np.float32(3e6), 3 * 10**6),
    ],
)
def test_budgets_in_text_and_numbers(text: object, size: int) -> None:
    assert parse_budget(text) == Budget(size)
    assert parse_bytes(text) == size


@pytest.mark.parametrize("limit", ["60%", "auto", "2 parsecs", True, 1.5, "0.5"])
def test_limits_name_only_what_they_take(limit: object) -> None:
    """A limit is bytes: neither a share nor "auto", so that its errors do not speak of these."""
    with pytest.raises(BudgetError, match="the limit") as error:
        parse_bytes(limit)
    assert "GiB" in str(error.value) and not re.search("share of|as .60%|free on", str(error.value))


@pytest.mark.parametrize(
    "budget",
    [
        *("2 parsecs", "", "GiB", "1.2.3 MB", "0%", "-5%", "1e400", "-1 GiB", "0.5 bytes"),
        *(0, -5, True, None, [1], float("nan"), float("inf")),
    ],
)
def test_budgets_that_are_none(budget: object) -> None:
    with pytest.raises(BudgetError, match="budget"):
        Rockmate(mlp(), X, budget)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "meant"),
    [(2, '"2 GiB"'), ("24", '"24 GiB"'), (80.0, '"80 GiB"'), (288, '"288 GiB"'), (0.6, '"0.6 GiB" or "60%"')],
)
def test_budgets_that_count_gigabytes(budget: int | float | str, meant: str) -> None:
    with pytest.raises(BudgetError, match=f"in which no step can be run: was {meant} meant"):
        Rockmate(mlp(), X, budget)


def test_budgets_that_are_shares() -> None:
    found = frontier(mlp(), X, costs="flops")
    rk = Rockmate(mlp(), X, "100%", costs="flops")
    assert rk.budget == found.max_budget
    assert rk.plan.recomputed == 0
    rk.budget = "95.5 %"
    assert rk.budget == rk.plan.budget == int(0.955 * found.max_budget)
    assert rk.plan.recomputed > 0
    rk(X[:64]).sum().backward()
    assert rk.plan.budget == rk.budget, "calls of other kinds have the same bytes"
    assert Rockmate(mlp(), X, "95.5%", costs="flops").budget == rk.budget
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(mlp(), X, "1%", costs="flops")
    assert error.value.min_budget == found.min_budget


def test_a_budget_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less what an optimizer will keep, and a twentieth: tests/training/test_device_budget.py has more."""
    moments = 2 * sum(p.nbytes for p in mlp().parameters())
    monkeypatch.setattr(Cpu, "free", lambda self, device: 1_000_000 + moments)
    rk = Rockmate(mlp(), X, " Auto", costs="flops")
    assert rk.budget == 950_000
    assert rk.memory().free == rk.budget - rk.plan.predicted_peak and rk.memory().margin == 50_000
    monkeypatch.setattr(Cpu, "free", lambda self, device: 2_000_000 + moments)
    rk.budget = "auto"
    assert rk.budget == 1_900_000


def test_a_copy_plans_for_the_budget_that_it_was_given() -> None:
    rk = copy.deepcopy(Rockmate(mlp(), X, "10 MiB", costs="flops"))
    assert rk.budget == 10 * 2**20
    rk.budget = "100%"
    assert "budget=100%" in repr(rk)
    with pytest.raises(InputError, match="so its bytes are known when a step was planned"):
        assert rk.budget
    rk(X)
    assert rk.budget == frontier(mlp(), X, costs="flops").max_budget


def test_a_budget_in_bytes_is_known_before_the_first_call() -> None:
    assert rockmate.attach(mlp(), "3 MiB").budget == 3 * 2**20


def test_a_budget_below_the_minimum_names_one_that_works() -> None:
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(mlp(), X, 1000, costs="flops")
    rk = Rockmate(mlp(), X, error.value.min_budget, costs="flops")
    assert rk.plan.predicted_peak <= error.value.min_budget
    assert error.value.__cause__ is None, "one message"
    assert error.value.__suppress_context__
    with pytest.raises(InfeasibleBudgetError):
        rk.budget = error.value.min_budget - 1


@pytest.mark.parametrize("name", ["mlp", "tied", "gpt"])
def test_the_least_budget_as_it_is_printed_can_be_planned(name: str) -> None:
    c = case(name)
    found = frontier(c.model(), *c.call(0)[0], costs="flops")
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(c.model(), c.call(0)[0], found.min_budget - 1, costs="flops")
    figures = re.findall(r"[0-9.]+ [KM]iB", str(error.value))
    budget, least, gradients, eager = map(parse_bytes, figures[:4])
    assert budget <= found.min_budget == error.value.min_budget <= least <= 1.01 * found.min_budget
    assert Rockmate(c.model(), c.call(0)[0], figures[1], costs="flops").plan.recomputed > 0
    assert 0 < gradients <= 1.01 * sum(p.nbytes for p in c.model().parameters()), "as printed"
    assert found.max_budget <= eager <= 1.01 * found.max_budget
    assert Rockmate(c.model(), c.call(0)[0], figures[3], costs="flops").plan.recomputed == 0


def test_a_budget_below_the_minimum_names_the_line_that_sets_it() -> None:
    places = {
        "mlp": r"the backward of linear in 2\.",
        "gpt": r"the backward of gelu in layers\.2 at gpt\.py:\d+\.",
        "moving_average": r"the backward of mul at models\.py:\d+\.",
    }
    for name, place in places.items():
        c = case(name)
        with pytest.raises(InfeasibleBudgetError, match=f"What sets it is {place}"):
            Rockmate(c.model(), c.call(0)[0], 1000, costs="flops")


def test_a_budget_where_nothing_can_be_saved_says_so() -> None:
    large, x = nn.Sequential(nn.Linear(512, 512), nn.ReLU()), torch.randn(2, 512)
    found = frontier(large, x, costs="flops")
    assert found.min_budget >= 0.99 * found.max_budget
    with pytest.raises(InfeasibleBudgetError, match=r"saves next to nothing here: .* gradients of parameters and what"):
        Rockmate(large, x, "50%", costs="flops")
    with pytest.raises(InfeasibleBudgetError) as error:
        Rockmate(mlp(), X, "1%", costs="flops")
    assert "nothing" not in str(error.value)


def test_a_budget_below_the_minimum_is_one_short_error() -> None:
    """Neither the solver's frames, nor those of TorchDynamo, nor another error before it."""
    model, rk = mlp(), Rockmate(mlp(), X, "100%", costs="flops")
    rockmate.attach(model, 1000, costs="flops")

    def set_budget() -> None:
        rk.budget = 1000

    for refused in (lambda: Rockmate(mlp(), X, 1000, costs="flops"), lambda: model(X), set_budget):
        with pytest.raises(InfeasibleBudgetError) as error:
            refused()
        assert error.value.__cause__ is None and error.value.__suppress_context__
        places = {Path(frame.filename).name for frame in traceback.extract_tb(error.value.__traceback__)}
        assert not places & {"planner.py", "runnable.py", "calls.py", "capture.py", "dynamo.py"}


def test_a_budget_that_the_loss_is_too_large_for() -> None:
    model = nn.Linear(16, 16)
    with pytest.raises(
        InfeasibleBudgetError, match=r"sets it is the loss, .*declare less than loss_memory=200000"
    ) as error:
        Rockmate(model, X, "100 KiB", loss_memory=200_000, costs="flops")
    assert "left free" not in str(error.value), "what is declared is not observed"


@pytest.mark.parametrize("size", [1, 999, 1023, 1024, 1025, 10_188, 10_189, 236_932, 2**20 + 1, 11 * 2**30 + 7])
def test_figures_that_are_rounded_up(size: int) -> None:
    assert size <= parse_bytes(show_at_least(size)) <= 1.01 * size


def test_a_sample_that_does_not_fit() -> None:
    with pytest.raises(InputError, match=r"cannot be called with this sample: RuntimeError.*1 positional"):
        Rockmate(mlp(), torch.ones(3, 7), "1 MiB")
    with pytest.raises(InputError, match=r"cannot be called with this sample: TypeError"):
        Rockmate(mlp(), {"nonsense": X}, "1 MiB")
    with pytest.raises(InputError, match=r"cannot be called with this sample: TypeError.*without the batch's targets"):
        Rockmate(mlp(), [X, torch.zeros(len(X))], "1 MiB")


def test_nothing_to_train() -> None:
    with pytest.raises(InputError, match="nothing needs a gradient"):
        Rockmate(nn.ReLU(), X, "1 MiB")
    with pytest.raises(InputError, match="nothing needs a gradient"):
        Rockmate(mlp().requires_grad_(False), X, "1 MiB")
    Rockmate(nn.ReLU(), X.clone().requires_grad_(), "1 MiB")


def test_model_elsewhere_than_the_sample() -> None:
    with pytest.raises(InputError, match=r"tensor 0 of the sample is on meta, the model on cpu.*\.to\('cpu'\)"):
        Rockmate(mlp(), X.to("meta"), "1 MiB")


def test_not_a_module_and_unknown_costs() -> None:
    with pytest.raises(InputError, match="the model is a function"):
        Rockmate(lambda x: x, X, "1 MiB")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="choose"):
        Rockmate(mlp(), X, "1 MiB", costs="guessed")


def test_arguments_of_another_kind() -> None:
    arguments: list[tuple[dict[str, Any], str]] = [
        ({"budget": "1 MiB", "sample_kwargs": [1]}, "sample_kwargs is of type list: give a dict"),
        ({"budget": "1 MiB", "loss_memory": "60%"}, "'60%' is a share, and nothing says of what"),
        ({"budget": "1 MiB", "loss_memory": -1}, "loss_memory=-1: give whole bytes"),
    ]
    for given, message in arguments:
        with pytest.raises(InputError, match=message):
            Rockmate(mlp(), X, **given)
    with pytest.raises(PlanError, match="plan is of type dict: give the path of the file"):
        Rockmate(mlp(), X, plan={"budget": 1})  # type: ignore[arg-type]
    with torch.inference_mode(), pytest.raises(InputError, match="plan outside of it"):
        Rockmate(mlp(), X, "1 MiB")


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_models_and_parts_that_are_compiled() -> None:
    scripted = torch.jit.script(mlp())
    for model in (scripted, torch.jit.trace(mlp(), X)):
        with pytest.raises(InputError, match=r"by torch\.jit as a whole: give the module as it was before"):
            Rockmate(model, X, "1 MiB")
    compiled = torch.compile(torch.tanh, backend="eager")

    class Calls(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compiled(super().forward(x))

    with pytest.raises(UnsupportedError, match=r"torch.compile made at test_interface.py:\d+.*Call the function as it"):
        make_all_graphs(Calls(16, 16), X)
    model = Calls(16, 16)
    expected = torch.tanh(torch.nn.functional.linear(X, model.weight, model.bias))
    assert torch.equal(Rockmate(model, X, "1 MiB", costs="flops")(X), expected)


def test_an_input_changed_in_place_where_gradients_pass() -> None:
    """No plan of a graph begins behind the change, so the call is followed; the sample stays what it is."""
    model = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(16, 16))
    inside = torch.randn(4, 16, requires_grad=True) * 1
    before = inside.detach().clone()
    for rk in (
        Rockmate(model, torch.randn(4, 16), "1 MiB", costs="flops"),
        Rockmate(model, inside, "1 MiB", costs="flops"),
    ):
        leaf = before.clone().requires_grad_()
        expected = model(leaf * 1)
        assert torch.equal(rk(leaf * 1), expected)
        assert "changes an input in place" in rk.reason
    assert torch.equal(inside, before)


def test_ways_to_give_the_sample() -> None:
    c = case("keywords")
    _, kwargs = c.call(0)
    a = Rockmate(c.model(), kwargs, "1 MiB", costs="flops")
    b = Rockmate(c.model(), (), "1 MiB", sample_kwargs=kwargs, costs="flops")
    assert torch.equal(a(**kwargs), b(**kwargs))
    two = case("two_in_two_out")
    both = Rockmate(two.model(), two.call(0)[0], "1 MiB", costs="flops")
    assert len(both(*two.call(1)[0])) == 2


def test_the_plan_says_what_is_promised() -> None:
    c = case("gpt")
    x = c.call(0)[0][0]
    found = frontier(c.model(), x, costs="flops")
    assert found.min_budget < found.max_budget
    budgets, overheads = zip(*found.points, strict=True)
    assert list(budgets) == sorted(budgets)
    assert list(overheads) == sorted(overheads, reverse=True)
    rk = Rockmate(c.model(), x, part_way(found, 0.5), costs="flops")
    assert 0 < rk.plan.predicted_peak <= rk.plan.budget == rk.budget
    assert 0 < rk.plan.predicted_overhead < 1
    assert set(rk.plan.setup_seconds) == {"capture", "trace", "simplify", "measure", "solve"}
    assert "predicted overhead" in str(rk.plan)
    assert rk.plan.program().count("recompute") == rk.plan.recomputed
    assert rk.backward() is None
    assert list(rk.state_dict()) == list(c.model().state_dict())
    assert all(a is b for a, b in zip(rk.parameters(), rk.original.parameters(), strict=True))
    again = Rockmate(c.model(), x, rk.budget, costs="flops")
    assert again.plan.schedule == rk.plan.schedule, "flops costs give the same plan every time"


def test_measured_costs_plan_too() -> None:
    rk = Rockmate(mlp(), X, "10 MiB")
    assert rk.plan.recomputed == 0
    assert rk.plan.problem.eager_time > 0


def test_peaks_that_can_be_computed_by_hand() -> None:
    a = torch.ones(1000)
    assert measure_peak(lambda: a * a, "cpu") == 4000
    assert measure_peak(lambda: (a * a) * a, "cpu") == 8000

    def chain() -> None:
        b = a * a
        for _ in range(3):
            b = b * a

    assert measure_peak(chain, "cpu") == 8000
    old = [torch.ones(5000)]
    assert measure_peak(lambda: old.clear() or a * a, "cpu") == 4000  # an older block's release is no gain


def test_a_plan_made_while_memory_is_measured_would_spoil_the_measurement() -> None:
    model = mlp()
    rk = Rockmate(model, X, "10 MiB", costs="flops")
    other = X[:64]

    def step() -> None:
        model.zero_grad()
        rk(other).sum().backward()

    with pytest.raises(MeasureError, match="Call the function once before"):
        memory.measure_peak(step)
    step()
    assert 0 < memory.measure_peak(step) <= rk.budget


def test_what_is_measured_is_planned_first_where_it_has_no_plan(caplog: pytest.LogCaptureFixture) -> None:
    model, planned = mlp(), copy.deepcopy(mlp())
    handle = attach(model, "60%", costs="flops")
    model(X).sum().backward()
    sizes: list[int] = []

    def step(of: nn.Module) -> None:
        of.zero_grad()
        sizes.append(64)
        of(X[:64]).sum().backward()

    with caplog.at_level(logging.INFO, "rockmate"):
        peak = measure_peak(lambda: step(model))
    assert len(sizes) == 3 and len(handle.plans) == 2  # where the plan was wanted, to be planned, to be measured
    assert "it runs once to be planned, then again to be measured" in caplog.text
    attach(planned, handle.budget, costs="flops")
    for size in (X, X[:64], X[:64]):
        planned(size).sum().backward()
    assert peak == measure_peak(lambda: step(planned))


def test_a_step_that_is_new_each_time_cannot_be_measured() -> None:
    model, lengths = mlp(), iter(range(100, 128))
    attach(model, "60%", costs="flops")
    model(X).sum().backward()
    with pytest.raises(MeasureError, match="Call the function once before") as raised:
        measure_peak(lambda: model(X[: next(lengths)]).sum().backward())
    assert len(traceback.extract_tb(raised.value.__traceback__)) < 6  # no frames of TorchDynamo's


def test_planning_ends_a_running_profiler_and_says_so() -> None:
    profiler = torch.autograd.profiler.profile(use_cpu=True)
    profiler.__enter__()
    try:
        with pytest.warns(RuntimeWarning, match="the running profiler session ends"):
            rk = Rockmate(mlp(), X, "10 MiB", costs="flops")
    finally:
        with contextlib.suppress(RuntimeError):  # of torch before 2.13, that it was ended
            profiler.__exit__(None, None, None)
    assert rk.plan.predicted_peak == Rockmate(mlp(), X, "10 MiB", costs="flops").plan.predicted_peak


def test_text_for_training() -> None:
    tokens = load_tokens(300)
    assert tokens.dtype == torch.int64
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < 300
    pairs = list(batches(tokens, 2, 8, 3, torch.Generator().manual_seed(0)))
    assert len(pairs) == 3
    assert all(torch.equal(x[:, 1:], y[:, :-1]) for x, y in pairs)


def test_the_demo(tmp_path, capsys) -> None:
    size = ["--layers", "2", "--width", "32", "--length", "16", "--batch", "2", "--vocabulary", "128"]
    run = ["--budgets", "90", "80", "--pairs", "1", "--steps", "2", "--device", "cpu", "--costs", "flops"]
    assert demo([*size, *run, "--out", str(tmp_path)]) == 0
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("frontier.png", "memory.png"))
    assert capsys.readouterr().out.count("yes") == 2


def test_public_names() -> None:
    assert set(rockmate.__all__) <= set(dir(rockmate))
