"""rotor trains as eager mode does, bit for bit, within its limit; every kind of operation is run."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import in_turn
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from rockmate import InfeasibleBudgetError, InputError, measure_peak, rotor
from rockmate.demo.gpt import Layer
from rockmate.rotor.models.utils import ReLUAtEnd
from solvers.rotor.plans import ALGORITHMS, revolve_sequence, segments_sequence


def block(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.3))


def convolutional() -> nn.Sequential:
    ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), block(8), nn.Sequential(block(8), block(8)), *ends)


def residual() -> nn.Sequential:
    return rotor.models.resnet18(num_classes=5)


def dense() -> nn.Sequential:
    return rotor.models.DenseNet(8, (3, 3), 16, drop_rate=0.2, num_classes=5)


def layers() -> nn.Sequential:
    return nn.Sequential(*(Layer(32, 4, 24, 0.1) for _ in range(4)))


class Pair(nn.Module):
    """A tuple to a tuple, the second shorter by one gradient path."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = pair
        return F.dropout(torch.tanh(self.first(x)), 0.2), torch.tanh(self.second(y) + x)


def images() -> torch.Tensor:
    return torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def larger_images() -> torch.Tensor:
    return torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def hidden() -> torch.Tensor:
    return torch.randn(8, 24, 32, generator=torch.Generator().manual_seed(1))


def features() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


MODELS = {
    "convolutional": (convolutional, images),
    "resnet": (residual, larger_images),
    "densenet": (dense, images),
    "transformer": (layers, hidden),
}


def train(model: nn.Module, eager: nn.Module, x: Any, steps: int = 2) -> list[Any]:
    """What steps of SGD leave: outputs, losses, gradients, parameters, buffers, the generator."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: list[Any] = []
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = torch.stack([t.square().mean() for t in outputs]).sum()
        loss.backward()
        found += [t.detach() for t in outputs] + [p.grad.clone() for p in eager.parameters() if p.grad is not None]
        optimizer.step()
    return [*found, *eager.state_dict().values(), torch.get_rng_state()]


def assert_same(ours: list[Any], eager: list[Any]) -> None:
    assert len(ours) == len(eager)
    for k, (a, b) in enumerate(zip(ours, eager, strict=True)):
        assert torch.equal(a, b), k


def step(model: nn.Module, x: Any) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_eager_within_the_limit(name: str) -> None:
    make, sample = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), sample()
    plain = copy.deepcopy(model)
    step(plain, x)
    full = measure_peak(lambda: step(plain, x))
    parameters = sum(p.nbytes for p in model.parameters())
    before = copy.deepcopy(model.state_dict())
    chk = rotor.Checkpointable(model, x, costs="flops")
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    recomputed = set()
    for share, algo in ((0.8, "persistent"), (0.6, "rotor"), (0.5, "persistent")):
        limit = int(parameters + share * (full - parameters))
        try:
            chk.compute_sequence(limit, algo=algo)
        except rotor.InfeasibleBudgetError:
            continue
        eager = copy.deepcopy(plain)
        for m in (model, eager):
            m.load_state_dict(before)
        assert_same(train(chk, model, x), train(eager, eager, x))
        measured = measure_peak(lambda: step(chk, x))
        assert measured <= limit
        assert measured <= chk.get_expected_memory() + 64  # the loss's own numbers
        recomputed |= {type(op).__name__ for op in chk.sequence}
    assert {"Fe", "Fck", "B", "Loss"} <= recomputed


@pytest.mark.parametrize("name", ["convolutional", "transformer"])
def test_the_prediction_is_the_measured_peak(name: str) -> None:
    """Where the peak lies in the chain, not in the loss, it is met but for the loss's value and gradient."""
    make, sample = MODELS[name]
    model, x = make(), sample()
    chk = rotor.Checkpointable(model, x, 2**30, costs="flops")
    assert chk.chain is not None
    for segments in (2, 4):
        chk.sequence = segments_sequence(chk.chain, segments)
        step(chk, x)
        kept = sum(stage.state + sum(size for _, size in stage.draws) for stage in chk.chain.stages)
        # A value that the next backward drops early is counted to the end: one value at most.
        slack = max(chk.chain.value_bytes) + kept + 64
        assert 0 <= chk.get_expected_memory() + 64 - measure_peak(lambda: step(chk, x)) <= slack


