"""What people do with autograd around a model, under a budget that forces recomputation, against eager mode."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from against_eager import assert_in_budget, assert_same, assert_trains_as_eager, planned, step, under_budget
from models import SEVERAL, case, part_way, randn, square_loss
from torch import nn
from torch.nn import functional as F

from rkgb.device import kind_of
from rockmate import BudgetWarning, Rockmate, attach, frontier, measure_peak


def smooth(inside: int, outside: int, width: int = 32) -> nn.Sequential:
    """Can be differentiated as often as one likes."""
    layers = [m for _ in range(3) for m in (nn.Linear(width, width), nn.GELU(), nn.Tanh())]
    return nn.Sequential(nn.Linear(inside, width), nn.Tanh(), *layers, nn.Linear(width, outside))


@pytest.mark.parametrize("name", ["gpt", "two_in_two_out"])
def test_autograd_grad(name: str) -> None:
    c = case(name)
    eager, rk = planned(c)

    def train(model: nn.Module, call: nn.Module) -> Any:
        args, _ = c.call(1)
        inputs = [t for t in args if t.requires_grad]
        yield from torch.autograd.grad(square_loss(call(*args)), [*model.parameters(), *inputs])
        some = list(model.parameters())[::2]
        yield from torch.autograd.grad(square_loss(call(*args)), some)

    assert_trains_as_eager(eager, rk, train)
    args, _ = c.call(2)
    assert_in_budget(rk, lambda: torch.autograd.grad(square_loss(rk(*args)), list(rk.parameters())))


def test_backward_with_inputs() -> None:
    """Gradients for some tensors only: of parameters in the middle, and of an input."""
    c = case("two_in_two_out")
    eager, rk = planned(c)

    def train(model: nn.Module, call: nn.Module) -> Any:
        args, _ = c.call(1)
        square_loss(call(*args)).backward(inputs=[model.join.weight, args[0]])
        yield args[0].grad

    assert_trains_as_eager(eager, rk, train)

    def some() -> None:
        square_loss(rk(*args)).backward(inputs=[rk.original.join.weight, args[0]])

    args, _ = c.call(2)
    assert_in_budget(rk, some, args[:1])


def test_hooks_of_tensors_and_parameters() -> None:
    c = case("two_in_two_out")
    eager, rk = planned(c)

    def train(model: nn.Module, call: nn.Module) -> Any:
        seen: list[torch.Tensor] = []
        args, _ = c.call(1)

        def note(g: torch.Tensor) -> torch.Tensor:
            seen.append(g.clone())
            return g * 0.5

        out = call(*args)
        handles = [p.register_hook(note) for p in model.parameters()]
        handles += [p.register_post_accumulate_grad_hook(lambda q: seen.append(q.grad * 2)) for p in model.parameters()]
        handles += [t.register_hook(note) for t in (*out, args[0])]
        square_loss(out).backward()
        for handle in handles:
            handle.remove()
        yield from seen
        yield args[0].grad

    assert_trains_as_eager(eager, rk, train)


def test_anomaly_mode() -> None:
    c = case("gpt")
    eager, rk = planned(c)

    def train(_: nn.Module, call: nn.Module) -> Any:
        torch.autograd.set_detect_anomaly(True)
        try:
            yield from step(call, *c.call(1))
        finally:
            torch.autograd.set_detect_anomaly(False)

    assert_trains_as_eager(eager, rk, train)
    assert_in_budget(rk, lambda: list(train(rk.original, rk)))


class BadRoot(nn.Module):
    """The gradient of its square root at 0 times 0 is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = smooth(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(torch.tanh(self.up(x)))
        return self.down(h + torch.sqrt(h * 0) * 0)


def test_anomaly_mode_finds_the_function() -> None:
    torch.manual_seed(0)
    model, x = BadRoot(), randn(64, 16, seed=0)
    messages = []
    for call in (model, under_budget(model, x)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of anomaly mode itself
            with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="SqrtBackward0") as error:
                square_loss(call(x)).backward()
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_retain_graph() -> None:
    c = case("gpt")
    eager, rk = planned(c)

    def train(_: nn.Module, call: nn.Module) -> Any:
        loss = square_loss(call(*c.call(1)[0]))
        for _ in range(3):
            loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time") as error:
            loss.backward()
        yield str(error.value)

    with pytest.warns(BudgetWarning, match=r"retain_graph"):
        assert_trains_as_eager(eager, rk, train)


def test_third_derivatives() -> None:
    torch.manual_seed(0)
    eager, x = smooth(4, 1), randn(256, 4, seed=0, requires_grad=True)
    rk = under_budget(copy.deepcopy(eager), x)

    def train(_: nn.Module, call: nn.Module) -> Any:
        y = call(x).sum()
        for _ in range(2):
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            y = g.square().sum()
        yield y.detach()
        y.backward()

    with pytest.warns(BudgetWarning, match="retain_graph"):
        assert_trains_as_eager(eager, rk, train)


def test_random_operations_in_a_second_backward() -> None:
    c = case("dropout_mlp")
    eager, rk = planned(c)

    def train(_: nn.Module, call: nn.Module) -> Any:
        args, _ = c.call(1)
        loss = square_loss(call(*args))
        loss.backward(retain_graph=True)
        yield torch.rand(3)
        loss.backward()
        yield args[0].grad

    with pytest.warns(BudgetWarning, match="retain_graph"):
        assert_trains_as_eager(eager, rk, train)


def test_backwards_of_parts() -> None:
    """Two losses, each of an output of its own, one backward after the other."""
    c = case("two_in_two_out")
    eager, rk = planned(c)

    def train(_: nn.Module, call: nn.Module) -> Any:
        args, _ = c.call(1)
        first, second = call(*args)
        first.square().mean().backward(retain_graph=True)
        second.square().mean().backward()
        yield args[0].grad

    with pytest.warns(BudgetWarning, match="retain_graph"):
        assert_trains_as_eager(eager, rk, train)


@pytest.mark.filterwarnings(SEVERAL)
def test_a_backward_within_a_hook() -> None:
    """Another call's backward runs inside this one's."""
    c = case("mlp")
    eager, rk = planned(c)

    def train(_: nn.Module, call: nn.Module) -> Any:
        inner = square_loss(call(*c.call(2)[0]))
        out = call(*c.call(1)[0])
        out.register_hook(lambda g: inner.backward())
        square_loss(out).backward()
        yield out.detach()

    assert_trains_as_eager(eager, rk, train)


def test_one_warning_a_call(recwarn: pytest.WarningsRecorder) -> None:
    c = case("mlp")
    _, rk = planned(c)
    warnings.simplefilter("always")
    loss = square_loss(rk(*c.call(1)[0]))
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert [w.category for w in recwarn] == [BudgetWarning]


def test_outputs_may_be_changed_where_eager_allows_it() -> None:
    c = case("mlp")  # ends in a linear layer, which does not need its result
    eager, rk = planned(c)

    def train(_: nn.Module, call: nn.Module) -> Any:
        out = call(*c.call(1)[0])
        out.mul_(2)
        square_loss(out).backward()
        yield out.detach()

    assert_trains_as_eager(eager, rk, train)


def test_outputs_that_the_backward_reads_may_not_be_changed() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(smooth(16, 64), nn.Tanh()), randn(64, 16, seed=0)
    rk: Rockmate = under_budget(model, x, fraction=0.0)
    for call in (model, rk):
        out = call(x)
        with torch.no_grad():
            out.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square_loss(out).backward()


@pytest.mark.filterwarnings(SEVERAL)
def test_gradients_of_gradients_match_numbers() -> None:
    """torch's own check against finite differences, in double precision."""
    torch.manual_seed(0)
    x = randn(16, 2, seed=0).double().requires_grad_()
    rk = under_budget(smooth(2, 2, width=8).double(), x)
    with pytest.warns(BudgetWarning, match="retain_graph"):
        assert torch.autograd.gradcheck(rk, (x,))
    assert_same([rk.plans_made], [1])


class Sides(nn.Module):
    """Two outputs of one random tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1 << 10))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = self.weight + torch.rand_like(self.weight)
        y = torch.atan2(drawn, (x * 1.5).cos().exp())
        for _ in range(6):
            y = y.sin().exp() * x
        return drawn.sin(), y


@pytest.mark.filterwarnings("ignore:a backward of a part of the graph", "ignore:a backward left outputs out")
def test_one_output_after_the_other_never_draws_anew() -> None:
    """The second backward gets eager's gradients: the generator's state stays while a part is left."""
    model, x = Sides(), torch.rand(1 << 10)
    rk = Rockmate(model, x, "1 MiB", costs="flops")
    found = rk.frontier()
    for k in range(6):
        rk.budget = part_way(found, k / 5)
        grads = []
        for call in (model, rk):
            model.zero_grad()
            torch.manual_seed(0)
            side, y = call(x)
            y.sum().backward()
            side.sum().backward()
            grads.append(model.weight.grad)
            drawn_next = torch.rand(1)
            torch.manual_seed(0)
            torch.rand(1 << 10)
            assert torch.equal(drawn_next, torch.rand(1))
        assert torch.equal(grads[0], grads[1])


class Reversal(torch.autograd.Function):
    """Passes its input on as a view, and turns the gradient around by as much as a tensor says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(by)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return -ctx.saved_tensors[0] * g, None


class Adversary(nn.Module):
    """Two heads; the features come to the second one by a view that reads another tensor."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(32))
        self.first, self.second = (
            nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3))) for _ in range(2)
        )
        self.by = by

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        h = x + self.offset
        by = {"given": by, "made": by.sin(), "of the base": h.detach().mean()}[self.by]
        first = self.first(h).square().mean()
        result: torch.Tensor = first + self.second(Reversal.apply(h, by)).square().mean()
        return result


@pytest.mark.parametrize("by", ["given", "made", "of the base"])
def test_a_view_by_a_function_that_reads_another_tensor(by: str) -> None:
    """Its base is dropped and runs again, and the view with it."""
    torch.manual_seed(0)
    model, args = Adversary(by), (torch.randn(256, 32), torch.tensor(0.3))
    eager = copy.deepcopy(model)
    rk = Rockmate(model, args, frontier(model, args, costs="flops").min_budget, costs="flops")
    for m in (rk, eager):
        m(*args).backward()
    assert rk.plan.recomputed
    assert by != "given" or "fwd.add" in "".join(
        line for line in rk.plan.program().splitlines() if line.endswith("recompute")
    )
    assert_same([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


class Finite(nn.Sequential):
    """It looks at what its layers return, so that it is traced as a whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
            if not torch.isfinite(x).all():
                raise ValueError("not finite")
        return x


@pytest.mark.filterwarnings("ignore:Finite. nothing of this call could be captured:rockmate.BudgetWarning")
@pytest.mark.parametrize("kind", [nn.Sequential, Finite])
def test_a_gradient_penalty_is_said_to_be_beside_the_budget_where_nothing_runs_again(kind: type[nn.Module]) -> None:
    """Then no slot sees the backward, but its outputs' hooks do."""
    torch.manual_seed(0)
    model = kind(*(layer for _ in range(4) for layer in (nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))))
    eager, x = copy.deepcopy(model), torch.randn(64, 32, requires_grad=True)

    def penalty(run: nn.Module) -> None:
        output = run(x).sum(1)
        (g,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.mean() + (g.norm(dim=1) - 1).square().mean()).backward()

    penalty(eager)
    handle = attach(model, 2 * measure_peak(lambda: eager(x).sum().backward()), costs="flops", cache=False)
    model(x).sum().backward()  # of which nothing may be captured
    model.zero_grad()
    with pytest.warns(
        BudgetWarning, match=r"create_graph=True.*A gradient penalty is planned where forward itself takes"
    ):
        penalty(model)
    assert handle.plan.recomputed == 0
    eager.zero_grad()
    penalty(eager)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


