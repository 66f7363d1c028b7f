"""How gradients lie in memory is known before a step: a backward may copy those that lie otherwise than it wants."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from against_eager import assert_same, planned_by, snapshot, tight_budget
from models import pairs, part_way, randn, square_loss
from torch import nn
from torch.nn import functional as F

from rkgb.cost.layouts import differentiated, unless_contiguous
from rkgb.device import Cpu
from rkgb.graphs import S_graph
from rkgb.program import run_node, source_values
from rockmate import Rockmate, frontier, measure_peak
from rockmate.planning.options import PlanOptions
from rockmate.planning.prepare import make_planner


class Outlook(nn.Module):
    """As in VOLO: a norm's result is used as it is, and pooled with the channels first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, width, 2, stride=2), nn.LayerNorm(width)
        self.value, self.attention = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.patches(x).permute(0, 2, 3, 1))
        value = F.unfold(self.value(y).permute(0, 3, 1, 2), 3, padding=1, stride=2).unflatten(1, (-1, 9))
        pooled = F.avg_pool2d(y.permute(0, 3, 1, 2), 2, ceil_mode=True).permute(0, 2, 3, 1)
        weights = self.attention(pooled).permute(0, 3, 1, 2).flatten(2).softmax(1)
        return (value * weights[:, :, None]).sum(2)


def _channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def _attended(t: torch.Tensor) -> torch.Tensor:
    q = t.transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2)


Change = Callable[[torch.Tensor], torch.Tensor]

# Tensors (batch, 8, 6, 4) to such of any sizes.
CHANGES: dict[str, Change] = {
    "permuted": lambda t: t.permute(0, 2, 3, 1),
    "turned": lambda t: t.transpose(2, 3),
    "channels last": _channels_last,
    "flipped": lambda t: t.flip(3),
    "expanded": lambda t: t + t.mean((2, 3), keepdim=True).expand_as(t),
    "unfolded": lambda t: F.unfold(t, 2).unflatten(1, (-1, 4)),
    "folded": lambda t: F.fold(F.unfold(t, 2, stride=2) * 2, (6, 4), 2, stride=2),
    "attended": _attended,
    "pooled": lambda t: F.avg_pool2d(_channels_last(t), 2),
    "joined": lambda t: torch.cat([t, t.flip(1)], 1),
    "added turned": lambda t: t + F.gelu(t.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "squeezed": lambda t: t * F.adaptive_avg_pool2d(_channels_last(t), 1).sigmoid(),
    "summed": lambda t: t.sum(1, keepdim=True).repeat(1, 8, 1, 1),
    "parts": lambda t: t[:, :4] * F.gelu(t[:, 4:]),
    "stacked": lambda t: torch.stack(t.unbind(1)[::-1], 3),
    "written": lambda t: (t * 1.5).transpose(2, 3).mul_(2.0),
}


class Between(nn.Module):
    """A change of layout between two layers of one kind, which read what comes with gradients of any layout."""

    def __init__(self, layer: Callable[[int], nn.Module], dim: int, change: Change, batch: int) -> None:
        super().__init__()
        self.start, self.change = nn.Conv2d(2, 8, 1), change
        self.first = layer((batch, 8, 6, 4)[dim])
        with torch.no_grad():
            between = change(self.first(torch.zeros(batch, 8, 6, 4)))
        self.second = layer(between.shape[dim])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.change(self.first(self.start(x).tanh())))
        return y


LAYERS: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "convolution": (lambda n: nn.Conv2d(n, n, 3, padding=1), 1),
    "linear": (lambda n: nn.Linear(n, n), 3),
    "layer norm": (nn.LayerNorm, 3),
    "group norm": (partial(nn.GroupNorm, 1), 1),
    "batch norm": (nn.BatchNorm2d, 1),
    "pooling": (lambda _: nn.MaxPool2d(3, 1, padding=1), 1),
}


def _of_a_step(s: S_graph, model: nn.Module, x: torch.Tensor) -> dict[tuple[int, int], tuple[int, ...] | None]:
    """The strides of the gradient of each result, by node and place, in a step that runs nothing again."""
    env, seen = source_values(s.d.sources, model, [x]), {}

    def note(gradients: tuple[torch.Tensor | None, ...], i: int, k: int, place: int) -> None:
        gradient = gradients[place]
        if gradient is not None:
            seen[i, k] = unless_contiguous(gradient)

    for i, node in enumerate(s.nodes):
        for op in (s.d.nodes[k] for k in node.ops):
            env.update(zip(op.outputs, run_node(op, env.__getitem__), strict=True))
        for k, t in enumerate(env[v] for v in node.makes):
            if t.grad_fn is not None:
                t.grad_fn.register_prehook(partial(note, i=i, k=k, place=t.output_nr))
    outputs = [env[v] for v in s.d.outputs]
    torch.autograd.backward(outputs, [torch.ones(t.shape) for t in outputs])
    return seen


