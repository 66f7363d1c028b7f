"""Several calls before a backward, of one model or of several: together they are within the budget of the step."""

from __future__ import annotations

import copy
import gc
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import pairs, randn
from torch import nn

from rkgb.cost.memory import timeline
from rkgb.device import Cpu
from rockmate import (
    BudgetWarning,
    InfeasibleBudgetError,
    InputError,
    Rockmate,
    attach,
    attached,
    detach,
    measure_peak,
)
from rockmate.calls.ways import PlannedWays
from rockmate.calls.whole_steps import form_of, phases_of
from rockmate.planning.ways import serving
from solvers import Schedule
from solvers.calls import level

ROWS, WIDTH = 512, 64
STEPS = 6
"""After which nothing new is learned."""

Step = Callable[[Sequence[nn.Module], torch.Tensor], None]
SEVERAL = pytest.mark.filterwarnings(
    "ignore:.*times before a backward:rockmate.BudgetWarning",
    "ignore:the last step of .* as its calls were not known well enough:rockmate.BudgetWarning",
)
"""In the first steps, before the calls of a step are known."""


class Layers(nn.Module):
    """Layers in a loop. ``prints``: no one graph."""

    def __init__(self, count: int = 6, out: int = WIDTH, prints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.last, self.prints = nn.Linear(WIDTH, out), prints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice as many activations as layers."""
        for k, layer in enumerate(self.layers):
            x = F.gelu(layer(x)).sin()
            if self.prints and k == 2:
                print(end="")  # noqa: T201 - what TorchDynamo captures no one graph of
        return self.last(x)


def two_branches(m: Sequence[nn.Module], x: torch.Tensor) -> None:
    """Of one loss."""
    (m[0](x) - m[0](-x)).square().mean().backward()


def crops(m: Sequence[nn.Module], x: torch.Tensor) -> None:
    """Of four sizes."""
    torch.stack([m[0](x[:n]).square().mean() for n in (ROWS, ROWS // 2, ROWS // 4, ROWS // 4)]).sum().backward()


def in_order(m: Sequence[nn.Module], x: torch.Tensor) -> None:
    """The backward of the first call comes first."""
    losses = [m[0](x).square().mean(), m[0](-x).square().mean()]
    for loss in losses:
        loss.backward()


def reversed_order(m: Sequence[nn.Module], x: torch.Tensor) -> None:
    """The backward of the last call comes first."""
    losses = [m[0](x).square().mean(), m[0](-x).square().mean()]
    for loss in losses[::-1]:
        loss.backward()


def unrolled(m: Sequence[nn.Module], x: torch.Tensor) -> None:
    """Each call reads what the one before returned."""
    for _ in range(4):
        x = m[0](x)
    x.square().mean().backward()


def mixed(m: Sequence[nn.Module], x: torch.Tensor) -> None:
    """A call that no backward comes to, and one without gradients."""
    first = m[0](x)
    with torch.no_grad():
        target = m[0](-x)
    unused = m[0](x + 1)
    (first - target).square().mean().backward()
    del unused


def adversarial(m: Sequence[nn.Module], x: torch.Tensor) -> None:
    """The discriminator learns while the generator waits."""
    generator, discriminator = m
    made = generator(x)
    real, false = discriminator(x), discriminator(made.detach())
    one, zero = torch.ones_like(real), torch.zeros_like(real)
    loss = F.binary_cross_entropy_with_logits(real, one) + F.binary_cross_entropy_with_logits(false, zero)
    loss.backward()
    for p in discriminator.parameters():
        p.grad = None
    F.binary_cross_entropy_with_logits(discriminator(made), one).backward()


def with_critic(m: Sequence[nn.Module], x: torch.Tensor) -> None:
    """A loss of what the first model makes, and of what the second makes of that."""
    made = m[0](x)
    ((made - x).square().mean() + m[1](made).mean()).backward()


def run(step: Step, models: Sequence[nn.Module], x: torch.Tensor) -> int:
    """The peak of one step without gradients before."""
    once(step, models, x)
    for p in nn.ModuleList(models).parameters():
        p.grad = None
    return measure_peak(lambda: step(models, x))


def once(step: Step, models: Sequence[nn.Module], x: torch.Tensor) -> None:
    """One step without gradients before."""
    for p in nn.ModuleList(models).parameters():
        p.grad = None
    step(models, x)


def trained(step: Step, models: Sequence[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients, and parameters, after some steps."""
    for _ in range(STEPS):
        once(step, models, x)
        with torch.no_grad():
            for p in nn.ModuleList(models).parameters():
                p -= 0 if p.grad is None else 0.01 * p.grad
    return [t for p in nn.ModuleList(models).parameters() for t in (p, p.grad) if t is not None]


def made(prints: Sequence[bool]) -> list[nn.Module]:
    """One model for each, all but the first smaller."""
    torch.manual_seed(0)
    return [Layers(6 if k == 0 else 4, WIDTH if k == 0 else 1, bool(p)) for k, p in enumerate(prints)]


BOTH = [(two_branches, (0,)), (two_branches, (1,)), (unrolled, (0,)), (unrolled, (1,))]
ONE = [(crops, (0,)), (in_order, (1,)), (reversed_order, (0,)), (mixed, (1,))]
TWO = [(adversarial, (0, 0)), (adversarial, (1, 1)), (with_critic, (0, 0)), (with_critic, (1, 0))]


@SEVERAL
@pytest.mark.parametrize(("step", "prints"), [*BOTH, *ONE, *TWO], ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_step_is_within_the_budget(step: Step, prints: Sequence[bool]) -> None:
    """Once its calls are known. A share is one of the whole step."""
    budget: str | float = "60%" if prints[0] else 0.55
    eager, x = made(prints), randn(ROWS, WIDTH, seed=1)
    models = copy.deepcopy(eager)
    peak = run(step, copy.deepcopy(eager), x)
    handles = attach(models, budget if isinstance(budget, str) else int(budget * peak), costs="flops", cache=False)
    wanted, found = trained(step, eager, x), trained(step, models, x)
    assert len(wanted) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert run(step, models, x) <= handles[0].budget
    losses = 3 * sum(m(x).nbytes for m in eager) * 4  # as much is left for each of up to four calls
    assert handles[0].budget <= 0.6 * (peak + losses)


class Writing(Layers):
    """Reads memory that each of its calls has written before: a buffer, and its input."""

    def __init__(self) -> None:
        super().__init__(prints=True)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """No one graph."""
        self.mean.add_(x.mean(0))
        x.mul_(0.5)
        return super().forward(x.sin() + self.mean)


@SEVERAL
def test_what_each_call_writes_and_reads_is_not_read_again() -> None:
    """Another call writes it before the backward of the first, whatever decides what runs again."""
    torch.manual_seed(0)
    eager, x = Writing(), randn(ROWS, WIDTH, seed=1)

    def step(m: Sequence[nn.Module], x: torch.Tensor) -> None:
        (m[0](x) - m[0](x)).square().mean().backward()

    model, ours = copy.deepcopy(eager), x.clone()
    peak = run(step, [copy.deepcopy(eager)], x.clone())
    attach(model, int(0.6 * peak), costs="flops", cache=False)
    wanted, found = trained(step, [eager], x), trained(step, [model], ours)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert run(step, [model], ours) <= 0.6 * peak


@SEVERAL
@pytest.mark.parametrize("prints", [False, True])
def test_a_twin_of_a_model_is_called_twice(prints: bool) -> None:
    torch.manual_seed(0)
    eager, x = Layers(prints=prints), randn(ROWS, WIDTH, seed=1)
    peak = run(two_branches, [copy.deepcopy(eager)], x)
    rk = Rockmate(copy.deepcopy(eager), x, int(0.55 * peak), costs="flops", cache=False)
    wanted, found = trained(two_branches, [eager], x), trained(two_branches, [rk], x)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert run(two_branches, [rk], x) <= rk.budget


class Short(nn.Module):
    """Recomputation saves next to nothing of one call. ``prints``: no one graph."""

    def __init__(self, prints: bool) -> None:
        super().__init__()
        self.wide, self.last, self.prints = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 8), prints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.wide(x)).sin()
        if self.prints:
            print(end="")  # noqa: T201 - what TorchDynamo captures no one graph of
        return self.last(x)


