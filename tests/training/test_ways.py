"""What training scripts do around a model, a few lines each, under a budget that forces recomputation."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from against_eager import assert_trains_as_eager, step, under_budget
from models import SEVERAL, randn, square_loss
from torch import nn
from torch.autograd import forward_ad, functional
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from rockmate import BudgetWarning, Rockmate, measure_peak

X = randn(64, 32, seed=0)
_PLANS = tempfile.TemporaryDirectory()


class Net(nn.Module):
    """Draws, has statistics, and ends in the width that it begins with."""

    def __init__(self) -> None:
        super().__init__()
        layers = [m for _ in range(8) for m in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
        self.layers, self.norm, self.head = nn.Sequential(*layers), nn.BatchNorm1d(32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.layers(x)))
        return out


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


@cache
def saved_plan() -> Path:
    path = Path(_PLANS.name) / "plan.json"
    under_budget(net(), X).plan.save(path)
    return path


def planned(model: nn.Module) -> Rockmate:
    return Rockmate(model, X, plan=saved_plan())


def like(call: nn.Module, model: nn.Module) -> nn.Module:
    """``model``, under a budget if ``call`` is."""
    return planned(model) if isinstance(call, Rockmate) else model


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def data_parallel(_: Any, call: nn.Module) -> Any:
    yield from step(nn.DataParallel(call), (X,))  # on the CPU there is nothing to copy to


def copied(_: Any, call: nn.Module) -> Any:
    yield from step(copy.copy(call), (X,))
    yield from step(call, (X,))


def shared_memory(_: Any, call: nn.Module) -> Any:
    yield from step(call.share_memory(), (X,))


def checkpointed(model: Any, call: nn.Module) -> Any:
    """Batch norm apart, whose statistics eager mode's second run changes again; ours may have less to run again."""
    model.norm.eval()
    x = X.clone().requires_grad_()
    out = checkpoint(call, x, use_reentrant=False)
    square_loss(out).backward()
    yield from (out.detach(), x.grad)


def checkpointed_reentrant(_: Any, call: nn.Module) -> Any:
    x = X.clone().requires_grad_()
    square_loss(checkpoint(call, x, use_reentrant=True)).backward()
    yield x.grad


def saved_on_the_cpu(_: Any, call: nn.Module) -> Any:
    """Planned in the context too: the batch is another one."""
    with torch.autograd.graph.save_on_cpu():
        out = call(X[:48])
    square_loss(out).backward()


def saved_tensors_may_change(_: Any, call: nn.Module) -> Any:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        doubled = 2 * call(X)
        loss = square_loss(doubled)
        doubled.zero_()  # which the loss has saved
        loss.backward()


def other_parameters_and_buffers(model: Any, call: nn.Module) -> Any:
    tensors = {k: v.detach().clone().requires_grad_() for k, v in model.named_parameters()}
    buffers = {k: v.clone() for k, v in model.named_buffers()}
    out = functional_call(call, (tensors, buffers), (X,))
    yield from torch.autograd.grad(square_loss(out), list(tensors.values()))
    yield from buffers.values()


def computed_parameters(model: Any, call: nn.Module) -> Any:
    """As a hypernetwork makes them."""
    scale = torch.tensor(2.0, requires_grad=True)
    square_loss(functional_call(call, {"head.weight": model.head.weight * scale}, (X,))).backward()
    yield scale.grad


def jacobian_and_products(model: Any, call: nn.Module) -> Any:
    model.norm.eval()
    yield functional.jacobian(call, X[:4])
    yield from functional.vhp(lambda x: square_loss(call(x)), X[:4], torch.ones(4, 32))


def batched_gradients(model: Any, call: nn.Module) -> Any:
    model.norm.eval()
    out = call(X)
    weights = torch.eye(32)[:3, None, :].expand(3, 64, 32)
    yield from torch.autograd.grad(out, list(model.parameters()), weights, is_grads_batched=True)


def gradients_under_vmap(model: Any, call: nn.Module) -> Any:
    model.norm.eval()
    x = X.clone().requires_grad_()
    out = call(x)
    weights = torch.eye(32)[:3, None, :].expand(3, 64, 32)
    yield torch.func.vmap(lambda w: torch.autograd.grad(out, x, w)[0])(weights)


def forward_mode(model: Any, call: nn.Module) -> Any:
    model.norm.eval()
    with forward_ad.dual_level():
        yield from (t.detach() for t in forward_ad.unpack_dual(call(forward_ad.make_dual(X, torch.ones_like(X)))))


