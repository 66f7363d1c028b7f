"""A Rockmate in place of its model: state, attributes, copies, and changes of the model after planning."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from against_eager import assert_in_budget, assert_same, assert_trains_as_eager, planned, step, under_budget
from models import SEVERAL, case, randn
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from rockmate import Rockmate


class Named(nn.Module):
    """Has attributes, a method, a documented forward, and state of its own."""

    offset: torch.Tensor

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(m for _ in range(3) for m in (nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)))
        )
        self.head = nn.Linear(width, 8)
        self.register_buffer("offset", torch.ones(width))
        self.scale = 2.0
        self.config = {"width": width}

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor | None = None, times: int = 1) -> torch.Tensor:
        """Document me."""
        for _ in range(times):
            x = self.layers(x) * self.scale + self.offset
        return self.head(x if shift is None else x + shift)

    def classes(self) -> int:
        return self.head.out_features

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


X = randn(64, 32, seed=0)


def named() -> tuple[Named, Rockmate]:
    torch.manual_seed(0)
    eager = Named()
    return eager, under_budget(copy.deepcopy(eager), X)


def one_step(_: nn.Module, call: nn.Module) -> Any:
    yield from step(call, (X,))


def test_state_dicts_are_exchanged_with_the_original() -> None:
    eager, rk = named()
    assert_trains_as_eager(eager, rk, one_step)
    assert list(rk.state_dict()) == list(eager.state_dict())
    other = Named()
    other.scale = 1.0
    other.load_state_dict(rk.state_dict())
    assert other.scale == 2.0
    rk.load_state_dict({**Named().state_dict(), "_extra_state": {"scale": 3.0}})
    assert rk.scale == 3.0
    eager.load_state_dict(rk.state_dict())
    assert_trains_as_eager(eager, rk, one_step)
    missing = {k: v for k, v in eager.state_dict().items() if k != "head.bias"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"head.bias"'):
        rk.load_state_dict(missing)


def test_state_within_another_module() -> None:
    eager, rk = named()
    outer, plain = nn.Sequential(rk, nn.Tanh()), nn.Sequential(eager, nn.Tanh())
    assert list(outer.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(outer.state_dict())
    outer.load_state_dict(plain.state_dict())
    assert [n for n, _ in outer.named_parameters()] == [n for n, _ in plain.named_parameters()]
    outer.eval()
    assert not rk.training
    assert not rk.original.training
    assert not rk.layers[0].training


def test_attributes_methods_and_signature() -> None:
    eager, rk = named()
    assert rk.classes() == 8
    assert rk.config is rk.original.config
    assert rk.head is rk.original.head
    assert inspect.signature(rk.forward) == inspect.signature(eager.forward)
    assert list(inspect.signature(rk.forward).parameters) == ["x", "shift", "times"]
    assert {"classes", "config", "plan"} <= set(dir(rk))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = rk.nothing_like_it
    rk.note = "mine"
    assert rk.original.note == "mine"
    rk.original.note = "its"
    assert rk.note == "its"
    assert isinstance(rk, Named)
    assert rk.parameters is not eager.parameters
    assert [type(m) for m in rk.modules()][1:] == [type(m) for m in eager.modules()][1:]


def test_a_forward_put_in_place_of_ours() -> None:
    """As accelerate does for mixed precision."""
    eager, rk = named()
    rk.forward = torch.autocast("cpu", dtype=torch.bfloat16)(rk.forward)
    eager.forward = torch.autocast("cpu", dtype=torch.bfloat16)(eager.forward)  # type: ignore[method-assign]
    assert_trains_as_eager(eager, rk, one_step)
    assert list(inspect.signature(rk.forward).parameters) == ["x", "shift", "times"]


def test_attributes_changed_after_planning() -> None:
    """Plain attributes are constants of a plan. For another number of the same graph, the plan is carried over."""
    eager, rk = named()

    def train(model: nn.Module, call: nn.Module) -> Any:
        for scale in (2.0, 0.5, 2.0):
            call.scale = scale
            yield from step(call, (X,))
        for p in (0.3, 0.1):
            model.layers[2].p = p
            yield from step(call, (X,))

    assert_trains_as_eager(eager, rk, train)
    assert rk.original.scale == 2.0
    assert rk.plans_made == 2


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_train(how: str) -> None:
    eager, rk = named()
    if how == "deepcopy":
        other = copy.deepcopy(rk)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(rk))
    else:
        file = io.BytesIO()
        torch.save(rk, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert other.original is not rk.original
    assert all(p is q for p, q in zip(other.parameters(), other.original.parameters(), strict=True))
    assert_trains_as_eager(eager, other, one_step)
    assert other.plan.recomputed > 0
    assert other.budget == rk.budget
    assert_in_budget(other, lambda: step(other, (X,)))
    assert all(p.grad is None for p in rk.parameters())


def test_parameters_replaced_after_planning() -> None:
    eager, rk = named()

    def train(model: nn.Module, call: nn.Module) -> Any:
        for k, layer in enumerate((model.layers[0], model.layers[3], model.head)):
            layer.weight = nn.Parameter(randn(*layer.weight.shape, seed=k))
        model.offset = randn(32, seed=5)
        with torch.no_grad():
            model.head.bias.data = randn(8, seed=6)
        yield from step(call, (X,))

    assert_trains_as_eager(eager, rk, train)
    assert rk.plans_made == 1


def test_layers_replaced_tied_and_untied_after_planning() -> None:
    eager, rk = named()

    def train(model: nn.Module, call: nn.Module) -> Any:
        model.layers[3].weight = model.layers[0].weight
        yield from step(call, (X,))
        model.zero_grad()
        model.layers[0].weight = nn.Parameter(randn(32, 32, seed=1))
        yield from step(call, (X,))
        model.zero_grad()
        torch.manual_seed(3)
        model.head = nn.Linear(32, 5)
        yield from step(call, (X,))

    assert_trains_as_eager(eager, rk, train)
    assert rk.plans_made == 2, "untied, the program is that of the sample again"


def test_functions_replaced_after_planning() -> None:
    """Modules and functions whose attributes look the same."""

    class Activated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
            self.smooth, self.activation = nn.Tanh(), F.gelu

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = self.smooth(self.activation(layer(x)))
            return x

    torch.manual_seed(0)
    eager, x = Activated(), randn(256, 32, seed=0)
    rk = under_budget(copy.deepcopy(eager), x)

    def train(model: nn.Module, call: nn.Module) -> Any:
        yield from step(call, (x,))
        model.smooth = nn.Sigmoid()
        yield from step(call, (x,))
        model.activation = F.silu
        yield from step(call, (x,))

    assert_trains_as_eager(eager, rk, train)
    assert rk.plans_made == 3


def test_other_precision_after_planning() -> None:
    eager, rk = named()

    def train(_: nn.Module, call: nn.Module) -> Any:
        call.to(torch.bfloat16)
        yield from step(call, (X.bfloat16(),))
        call.float()
        yield from step(call, (X,))

    assert_trains_as_eager(eager, rk, train)


def test_requires_grad_changed_after_planning() -> None:
    eager, rk = named()

    def train(model: nn.Module, call: nn.Module) -> Any:
        yield from step(call, (X,))
        model.zero_grad()
        model.layers[0].requires_grad_(False)
        yield from step(call, (X,))
        model.zero_grad()
        model.requires_grad_(True)
        yield from step(call, (X,))

    assert_trains_as_eager(eager, rk, train)
    assert rk.plans_made == 2
    rk.layers.requires_grad_(False)
    rk.offset.requires_grad_(False)
    assert_in_budget(rk, lambda: step(rk, (X,)))


def test_the_mode_of_submodules() -> None:
    eager, rk = named()

    def train(model: nn.Module, call: nn.Module) -> Any:
        model.layers[2].eval()
        yield from step(call, (X,))
        model.eval()
        yield call.training
        model.train()
        yield from step(call, (X,))

    assert_trains_as_eager(eager, rk, train)


def test_a_recurrent_layer_is_moved_with_what_it_keeps_elsewhere() -> None:
    """It holds its weights in a list too, which only its own ``_apply`` follows."""
    torch.manual_seed(0)
    lstm = nn.LSTM(8, 8, 2, batch_first=True)
    x = randn(4, 5, 8, seed=0)
    eager = copy.deepcopy(lstm)
    rk = Rockmate(lstm, x, "1 MiB", costs="flops")
    rk.double()
    eager.double()
    assert_trains_as_eager(eager, rk, lambda _, call: step(call, (x.double(),)))
    rk.eval()
    assert torch.equal(rk(x.double())[0], eager.eval()(x.double())[0])


# ---------------------------------------------------------------------------------------------- hooks


def test_hooks_of_the_rockmate_itself() -> None:
    eager, rk = named()

    def train(_: nn.Module, call: nn.Module) -> Any:
        seen: list[Any] = []
        handles = [
            call.register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
            call.register_forward_hook(lambda m, a, out: seen.append(out.detach().clone())),
            call.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone())),
        ]
        yield from step(call, (X.clone().requires_grad_(),))
        yield from seen
        for handle in handles:
            handle.remove()

    assert_trains_as_eager(eager, rk, train)


def test_hooks_that_change_values_are_part_of_the_plan() -> None:
    eager, rk = named()

    def train(model: nn.Module, call: nn.Module) -> Any:
        handles = [
            model.layers[0].register_forward_hook(lambda m, a, out: out * 0.5),
            model.layers[3].register_forward_pre_hook(lambda m, a: (torch.tanh(a[0]),)),
            model.head.register_forward_hook(lambda m, a, k, out: out + 1, with_kwargs=True),
        ]
        yield from step(call, (X,))
        for handle in handles:
            handle.remove()
        yield from step(call, (X,))

    assert_trains_as_eager(eager, rk, train)
    assert rk.plans_made == 2


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_forward_hooks_that_only_look_on_are_called(kind: str) -> None:
    eager, rk = named()

    def train(model: nn.Module, call: nn.Module) -> Any:
        seen: list[str] = []
        handle = getattr(model.layers[1], f"register_{kind}_hook")(lambda m, *_: seen.append(type(m).__name__))
        yield from step(call, (X,))
        yield from step(call, (X,))
        handle.remove()
        yield from step(call, (X,))
        yield seen == ["GELU", "GELU"]

    assert_trains_as_eager(eager, rk, train)


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
@pytest.mark.parametrize("when", ["before planning", "after planning"])
def test_backward_hooks_of_modules_are_called(kind: str, when: str) -> None:
    """Under a plan of one graph there would be no modules: such a model is followed."""
    eager, rk = named()
    if when == "before planning":
        hooked = copy.deepcopy(rk.original)
        getattr(hooked.layers[1], f"register_{kind}_hook")(lambda *_: None)
        rk = Rockmate(hooked, X, rk.budget, costs="flops")

    def train(model: nn.Module, call: nn.Module) -> Any:
        seen: list[str] = []
        getattr(model.layers[1], f"register_{kind}_hook")(lambda m, *_: seen.append(type(m).__name__))
        for _ in range(3):
            yield from step(call, (X,))
        yield seen == ["GELU", "GELU", "GELU"]

    assert_trains_as_eager(eager, rk, train)


def test_hooks_registered_inside_forward() -> None:
    class Registers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.layer(x))
            h.register_hook(lambda g: -g)
            return h

    def train(_: nn.Module, call: nn.Module) -> Any:
        for _ in range(3):
            yield from step(call, (X,))

    assert_trains_as_eager(Registers(), Rockmate(Registers(), X, "1 MiB"), train)


# ----------------------------------------------------------------------------------- parametrizations


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).mT


@pytest.mark.parametrize("how", ["spectral_norm", "weight_norm", "orthogonal", "own", "old_spectral_norm"])
@pytest.mark.filterwarnings(SEVERAL)
def test_parametrizations(how: str) -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU(), nn.Tanh())))
    for layer in list(eager)[::3]:
        if how == "own":
            parametrize.register_parametrization(layer, "weight", Symmetric())
        elif how == "old_spectral_norm":
            nn.utils.spectral_norm(layer)
        else:
            getattr(parametrizations, how)(layer)
    x = randn(256, 32, seed=0)
    rk = under_budget(copy.deepcopy(eager), x)

    def train(model: nn.Module, call: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            yield from step(call, (x,))
            optimizer.step()
        model.eval()
        yield call(x)
        model.train()

    assert_trains_as_eager(eager, rk, train)
    assert_in_budget(rk, lambda: step(rk, (x,)))


def test_functional_call_is_eager() -> None:
    """Other parameters than the module's own, for one call."""
    c = case("mlp")
    eager, rk = planned(c)
    (x,), _ = c.call(1)
    others = {name: randn(*p.shape, seed=k, requires_grad=True) for k, (name, p) in enumerate(eager.named_parameters())}

    def grads(call: nn.Module) -> Any:
        out = torch.func.functional_call(call, others, (x,))
        return [out.detach(), *torch.autograd.grad(F.mse_loss(out, torch.zeros_like(out)), list(others.values()))]

    assert_same(grads(rk), grads(eager))


class Private(nn.Module):
    """Has a private number, a buffer that is not saved, and its own ``eval``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self._scale, self.evaluated = nn.Linear(8, 8), 1.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self._scale

    def eval(self) -> Private:
        self.evaluated += 1
        return super().eval()


def test_what_is_set_on_it_is_set_on_the_model() -> None:
    model, x = Private(), randn(16, 8, seed=0)
    rk = Rockmate(model, x, "1 MiB", costs="flops")
    rk._scale = 3.0
    assert model._scale == 3.0
    assert torch.equal(rk(x), model(x))
    rk.register_buffer("cache", torch.ones(2), persistent=False)
    assert torch.equal(model.cache, torch.ones(2))  # type: ignore[arg-type]
    assert "cache" not in rk.state_dict()
    rk.eval()
    assert model.evaluated == 1
    assert not model.training
