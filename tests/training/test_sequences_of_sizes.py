"""Sequences of sizes of models of many kinds under one budget: eager mode's bits, and peaks within the budget."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import assert_same, snapshot, tight_budget
from models import randn, tokens
from torch import nn

import rockmate.calls.captured_calls
from rkgb.device import Cpu
from rkgb.graphs import D_graph
from rockmate import attach, measure_peak

Sizes = list[tuple[int, ...]]


class Translating(nn.Module):
    """An encoder and a decoder with lengths of their own, and masks that are made of these."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 24), nn.Linear(24, 40)
        self.body = nn.Transformer(24, 2, 2, 2, 48, dropout=0.1, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.body(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class Shifted(nn.Module):
    """Writes a number into a slice of its own result, fills with another, and joins tensors of numbers, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(40, 24), _layers(24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        shifted = ids.new_zeros(ids.shape)
        shifted[..., 1:] = ids[..., :-1].clone()
        shifted[..., 0] = 3
        shifted.masked_fill_(shifted == 5, 0)
        none = torch.tensor([], dtype=torch.float32, device=ids.device)
        x = self.layers(torch.cat([none, self.embed(shifted)], -2)) * torch.tensor([0.5])
        return x / ids.shape[1] ** 0.5


class Grouped(nn.Module):
    """Attention whose keys and values serve several heads, with a mask of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(24, 32), nn.Linear(24, 32), nn.Linear(32, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 4, 8).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, 2, 8).permute(2, 0, 3, 1, 4)
        seen = torch.arange(length, device=x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None] >= seen, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1)).tanh()


class Rounded(nn.Module):
    """Sizes that are halved and rounded, and brought back by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.ConvTranspose2d(12, 12, 2, stride=2)
        self.norm, self.out = nn.BatchNorm2d(12), nn.Conv2d(12, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(F.gelu(self.norm(self.down(x))), 2, ceil_mode=True)
        y = F.interpolate(F.gelu(self.up(y)), x.shape[-2:], mode="bilinear", align_corners=False)
        return self.out(y)


class Recurrent(nn.Module):
    """A recurrent layer, whose kernels on a CPU keep other tensors than torch's rules for sizes know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = _layers(24), nn.LSTM(24, 24, 2, batch_first=True), _layers(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(self.first(x))[0])


class OfData(nn.Module):
    """A constant that is larger than a number, by which the rows are weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers(24)
        self.weights = [0.5, 2.0, 0.25] * 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * torch.tensor(self.weights)


class Frozen(nn.Module):
    """A part without gradients and an in-place change, of a length that a window divides."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.layers = _layers(24), _layers(24)
        self.register_buffer("mean", torch.zeros(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
            self.mean.lerp_(target.mean((0, 1)), 0.1)
        windows = self.layers(x).unfold(1, 4, 3)
        return windows.mean(-1).relu_() + self.mean - target.mean(1, keepdim=True)


def _layers(width: int) -> nn.Sequential:
    layers = (nn.Linear(width, 3 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(3 * width, width), nn.LayerNorm(width))
    return nn.Sequential(*layers, *copy.deepcopy(layers))


LENGTHS: Sizes = [(4, 30), (4, 21), (3, 30), (4, 17), (2, 9), (4, 29), (5, 24), (1, 26)]
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[torch.Tensor, ...]], Sizes]] = {
    "translation": (
        Translating,
        lambda a, b: (tokens(3, a, high=40, seed=a), tokens(3, b, high=40, seed=b)),
        [(20, 14), (13, 19), (17, 17), (9, 20), (20, 6), (11, 12)],
    ),
    "shifted": (Shifted, lambda b, n: (tokens(b, n, high=40, seed=n),), LENGTHS),
    "grouped": (Grouped, lambda b, n: (randn(b, n, 24, seed=n),), LENGTHS),
    "images": (Rounded, lambda h, w: (randn(2, 3, h, w, seed=h),), [(33, 28), (24, 31), (17, 40), (30, 30), (9, 37)]),
    "channels last": (
        lambda: Rounded().to(memory_format=torch.channels_last),
        lambda h, w: (randn(2, 3, h, w, seed=h).to(memory_format=torch.channels_last),),
        [(33, 28), (24, 31), (17, 40), (9, 37)],
    ),
    "recurrent": (Recurrent, lambda b, n: (randn(b, n, 24, seed=n),), LENGTHS),
    "constants": (OfData, lambda b, n: (randn(b, n, 24, seed=n),), LENGTHS),
    "frozen": (Frozen, lambda b, n: (randn(b, n, 24, seed=n),), LENGTHS),
    "bfloat16": (lambda: _layers(24).bfloat16(), lambda b, n: (randn(b, n, 24, seed=n).bfloat16(),), LENGTHS),
    "one layer": (lambda: _layers(24), lambda b, n: (randn(b, n, 24, seed=n),), LENGTHS),
}