def test_the_last_layer_may_run_again() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh()))),
        torch.randn(256, 64),
    )
    eager = copy.deepcopy(model)
    chk = rotor.Checkpointable(model, x, 2**30, costs="flops", loss_tmp_memory_usage=0)
    for text in (
        "Fe_0, Fe_1, Fe_2, Fe_3, Fe_4, Fck_5, Loss, Fe_5, B_5, B_4, B_3, B_2, B_1, B_0",
        "Fck_0, Fn_1, Fn_2, Fn_3, Fn_4, Fn_5, Loss, Fe_0, Fe_1, Fe_2, Fe_3, Fe_4, Fe_5, B_5, B_4, B_3, B_2, B_1, B_0",
    ):
        chk.sequence = rotor.Sequence.parse(text)
        model.load_state_dict(eager.state_dict())
        assert_same(train(chk, model, x, 1), train(other := copy.deepcopy(eager), other, x, 1))
        assert measure_peak(lambda: step(chk, x)) <= chk.get_expected_memory() + 64


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_algorithm_runs(algo: str) -> None:
    torch.manual_seed(0)
    model, x = convolutional(), images()
    eager = copy.deepcopy(model)
    chk = rotor.Checkpointable(model, x, costs="flops")
    chk.compute_sequence(2**22 if algo != "no_checkpoint" else 2**30, algo=algo)
    assert_same(train(chk, model, x), train(eager, eager, x))


def test_tuples_in_and_between() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Pair() for _ in range(5)))
    eager = copy.deepcopy(model)
    x = (torch.randn(64, 16, requires_grad=True), torch.randn(64, 16, requires_grad=True))
    chk = rotor.Checkpointable(model, x, costs="flops")
    for segments in (2, 3):
        chk.build_chain(10**6)
        chk.sequence = segments_sequence(chk.chain, segments)
        results = []
        model.load_state_dict(eager.state_dict())
        for m in (chk, eager):
            leaves = tuple(t.detach().clone().requires_grad_() for t in x)
            results.append([*train(m, model if m is chk else eager, leaves, 1), *(t.grad for t in leaves)])
        assert_same(*results)


@dataclass
class Two:
    h: torch.Tensor
    skip: torch.Tensor


class Bag:
    __slots__ = ("h", "seen")


class Passes(nn.Module):
    """``way``: in what two tensors pass from layer to layer, made anew or changed."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        if self.way == "a list that grows":
            x = [x, x.sin()] if isinstance(x, torch.Tensor) else x
            x.append(F.dropout(torch.tanh(self.linear(x[-1])), 0.2) + x[-2])
            return x
        if self.way == "a dict that changes":
            x = {"h": x} if isinstance(x, torch.Tensor) else x
            x["skip"], x["h"] = x["h"].cos(), torch.tanh(self.linear(x["h"])) * x.get("skip", 1)
            return x
        if self.way == "an object that changes":
            bag = Bag() if isinstance(x, torch.Tensor) else x
            bag.h, bag.seen = (x, [x]) if isinstance(x, torch.Tensor) else (x.h, x.seen)
            bag.h = F.dropout(torch.tanh(self.linear(bag.h)), 0.2) + bag.seen[0]
            bag.seen.append(bag.h)
            return bag
        two = Two(x, x) if isinstance(x, torch.Tensor) else x
        return Two(torch.tanh(self.linear(two.h)) * two.skip, two.h.sin())


class Joins(nn.Module):
    def forward(self, x: Any) -> torch.Tensor:
        parts = x if isinstance(x, list) else [*x.values()] if isinstance(x, dict) else [x.h, *getattr(x, "seen", [])]
        return torch.stack(parts).prod(0)


@pytest.mark.parametrize("way", ["a list that grows", "a dict that changes", "an object that changes", "a dataclass"])
def test_objects_between_and_containers_that_layers_change(way: str) -> None:
    """Each run gets containers and objects of its own, which it may change, as eager mode's only run does."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Passes(way) for _ in range(4)), Joins())
    eager, x = copy.deepcopy(model), torch.randn(64, 16)
    chk = rotor.Checkpointable(model, x, costs="flops")
    with pytest.raises(InfeasibleBudgetError) as error:
        chk.compute_sequence(100)
    chk.compute_sequence(error.value.min_budget)
    assert any(isinstance(operation, rotor.Fck) for operation in chk.sequence)
    assert_same(train(chk, model, x), train(eager, eager, x))
    model.zero_grad()
    assert measure_peak(lambda: step(chk, x)) <= chk.mem_limit


