"""Recurrent layers and cells: captured, and followed, where their steps are operations of their own."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Collection
from typing import Any

import pytest
import torch
from against_eager import assert_same, snapshot
from models import in_turn, randn
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from rockmate import Attachment, InfeasibleBudgetError, Rockmate, attach, frontier, measure_peak
from rockmate.calls.capture import MANY_LENGTHS
from rockmate.calls.reasons import LOOPS
from rockmate.follow import known, plan
from rockmate.follow.advice import MOST_USES
from rockmate.follow.engine import MOST_ALONE
from rockmate.follow.following import following
from rockmate.follow.online import Online
from rockmate.follow.reruns import Reruns
from rockmate.follow.tape import Tape

LAYERS = [nn.RNN, nn.GRU, nn.LSTM]
CELLS = [nn.RNNCell, nn.GRUCell, nn.LSTMCell]


class Sequence(nn.Module):
    """A recurrent layer between others. ``way``: "captured", "counts" (reads a number), or "packed"."""

    def __init__(self, kind: type[nn.Module], way: str, both: bool = False, drop: float = 0.0, layers: int = 1) -> None:
        super().__init__()
        self.first, self.way = nn.Linear(24, 32), way
        self.layer = kind(32, 16, layers, batch_first=True, bidirectional=both, dropout=drop)  # type: ignore[call-arg]
        sizes = [32 if both else 16, 64, 64, 64, 64]
        layers_after = (m for n in sizes for m in (nn.GELU(), nn.Linear(n, 64)))
        self.last = nn.Sequential(*layers_after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (rows, length, 24)."""
        x = self.first(x)
        if self.way == "packed":
            lengths = torch.arange(x.shape[1], x.shape[1] - x.shape[0], -1)
            packed = pack_padded_sequence(x, lengths, batch_first=True)
            return self.last(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])
        if self.way == "counts":
            self.seen = x.mean().item()
        return self.last(self.layer(x)[0])


class Cells(nn.Module):
    """Messages, then a cell, four times."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.messages = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 32)) for _ in range(4)
        )
        self.cells = nn.ModuleList(kind(32, 32) for _ in range(4))  # type: ignore[call-arg]

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Of (rows, 32)."""
        for message, cell in zip(self.messages, self.cells, strict=True):
            found = cell(message(h), (h, h) if isinstance(cell, nn.LSTMCell) else h)
            h = found[0] if isinstance(found, tuple) else found
        return h


def step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def trains_as_eager(eager: nn.Module, x: torch.Tensor, share: float) -> Attachment:
    """Attached at this share of eager's peak, after two steps; the least budget where that is too little."""
    model = copy.deepcopy(eager)
    step(eager, x)
    eager.zero_grad()
    budget = int(share * measure_peak(lambda: step(eager, x)))
    handle = attach(model, budget, costs="flops", cache=False)
    for k in range(3):
        found: list[Any] = []
        for m in (eager, model):
            torch.manual_seed(k)
            step(m, x)
            found.append(snapshot(m))
        assert_same(*found)
    model.zero_grad()
    assert measure_peak(lambda: step(model, x)) <= budget
    return handle


@pytest.mark.parametrize(("kind", "way"), in_turn(LAYERS, ["counts", "packed"]))
def test_a_followed_layer_trains_as_eager(kind: type[nn.Module], way: str) -> None:
    torch.manual_seed(0)
    handle = trains_as_eager(Sequence(kind, way), randn(4, 12, 24, seed=0), 0.92)
    assert handle.reason and handle.plan is not None and handle.plan.recomputed