KEPT_OTHERWISE = ("recurrent", "bfloat16")
"""Cases with kernels that keep or lay out otherwise on a CPU than torch's rules for sizes say."""

OF_ONE = ("recurrent",)
"""Cases in which a batch of one is another graph, which is traced when it comes."""


def trained(model: nn.Module, batches: list[tuple[torch.Tensor, ...]]) -> list[Any]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found: list[Any] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(*batch).float().square().mean()
        loss.backward()
        found += [loss.detach(), *snapshot(model)]
        optimizer.step()
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_sequence_of_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first call is traced on data, and only where kernels of the CPU keep otherwise does another one run."""
    make, call, sizes = CASES[name]
    traced, ran = 0, 0
    planner, run = rockmate.calls.made.make_planner, rockmate.calls.graph.Shown.graph_of_a_run

    def count_traces(*args: Any, **kwargs: Any) -> Any:
        nonlocal traced
        traced += 1
        return planner(*args, **kwargs)

    def count_runs(*args: Any) -> D_graph | None:
        nonlocal ran
        ran += 1
        return run(*args)

    torch.manual_seed(0)
    model = make()
    eager, batches = copy.deepcopy(model), [call(*size) for size in sizes]
    budget = max(tight_budget(copy.deepcopy(model), batch, fraction=0.4) for batch in batches[:2])
    monkeypatch.setattr(rockmate.calls.made, "make_planner", count_traces)
    monkeypatch.setattr(rockmate.calls.graph.Shown, "graph_of_a_run", count_runs)
    attach(model, budget, costs="flops", on_infeasible="least")
    assert_same(trained(model, batches), trained(eager, batches))
    assert traced == 1 + (name in OF_ONE)
    assert (ran > 0) == (name in KEPT_OTHERWISE)
    for batch in batches[:2]:

        def step(batch: tuple[torch.Tensor, ...] = batch) -> None:
            model.zero_grad()
            model(*batch).float().square().mean().backward()

        step()
        assert measure_peak(step) <= budget


def test_a_program_that_takes_data_is_traced_at_each_size(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator without a rule for sizes: results are eager mode's, and it is said once."""
    caplog.set_level(logging.INFO, "rockmate")

    def refused(*args: Any) -> None:
        raise NotImplementedError("no rule for sizes")

    for trace in ("trace_without_data", "trace_of_any_size"):
        monkeypatch.setattr(f"rkgb.probe.resize.{trace}", refused)
    torch.manual_seed(0)
    model = _layers(24)
    eager, batches = copy.deepcopy(model), [(randn(b, n, 24, seed=n),) for b, n in LENGTHS]
    attach(model, tight_budget(copy.deepcopy(model), batches[0], fraction=0.4), costs="flops", on_infeasible="least")
    assert_same(trained(model, batches), trained(eager, batches))
    assert caplog.text.count("does not show without data") == 1


def test_at_the_third_size_a_sample_is_recommended(caplog: pytest.LogCaptureFixture) -> None:
    """As a larger one than the first has come."""
    caplog.set_level(logging.INFO, "rockmate")
    torch.manual_seed(0)
    model = _layers(24)
    batches = [(randn(b, n, 24, seed=n),) for b, n in sorted(LENGTHS[1:4], key=math.prod)]
    attach(model, tight_budget(copy.deepcopy(model), batches[0], fraction=0.4), costs="flops", on_infeasible="least")
    for k, batch in enumerate(batches):
        model(*batch).sum().backward()
        assert ("sample=" in caplog.text) == (k >= 2)