def test_objects_in_and_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Passes("a dataclass") for _ in range(4)))
    eager = copy.deepcopy(model)
    results = []
    for run, owner in ((checkpointed(model, Two(features(), features()), 2), model), (eager, eager)):
        given = Two(features().requires_grad_(), features())
        made = run(given)
        (made.h * made.skip).sum().backward()
        results.append([made.h, given.h.grad, *(p.grad for p in owner.parameters())])
    assert_same(*results)


@pytest.mark.parametrize("hide", [lambda x: iter([x]), lambda x: lambda: x, lambda x: {x}])
def test_what_hides_tensors_between_layers_is_refused(hide: Callable[[torch.Tensor], Any]) -> None:
    class Hides(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return hide(x)

    with pytest.raises(
        InputError, match=r"layer 1 \(1\) returns what cannot be given to a second run: .* hides tensors"
    ):
        rotor.Checkpointable(nn.Sequential(nn.Linear(16, 16), Hides(), nn.Identity()), torch.randn(4, 16))


def checkpointed(model: nn.Sequential, x: Any, segments: int = 3) -> rotor.Checkpointable:
    chk = rotor.Checkpointable(model, x, 2**30, costs="flops")
    chk.sequence = segments_sequence(chk.chain, segments)
    return chk


def test_two_forwards_before_two_backwards_and_hooks() -> None:
    torch.manual_seed(0)
    model, x = convolutional(), images()
    eager = copy.deepcopy(model)
    chk = checkpointed(model, x)
    found = []
    for m, owner in ((chk, model), (eager, eager)):
        torch.manual_seed(1)
        order: list[str] = []
        for n, p in owner.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, n=n, order=order: order.append(n))
        first, second = m(x).square().mean(), m(2 * x).square().mean()
        first.backward()
        second.backward()
        found.append(([p.grad for p in owner.parameters()], list(owner.buffers()), order))
    assert_same(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


def test_autograd_grad_retained_graphs_and_tied_weights() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(16, 16)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), shared, nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(32, 16, requires_grad=True)
    chk = checkpointed(model, x)
    wanted = [x, *model.parameters()]
    ours, eager = chk(x).square().mean(), model(x).square().mean()
    assert_same(
        list(torch.autograd.grad(ours, [wanted[-1]], retain_graph=True)),
        list(torch.autograd.grad(eager, [wanted[-1]], retain_graph=True)),
    )
    for _ in range(2):
        a, b = (torch.autograd.grad(loss, wanted, retain_graph=True) for loss in (ours, eager))
        assert_same(list(a), list(b))
    a, b = (torch.autograd.grad(loss, x, create_graph=True)[0].square().sum() for loss in (ours, eager))
    assert_same(list(torch.autograd.grad(a, wanted[1:])), list(torch.autograd.grad(b, wanted[1:])))


@pytest.mark.parametrize(("names", "transposed"), in_turn(["own", "tied", "of another"], [True, False]))
def test_gradients_of_a_shared_weight_are_added_up_within_the_limit(names: str, transposed: bool) -> None:
    """Autograd holds the first, and adds the second one in the memory of a third."""

    class Layer(nn.Module):
        def __init__(self, weight: torch.Tensor, registers: bool) -> None:
            super().__init__()
            self.weights = [weight]
            if registers:
                self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = getattr(self, "weight", self.weights[0])
            return torch.tanh(x @ (weight.t() if transposed else weight))

    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64) / 8)
    layer = Layer(weight, True)
    other = layer if names == "own" else Layer(weight, names == "tied")
    model, x = nn.Sequential(layer, nn.Tanh(), other, nn.Tanh()), torch.randn(4, 64)
    chk = rotor.Checkpointable(model, x, costs="flops")
    with pytest.raises(InfeasibleBudgetError) as error:
        chk.compute_sequence(100)
    for limit in (error.value.min_budget, 2**20):
        chk.compute_sequence(limit)
        step(chk, x)
        chk.zero_grad()
        assert measure_peak(lambda: step(chk, x)) <= chk.get_expected_memory() + 64


def test_a_second_backward_through_random_layers_is_refused() -> None:
    model, x = convolutional(), images()
    loss = checkpointed(model, x)(x).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="random state"):
        loss.backward()