@pytest.mark.parametrize(("kind", "autocast"), in_turn(LAYERS, [True, False]))
def test_one_capture_serves_all_lengths(kind: type[nn.Module], autocast: bool) -> None:
    """The first one is of its length, the second one of any."""
    torch.manual_seed(0)
    eager = Sequence(kind, "captured", both=True, drop=0.1, layers=2)
    model = copy.deepcopy(eager)
    handle = attach(model, "2.5 MiB", costs="flops", cache=False)
    capture, captured = handle._capture, []
    made, capture.captured = capture.captured, lambda program: captured.append(program) or made(program)  # type: ignore
    for k, length in enumerate([40, 9, 20, 5, 31, 40, 12]):
        found: list[Any] = []
        for m in (eager, model):
            torch.manual_seed(k)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                step(m, randn(4, length, 24, seed=k))
            found.append(snapshot(m))
        assert_same(*found)
    assert not handle.reason and len(captured) == 2


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_layers_in_both_directions_with_dropout(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Sequence(kind, "packed", both=True, drop=0.2, layers=2)
    handle = trains_as_eager(model, randn(3, 8, 24, seed=0), 0.96)
    assert handle.reason and handle.plan is not None


@pytest.mark.parametrize("share", [0.6, 0.75, 0.9])
def test_a_long_chain_of_steps_does_not_run_again_from_its_start(share: float) -> None:
    """Each step of the chain would need all those before it: in segments, each runs about once more."""
    torch.manual_seed(0)
    handle = trains_as_eager(Sequence(nn.GRU, "counts", both=True), randn(8, 30, 24, seed=0), share)
    assert handle.plan is not None
    runs = sum(node.rerun for node in handle.plan.problem.nodes)  # type: ignore[union-attr]
    assert 0 < handle.plan.recomputed <= 3 * runs


@pytest.mark.parametrize("kind", CELLS)
def test_cells_are_planned_as_checkpoints_would_be(kind: type[nn.Module]) -> None:
    """Their chunks of one result have version counters of their own: what is written into one spoils no other."""
    torch.manual_seed(0)
    eager, x = Cells(kind), randn(500, 32, seed=0)
    found = frontier(copy.deepcopy(eager), x, costs="flops")
    assert found.min_budget < 0.45 * found.max_budget
    handle = trains_as_eager(eager, x, 0.6)
    assert handle.plan is not None and handle.plan.recomputed


def chunked(x: torch.Tensor) -> torch.Tensor:
    """The second chunk is saved, and the first one changed."""
    a, b = x.unsafe_chunk(2, dim=1)
    y = b.sigmoid() * b.tanh()
    return torch.cat([a.mul_(2), y], 1)


def split(x: torch.Tensor) -> torch.Tensor:
    a, b = (2 * x).unsafe_split(x.shape[1] // 2, dim=1)
    y = b.exp()
    a.add_(1)
    return torch.cat([a, y * b], 1)


def sizes(x: torch.Tensor) -> torch.Tensor:
    n = x.shape[1] // 2
    a, b = torch.ops.aten.unsafe_split_with_sizes(2 * x, [n, n], 1)
    y = (b * b).sin()
    a.sigmoid_()
    return torch.cat([a, y], 1)


def own_data(x: torch.Tensor) -> torch.Tensor:
    y = (2 * x).tanh()
    z = y.sin()
    y.detach().data[:0].zero_()
    return z * y


@pytest.mark.parametrize("part", [chunked, split, sizes, own_data])
def test_chunks_that_are_changed_spoil_no_others(part: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k, layer in enumerate(self.layers):
                x = torch.tanh(layer(x))
                x = part(1.5 * x) if k in (1, 3) else x
            return x

    torch.manual_seed(0)
    handle = trains_as_eager(Net(), randn(256, 64, seed=0), 0.6)
    assert handle.plan is not None and handle.plan.recomputed


def test_a_chunk_that_is_saved_and_changed_raises_as_in_eager_mode() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = (2 * self.layer(x)).unsafe_chunk(2, dim=1)
            y = a.exp().sin()
            z = b.tanh()
            b.add_(1)
            y.add_(0)
            return z, y * b

    x = randn(4, 8, seed=0)
    for read in (0, 1):
        torch.manual_seed(0)
        eager = Net()
        model = copy.deepcopy(eager)
        attach(model, "100%", costs="flops", cache=False)
        found = []
        for m in (eager, model):
            for _ in range(2):
                m.zero_grad()
                try:
                    m(x)[read].sum().backward()
                    found.append("")
                except RuntimeError as error:
                    found.append(str(error)[:40])
        assert found[:2] == found[2:]


@pytest.mark.parametrize("door", [attach, Rockmate])
def test_a_call_whose_result_has_no_gradient_runs_as_it_is(door: Any) -> None:
    """No backward can come to it, so nothing is kept, whatever the budget."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                *(m for _ in range(6) for m in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
            )

        def forward(self, x: torch.Tensor, target: bool = True) -> torch.Tensor:
            y = self.layers(x)
            return y.detach() if target else y

    torch.manual_seed(0)
    eager, x = Net(), randn(64, 32, seed=0)
    model = copy.deepcopy(eager)
    if door is attach:
        attach(model, "60%", costs="flops", cache=False)
        called: Any = model
    else:
        called = Rockmate(model, (x, False), "60%", costs="flops", cache=False)
    for target in (True, False, True, False):
        found = called(x, target)
        assert torch.equal(found, eager(x, target)) and found.requires_grad is not target
    found.sum().backward()
    eager(x, False).sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


def test_a_budget_that_is_too_small_for_a_chain_names_the_least() -> None:
    torch.manual_seed(0)
    model, x = Sequence(nn.GRU, "counts"), randn(4, 10, 24, seed=0)
    attach(model, 2000, costs="flops", cache=False)
    with pytest.raises(InfeasibleBudgetError) as told:
        for _ in range(2):
            step(model, x)
    model = copy.deepcopy(model)
    again = attach(model, told.value.min_budget, costs="flops", cache=False)
    for _ in range(3):
        step(model, x)
    assert again.plan is not None and again.plan.predicted_peak <= told.value.min_budget


class Within(nn.Module):
    """A recurrent layer, which runs twice, within an autocast of forward's own."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer, self.last = kind(24, 24, batch_first=True), nn.Linear(24, 64)  # type: ignore[call-arg]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layer(x)[0]
            return self.last(self.layer(y.sin())[0])


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_weights_that_autocast_casts_once_for_all_steps(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    eager = Within(kind)
    model = copy.deepcopy(eager)
    attach(model, "100%", costs="flops", cache=False)
    for seed in range(3):
        for m in (eager, model):
            m.zero_grad()
            m(randn(6, 12, 24, seed=seed)).float().square().mean().backward()
        assert_same(snapshot(model), snapshot(eager))


class Narrow(nn.Module):
    """A recurrent layer that saves more than the others."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(16, 16), nn.GELU())))
        self.layer = kind(16, 16, batch_first=True, bidirectional=True)  # type: ignore[call-arg]
        self.last = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.last(self.layer(self.first(x))[0]))


@pytest.mark.parametrize(("kind", "way"), in_turn([nn.RNN, nn.GRU], ["attach", "Rockmate"]))
def test_a_layer_that_runs_again_after_the_autocast_casts_its_weights_once(kind: type[nn.Module], way: str) -> None:
    """Autocast casts within the operation: where it ran again, each step saved copies that no plan counted."""
    torch.manual_seed(0)
    eager, x = Narrow(kind), randn(4, 10, 16, seed=0)

    def mixed(model: nn.Module) -> None:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()

    with torch.autocast("cpu", torch.bfloat16):
        budget = frontier(copy.deepcopy(eager), x, costs="flops").min_budget
        if way == "attach":
            model = copy.deepcopy(eager)
            handle: Any = attach(model, budget, costs="flops", cache=False)
        else:
            handle = model = Rockmate(copy.deepcopy(eager), x, budget, costs="flops")
    for _ in range(3):
        mixed(eager)
        mixed(model)
        assert_same(snapshot(model), snapshot(eager))
    model.zero_grad()
    assert handle.plan is not None and handle.plan.recomputed
    assert measure_peak(lambda: mixed(model)) <= budget


@pytest.mark.parametrize("limit", range(74000, 83000, 512))
def test_what_a_layer_makes_is_not_made_again_while_some_of_it_is_in_use(limit: int) -> None:
    """An LSTM's backward reads its reserve and its states, which one operation makes: all of them go, or none."""
    torch.manual_seed(0)
    layer, tape = nn.LSTM(8, 8), Tape(torch.device("cpu"), Online(limit))
    with following(tape, []):
        y, (h, c) = layer(randn(20, 4, 8, seed=1))
        w = torch.cat([h, c, h], -1)
        loss = (w * w).sum() + (w * y[:1].repeat(1, 1, 3)).sum()
    del y, h, c, w
    for datum in tape.data:
        datum.base = datum.base if datum.pinned else None
    reserve = max(tape.data, key=lambda d: d.size)
    before: list[int] = []
    run = tape.reruns.run

    def noted(ops: Any, wanted: Collection[int]) -> None:
        before.extend(tape.ledger.live for index in ops if index == reserve.maker)
        run(ops, wanted)

    tape.reruns.run = noted  # type: ignore[method-assign]
    loss.backward()
    assert before and max(before) < reserve.size


class Steps(nn.Module):
    """Loops over what it is given, after some layers; ``counts`` reads a number, so that it is never captured."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.1))
        self.cell, self.counts, self.seen = nn.GRUCell(16, 16), counts, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (rows, length, 16)."""
        x = self.layers(x)
        if self.counts:
            self.seen = x.mean().item()
        h = torch.zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h).tanh()
        return h


@pytest.mark.parametrize("counts", [False, True], ids=["captured", "followed"])
def test_lengths_over_which_forward_loops_are_planned_when_they_come_often(
    counts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Few lengths are planned at once; later ones run as they come, with eager mode's bits."""
    caplog.set_level(logging.INFO, "rockmate")
    torch.manual_seed(0)
    model = Steps(counts)
    eager = copy.deepcopy(model)
    handle = attach(model, "90%", costs="flops", cache=False)
    first = MOST_ALONE if counts else MANY_LENGTHS + 1
    lengths = [12, *(3 + k for k in range(first + 1)), *[11] * (MOST_USES + 1)]
    plans = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k, length in enumerate(lengths):
            x = randn(8, length, 16, seed=k)
            for m in (model, eager):
                torch.manual_seed(k)
                m(x).square().mean().backward()
            assert_same([*snapshot(model)][:-1], [*snapshot(eager)][:-1])
            for m in (model, eager):
                m.zero_grad()
            plans.append(handle.plan is not None)
    assert plans == [True] * first + [False] * (len(plans) - first - 2) + [True] * 2
    assert handle.reason
    assert counts or LOOPS in handle.reason
    warned = [str(w.message) for w in caught]
    assert sum("attach the encoder" in line and "8th time" in line for line in warned) == 1


class Boxes(nn.Module):
    """Loops over boxes, behind layers whose backwards take much memory; ``counts`` as in ``Steps``."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(5)])
        self.counts, self.seen = counts, 0.0

    def forward(self, x: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        if self.counts:
            self.seen = x.mean().item()
        return torch.stack([(x[:, :, k:] * (k + 1)).square().mean() for k in range(len(boxes))]).sum()


@pytest.mark.filterwarnings("ignore:.*each size that has come:rockmate.BudgetWarning")
@pytest.mark.parametrize("counts", [False, True], ids=["captured", "followed"])
def test_steps_that_are_not_worth_a_plan_leave_the_room_that_backwards_took_in_others(counts: bool) -> None:
    torch.manual_seed(0)
    model, x = Boxes(counts), randn(4, 8, 24, 24, seed=0)
    handle = attach(model, 540000, costs="flops", cache=False)
    first = MOST_ALONE if counts else MANY_LENGTHS + 1
    for k in range(1, first + 4):
        boxes = torch.zeros(k)
        if k <= first:
            model(x, boxes).backward()
        else:
            assert measure_peak(lambda boxes=boxes: model(x, boxes).backward()) <= handle.budget  # type: ignore[misc]
        assert (handle.plan is not None) == (k <= first)
        model.zero_grad()


class Drops(nn.Module):
    """Loops over boxes, behind layers whose masks may not be drawn again; it reads a number, and is never captured."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(12)]
        self.layers, self.seen = nn.Sequential(*layers), 0.0

    def forward(self, x: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        self.seen = x.mean().item()
        n = len(boxes)
        return torch.stack([(x[k::n] * (k + 1)).square().mean() for k in range(n)]).sum()


@pytest.mark.filterwarnings("ignore:.*each size that has come:rockmate.BudgetWarning")
def test_steps_that_are_not_worth_a_plan_run_little_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where masks alone take more than such a step may keep, not each read of the backward runs all layers."""
    ran = 0

    def counted(reruns: Reruns, ops: Collection[int], wanted: Collection[int]) -> None:
        nonlocal ran
        ran += len(ops)
        run(reruns, ops, wanted)  # type: ignore[arg-type]

    run = Reruns.run
    monkeypatch.setattr(Reruns, "run", counted)
    torch.manual_seed(0)
    model, x = Drops(), randn(256, 32, seed=0)
    handle = attach(model, 600000, costs="flops", cache=False)
    for k in range(1, MOST_ALONE + 9):
        ran, boxes = 0, torch.zeros(k)
        if k < MOST_ALONE + 8:
            model(x, boxes).backward()
            assert (handle.plan is not None) == (k <= MOST_ALONE)
            assert handle.plan is not None or ran <= 5 * 36 + 3 * k  # the layers a few times, and each box once
        else:
            assert measure_peak(lambda boxes=boxes: model(x, boxes).backward()) <= handle.budget  # type: ignore[misc]
        model.zero_grad()


def test_sizes_of_the_same_operations_are_planned_at_once() -> None:
    """However many come: no loop is over them."""
    torch.manual_seed(0)
    model = Sequence(nn.LSTM, "counts")
    handle = attach(model, "90%", costs="flops", cache=False)
    for length in (12, 3, 4, 5, 6, 7, 8, 9):
        model(randn(4, length, 24, seed=length)).square().mean().backward()
        model.zero_grad()
        assert handle.plan is not None


def test_a_followed_step_that_fits_no_budget_is_searched_once_and_made_no_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems, programs = [], []
    staged, made = plan.recompute_all, known.program_of
    monkeypatch.setattr(plan, "recompute_all", lambda p: problems.append(p) or staged(p))
    monkeypatch.setattr(known, "program_of", lambda *given: programs.append(given) or made(*given))
    plan.find_least.cache_clear()
    model = Sequence(nn.LSTM, "packed")
    attach(model, "4 KiB", costs="flops", cache=False)
    model(randn(4, 12, 24, seed=0)).square().mean().backward()
    with pytest.raises(InfeasibleBudgetError):
        model(randn(4, 12, 24, seed=0))
    assert len(problems) <= 2, "of the step, and of the step whose outputs are held"
    assert not programs
