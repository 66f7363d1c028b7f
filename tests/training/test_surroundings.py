"""A Rockmate under torch's compilers, tracers and transforms, and hooks of all modules: it works, or says what not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import against_eager
import pytest
import torch
from against_eager import assert_in_budget, assert_same, assert_trains_as_eager, step
from models import SEVERAL, part_way, square_loss
from test_ways import X, gradients, net, planned
from torch import nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.flop_counter import FlopCounterMode

from rockmate import BudgetWarning, HookError, InputError, Rockmate, attach, frontier

# ------------------------------------------------------------------------------------------- compilers


def compiled(call: nn.Module) -> Any:
    yield from step(torch.compile(call, backend="eager"), (X,))


def compiled_within(call: nn.Module) -> Any:
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(32, 32), nn.GELU(), call, nn.Tanh(), nn.Linear(32, 4))
    yield from step(torch.compile(whole, backend="eager"), (X,))
    yield from gradients(whole)


def compiled_in_place(call: nn.Module) -> Any:
    call.compile(backend="eager")
    yield from step(call, (X[:40],))


def test_guards_of_other_captures_only_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """To time them takes longer than to make them: TorchDynamo empties the processor's caches before."""
    timed: list[float] = []
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: timed.append(1.0) or 1.0)
    model = net()
    handle = attach(model, "90%", costs="flops", cache=False)
    square_loss(model(X)).backward()
    assert handle.plan is not None and not timed
    torch.compile(net(1), backend="eager")(X)
    assert timed


@pytest.mark.parametrize("way", [compiled, compiled_within, compiled_in_place], ids=lambda way: way.__name__)
def test_a_rockmate_runs_as_it_is_under_torch_compile(way: Any) -> None:
    """Its plan is not compiled; what lies around it is."""
    rk = planned(net())
    assert_trains_as_eager(net(), rk, lambda _, call: way(call))
    assert_in_budget(rk, lambda: step(torch.compile(rk, backend="eager"), (X,)))


def test_models_that_were_compiled_are_refused() -> None:
    with pytest.raises(InputError, match=r"it was compiled.*as it was before torch\.compile"):
        Rockmate(torch.compile(net(), backend="eager"), X, "1 MiB")
    model = net()
    model.layers[0].compile(backend="eager")
    for plan in (lambda: Rockmate(model, X, "1 MiB"), lambda: attach(model, "1 MiB")):
        with pytest.raises(InputError, match=r"its submodule 'layers\.0' was compiled"):
            plan()
    with pytest.raises(InputError, match="it was compiled"):
        attach(torch.compile(net(), backend="eager"), "1 MiB")


@pytest.mark.filterwarnings(r"ignore:`torch.jit.\w+` is deprecated")
def test_what_records_operations_records_the_model() -> None:
    eager, rk = net().eval(), planned(net())
    exported = torch.export.export(rk, (X,)).module()  # while it trains
    recorded = torch.jit.trace(rk.eval(), (X,))
    assert_same([recorded(X)], [eager(X)])
    assert exported(X).shape == X.shape
    assert_trains_as_eager(net(), planned(net()), lambda _, call: step(call, (X,)))


def test_a_capture_of_another_thread_is_no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has one flag for all threads, that one of them compiles."""
    model = net()
    handle = attach(model, "100%", costs="flops", cache=False)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    model(X).square().mean().backward()
    assert handle.plan is not None


def test_a_rockmate_within_another() -> None:
    """The outer one's plan covers both."""
    eager, inner = nn.Sequential(net(), nn.Tanh()), nn.Sequential(planned(net()), nn.Tanh())
    rk = Rockmate(inner, X, 3 * planned(net()).budget, costs="flops")
    assert_trains_as_eager(eager, rk, lambda _, call: step(call, (X,)))
    assert inner[0].plans_made == 0


# ------------------------------------------------------------------------------------------ transforms


def without_random(model: Any) -> None:
    model.norm.eval()
    for layer in model.layers:
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0


def gradient_of_parameters(model: nn.Module, call: nn.Module) -> Any:
    tensors = {k: p.detach() for k, p in model.named_parameters()}
    loss = lambda given: square_loss(torch.func.functional_call(call, given, (X,)))  # noqa: E731
    return torch.func.grad(loss)(tensors).values()


def gradient_of_each_row(_: nn.Module, call: nn.Module) -> Any:
    return [torch.func.vmap(torch.func.grad(lambda x: square_loss(call(x[None]))))(X)]


def forward_mode(_: nn.Module, call: nn.Module) -> Any:
    return torch.func.jvp(call, (X,), (torch.ones_like(X),))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward mode
@pytest.mark.parametrize(
    "way", [gradient_of_parameters, gradient_of_each_row, forward_mode], ids=lambda way: way.__name__
)
def test_under_transforms_the_model_itself_runs_and_says_so(way: Any) -> None:
    def train(model: nn.Module, call: nn.Module) -> Any:
        without_random(model)
        yield from way(model, call)

    with pytest.warns(BudgetWarning, match=r"under torch\.func's transforms"):
        assert_trains_as_eager(net(), planned(net()), train)


