"""Graphs that show without a run are those of a run; where they are not, the run decides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkgb.pipeline
import rkgb.probe.alike
from rkgb.blocks.simplify import D_to_S
from rkgb.pipeline import make_S
from rkgb.probe.alike import graphs_without_data
from rkgb.probe.resize import is_same
from rkgb.probe.skeleton import skeleton
from rkgb.sample import Call
from rkgb.trace.meta import without_data
from rockmate import attach

CPU = torch.device("cpu")


def drop(x: torch.Tensor, p: float = 0.3) -> torch.Tensor:
    return F.dropout(x, p, True)


def halved(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, ::2] *= 0.5
    return y


def unused(x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)  # drawn, and read by nobody
    return x.exp()


def scaled(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.abs().mean()
    return x / scale


def mixed(function: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., Any]:
    """``function`` of ``x`` and the weight, under autocast."""

    def run(x: torch.Tensor, weight: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return function(x, weight)

    return run


def averaged(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x * weight
    with torch.no_grad():
        weight.mul_(0.9)
    return y


def heads(x: torch.Tensor, p: float) -> torch.Tensor:
    q, k, v = (x.view(8, 3, 4, 4).transpose(1, 2) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=p)


class Program(nn.Module):
    """``function`` of ``x`` and of a weight and statistics, if it takes these."""

    pure = True

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16))
        self.table = nn.Buffer(torch.zeros(100_000, 1))
        self.mean, self.var = nn.Buffer(torch.zeros(12)), nn.Buffer(torch.ones(12))

    def forward(self, x: torch.Tensor) -> Any:
        names = self.function.__code__.co_varnames[1 : self.function.__code__.co_argcount]
        return self.function(x, **{k: getattr(self, k) for k in names if k in ("weight", "table", "mean", "var")})


def images(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(2, 12, 4, 4).contiguous(memory_format=torch.channels_last)


ALIKE: dict[str, Callable[..., Any]] = {
    "products": lambda x, weight: F.layer_norm(F.gelu(x @ x.t() @ x), (16,), weight),
    "dropout": lambda x: drop(x) + drop(x.exp()),
    "dropout of nothing": lambda x: drop(x, 0.0) * 2,
    "attention": lambda x: heads(x, 0.0),
    "attention with dropout": lambda x: heads(x, 0.1),
    "slices written": halved,
    "drawn, not read": unused,
    "no gradient": scaled,
    "a parameter written": averaged,
    "convolution": lambda x: F.conv2d(x.reshape(2, 12, 4, 4), torch.ones(3, 12, 3, 3), padding=1).relu_(),
    "channels last": lambda x: F.max_pool2d(F.conv2d(images(x), torch.ones(3, 12, 3, 3), padding=1), 2),
    "group norm": lambda x: F.group_norm(images(x), 3).mean() + F.group_norm(x.reshape(2, 12, 16), 4),
    "batch norm": lambda x, mean, var: F.relu(F.batch_norm(x.reshape(2, 12, 4, 4), mean, var, None, None, True)),
    "embedding": lambda x, weight: F.embedding((x > 0).long().sum(1), weight[:, None] * x[0]),
    "several results": lambda x: x.sort(-1)[0] + torch.cat(x.chunk(2, 1)[::-1], 1) + x.topk(1)[0],
    "shared memory": lambda x: torch.addcmul(x.view(-1)[:16], x.view(-1)[16:32], x.view(-1)[4:20]),
    "expanded": lambda x: (x[:, :1].expand(-1, 16) * x).sum().expand(3) * 2,
    "complex": lambda x: torch.fft.rfft(x).abs(),
    "numbers": lambda x: x * torch.tensor(0.5) + torch.full((16,), 2.0),
    "noise": lambda x: torch.nn.functional.rrelu(x, training=True) + torch.randn_like(x),
}  # fmt: skip
CAST: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a product": lambda x, weight: x @ x.t(),
    "linear": lambda x, weight: F.linear(F.gelu(F.linear(x, x, x[:, 0])), x.t()),
    "a weight, cast once": lambda x, weight: x @ weight + x.exp() @ weight,
    "a value, cast each time": lambda x, weight: torch.baddbmm(x[None, :, :1], x[None], x.t()[None]) + x @ x.t(),
    "convolution": lambda x, weight: F.conv1d(x.reshape(2, 12, 16), torch.ones(3, 12, 3), weight[:3], padding=1).relu(),
    "transposed": lambda x, weight: F.conv_transpose2d(images(x), torch.ones(12, 3, 2, 2), stride=2),
    "attention": lambda x, weight: heads(x, 0.1),
    "the widest": lambda x, weight: torch.cat([x @ x.t(), x], 1) + torch.cat([x.t() @ x[:, :16], x], 0).sum(),
    "of one type": lambda x, weight: torch.stack([x @ weight, x.exp() @ weight]),
    "float32": lambda x, weight: F.l1_loss(x @ weight, x[:, 0]) + F.kl_div(x @ weight, x[:, 1], reduction="sum"),
    "layer norm": lambda x, weight: F.layer_norm(x @ torch.ones(16, 16), (16,), weight),
    "group norm": lambda x, weight: F.group_norm(F.conv1d(x.reshape(2, 12, 16), torch.ones(12, 12, 3)), 3, weight[:12]),
    "no gradient": lambda x, weight: (x.detach() @ weight.detach()) * (x @ weight),
    "an index": lambda x, weight: F.embedding((x @ weight > 0).long(), x),
    "float64": lambda x, weight: x.double() @ weight.double(),
}  # fmt: skip
ALIKE |= {f"autocast, {name}": mixed(function) for name, function in CAST.items()}


def shown_and_run(function: Callable[..., Any]) -> tuple[Any, Any]:
    """(B, D) without a run, and the graphs of one."""
    torch.manual_seed(0)
    model = Program(function)
    x = torch.randn(24, 16, requires_grad=True)
    inputs = without_data([x])
    assert inputs is not None
    bare = copy.deepcopy(model).to("meta")
    return graphs_without_data(bare, Call(tuple(inputs), {}), CPU), make_S(model, Call((x,), {}))


@pytest.mark.parametrize("name", ALIKE)
def test_what_shows_without_a_run_is_what_a_run_shows(name: str) -> None:
    shown, (b, d, s) = shown_and_run(ALIKE[name])
    assert shown is not None
    found = D_to_S(shown[1])
    assert str(shown[0]) == str(b)
    assert str(found.d) == str(d)
    assert skeleton(found) == skeleton(D_to_S(d))
    assert is_same(found, s)
    assert [(f.drawn, f.spoilt, f.writes) for f in found.d.facts] == [(f.drawn, f.spoilt, f.writes) for f in d.facts]
    assert shown[1].structure == d.structure


def custom(name: str, kernel: Callable[..., Any], rule: Callable[..., Any]) -> Any:
    """An operator whose rule for sizes may say otherwise than its kernel does."""
    op = torch.library.custom_op(f"rockmate_alike::{name}", kernel, mutates_args=())
    op.register_fake(rule)
    return op


def of_other_strides(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def of_more_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(2 * x.numel()).fill_(1)[: x.numel()].view(x.shape)


def of_draws(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(())


@pytest.mark.parametrize("kernel", [of_other_strides, of_more_memory, of_draws])
def test_a_rule_that_says_otherwise_is_found_out(kernel: Callable[..., Any]) -> None:
    op = custom(kernel.__name__, kernel, torch.empty_like)
    assert shown_and_run(lambda x: op(x.detach()) * x)[0] is None


RUN: dict[str, Callable[..., Any]] = {
    "refuses zeros": lambda x: torch.linalg.cholesky((x.t() @ x).detach() + torch.eye(16)) @ x.t(),
    "would end a GPU's work": lambda x: x * torch.multinomial(x.detach().abs(), 1),
    "more memory than a step": lambda x, table: F.embedding((x > 0).long(), table) * x[..., None],
    "lies otherwise": lambda x: F.conv2d(images(x), torch.ones(3, 12, 3, 3), padding="same"),
    "casts of autocast inside an operation": mixed(lambda x, weight: torch.einsum("ij,kj->ik", x, x)),
    "sizes by values": lambda x: x[x[:, 0] > 0],
    "transforms": lambda x: torch.vmap(torch.dot)(x, x),
    "Python": lambda x: x.detach().view(torch.int32).bitwise_and(3) * x,
}


@pytest.mark.parametrize("name", RUN)
def test_what_does_not_show_is_run(name: str) -> None:
    assert shown_and_run(RUN[name])[0] is None


def test_another_kernel_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention saves otherwise where there are no data, if nobody sees to it."""
    monkeypatch.setattr("rkgb.trace.meta._ON_CPU", {})
    assert shown_and_run(ALIKE["attention"])[0] is None


