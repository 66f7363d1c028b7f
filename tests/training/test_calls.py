"""Every way in which a module is called, under a budget that forces recomputation, against eager mode."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from against_eager import assert_in_budget, assert_same, assert_trains_as_eager, planned, snapshot, step, under_budget
from models import SEVERAL, case, randn, square_loss
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from rkgb.cost.memory import measure_memory
from rockmate import Rockmate, attach


class Nested(nn.Module):
    """Takes a dict of lists beside a keyword, returns tuples in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, batch: dict[str, list[torch.Tensor]], *, scale: float = 1.0) -> dict[str, Any]:
        h = torch.tanh(self.up(batch["x"][0]) * scale)
        for shift in batch["shifts"]:
            h = F.gelu(self.middle(h) + shift) * h
        return {"out": (self.down(h), h.mean()), "none": None}


def nested_batch(seed: int) -> dict[str, list[torch.Tensor]]:
    return {"x": [randn(32, 16, seed=seed)], "shifts": [randn(32, seed=seed + k, requires_grad=True) for k in (1, 2)]}


def test_nested_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    eager = Nested()
    torch.manual_seed(0)
    rk = under_budget(Nested(), nested_batch(0), scale=2.0)

    def train(_: nn.Module, call: nn.Module) -> Any:
        batch = nested_batch(1)
        yield from step(call, (batch,), {"scale": 2.0})
        yield from (t.grad for t in batch["shifts"])
        result = call(batch, scale=2.0)
        yield list(result)
        yield type(result["out"])

    assert_trains_as_eager(eager, rk, train)
    batch = nested_batch(2)
    assert_in_budget(rk, lambda: step(rk, (batch,), {"scale": 2.0}), batch["shifts"])


class Registered:
    def __init__(self, t: torch.Tensor) -> None:
        self.t = t


class TakesRegistered(Nested):
    def forward(self, given: Any) -> Any:  # type: ignore[override]
        torch._dynamo.graph_break()
        return super().forward({"x": [given.t], "shifts": []})["out"][0]


@pytest.mark.filterwarnings("ignore::rockmate.BudgetWarning")  # next to nothing can run again
def test_an_argument_of_a_class_that_names_nothing_of_what_it_holds() -> None:
    """It is registered with PyTorch's trees; the model is followed."""
    pytree.register_pytree_node(Registered, lambda r: ([r.t], None), lambda held, _: Registered(*held))
    torch.manual_seed(0)
    model = TakesRegistered()
    eager = copy.deepcopy(model)
    handle = attach(model, "60%", costs="flops", on_infeasible="least")
    for k in range(4):
        found = [step(m, (Registered(randn(512, 16, seed=k)),)) for m in (model, eager)]
        assert_same(*found)
    assert_same(snapshot(model), snapshot(eager))
    assert handle.reason


@pytest.mark.filterwarnings(SEVERAL)
def test_the_output_as_the_next_input() -> None:
    """The same module twice in one graph."""
    torch.manual_seed(0)
    make = lambda: nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU())))  # noqa: E731
    eager = make()
    rk = under_budget(make(), randn(32, 32, seed=0))
    rk.load_state_dict(eager.state_dict())

    def train(_: nn.Module, call: nn.Module) -> Any:
        y = call(call(randn(32, 32, seed=1)))
        yield y.detach().clone()
        square_loss(y).backward()

    assert_trains_as_eager(eager, rk, train)


@pytest.mark.filterwarnings(SEVERAL)
def test_forwards_before_backwards_in_any_order() -> None:
    eager, rk = planned(case("dropout_mlp"))
    rk.budget = 2 * rk.budget  # three calls wait at once

    def train(_: nn.Module, call: nn.Module) -> Any:
        losses = [square_loss(call(randn(32, 16, seed=k))) for k in range(3)]
        for k in (1, 2, 0):
            losses[k].backward()
        total = sum(square_loss(call(randn(32, 16, seed=k))) for k in range(2))
        total.backward()
        yield total.detach()

    assert_trains_as_eager(eager, rk, train)


@pytest.mark.parametrize("allocated", [False, True], ids=["grads_none", "grads_present"])
def test_accumulation(allocated: bool) -> None:
    c = case("gpt")
    eager, rk = planned(c)

    def train(model: nn.Module, call: nn.Module) -> Any:
        model.zero_grad(set_to_none=not allocated)
        for k in range(3):
            yield from step(call, *c.call(k))

    assert_trains_as_eager(eager, rk, train)
    args, kwargs = c.call(0)
    if allocated:
        step(rk, args, kwargs)
        _, peak, _ = measure_memory(lambda: step(rk, args, kwargs), torch.device("cpu"))
        assert peak <= rk.budget
    else:
        assert_in_budget(rk, lambda: step(rk, args, kwargs))