def test_parameters_changed_between_forward_and_backward_are_refused() -> None:
    model, x = convolutional(), images()
    loss = checkpointed(model, x)(x).square().mean()
    with torch.no_grad():
        model[1][0].bias.add_(1)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        loss.backward()


class Counter(nn.Module):
    """Reads a buffer that it changes, and assigns another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.tanh(self.layer(x) * self.calls + self.mean)


def test_buffers_that_are_read_and_changed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Counter() for _ in range(5)))
    eager = copy.deepcopy(model)
    x = torch.randn(16, 8)
    chk = checkpointed(model, x, 2)
    assert_same(train(chk, model, x), train(eager, eager, x))
    assert [m.calls.item() for m in model] == [2] * 5


def test_autocast_is_restored() -> None:
    torch.manual_seed(0)
    model, x = layers(), hidden()
    eager = copy.deepcopy(model)

    def run(m: nn.Module) -> torch.Tensor:
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m(x)
        y.float().square().mean().backward()
        return y

    with torch.autocast("cpu", dtype=torch.bfloat16):
        chk = checkpointed(model, x)
    assert torch.equal(run(chk), run(eager))
    assert_same([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross entropy": F.cross_entropy,
    "mean square": lambda y, _: y.square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_room_for_a_loss_on_outputs_of_low_precision(name: str) -> None:
    """It works on float32 copies, and these count; the peak is at the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 8), *(nn.Tanh() for _ in range(8)), nn.Linear(8, 512))
    x, target = torch.randn(64, 32), torch.zeros(64, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(InfeasibleBudgetError) as error:
            rotor.Checkpointable(model, x, 1000)
        limit = error.value.min_budget
        chk = rotor.Checkpointable(model, x, limit)

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = chk(x).float()
        LOSSES[name](y, target).backward()

    step()
    model.zero_grad()
    assert measure_peak(step, "cpu") <= limit


def test_a_dropped_graph_releases_its_checkpoints_at_once() -> None:
    model, x = convolutional(), images()
    chk = checkpointed(model, x)
    gc.collect()
    gc.disable()
    try:
        held: list[weakref.ref[Any]] = []
        first = rotor.checkpointable.Call.forward

        def spied(call: Any, x: Any) -> Any:
            held.append(weakref.ref(call))
            return first(call, x)

        rotor.checkpointable.Call.forward = spied  # type: ignore[method-assign]
        try:
            y = chk(x)
        finally:
            rotor.checkpointable.Call.forward = first  # type: ignore[method-assign]
        assert held[0]() is not None
        del y
        assert held[0]() is None
    finally:
        gc.enable()


def test_without_random_states_layers_draw_again() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 4)), torch.ones(64, 8)
    gradients = []
    for preserve in (True, False):
        torch.manual_seed(0)
        chk = rotor.Checkpointable(model, x, 2**30, costs="flops", preserve_rng_state=preserve)
        chk.sequence = segments_sequence(chk.chain, 2)
        torch.manual_seed(1)
        model.zero_grad()
        chk(x).square().mean().backward()
        gradients.append(model[0].weight.grad)
    torch.manual_seed(1)
    model.zero_grad()
    model(x).square().mean().backward()
    assert torch.equal(gradients[0], model[0].weight.grad)
    assert not torch.equal(gradients[1], model[0].weight.grad)