def test_warnings_name_the_users_line() -> None:
    """Whatever of torch's lies between; TorchDynamo's own warnings are hidden, and a line of its would hide ours."""
    model = net()
    attach(model, planned(net()).budget, costs="flops")
    list(step(model, (X,)))
    with pytest.warns(BudgetWarning, match="under hooks of saved tensors") as said, torch.autograd.graph.save_on_cpu():
        list(step(model, (X,)))
    assert {w.filename for w in said} == {against_eager.__file__}


# --------------------------------------------------------------------------------- hooks of all modules


@contextmanager
def hook_of_all(kind: str) -> Iterator[list[Any]]:
    seen: list[Any] = []
    handle = getattr(modules, f"register_module_{kind}_hook")(lambda module, *_: seen.append(type(module)))
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_all_modules_are_refused_by_name(kind: str) -> None:
    rk = planned(net())
    with hook_of_all(kind) as seen:
        with pytest.raises(
            HookError, match=rf"hook_of_all\.<locals>\.<lambda> of all modules \(register_module_{kind}"
        ):
            rk(X)
        with pytest.raises(HookError, match=rf"register_module_{kind}_hook"):
            Rockmate(net(), X, "1 MiB")
        seen.clear()
        with torch.no_grad():
            rk.eval()(X)
        assert (nn.GELU in seen) == ("forward" in kind)
    rk.train().zero_grad()
    assert_trains_as_eager(net(), rk, lambda _, call: step(call, (X,)))


def test_flops_are_counted_around_a_step() -> None:
    """torch's counter hooks all modules. It counts what a plan runs again, and nothing of the planning."""
    counts = []
    for call in (net(), planned(net()), Rockmate(copy.deepcopy(net()), X, "1 GiB", costs="flops")):
        for x in (X, X[:40]):
            with FlopCounterMode(display=False) as counter:
                step(call, (x,))
            counts.append(counter.get_total_flops())
    eager, planned_, kept = counts[:2], counts[2:4], counts[4:]
    assert kept == eager
    assert planned_[0] >= eager[0]
    model = net()
    rk = Rockmate(model, X, part_way(frontier(model, X, costs="flops"), 0.2), costs="flops")
    with FlopCounterMode(display=False) as counter:
        step(rk, (X,))
    assert counter.get_total_flops() > eager[0]  # the plan ran, and not the program as it is
    assert not modules._global_forward_pre_hooks


# -------------------------------------------------------------------------- changes to the Rockmate itself


class Direct(nn.Module):
    """Has a weight of its own, not in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


@pytest.mark.parametrize(
    ("register", "name"),
    [
        (lambda m: parametrize.register_parametrization(m, "weight", nn.Identity()), "a parametrization"),
        (lambda m: parametrizations.weight_norm(m, "weight"), "a parametrization"),
    ],
    ids=["parametrize", "weight_norm"],
)
def test_weights_replaced_on_the_rockmate_are_refused(register: Any, name: str) -> None:
    """The model's forward would not see them; on the model they work."""
    eager, model = Direct(), Direct()
    rk = Rockmate(model, X, "1 MiB", costs="flops")
    register(rk)
    with pytest.raises(InputError, match=rf"{name} was registered on the Rockmate.*rk\.original"):
        rk(X)
    model = Direct()
    rk = Rockmate(model, X, "1 MiB", costs="flops")
    register(model)
    register(eager)
    assert_trains_as_eager(eager, rk, lambda _, call: step(call, (X,)))


def test_pruning_on_the_rockmate() -> None:
    eager, rk = Direct(), Rockmate(Direct(), X, "1 MiB", costs="flops")
    for model in (eager, rk):
        torch.manual_seed(1)
        prune.l1_unstructured(model, "weight", amount=0.5)
    assert_trains_as_eager(eager, rk, lambda _, call: step(call, (X,)))


def test_cached_parametrizations_while_planning() -> None:
    def train(model: Any, call: nn.Module) -> Any:
        parametrize.register_parametrization(model.head, "weight", nn.Identity())
        with parametrize.cached():
            yield from step(call, (X,))

    assert_trains_as_eager(net(), planned(net()), train)


@pytest.mark.filterwarnings(SEVERAL)
def test_several_calls_with_cached_parametrizations() -> None:
    """The calls share one weight, and so one gradient of it, as in eager mode."""
    eager, model = net(), net()
    rk = planned(model)
    for m in (eager, model):
        parametrize.register_parametrization(m.head, "weight", nn.Softmax(dim=0))

    def train(_: nn.Module, call: nn.Module) -> Any:
        with parametrize.cached():
            (square_loss(call(X)) + square_loss(call(X + 1))).backward()
        yield from gradients(call)

    assert_trains_as_eager(eager, rk, train)


def test_hooks_of_the_state_are_the_models() -> None:
    def train(_: nn.Module, call: nn.Module) -> Any:
        seen: list[str] = []
        call.register_state_dict_pre_hook(lambda *_: seen.append("before"))
        call.register_state_dict_post_hook(lambda *_: seen.append("after"))
        call.register_load_state_dict_pre_hook(lambda *_: seen.append("before loading"))
        call.register_load_state_dict_post_hook(lambda *_: seen.append("after loading"))
        nn.Sequential(call).load_state_dict(nn.Sequential(call).state_dict())
        yield seen

    assert_trains_as_eager(net(), planned(net()), train)


def test_copies_on_many_devices_are_refused() -> None:
    with pytest.raises(InputError, match=r"DataParallel copies modules.*DistributedDataParallel around"):
        planned(net())._replicate_for_data_parallel()