def test_smaller_batches_and_other_lengths_are_planned_once_each() -> None:
    c = case("gpt")
    eager, rk = planned(c)
    ids = c.call(1)[0][0]
    shapes = [ids, ids[:1], ids[:, :12], ids[:1], ids[:, :12], ids]

    def train(_: nn.Module, call: nn.Module) -> Any:
        for x in shapes:
            yield from step(call, (x,))

    assert_trains_as_eager(eager, rk, train)
    assert rk.plans_made == 2
    for x in shapes[:3]:
        assert_in_budget(rk, lambda x=x: step(rk, (x,)))


@pytest.mark.parametrize("used", [0, 1])
def test_outputs_used_partly(used: int) -> None:
    c = case("two_in_two_out")
    eager, rk = planned(c)

    def train(_: nn.Module, call: nn.Module) -> Any:
        args, _ = c.call(1)
        results = call(*args)
        square_loss(results[used]).backward()
        yield from (t.detach() for t in results)
        yield from (t.grad for t in args)

    assert_trains_as_eager(eager, rk, train)
    args, _ = c.call(2)

    def part() -> None:
        square_loss(rk(*args)[used]).backward()

    assert_in_budget(rk, part, args[:1])


def test_backward_from_a_thread() -> None:
    c = case("gpt")
    eager, rk = planned(c)

    def train(_: nn.Module, call: nn.Module) -> Any:
        loss = square_loss(call(*c.call(1)[0]))
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()
        yield loss.detach()

    assert_trains_as_eager(eager, rk, train)


def test_forward_and_backward_in_many_threads() -> None:
    """Data parallel in one process: each thread has its own call."""
    c = case("mlp")
    eager, rk = planned(c)
    expected = []
    for k in range(4):
        expected.append(torch.autograd.grad(square_loss(eager(*c.call(k)[0])), list(eager.parameters())))
    found: dict[int, Any] = {}

    def work(k: int) -> None:
        found[k] = torch.autograd.grad(square_loss(rk(*c.call(k)[0])), list(rk.parameters()))

    workers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    for k in range(4):
        assert_same(found[k], expected[k])


def test_without_gradients_the_model_itself_runs() -> None:
    c = case("dropout_mlp")
    eager, rk = planned(c)
    x = randn(32, 16, seed=3)
    calls = []
    rk.original.register_forward_hook(lambda *_: calls.append(1))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.manual_seed(1)
            ours = rk(x)
            torch.manual_seed(1)
            assert torch.equal(ours, eager(x))
            assert ours.is_inference() == (mode is torch.inference_mode)
    assert rk.plans_made == 0
    assert torch.equal(rk.eval()(x), eager.eval()(x))
    assert len(calls) == 3
    assert rk.plans_made == 1, "gradients count in eval mode too"
    assert_same(rk.buffers(), eager.buffers())


def test_an_exception_in_the_loss_leaves_nothing_allocated() -> None:
    c = case("gpt")
    _, rk = planned(c)
    args, kwargs = c.call(1)
    step(rk, args, kwargs)

    class Failure(Exception):
        pass

    def fail() -> None:
        out = rk(*args, **kwargs)
        loss = square_loss(out)
        raise Failure(loss)

    def run() -> None:
        with pytest.raises(Failure):
            fail()

    _, peak, net = measure_memory(run, torch.device("cpu"))
    assert peak > 0
    assert net == 0


def test_outputs_dropped_without_a_backward_free_everything() -> None:
    c = case("gpt")
    _, rk = planned(c)
    args, kwargs = c.call(1)

    def run() -> None:
        out = rk(*args, **kwargs)
        del out

    run()
    _, peak, net = measure_memory(run, torch.device("cpu"))
    assert peak > 0
    assert net == 0


class Pooled(nn.Module):
    """Returns indices that a node makes beside what must run again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled, where = F.max_pool2d(self.first(x).relu(), 2, return_indices=True)
        return self.second(F.max_unpool2d(pooled.tanh(), where, 2)), where


def test_outputs_that_are_held_are_not_kept_twice_where_their_node_runs_again() -> None:
    torch.manual_seed(0)
    eager = Pooled()
    x = randn(2, 3, 16, 16, seed=0)
    rk = under_budget(copy.deepcopy(eager), x, fraction=0.0)

    def hold(call: nn.Module) -> Any:
        outputs = call(x)
        square_loss(outputs).backward()
        return outputs

    def train(_: nn.Module, call: nn.Module) -> Any:
        yield from (t.detach().clone() for t in hold(call))

    assert_trains_as_eager(eager, rk, train)
    assert_in_budget(rk, lambda: hold(rk))


class Scaled(nn.Module):
    """Views its input, and saves nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x.view(-1, 8) * 2.0)
        return out


def test_a_view_of_a_batch_from_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.randn(4, 16)
    model = Scaled()
    rk = Rockmate(model, x.clone(), "1 MiB", costs="flops")
    gradients = []
    for m in (rk, model):
        model.zero_grad()
        m(x).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))  # type: ignore[arg-type]