class Noise(nn.Module):
    """Draws from the generator that it is given, from the default one otherwise."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(64, 64), generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() * torch.rand(x.shape, generator=self.generator)


def noisy(kinds: str) -> nn.Sequential:
    """A layer for each letter: d draws from the default generator, a and b from their own, l is linear."""
    torch.manual_seed(0)
    own = {"a": torch.Generator(), "b": torch.Generator()}
    return nn.Sequential(*(nn.Linear(64, 64) if kind == "l" else Noise(own.get(kind)) for kind in kinds))


@pytest.mark.parametrize("kinds", ["dddddddd", "ldlddlld", "abdabdab", "aabblldd", "dallaaad", "bdbdbdba"])
def test_random_layers_in_any_sequence(kinds: str) -> None:
    """Layers that run again after one another draw from one state, which the first of them keeps."""
    model, x = noisy(kinds), torch.ones(16, 64)
    generators = list({id(m.generator): m.generator for m in model if isinstance(m, Noise) and m.generator}.values())

    def states(run: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        for k, generator in enumerate(generators):
            generator.manual_seed(k)
        model.zero_grad()
        run(x).square().mean().backward()
        ends = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
        return [*(p.grad.clone() for p in model.parameters() if p.grad is not None), *ends]

    eager = states(model)
    chk = rotor.Checkpointable(model, x, 2**30, costs="flops")
    assert chk.chain is not None
    sequences = [segments_sequence(chk.chain, n) for n in range(1, 9)]
    for chk.sequence in (*sequences, *(revolve_sequence(chk.chain, c) for c in range(7))):
        assert_same(states(chk), eager)
        assert measure_peak(lambda: step(chk, x)) <= chk.get_expected_memory() + 64


class Forked(nn.Module):
    """Draws from the state of its caller, which it puts back; or it sets a seed, and always leaves the same state."""

    def __init__(self, seeds: bool) -> None:
        super().__init__()
        self.linear, self.seeds = nn.Linear(64, 64), seeds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seeds:
            torch.manual_seed(5)
            return F.dropout(self.linear(x), 0.5)
        with torch.random.fork_rng():
            return F.dropout(self.linear(x), 0.5)


@pytest.mark.parametrize("kinds", ["ldfldlf", "sdfsls", "ffffl", "lslsl"])
def test_layers_that_leave_no_trace_in_the_random_state(kinds: str) -> None:
    layers = {"l": lambda: nn.Linear(64, 64), "d": Noise, "f": lambda: Forked(False), "s": lambda: Forked(True)}
    model, x = nn.Sequential(*(layers[kind]() for kind in kinds)), torch.ones(16, 64)
    torch.manual_seed(5)
    F.dropout(x)  # the state that a layer that sets the seed leaves
    first = rotor.Checkpointable(model, x, 2**30, costs="flops")
    for chk in (first, copy.deepcopy(first)):
        plain = copy.deepcopy(chk.model)
        for segments in range(1, len(kinds) + 1):
            found = []
            for run, owner in ((chk, chk.model), (plain, plain)):
                torch.manual_seed(1)
                owner.zero_grad()
                y = run(x)
                torch.rand(3)
                y.square().mean().backward()
                found.append([*(p.grad.clone() for p in owner.parameters()), torch.get_rng_state()])
            assert_same(*found)
            assert chk.chain is not None
            assert measure_peak(lambda run=chk: step(run, x)) <= chk.get_expected_memory() + 64
            chk.sequence = segments_sequence(chk.chain, segments)


class Turned(nn.Module):
    """Its backward copies the gradient before it reads a saved tensor; its forward takes more than its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.repeat(1, 16).square().mean()
        return x + self.layer(x.sin() * scale).view(8, 8, 64).transpose(0, 1).reshape(64, 64)


def test_a_stage_runs_again_before_its_backward_copies_a_gradient() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Turned() for _ in range(5)), nn.Linear(64, 1)), torch.randn(64, 64)
    chk = rotor.Checkpointable(model, x, 2**30, costs="flops")
    step(chk, x)
    assert chk.chain is not None
    for segments in range(1, 6):
        chk.sequence = segments_sequence(chk.chain, segments)
        assert measure_peak(lambda: step(chk, x)) <= chk.get_expected_memory() + 64


def test_random_segments_take_what_checkpoint_sequential_takes() -> None:
    model, x = noisy("dddddddd"), torch.randn(512, 64)
    chk = rotor.Checkpointable(model, x, 2**30, costs="flops")
    assert chk.chain is not None
    for segments in (2, 3, 4):
        theirs = partial(checkpoint_sequential, model, segments, use_reentrant=False)
        chk.sequence = segments_sequence(chk.chain, segments)
        peaks = []
        for run in (chk, theirs):
            for _ in range(2):
                model.zero_grad()
                peaks.append(measure_peak(lambda run=run: run(x).square().mean().backward()))
        assert peaks[1] <= peaks[3]


class Freed(nn.Module):
    """The last thing that its backward frees is the output, if the caller does not hold that."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(16, 16, 3, padding=1), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.convolution(x.transpose(1, 2))).relu().transpose(1, 2)


def test_an_output_that_the_caller_holds_through_the_backward() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Freed()), torch.randn(3, 40, 16)
    chk = rotor.Checkpointable(model, x, costs="flops", mem_limit=2**30)

    def step() -> None:
        model.zero_grad()
        y = chk(x)
        y.square().mean().backward()

    limit = chk.get_expected_memory() + 64
    chk.compute_sequence(limit)
    step()
    assert measure_peak(step) <= limit


class Turns(nn.Module):
    """The gradient of its input is contiguous in another order of dimensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).sin().contiguous()