def test_a_size_that_takes_long_has_a_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rockmate.calls.front.LONG", 0.0)
    caplog.set_level(logging.INFO, "rockmate")
    torch.manual_seed(0)
    model = _layers(24)
    batches = [(randn(b, n, 24, seed=n),) for b, n in LENGTHS[:2]]
    attach(model, tight_budget(copy.deepcopy(model), batches[0], fraction=0.4), costs="flops", on_infeasible="least")
    for batch in batches:
        model(*batch).sum().backward()
    said = [line for line in caplog.messages if "carried over" in line]
    assert len(said) == 1
    assert "of which its capture took" in said[0]


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_size_counts_once_however_often_it_is_captured(caplog: pytest.LogCaptureFixture, epochs: int) -> None:
    """A smaller last batch makes TorchDynamo capture all again, with symbols, and the first size comes to that, too."""
    caplog.set_level(logging.INFO, "rockmate")
    torch.manual_seed(0)
    model = _layers(24)
    long, short, last = [(randn(b, 40, 24, seed=b),) for b in (8, 7, 6)]
    attach(model, tight_budget(copy.deepcopy(model), long, fraction=0.4), costs="flops", on_infeasible="least")
    for batch in [long, long, short] * epochs + [long, long]:
        model(*batch).sum().backward()
        model.zero_grad()
    assert not [line for line in caplog.messages if "other sizes" in line]
    for batch in (last, long, last, short):
        model(*batch).sum().backward()
        model.zero_grad()
    assert len([line for line in caplog.messages if ": 2 other sizes, or" in line]) == 1
    assert len([line for line in caplog.messages if "other sizes" in line]) == 1


class StepsKept(nn.Module):
    """Each step in time keeps its gates, which are no results of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(40, 24), nn.ModuleList(nn.LSTM(24, 24) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids.T)
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


class WeightsKept(nn.Module):
    """With dropout, attention on a CPU keeps its weights, of all pairs of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(40, 24), nn.ModuleList(nn.Linear(24, 72) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            query, key, value = (t.unflatten(-1, (6, -1)).transpose(1, 2) for t in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(query, key, value, dropout_p=0.1).transpose(1, 2).flatten(2)
        return x


class HeadsOfTorch(WeightsKept):
    """The same, by torch's module, which is one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(24, 6, dropout=0.1, batch_first=True) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


@pytest.mark.parametrize("lengths", [(8, 100, 95), (95, 100)], ids=["small first", "large first"])
@pytest.mark.parametrize(("kind", "times"), [(StepsKept, 1), (WeightsKept, 2), (HeadsOfTorch, 2)])
def test_lengths_of_which_some_need_no_plan(kind: type[nn.Module], times: int, lengths: tuple[int, ...]) -> None:
    """What needs a plan is known before a step that takes more than the budget."""
    torch.manual_seed(0)
    model = kind()
    batches = [torch.randint(40, (4, times * n)) for n in lengths]

    def step(ids: torch.Tensor) -> None:
        model.zero_grad()
        model(ids).square().mean().backward()

    budget = int(0.75 * max(measure_peak(lambda ids=ids: step(ids)) for ids in batches))
    attach(model, budget, progress=False)
    for ids in batches:
        step(ids)  # a step beyond the budget is a warning, which is an error here


class Outer(WeightsKept):
    """An operation that makes many times its result meanwhile, of which nothing is known ahead."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            y = layer(x)[..., :24]
            x = x + torch.einsum("bld,bme,lm->bld", y, x, y.new_ones(y.shape[1], y.shape[1]))
        return x


def test_what_exceeds_is_planned_at_each_size() -> None:
    """No step takes more than the budget before it is planned."""
    torch.manual_seed(0)
    model = Outer()
    batches = [torch.randint(40, (4, n)) for n in (8, 20, 100, 95)]

    def step(ids: torch.Tensor) -> None:
        model.zero_grad()
        model(ids).square().mean().backward()

    least = [measure_peak(lambda ids=ids: step(ids)) for ids in batches]
    attach(model, int(0.75 * max(least)), progress=False, on_infeasible="least")
    said = []
    for ids in batches:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(ids)
        said += [w for w in caught if "the last step took" in str(w.message)]
    assert not said


class Interpolated(nn.Module):
    """Convolutions on the way down and up; a batch of two may have as many numbers as a larger picture alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 8), (8, 12), (12, 16)))
        self.up = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((28, 12), (20, 8)))
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for layer in self.down:
            x = F.gelu(layer(F.max_pool2d(x, 2) if kept else x))
            kept.append(x)
        for layer, other in zip(self.up, kept[1::-1], strict=True):
            x = F.gelu(layer(torch.cat([F.interpolate(x, other.shape[-2:], mode="bilinear"), other], 1)))
        return self.out(x)  # type: ignore[no-any-return]


def test_other_shapes_of_as_many_bytes_have_other_kernels() -> None:
    model = Interpolated()
    handle = attach(model, 62_000, costs="flops", cache=False)

    def step() -> None:
        model(x).square().mean().backward()

    for shape in ((1, 3, 8, 7), (2, 3, 5, 7)):
        x = randn(*shape, seed=0)
        for _ in range(2):
            model.zero_grad()
            step()
        model.zero_grad()
        peak = measure_peak(step)
        assert handle.plan is not None
        assert peak <= handle.plan.predicted_peak + Cpu.scalars <= 62_000 + Cpu.scalars