class Sparse(nn.Module):
    """Embeddings whose gradients are sparse, and far smaller than the tables."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(20_000, 16, sparse=True)
        self.bag = nn.EmbeddingBag(20_000, 16, sparse=True, mode="sum") if kind == "both" else None
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))

    def forward(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        x = self.table(i)
        if self.kind == "twice":
            x = x + self.table(j)
        if self.bag is not None:
            x = x + self.bag(j[:, None])
        y: torch.Tensor = self.layers(x)
        return y + self.table(j) if self.kind == "at both ends" else y


@pytest.mark.parametrize("kind", ["once", "twice", "both", "at both ends"])
def test_sparse_gradients_take_what_they_take(kind: str) -> None:
    model = Sparse(kind)
    i, j = torch.randint(20_000, (512,)), torch.randint(20_000, (512,))

    def step(call: nn.Module) -> None:
        model.zero_grad()
        call(i, j).square().mean().backward()

    step(model)
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    budget = round(0.85 * measure_peak(lambda: step(model)))
    model.zero_grad()
    rk = Rockmate(model, (i, j), budget, costs="flops")
    step(rk)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None and gradient is not None
        assert p.grad.layout == gradient.layout
        assert torch.equal(p.grad.to_dense(), gradient.to_dense())
    step(rk)
    model.zero_grad()
    measured = measure_peak(lambda: step(rk))
    assert measured <= rk.budget
    assert measured <= rk.plan.predicted_peak + rk.plan.room.scalars  # numbers of the loss are not in the prediction


class Words(nn.Module):
    """Between its layers, sums of rows of a table that is smaller than the sparse gradient of one use."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.uses, self.table = uses, nn.Embedding(50, 32, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = F.gelu(layer(x))
            x = x * self.table(i).sum(1).sin() if k < self.uses else x
        return x


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_sparse_gradients_are_put_together(uses: int) -> None:
    model, x, i = Words(uses), torch.randn(64, 32), torch.randint(50, (64, 16))
    rk = Rockmate(model, (x, i), "100%", costs="flops")

    def step() -> None:
        rk(x, i).square().mean().backward()

    for _ in range(2):
        model.zero_grad()
        step()
    model.zero_grad()
    measured = measure_peak(step)
    assert measured <= rk.plan.predicted_peak + rk.plan.room.scalars