def assert_layouts_are_those_of_a_step(model: nn.Module, x: torch.Tensor) -> None:
    """Of nodes with one result that gets a gradient: of several, some may be made of others within the node."""
    graphs = make_planner(model, x, PlanOptions("flops")).graphs
    s, usage = graphs.S, graphs.K.usage
    (layouts,) = (layouts for u, layouts in graphs.known.layouts.items() if not u.turned)
    seen, compared = _of_a_step(s, model, x), 0
    for i, results in enumerate(differentiated(s, usage.root_values(s.d))):
        if len(results) == 1 and (i, results[0]) in seen:
            compared += 1
            assert layouts[i] == (seen[i, results[0]],), f"{s.nodes[i].label} at {s.main(i).line}"
    assert compared


@pytest.mark.parametrize(("layer", "change", "batch"), pairs(LAYERS, CHANGES, [1, 3]))
def test_strides_of_gradients_are_known_before_a_step(layer: str, change: str, batch: int) -> None:
    """Those of dimensions of size 1 count: kernels tell by them whether channels come last."""
    torch.manual_seed(0)
    make, dim = LAYERS[layer]
    assert_layouts_are_those_of_a_step(Between(make, dim, CHANGES[change], batch), randn(batch, 2, 6, 4, seed=0))


@pytest.mark.parametrize("batch", [1, 2])
def test_strides_of_gradients_of_an_outlooker(batch: int) -> None:
    torch.manual_seed(0)
    assert_layouts_are_those_of_a_step(Outlook(16), randn(batch, 3, 16, 16, seed=0))


@pytest.mark.parametrize(("share", "way"), [(0.0, "attach"), (0.3, "Rockmate"), (0.3, "attach"), (1.0, "Rockmate")])
def test_a_gradient_that_arrives_permuted_takes_what_was_predicted(share: float, way: str) -> None:
    torch.manual_seed(0)
    eager, x = Outlook(64), randn(1, 3, 64, 64, seed=0)
    model = copy.deepcopy(eager)
    budget = frontier(model, x, costs="flops").max_budget if share == 1 else tight_budget(model, x, fraction=share)
    call, planned = planned_by(way, model, budget, x)

    def step(call: nn.Module) -> Any:
        out = call(x)
        square_loss(out).backward()
        return out.detach()

    for _ in range(3):
        assert_same([step(call), *snapshot(model)], [step(eager), *snapshot(eager)])
    for p in model.parameters():
        p.grad = None
    peak = measure_peak(partial(step, call), "cpu")
    assert planned.plan is not None
    assert planned.plan.predicted_peak <= peak <= planned.plan.predicted_peak + Cpu.scalars
    assert peak <= budget


class Embedded(nn.Module):
    """A parameter whose gradient is that of another value, too, or lies in its memory."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first = (
            how,
            nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)),
        )  # where the peak is
        self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 2)
        self.position, self.other = (nn.Parameter(torch.randn(1, 256, 64)) for _ in range(2))
        self.token = nn.Parameter(torch.randn(1, 1, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if self.how == "added":
            y = y + self.position
        elif self.how == "added to an input":
            y = self.first(x + self.position)
        elif self.how == "two added":
            y = y * (self.position + self.other)
        elif self.how == "added twice":
            y = (y + self.position).sin() + self.position
        elif self.how == "a view added":
            y = y + self.position.view(256, 64)
        elif self.how == "joined":
            y = torch.cat([self.token.expand(len(y), -1, -1), y], 1)
        elif self.how == "a part":
            y = y + self.position[:, : y.shape[1]]
        z: torch.Tensor = self.head(torch.tanh(self.second(y + torch.tanh(self.second(y)))))
        return z


EMBEDDED = ("added", "added to an input", "two added", "added twice", "a view added", "joined", "a part")


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("how", EMBEDDED)
def test_gradients_of_parameters_that_are_gradients_of_others(how: str, given: bool) -> None:
    """``.grad`` is the gradient itself, or a copy where another value still has it. ``given``: it is there before."""
    torch.manual_seed(0)
    model, x = Embedded(how), randn(1, 256, 64, seed=0)

    def start() -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if given else None

    start()
    rk = Rockmate(model, x, "100%", costs="flops")
    found = rk.frontier()

    def step() -> None:
        model.zero_grad(set_to_none=not given)
        square_loss(rk(x)).backward()

    for share in (0.0, 1.0):
        rk.budget = part_way(found, share)
        step()
        start()
        peak = measure_peak(step, "cpu")
        start()
        # The loss may take as much as the output once more.
        assert rk.plan.predicted_peak - rk(x).nbytes <= peak <= rk.plan.predicted_peak + Cpu.scalars


class Shuffled(nn.Module):
    """``pixel_shuffle`` of five dimensions takes no gradient whose dimensions are turned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.LayerNorm(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pixel_shuffle(self.layers(x), 2)


def test_an_operator_that_takes_no_turned_gradient_is_planned() -> None:
    model, x = Shuffled(), randn(3, 6, 8, 12, 2, seed=0)
    rk = Rockmate(model, x, frontier(model, x, costs="flops").min_budget, costs="flops", cache=False)
    for _ in range(2):
        rk(x).square().mean().backward()
    assert measure_peak(lambda: rk(x).square().mean().backward()) <= rk.budget