@SEVERAL
@pytest.mark.filterwarnings(
    "ignore:.*The budget is a share of one call, as no step has shown yet how many:rockmate.BudgetWarning"
)
@pytest.mark.parametrize("prints", [False, True])
def test_a_share_that_one_call_would_not_fit_is_one_of_the_whole_step(prints: bool) -> None:
    torch.manual_seed(0)
    eager, xs = Short(prints), [randn(ROWS, WIDTH, seed=k) for k in range(2)]
    model = copy.deepcopy(eager)

    def both(m: Sequence[nn.Module], _: torch.Tensor) -> None:
        (m[0](xs[0]).square().mean() + m[0](xs[1]).square().mean()).backward()

    peak = run(both, [copy.deepcopy(eager)], xs[0])
    handle = attach(model, "65%", costs="flops", cache=False)
    wanted, found = trained(both, [eager], xs[0]), trained(both, [model], xs[0])
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert run(both, [model], xs[0]) <= handle.budget <= 0.66 * peak


@pytest.mark.parametrize("prints", [False, True])
def test_a_share_that_one_call_does_not_fit_is_an_error_once_a_step_had_no_other(prints: bool) -> None:
    model, x = Short(prints), randn(ROWS, WIDTH, seed=1)
    attach(model, "40%", costs="flops", cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        model(x).square().mean().backward()
    with pytest.raises(InfeasibleBudgetError, match="the smallest that can be planned is"):
        model(x)


@SEVERAL
def test_no_plans_that_fit_are_an_error_from_the_second_step_on() -> None:
    """At a budget that each call fits alone."""
    model, x = Layers(), randn(ROWS, WIDTH, seed=1)
    peak = run(unrolled, [copy.deepcopy(model)], x)
    handle = attach(model, int(0.5 * peak), costs="flops", cache=False)
    for _ in range(STEPS):
        once(unrolled, [model], x)
    with pytest.raises(InfeasibleBudgetError, match="no plan fits") as error:
        handle.budget = int(0.05 * peak)
    handle.budget = error.value.min_budget
    for _ in range(2):
        with pytest.raises(
            InfeasibleBudgetError, match=r"no plan fits a budget of .* for a step in which Layers"
        ) as error:
            once(unrolled, [model], x)
    handle.budget = error.value.min_budget
    for _ in range(STEPS):
        once(unrolled, [model], x)
    assert run(unrolled, [model], x) <= error.value.min_budget


@SEVERAL
def test_what_a_derivative_keeps_is_in_all_figures_of_the_error() -> None:
    """As in meta-learning: parameters that are computed come as inputs, by their names in the model."""
    model, x = Layers(), randn(128, WIDTH, seed=1)
    attach(model, "60%", costs="flops", cache=False)

    def step() -> None:
        given, loss = dict(model.named_parameters()), torch.zeros(())
        for _ in range(2):
            inner = torch.func.functional_call(model, given, (x,)).square().mean()
            slopes = torch.autograd.grad(inner, list(given.values()), create_graph=True)
            fast = {k: p - 0.1 * g for (k, p), g in zip(given.items(), slopes, strict=True)}
            loss = loss + torch.func.functional_call(model, fast, (x,)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]

    with warnings.catch_warnings(), pytest.raises(InfeasibleBudgetError, match="planned for together") as error:
        warnings.simplefilter("ignore", BudgetWarning)
        for _ in range(STEPS):
            step()
    said = str(error.value)
    least, plain = (float(word[1]) for word in re.finditer(r"(?:together is|step takes) ([\d.]+) MiB", said))
    assert least <= plain
    assert "layers.0.weight float32[64, 64] with gradient" in said
    assert "more, train" in said
    assert "last.bias" not in said


@SEVERAL
def test_the_plans_of_least_memory_run_if_that_is_asked_for() -> None:
    model, x = Layers(), randn(ROWS, WIDTH, seed=1)
    peak = run(two_branches, [copy.deepcopy(model)], x)
    attach(model, int(0.2 * peak), costs="flops", cache=False, on_infeasible="least")
    once(two_branches, [model], x)
    with pytest.warns(BudgetWarning, match="The plans of least memory run instead") as said:
        once(two_branches, [model], x)
    assert len([w for w in said if "least memory" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        once(two_branches, [model], x)


def test_calls_one_at_a_time_are_no_step_of_several() -> None:
    model, x = Layers(), randn(ROWS, WIDTH, seed=1)
    attach(model, "60%", costs="flops", cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        for _ in range(3):
            kept = model(x)  # its graph goes without a backward
            del kept
            with torch.no_grad():
                model(x)
            model(x).square().mean().backward()
            model(-x).square().mean().backward()


@SEVERAL
def test_steps_of_another_number_of_calls_are_within_the_budget_too() -> None:
    """Steps that begin in the same way: the first call does not know how many follow."""
    model, x = Layers(), randn(ROWS, WIDTH, seed=1)

    def alternating(m: Sequence[nn.Module], x: torch.Tensor, count: int) -> None:
        torch.stack([m[0](x + k).square().mean() for k in range(count)]).sum().backward()

    peak = run(two_branches, [copy.deepcopy(model)], x)
    attach(model, int(0.6 * peak), costs="flops", cache=False)
    for count in (1, 2, 3, 1, 2, 3, 1, 2):
        once(lambda m, x, count=count: alternating(m, x, count), [model], x)  # type: ignore[misc]
    peaks = [run(lambda m, x, count=count: alternating(m, x, count), [model], x) for count in (1, 3, 2, 1)]  # type: ignore[misc]
    assert max(peaks) <= 0.6 * peak


@SEVERAL
def test_steps_of_other_models_are_not_booked_to_one_that_is_measured() -> None:
    """Its first call has no backward, so that only the next step shows that it is over."""
    model, x = Layers(), randn(ROWS, WIDTH, seed=1)

    def unused(m: Sequence[nn.Module], x: torch.Tensor) -> None:
        kept = m[0](x)
        m[0](-x).square().mean().backward()
        del kept

    eager = copy.deepcopy(model)
    peak = run(unused, [eager], x)
    attach(model, int(0.65 * peak), costs="flops", cache=False)
    for _ in range(STEPS):
        once(unused, [model], x)
        once(unused, [eager], x)
    assert run(unused, [model], x) <= 0.65 * peak


@SEVERAL
def test_the_budget_of_several_modules_is_set_for_all_of_them() -> None:
    models, x = made((False, False)), randn(ROWS, WIDTH, seed=1)
    peak = run(with_critic, copy.deepcopy(models), x)
    first, second = attach(models, peak, costs="flops", cache=False)
    assert (first.name, second.name) == ("Layers [0]", "Layers [1]")
    for budget in (int(0.5 * peak), int(0.8 * peak)):
        second.budget = budget
        assert first.budget == budget
        for _ in range(STEPS):
            once(with_critic, models, x)
        assert run(with_critic, models, x) <= budget
    detach(models[0])
    assert attached(models[1]) is second
    run(with_critic, models, x)


def test_lists_of_modules_that_cannot_share_a_budget() -> None:
    model = Layers()
    with pytest.raises(InputError, match="the list of modules is empty"):
        attach([], "1 GiB")
    with pytest.raises(InputError, match="the Layers is in the list more than once: give each"):
        attach([model, model], "1 GiB")
    with pytest.raises(InputError, match="is the Layers, a part of it, or has it as a part"):
        attach([model, model.last], "1 GiB")
    with pytest.raises(InputError, match="sample= is for one module"):
        attach([model, Layers()], "1 GiB", sample=randn(2, WIDTH, seed=1))
    with pytest.raises(InputError):
        attach([model, "x"], "1 GiB")  # type: ignore[list-item]
    assert attached(model) is None


class Alternating(Layers):
    """Computes otherwise in each second call. Its forward takes most at its end; what it returns is large."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """No one graph."""
        self.calls += 1
        y = super().forward(x.neg() if self.calls % 2 else x)
        return y + y.detach().sin().cos().max()


def let_go(m: Sequence[nn.Module], x: torch.Tensor) -> None:
    """What the first call returned goes when the loss is computed: it is there in the forward of the second."""
    first, second = m[0](x), m[0](-x)
    loss = first.mean() + second.mean()
    del first, second
    loss.backward()


@SEVERAL
def test_results_that_go_before_the_backward_wait_while_other_forwards_run() -> None:
    torch.manual_seed(0)
    eager, x = Alternating(6, 16 * WIDTH, prints=True), randn(ROWS, WIDTH, seed=1)
    budget = int(0.93 * run(let_go, [copy.deepcopy(eager)], x))
    model = copy.deepcopy(eager)
    attach(model, budget, costs="flops", cache=False)
    wanted, found = trained(let_go, [eager], x), trained(let_go, [model], x)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert run(let_go, [model], x) <= budget


def test_budgets_that_hardly_differ_need_no_search_each() -> None:
    """What a step was seen to take beside its calls changes their budget a little, time after time."""
    assert serving([(1000, False)], 970, False) == serving([(1000, False)], 1030, False) == (1000, False)
    assert serving([(1000, False)], 900, False) is None
    assert serving([(1000, False)], 970, True) is None
    assert serving([(1000, False), (1000, True)], 970, True) == (1000, True)
    assert serving([(1000, True)], 1000, False) == (1000, True)


@SEVERAL
def test_sizes_of_one_graph_share_the_ways_that_were_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another model's call of one size: a search for each size would take longer than its steps."""
    searched: list[tuple[int, bool]] = []

    def counted(ways: PlannedWays, budget: int, tight: bool) -> Iterable[Schedule]:
        searched.append((budget, tight))
        return look_for(ways, budget, tight)

    look_for = PlannedWays.look_for
    monkeypatch.setattr(PlannedWays, "look_for", counted)
    models = [Layers(), Layers()]
    eager = copy.deepcopy(models)
    budget = 2_500_000
    attach(models, budget, costs="flops", cache=False)

    def both(m: Sequence[nn.Module], x: torch.Tensor, y: torch.Tensor) -> None:
        (m[0](x).square().mean() * m[1](y).square().mean()).backward()

    x = randn(ROWS, WIDTH, seed=0)
    sizes = [randn(rows, WIDTH, seed=rows) for rows in (512, 480, 500, 440, 470, 490, 430, 450, 460, 420)]
    for y in [*sizes, *sizes]:
        both(models, x, y)
        both(eager, x, y)
    for m, e in zip(models, eager, strict=True):
        for p, q in zip(m.parameters(), e.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    assert 0 < len(searched) < len(sizes)
    peaks = [measure_peak(lambda y=y: both(models, x, y)) for y in sizes[-2:]]  # type: ignore[misc]
    assert max(peaks) <= budget


@SEVERAL
@pytest.mark.parametrize("prints", [False, True])
def test_pairs_of_lengths_that_did_not_come_before_are_within_the_budget(prints: bool) -> None:
    """As far as the plans tell, in the first step of each: the first call took what its successor was to have."""
    models = [Layers(6, prints=prints), Layers(6, prints=prints)]
    eager = copy.deepcopy(models)

    def both(m: Sequence[nn.Module], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (m[0](x) * m[1](y).mean(0)).square().mean()

    def rows(count: int) -> torch.Tensor:
        return randn(count, WIDTH, seed=count)

    budget = int(0.6 * measure_peak(lambda: both(eager, rows(ROWS), rows(ROWS)).backward()))
    steps = attach(models, budget, costs="flops", cache=False)[0].terms.steps
    lengths = [*[(ROWS, ROWS)] * STEPS, (512, 180), (500, 170), (180, 500), (480, 480), (300, 500), (490, 200)]
    for k, (first, second) in enumerate(lengths):
        loss = both(models, rows(first), rows(second))
        turns = list(steps.turns)
        loss.backward()
        form, chosen = form_of(turns), [turn.way for turn in turns]
        levels = [level(phase, chosen) for phase in phases_of(form, [turn.ways for turn in turns])]
        assert k < STEPS or max(levels) <= budget, (first, second)
        for m in eager:
            m.zero_grad()
        both(eager, rows(first), rows(second)).backward()
        for m, e in zip(models, eager, strict=True):
            for p, q in zip(m.parameters(), e.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
            m.zero_grad()


def peak_of_the_first(run: Callable[[], None]) -> int:
    """The bytes that it takes, which is not run before to be measured."""
    gc.collect()
    recorded = timeline(torch.device("cpu"))
    assert recorded is not None
    recorded.mark()
    run()
    recorded.mark()
    found = recorded.close()
    assert found is not None
    peak = max(moment.peak for moment in found)
    assert peak > 0
    return peak


class Encoder(nn.Module):
    """An autoencoder, in which Python reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)) for _ in range(2))
        self.code, self.wide = nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The result, and the code's means and logarithms of variances."""
        for layer in self.down:
            x = F.gelu(layer(x))
        mean, log = self.code(x).chunk(2, -1)
        assert log.detach().mean().item() < 100
        x = self.wide(mean + torch.randn_like(mean) * (0.5 * log).exp())
        for layer in self.up:
            x = F.gelu(layer(x))
        return x, mean, log


class Judge(nn.Module):
    """As the discriminator of a GAN. Python reads a value in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number for each row."""
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.2)
        assert x.detach().mean().item() < 100
        return self.last(x)


def encoded_and_judged(m: Sequence[nn.Module], x: torch.Tensor) -> None:
    """What one model returns, the other gets, and the loss reads both, and more."""
    made, mean, log = m[0](x)
    loss = F.mse_loss(made, x) + (mean * mean + log.exp() - log).mean()
    (loss - F.logsigmoid(m[1](made)).mean()).backward()


@pytest.mark.parametrize("share", [0.4, 0.65, 0.75])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_second_and_the_third_step_of_two_followed_models_are_within_their_budget(share: float, steps: int) -> None:
    """One of them has its plan before the other: it leaves room for that one's backward. When both have one, these
    are of the step's budget.
    """
    models, x = [Encoder(), Judge()], randn(ROWS, WIDTH, seed=1)
    budget = int(share * measure_peak(lambda: encoded_and_judged(copy.deepcopy(models), x)))
    attach(models, budget, costs="flops", cache=False)
    for _ in range(steps):
        encoded_and_judged(models, x)
        for m in models:
            m.zero_grad()
    assert peak_of_the_first(lambda: encoded_and_judged(models, x)) <= budget


def chained(m: Sequence[nn.Module], x: torch.Tensor) -> None:
    """Each call gets what the one before it returned."""
    for _ in range(4):
        x = m[0](x)
    x.square().mean().backward()


def products(m: Sequence[nn.Module], x: torch.Tensor) -> None:
    """All calls wait until the last one is over."""
    a, b, c, d = (m[0](x) for _ in range(4))
    (a * b - c * d).square().mean().backward()


@pytest.mark.parametrize("share", [0.5, 0.85])
@pytest.mark.parametrize("step", [chained, products, crops])
@pytest.mark.filterwarnings("ignore:Layers has no plan for calls:rockmate.BudgetWarning")  # memory is recorded here
def test_the_calls_of_a_first_step_let_data_go_for_one_another(step: Step, share: float) -> None:
    """Each had a part of what those before had left, and their backwards what was left then, which was too little."""
    models, x = [Layers(prints=True)], randn(ROWS, WIDTH, seed=1)
    eager = copy.deepcopy(models)
    budget = int(share * measure_peak(lambda: step(eager, x)))
    attach(models, budget, costs="flops", cache=False)
    assert peak_of_the_first(lambda: step(models, x)) <= budget
    eager[0].zero_grad()
    step(eager, x)
    for p, q in zip(models[0].parameters(), eager[0].parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


CALLS = 12


def validated_with_gradients(model: nn.Module, x: torch.Tensor) -> float:
    """A validation whose author forgot ``torch.no_grad``: the graphs of all calls are there until its end."""
    total = sum((model(x).square().mean() for _ in range(CALLS)), torch.zeros(()))
    return total.item()


def one_call(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    model.zero_grad()


def trained_and_validated(budget: float | str, on_infeasible: str, prints: bool) -> tuple[Any, Callable[[], None], int]:
    torch.manual_seed(0)
    model, x = Layers(prints=prints), randn(ROWS, WIDTH, seed=1)
    eager = run(lambda m, x: one_call(m[0], x), [copy.deepcopy(model)], x)
    size = budget if isinstance(budget, str) else int(budget * eager)
    handle = attach(model, size, costs="flops", cache=False, on_infeasible=on_infeasible)
    for _ in range(3):
        one_call(model, x)
    with pytest.warns(BudgetWarning, match=r"times before a backward.*torch.no_grad"):
        validated_with_gradients(model, x)
    return handle, lambda: one_call(model, x), handle.budget


@pytest.mark.parametrize(("budget", "on_infeasible", "prints"), pairs([0.7, "70%"], ["error", "least"], [False, True]))
def test_steps_go_on_after_a_validation_with_gradients(budget: float | str, on_infeasible: str, prints: bool) -> None:
    handle, train, before = trained_and_validated(budget, on_infeasible, prints)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*The plans of least memory run instead", BudgetWarning)
        for _ in range(3):
            train()
        assert measure_peak(train) <= handle.budget
    assert handle.budget == before, "a share is one of a step, and a validation is none"


@pytest.mark.parametrize(("budget", "fits", "prints"), [(0.7, True, False), (0.38, False, True)])
def test_a_second_validation_with_gradients_is_planned_or_refused(budget: float, fits: bool, prints: bool) -> None:
    handle, train, _ = trained_and_validated(budget, "error", prints)
    x = randn(ROWS, WIDTH, seed=1)
    for _ in range(2):
        train()
        if fits:
            assert measure_peak(lambda: validated_with_gradients(handle.model, x)) <= handle.budget
        else:
            with pytest.raises(InfeasibleBudgetError, match=r"called 12 times.*belong under torch\.no_grad"):
                validated_with_gradients(handle.model, x)
    train()
    assert measure_peak(train) <= handle.budget


@SEVERAL
@pytest.mark.parametrize("prints", [False, True])
def test_one_step_of_many_calls_among_steps_of_one(prints: bool) -> None:
    torch.manual_seed(0)
    model, x = Layers(prints=prints), randn(ROWS, WIDTH, seed=1)
    eager = run(lambda m, x: one_call(m[0], x), [copy.deepcopy(model)], x)
    handle = attach(model, int(0.7 * eager), costs="flops", cache=False)
    for _ in range(3):
        one_call(model, x)
    sum((model(x).mean() for _ in range(CALLS)), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
    for _ in range(3):
        one_call(model, x)
    model.zero_grad()
    assert measure_peak(lambda: one_call(model, x)) <= handle.budget


def kept_by_the_caller(m: Sequence[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    """What the calls returned is there until the step is over."""
    results = [m[0](x), m[0](-x)]
    sum(y.square().mean() for y in results).backward()  # type: ignore[union-attr]
    return results


@SEVERAL
@pytest.mark.parametrize(
    ("step", "prints"), [(two_branches, True), (let_go, False), (reversed_order, False), (reversed_order, True)]
)
def test_a_planned_step_of_several_calls_takes_what_is_predicted(step: Step, prints: bool) -> None:
    """What is beside the calls, as the loss keeps it, counts once, and results that went do not count."""
    torch.manual_seed(0)
    model, x = Layers(prints=prints), randn(ROWS, WIDTH, seed=1)
    eager = run(step, [model], x)
    handle = attach(model, int(0.7 * eager), costs="flops", cache=False)
    for _ in range(STEPS):
        once(step, [model], x)
    [known] = handle.terms.steps._known.values()
    assert known.beside == 0
    assert known.peak - 2 * Cpu.scalars <= run(step, [model], x) <= known.peak <= handle.budget


def with_a_result_that_goes(m: Sequence[nn.Module], x: torch.Tensor) -> None:
    """Of four calls, one has no backward, and the loss keeps as much as their results take."""
    results = [m[0](x)]
    results += [m[0](results[0])]
    results += [m[0](results[1]), m[0](results[0].detach())]
    del results[2]
    sum((F.mse_loss(y, torch.zeros_like(y)) for y in results), x.new_zeros(())).backward()


@SEVERAL
def test_calls_that_are_planned_again_leave_room_for_those_that_follow() -> None:
    """The ways of the calls before them were chosen for what was known until then."""
    torch.manual_seed(0)
    model, x = Layers(3), randn(ROWS, WIDTH, seed=1)
    budget = int(0.4 * run(with_a_result_that_goes, [copy.deepcopy(model)], x))
    attach(model, budget, costs="flops", cache=False)
    for _ in range(STEPS):
        with_a_result_that_goes([model], x)
    assert measure_peak(lambda: with_a_result_that_goes([model], x)) <= budget


class ChangingSides(Layers):
    """Takes more memory in each second call. ``derives``: a backward runs within forward."""

    calls, derives = 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """No one graph."""
        self.calls += 1
        if self.calls % 2:
            x = torch.cat([x, x.cos()])
        if self.derives:
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                x = x + torch.autograd.grad(y.sin().sum(), y)[0]
        return super().forward(x)


@SEVERAL
@pytest.mark.parametrize(("validates", "derives"), [(True, False), (False, True)])
def test_steps_whose_calls_compute_by_turns_are_within_the_budget(validates: bool, derives: bool) -> None:
    """Whichever of the two ways comes first, and where a forward has backwards of its own."""
    torch.manual_seed(0)
    model, x = ChangingSides(prints=True), randn(ROWS, WIDTH, seed=1)
    model.derives = derives

    def step() -> list[torch.Tensor]:
        if validates:
            with torch.no_grad():
                model(x)
        for p in model.parameters():
            p.grad = None
        return kept_by_the_caller([model], x)

    step()
    budget = int(0.8 * measure_peak(step))
    handle = attach(model, budget, costs="flops", cache=False)
    for _ in range(3 * STEPS):
        step()
    assert max(measure_peak(step), measure_peak(step)) <= budget
    assert all(s.peak <= budget for s in handle.terms.steps._known.values())


class ChangingWays(Layers):
    """Draws a mask where there is none, and computes more in each third call: four ways, in an order of six steps."""

    calls = 0
    mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """No one graph."""
        if self.mask is None:
            self.mask = torch.bernoulli(torch.full((1, WIDTH), 0.8))
        self.calls += 1
        y = super().forward(x * self.mask)
        return y if self.calls % 3 else y + y.detach().flip(0)


@SEVERAL
def test_steps_whose_calls_are_seen_to_be_others_than_expected_are_within_the_budget() -> None:
    """A call that goes over to another way runs in the one that was planned for the step of that. Ways that no step
    was observed of come before a measurement of a whole step.
    """
    torch.manual_seed(0)
    model, x, steps = ChangingWays(prints=True), randn(ROWS, WIDTH, seed=1), 0

    def step() -> list[torch.Tensor]:
        nonlocal steps
        steps += 1
        model.mask = model.mask if steps % 2 else None
        for p in model.parameters():
            p.grad = None
        return kept_by_the_caller([model], x)

    step()
    budget = int(0.6 * max(measure_peak(step) for _ in range(3)))
    attach(model, budget, costs="flops", cache=False)
    for _ in range(3 * STEPS):
        step()
    assert max(measure_peak(step) for _ in range(STEPS)) <= budget


@SEVERAL
def test_plans_of_a_step_are_told_once_with_what_they_cost(caplog: pytest.LogCaptureFixture) -> None:
    """Not once for every byte that later steps show."""
    caplog.set_level(logging.INFO, "rockmate")
    models, x = made((0, 0)), randn(ROWS, WIDTH, seed=1)
    models[0].__class__ = type("Generator", (Layers,), {})
    peak = run(adversarial, copy.deepcopy(models), x)
    attach(models, int(0.6 * peak), costs="flops", cache=False)
    trained(adversarial, models, x)
    lines = [m for m in caplog.messages if "planned together" in m]
    assert len(lines) == 1 and re.search(r"budget [\d.]+ MiB, [1-9][\d.]* % more time", lines[0]), lines
    assert lines[0].startswith("Generator and Layers: 4 calls of a step"), lines