def test_distinct_calls_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    alike = rkgb.probe.alike._are_alike

    def count(calls: Any, device: torch.device) -> bool:
        made.append(len(calls))
        return alike(calls, device)

    def layers(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = F.gelu(x + 1)
        return x

    monkeypatch.setattr(rkgb.probe.alike, "_are_alike", count)
    assert shown_and_run(layers)[0] is not None
    assert made == [2]


def test_regions_of_autocast_leave_none_behind() -> None:
    """Calls that switch modes are not made again: torch would count its contexts wrong, and keep stale casts."""

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                with torch.autocast("cpu", torch.bfloat16):
                    x = layer(x).float()
                x = F.gelu(x)
            return x

    model = Casts()
    handle = attach(model, "70%")
    model(torch.randn(256, 64)).sum().backward()
    assert handle.plan is not None
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0


@pytest.mark.parametrize(("rows", "runs"), [(256, True), (2**14, False)])
def test_what_takes_little_time_runs(monkeypatch: pytest.MonkeyPatch, rows: int, runs: bool) -> None:
    """To compare what shows with a device takes time, too, for each distinct call."""
    monkeypatch.undo()  # see conftest.py
    ran = 0
    run = rkgb.pipeline._run

    def count(*args: Any) -> Any:
        nonlocal ran
        ran += 1
        return run(*args)

    monkeypatch.setattr(rkgb.pipeline, "_run", count)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    handle = attach(model, "80%")
    model(torch.randn(rows, 64)).sum().backward()
    assert handle.plan is not None
    assert ran == runs