def unused_tensors(model: Any, call: nn.Module) -> Any:
    other = nn.Parameter(torch.ones(3))
    yield from torch.autograd.grad(square_loss(call(X)), [other, *model.parameters()], allow_unused=True)
    yield from torch.autograd.grad(square_loss(call(X)), [other, model.head.bias], materialize_grads=True)
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph") as error:
        torch.autograd.grad(square_loss(call(X)), [other])
    yield str(error.value)


def planned_in_between(_: Any, call: nn.Module) -> Any:
    """The second call is of another kind: its planning leaves what the first one saved."""
    first = square_loss(call(X))
    second = square_loss(call(X[:40]))
    first.backward()
    second.backward()


def two_of_one_model(model: Any, call: nn.Module) -> Any:
    (square_loss(call(X)) + square_loss(like(call, model)(X + 1))).backward()


def inside_a_larger_model(_: Any, call: nn.Module) -> Any:
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(32, 32), call, nn.Tanh(), nn.Linear(32, 4))
    yield from step(whole, (X,))
    yield from gradients(whole)


def gradients_on_and_off(_: Any, call: nn.Module) -> Any:
    for on in (True, False, True):
        with torch.set_grad_enabled(on):
            out = call(X)
        yield from (out.detach().clone(), out.requires_grad)
        if on:
            square_loss(out).backward()


def eval_with_gradients(_: Any, call: nn.Module) -> Any:
    call.eval()
    yield from step(call, (X,))
    call.train()
    yield from step(call, (X,))


def frozen_and_thawed(_: Any, call: nn.Module) -> Any:
    call.requires_grad_(False)
    out = call(X)
    yield from (out, out.requires_grad)
    x = X.clone().requires_grad_()
    yield from step(call, (x,))
    yield x.grad
    call.requires_grad_(True)
    yield from step(call, (X,))


def state_loaded_by_assignment(_: Any, call: nn.Module) -> Any:
    call.load_state_dict({k: v.clone() * 2 for k, v in call.state_dict().items()}, assign=True)
    yield from step(call, (X,))


def a_batch_of_nothing(model: Any, call: nn.Module) -> Any:
    model.norm.eval()
    yield from step(call, (X[:0],))


def a_batch_from_inference_mode(_: Any, call: nn.Module) -> Any:
    with torch.inference_mode():
        x = X * 2
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward") as error:
        call(x)
    yield str(error.value)


WAYS: list[Callable[[Any, nn.Module], Any]] = [
    data_parallel,
    copied,
    shared_memory,
    checkpointed_reentrant,
    other_parameters_and_buffers,
    computed_parameters,
    jacobian_and_products,
    batched_gradients,
    gradients_under_vmap,
    forward_mode,
    unused_tensors,
    planned_in_between,
    two_of_one_model,
    inside_a_larger_model,
    gradients_on_and_off,
    eval_with_gradients,
    frozen_and_thawed,
    state_loaded_by_assignment,
    a_batch_of_nothing,
    a_batch_from_inference_mode,
]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward mode
@pytest.mark.filterwarnings("ignore:under torch.func's transforms and in forward mode:rockmate.BudgetWarning")
@pytest.mark.filterwarnings(SEVERAL)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_ways(way: Callable[[Any, nn.Module], Any]) -> None:
    def train(model: Any, call: nn.Module) -> Any:
        yield from way(model, call) or ()
        yield from gradients(model)

    assert_trains_as_eager(net(), planned(net()), train)


def test_one_after_the_other_each_with_its_budget() -> None:
    """What the second allocates comes on top of what the first keeps, which is within the first one's budget."""
    models, rks = [net(0), net(1)], [planned(net(0)), planned(net(1))]
    both = [nn.Sequential(*models), nn.Sequential(*rks)]
    results = []
    for whole in both:
        torch.manual_seed(5)
        results.append([*step(whole, (X,)), *gradients(whole)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    peaks = []
    for whole in both:
        whole.zero_grad()
        peaks.append(measure_peak(lambda whole=whole: step(whole, (X,)), "cpu"))
    assert peaks[1] <= sum(rk.budget for rk in rks) < peaks[0]


@pytest.mark.parametrize(
    "way", [checkpointed, saved_on_the_cpu, saved_tensors_may_change], ids=lambda way: way.__name__
)
def test_hooks_of_saved_tensors_around_a_call(way: Callable[[Any, nn.Module], Any]) -> None:
    """They keep what they like, which is said."""
    with pytest.warns(BudgetWarning, match=r"under hooks of saved tensors \(torch\.utils\.checkpoint"):
        assert_trains_as_eager(net(), planned(net()), lambda model, call: way(model, call) or ())