@pytest.mark.parametrize("which", ["weight", "bias", "all", "input"])
def test_parameters_that_get_other_memory_before_the_backward(which: str) -> None:
    """What the forward read stays as it was then, as in eager mode."""

    def gradients(call: nn.Module, model: nn.Module) -> list[torch.Tensor | None]:
        model.zero_grad()
        x = randn(64, 32, seed=1, requires_grad=True)
        y = call(x)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if which in name or which == "all":
                    p.data = p.data * 1.5
            if which == "input":
                x.data = x.data + 1
        y.square().mean().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    torch.manual_seed(0)
    eager = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Tanh()) for _ in range(6)))
    model = copy.deepcopy(eager)
    x = randn(64, 32, seed=1, requires_grad=True)
    rk = Rockmate(model, x, part_way(frontier(model, x, costs="flops"), 0.5), costs="flops")
    for _ in range(2):
        found, expected = gradients(rk, model), gradients(eager, eager)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]
    assert rk.plan.recomputed > 0


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * g


class SumOfSines(torch.autograd.Function):
    """Takes and returns what ``Square`` does, and as much again many times meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x.unsqueeze(-1) * torch.linspace(0, 1, 32)).sin().sum(-1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        factors = torch.linspace(0, 1, 32)
        return g * ((x.unsqueeze(-1) * factors).cos() * factors).sum(-1)


@pytest.mark.parametrize("order", [(Square, SumOfSines), (SumOfSines, Square)])
def test_functions_of_the_same_form_are_measured_each(order: tuple[type[torch.autograd.Function], ...]) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in order)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, function in zip(self.layers, order, strict=True):
                x = function.apply(layer(x))
            return x

    x = randn(256, 16, seed=0)
    rk = Rockmate(Both(), x, "100%", costs="flops")

    def fresh_step() -> None:
        rk.zero_grad()
        step(rk, (x,))

    fresh_step()
    rk.zero_grad()
    peak = measure_peak(fresh_step, "cpu")
    assert abs(peak - rk.plan.predicted_peak) <= kind_of(torch.device("cpu")).scalars