def test_gradients_lie_as_the_next_layer_hands_them_on() -> None:
    """The backward of a GELU copies a gradient that is not contiguous."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 64), nn.GELU(), Turns(), nn.Linear(40, 1)), torch.randn(3, 40, 16)
    chk = rotor.Checkpointable(model, x, costs="flops", mem_limit=2**30)
    for segments in (1, 2, 4):
        chk.sequence = segments_sequence(chk.chain, segments)
        step(chk, x)
        assert measure_peak(lambda: step(chk, x)) <= chk.get_expected_memory() + 64


def test_relu_at_end_is_one_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(ReLUAtEnd(nn.Linear(16, 16)) for _ in range(4)))
    eager = copy.deepcopy(model)
    x = torch.randn(8, 16)
    assert_same(train(checkpointed(model, x, 2), model, x), train(eager, eager, x))


class First(nn.Module):
    """Of a tuple; its backward reads nothing."""

    def forward(self, pair: tuple[torch.Tensor, object]) -> torch.Tensor:
        return pair[0]


def frozen_draws() -> nn.Sequential:
    """A random layer that no gradient reaches runs again for those behind it."""
    draws = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(3)]
    return nn.Sequential(draws[0].requires_grad_(False), *draws[1:])


@pytest.mark.parametrize("make", [frozen_draws, lambda: nn.Sequential(nn.LSTM(32, 32), First(), nn.Linear(32, 32))])
def test_the_least_memory_is_enough_where_a_backward_reads_nothing(make: Any) -> None:
    chk = rotor.Checkpointable(make(), costs="flops")
    x = torch.randn(64, 32)
    chk.measure(x)

    def train() -> None:
        for p in chk.parameters():
            p.grad = None
        output = chk(x)
        output.square().mean().backward()

    for algorithm in ALGORITHMS:
        with pytest.raises(InfeasibleBudgetError) as error:
            chk.compute_sequence(1000, algo=algorithm)
        chk.compute_sequence(error.value.min_budget, algo=algorithm)
        train()
        chk.zero_grad()
        assert measure_peak(train) <= error.value.min_budget, algorithm


def test_persistent_takes_what_binomial_checkpointing_takes() -> None:
    chk = rotor.Checkpointable(frozen_draws().requires_grad_(), costs="flops")
    chk.measure(torch.randn(64, 32))
    with pytest.raises(InfeasibleBudgetError) as error:
        chk.compute_sequence(1000, algo="griewank")
    chk.compute_sequence(error.value.min_budget)
    assert chk.get_expected_memory() <= error.value.min_budget


class Unread(nn.Module):
    """Two results of which the second one is read by the second one of the next layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x if isinstance(x, tuple) else (x, x)
        h = torch.tanh(self.linear(a))
        return h, torch.tanh(h * b)


@pytest.mark.parametrize("read", [0, 1])
def test_what_no_backward_reads_goes_with_its_stage(read: int) -> None:
    """What runs again filled slots that no backward empties; hooks in autograd's graph held them to its end."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Unread() for _ in range(6))), torch.randn(512, 64)
    eager = copy.deepcopy(model)
    ours = rotor.Checkpointable(model, x, costs="flops")
    ours.compute_sequence(1_572_864)

    def step(m: nn.Module) -> None:
        outputs = m(x)  # both are held through the backward
        outputs[read].sum().backward()

    assert measure_peak(lambda: step(ours)) <= ours.mem_limit
    step(eager)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


class Hooked(nn.Module):
    """Has a hook on the gradient of its input, which counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(64, 64), list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def halve(g: torch.Tensor) -> torch.Tensor:
            self.seen.append(g.numel())
            return g * 0.5

        if x.requires_grad:
            x.register_hook(halve)
        return torch.tanh(self.linear(x))


def test_a_hook_on_a_layer_s_input_runs_once() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Hooked() for _ in range(6))), torch.randn(512, 64)
    eager = copy.deepcopy(model)
    ours = rotor.Checkpointable(model, x, 983_040, costs="flops")
    for layer in model:
        layer.seen.clear()
    for m in (ours, eager):
        m(x).sum().backward()
    assert [layer.seen for layer in model] == [layer.seen for layer in eager] == [[]] + 5 * [[512 * 64]]
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
