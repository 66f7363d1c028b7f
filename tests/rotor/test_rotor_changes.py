"""rotor where something changes: between forward and backward, after measuring, or beside what autograd saves."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from rockmate import BudgetWarning, InfeasibleBudgetError, InputError, measure_peak, rotor
from rockmate.rotor.models.utils import AtomicSequential
from solvers.rotor.ops import Sequence


def model(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.Tanh())))


def x(rows: int = 256) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(0))


def least(m: nn.Module, sample: Any) -> rotor.Checkpointable:
    """With the smallest limit that can be met."""
    chk = rotor.Checkpointable(m, sample, costs="flops")
    with pytest.raises(InfeasibleBudgetError) as error:
        chk.compute_sequence(100)
    chk.compute_sequence(error.value.min_budget)
    return chk


def same(ours: Any, eager: Any) -> bool:
    return all(map(torch.equal, ours, eager))


def assert_in_limit(chk: rotor.Checkpointable, step: Callable[[], None]) -> None:
    step()
    chk.zero_grad()
    assert chk.mem_limit is not None
    assert measure_peak(step) <= chk.mem_limit


def test_statistics_of_fake_quantizations_change_once() -> None:
    """They are written by an operation that leaves version counters alone, and read by the same one."""
    torch.manual_seed(0)
    layers = (layer for _ in range(4) for layer in (nn.Linear(32, 32), FusedMovingAvgObsFakeQuantize(), nn.Tanh()))
    m = nn.Sequential(*layers)
    eager = copy.deepcopy(m)
    chk = least(m, x())
    for k in (1, 1, 3):
        for run in (chk, eager):
            run.zero_grad()
            run(k * x()).sum().backward()
        assert same([p.grad for p in m.parameters()], [p.grad for p in eager.parameters()])
        assert same(m.buffers(), eager.buffers())


class Reads(nn.Module):
    """A layer that computes with a weight of another one."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.others = [weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.others[0].t())


def test_gradients_of_weights_that_are_not_the_layer_s_own() -> None:
    """Measuring adds nothing to them, also where they have some already; and what they take counts."""

    def made() -> tuple[nn.Sequential, torch.Tensor]:
        torch.manual_seed(0)
        first, apart = nn.Linear(32, 32), torch.randn(32, 32, requires_grad=True)
        return nn.Sequential(first, nn.Tanh(), Reads(first.weight), nn.Linear(32, 32), Reads(apart)), apart

    (m, apart), (eager, theirs) = made(), made()
    chk = rotor.Checkpointable(m, mem_limit=2**20, costs="flops")
    for rows in (8, 16, 32):  # each call is measured, as more rows may need more
        for run in (chk, eager):
            run(x(rows)).sum().backward()
    assert same([p.grad for p in (*m.parameters(), apart)], [p.grad for p in (*eager.parameters(), theirs)])
    chk, inputs = least(m, x(8)), x(8)
    chk(inputs).sum().backward()
    chk.zero_grad()
    apart.grad = None
    assert chk.mem_limit is not None
    assert measure_peak(lambda: chk(inputs).sum().backward()) <= chk.mem_limit


def test_parameters_of_the_forward_are_those_of_the_backward() -> None:
    """Of functional_call, and where layers get other parameters before the backward."""
    m = model()
    eager, chk = copy.deepcopy(m), least(m, x())
    values = {name: (p.detach() + 0.1).requires_grad_() for name, p in m.named_parameters()}
    ours = functional_call(chk, {f"model.{name}": p for name, p in values.items()}, (x(),))
    wanted = functional_call(eager, values, (x(),))
    parameters = list(values.values())
    assert same(torch.autograd.grad(ours.sum(), parameters), torch.autograd.grad(wanted.sum(), parameters))
    found = []
    for run, owner in ((chk, m), (eager, eager)):
        parameters = list(owner.parameters())
        loss = run(x()).sum()
        owner.load_state_dict({n: 2 * p for n, p in owner.state_dict().items()}, assign=True)
        found.append(torch.autograd.grad(loss, parameters))
    assert same(*found)


def test_an_input_changed_before_the_backward_is_refused() -> None:
    for part in (0, 1):  # whether the backward of the first layer reads its input
        chk = least(nn.Sequential(*([nn.Flatten(), nn.Tanh()] * part), *model()), x())
        inputs = x()
        loss = chk(inputs).sum()
        inputs.zero_()
        with pytest.raises(RuntimeError, match=r"the input of \w+ was changed in place.*change a copy"):
            loss.backward()


class Shifted(nn.Module):
    """Its backward reads the output, and not the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("shift", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) + self.shift)


def test_a_buffer_changed_before_the_backward_is_refused() -> None:
    m = nn.Sequential(*(Shifted() for _ in range(4)))
    loss = least(m, x())(x()).sum()
    m[1].shift.zero_()
    with pytest.raises(RuntimeError, match="shift of Shifted was changed in place"):
        loss.backward()


def test_a_buffer_replaced_before_the_backward() -> None:
    m = nn.Sequential(*(Shifted() for _ in range(4)))
    eager = copy.deepcopy(m)
    found = []
    for run, owner in ((least(m, x()), m), (eager, eager)):
        loss = run(x()).sum()
        for layer in owner:
            layer.shift = torch.zeros(32)
        found.append(torch.autograd.grad(loss, list(owner.parameters())))
    assert same(*found)


def test_stages_that_autograd_kept_can_run_again() -> None:
    """A second backward runs the chain from its start, through layers that ran by Fe."""
    for make in (model, lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), *model())):
        m = make()
        eager = copy.deepcopy(m)
        chk = rotor.Checkpointable(m, x(), 2**30, costs="flops")
        end = len(m) - 1
        kept = ", ".join(f"Fe_{i}" for i in range(end))
        backward = ", ".join(f"B_{i}" for i in reversed(range(end)))
        chk.sequence = rotor.Sequence.parse(f"{kept}, Fck_{end}, Loss, Fe_{end}, B_{end}, {backward}")
        for run in (chk, eager):
            loss = run(x()).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        assert same([p.grad for p in m.parameters()], [p.grad for p in eager.parameters()])
        assert same(m.buffers(), eager.buffers())


def test_a_random_stage_that_autograd_kept_cannot() -> None:
    m = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Tanh(), nn.Tanh())
    chk = rotor.Checkpointable(m, x(), 2**30, costs="flops")
    chk.sequence = rotor.Sequence.parse("Fe_0, Fe_1, Fe_2, Fck_3, Loss, Fe_3, B_3, B_2, B_1, B_0")
    loss = chk(x()).sum()
    loss.backward(retain_graph=True)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="a second backward needs Dropout to run again"):
        loss.backward()
    assert torch.equal(state, torch.get_rng_state())


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(32, 32), torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) * torch.rand(x.shape, generator=self.generator)


def test_generators_of_layers() -> None:
    m = nn.Sequential(*(Noise() for _ in range(5)))
    chk = least(m, x())
    found = []
    for run in (chk, m):
        m.zero_grad()
        for layer in m:
            layer.generator.manual_seed(1)
        run(x()).sum().backward()
        found.append([*(p.grad for p in m.parameters()), *(layer.generator.get_state() for layer in m)])
    assert same(*found)


def test_generators_that_are_replaced_before_the_backward() -> None:
    m = nn.Sequential(*(Noise() for _ in range(5)))
    chk = least(m, x())
    found = []
    for run in (chk, m):
        m.zero_grad()
        for k, layer in enumerate(m):
            layer.generator = torch.Generator().manual_seed(k)
        loss = run(x()).sum()
        for layer in m:
            layer.generator = torch.Generator().manual_seed(9)
        loss.backward()
        found.append([*(p.grad for p in m.parameters()), *(layer.generator.get_state() for layer in m)])
    assert same(*found)


class Scales(nn.Module):
    """Sets a number of the next such layer as it runs, and reads its own."""

    def __init__(self, following: list[nn.Module]) -> None:
        super().__init__()
        self.layer, self.factor, self.following = nn.Linear(32, 32), 1.0, following

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.following:
            layer.factor = self.factor + 1
        return torch.tanh(self.layer(x) * self.factor)


def test_numbers_that_an_earlier_layer_sets_as_it_runs() -> None:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers.insert(0, Scales(layers[:1]))
    m = nn.Sequential(*layers)
    eager = copy.deepcopy(m)
    chk = least(m, x())
    found = []
    for run, owner in ((chk, m), (eager, eager)):
        for layer in owner:
            layer.factor = 0.5
        loss = run(x()).square().sum()
        loss.backward()
        found.append([p.grad for p in owner.parameters()] + [torch.tensor(layer.factor) for layer in owner])
    assert same(*found)


class Draws(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * self.draw()


def test_layers_that_draw_beside_torch_are_refused() -> None:
    for draw, library in ((random.random, "Python's"), (lambda: float(numpy.random.rand()), "NumPy's")):
        m = nn.Sequential(nn.Linear(32, 32), Draws(draw))
        with pytest.raises(InputError, match=rf"layer 1 \(1\) draws from {library} random module.*torch\.rand"):
            rotor.Checkpointable(m, x(), 2**30)
        rotor.Checkpointable(m, x(), 2**30, preserve_rng_state=False)


class Hoard(torch.autograd.Function):
    """Keeps a tensor where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.factor = 2 * x
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.factor


class Hoarding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Hoard.apply(x)
        return y


def test_what_custom_functions_keep_counts() -> None:
    inputs = x()
    chk = least(nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(32, 32), Hoarding()))), inputs)
    assert_in_limit(chk, lambda: F.l1_loss(chk(inputs), inputs).backward())


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_copies_of_weights_that_autocast_caches_count() -> None:
    torch.manual_seed(0)
    m = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())))
    inputs, target = torch.ones(256, 64), torch.zeros(256, 64)
    with autocast():
        chk = least(m, inputs)

    def step() -> None:
        with autocast():
            y = chk(inputs)
        F.l1_loss(y.float(), target).backward()

    assert_in_limit(chk, step)


class Loop(nn.Module):
    """Reads one weight many times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.tanh(self.layer(x))
        return x


@pytest.mark.parametrize("within", [False, True])
def test_a_weight_that_is_read_many_times_is_cast_once_in_a_second_run(within: bool) -> None:
    """As in the forward, also where the backward runs out of autocast."""
    torch.manual_seed(0)
    m = nn.Sequential(*(Loop() for _ in range(4)))
    eager, inputs, target = copy.deepcopy(m), torch.ones(4, 64), torch.zeros(4, 64)
    with autocast():
        chk = least(m, inputs)

    def step(run: nn.Module = chk) -> None:
        with autocast():
            loss = F.l1_loss(run(inputs).float(), target)
            if within:
                loss.backward()
        if not within:
            loss.backward()

    step()
    step(eager)
    assert same((p.grad for p in m.parameters()), (p.grad for p in eager.parameters()))
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
    if not within:  # there, the copies of the forward stay to the end
        chk.zero_grad()
        assert_in_limit(chk, step)


def test_what_is_passed_goes_when_the_next_layer_has_run() -> None:
    """Its backward reads its output only, so nobody reads its input again."""
    m = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 256), nn.Tanh())
    chk = rotor.Checkpointable(m, x(), 2**30, costs="flops")
    chk.sequence = rotor.Sequence.parse("Fck_0, Fe_1, Fe_2, Fe_3, Fe_4, Fe_5, Loss, B_5, B_4, B_3, B_2, B_1, Fe_0, B_0")
    held: list[torch.Tensor] = []
    assert measure_peak(lambda: held.append(chk(x()))) <= max(m.peak for m in chk.walked().moments[:6]) + x().nbytes


def test_a_call_that_may_need_more_is_measured_anew() -> None:
    def thawed(m: nn.Sequential) -> None:
        m.requires_grad_(True)

    def exchanged(m: nn.Sequential) -> None:
        m[3] = nn.Sequential(nn.GELU(), nn.Linear(32, 32))

    def training(m: nn.Sequential) -> None:
        m[5].train()

    for change in (thawed, exchanged, training):
        m = model()
        m[5] = nn.Dropout(0.5).eval()
        if change is thawed:
            m[:8].requires_grad_(False)
        chk = least(m, x())
        before, limit = chk.chain, chk.mem_limit
        change(m)
        eager = copy.deepcopy(m)
        chk.mem_limit = 2 * limit
        for run in (chk, eager):
            torch.manual_seed(0)
            run(x()).sum().backward()
        assert chk.chain is not before
        assert same([p.grad for p in m.parameters()], [p.grad for p in eager.parameters()])


def test_layers_keep_their_modes() -> None:
    m = model()
    m[1].eval()
    chk = rotor.Checkpointable(m)
    assert chk.training and not m[1].training and not rotor.Checkpointable(m.eval()).training


def test_another_autocast_is_measured_anew() -> None:
    chk = rotor.Checkpointable(model(), x(), 2**20, costs="flops")
    chains = [chk.chain]
    for _ in range(2):
        with autocast():
            chk(x())
        chains.append(chk.chain)
    assert chains[0] is not chains[1] is chains[2]


def test_a_call_that_needs_less_is_not() -> None:
    m = model()
    with torch.no_grad():
        chk = rotor.Checkpointable(m, x(), 2**20, costs="flops")
    chain = chk.chain
    m[0].requires_grad_(False)
    chk(x()).sum().backward()
    copied = copy.deepcopy(chk)
    copied(x()[:5]).sum().backward()
    assert chk.chain is chain and copied.sequence is not None and copied.sequence == chk.sequence


def test_situations_that_alternate_are_measured_once_each() -> None:
    """As where two models train each other, each of them frozen in turn."""
    m = model()
    eager, chk = copy.deepcopy(m), rotor.Checkpointable(m, x(), 2**20, costs="flops")
    chains = []
    for frozen in (False, True) * 3:
        grads = []
        for run, owner in ((chk, m), (eager, eager)):
            owner.requires_grad_(not frozen)
            inputs = x().requires_grad_(frozen)
            run(inputs).sum().backward()
            grads.append([inputs.grad] if frozen else [p.grad for p in owner.parameters()])
        assert same(*grads)
        chains.append(chk.chain)
    assert chains[0] is chains[2] is chains[4] is not chains[1] is chains[3] is chains[5]
    chk.compute_sequence(2**19)
    m.requires_grad_(True)
    chk(x())
    assert chk.chain is not chains[0] and chk.mem_limit == 2**19


def test_sparse_gradients() -> None:
    m = nn.Sequential(nn.Embedding(50, 32, sparse=True), *model())
    eager, tokens = copy.deepcopy(m), torch.arange(40).view(4, 10)
    for run in (least(m, tokens), eager):
        run(tokens).sum().backward()
    assert torch.equal(m[0].weight.grad.to_dense(), eager[0].weight.grad.to_dense())
    assert same([p.grad for p in m[1:].parameters()], [p.grad for p in eager[1:].parameters()])


class Sparse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to_sparse()


def test_what_has_no_memory_to_count_is_refused() -> None:
    for wrong, where in (
        (lambda: rotor.Checkpointable(model(), x().to("meta")), "the sample is a tensor on the meta device"),
        (lambda: rotor.Checkpointable(model().to("meta"), x()), "a parameter is a tensor on the meta device"),
        (lambda: rotor.Checkpointable(model(), x().to_sparse()), r"the sample is a tensor of the layout torch\.sparse"),
        (lambda: rotor.Checkpointable(nn.Sequential(Sparse()), x()), r"layer 0 \(0\) returns a tensor of the layout"),
    ):
        with pytest.raises(InputError, match=where):
            wrong()


def test_a_checkpointable_within_another_is_refused() -> None:
    inner = rotor.Checkpointable(model(), mem_limit=2**20)
    with pytest.raises(InputError, match="layer 1 is or has a Checkpointable"):
        rotor.Checkpointable(nn.Sequential(nn.Linear(32, 32), inner), x())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_layers_of_torchscript_are_refused() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.Tanh()))
    for layer in (scripted, AtomicSequential(nn.Linear(32, 32), scripted)):
        with pytest.raises(InputError, match=r"layer 1 is or has a module of TorchScript.*Leave it out"):
            rotor.Checkpointable(nn.Sequential(nn.Linear(32, 32), layer), x())


@pytest.mark.parametrize("wrong", [1.5, "500", None])
def test_numbers_that_are_none(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"mem_slots is .*: give a whole number"):
        rotor.Checkpointable(model(), mem_slots=wrong)
    with pytest.raises(InputError, match=r"verbosity is 'a': give a whole number"):
        rotor.Checkpointable(nn.Sequential(nn.Linear(4, 4)), verbosity="a")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"loss_tmp_memory_usage is .*: give a whole number"):
        rotor.Checkpointable(model(), loss_tmp_memory_usage=wrong)
    with pytest.raises(InputError, match=r"loss_tmp_memory_usage is -1: bytes cannot be negative"):
        rotor.Checkpointable(model(), loss_tmp_memory_usage=-1)


def test_under_transforms_the_model_itself_runs() -> None:
    m = model()
    chk = least(m, x())
    with pytest.warns(BudgetWarning, match="the model itself runs"):
        ours = torch.func.grad(lambda inputs: chk(inputs).sum())(x())
    assert torch.equal(ours, torch.func.grad(lambda inputs: m(inputs).sum())(x()))


def test_layers_that_get_their_parameters_in_the_first_call() -> None:
    """They draw them there, as in eager mode."""

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.LazyLinear(32), nn.Tanh(), nn.LazyLinear(8))

    m, eager = made(), made()
    chk = rotor.Checkpointable(m, mem_limit=2**20, costs="flops")
    with pytest.raises(InputError, match=r"0\.weight of the model has no shape yet"):
        chk.measure(x())
    for _ in range(2):
        torch.manual_seed(1)
        eager(x()).sum().backward()
        state = torch.get_rng_state()
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sequential: layers get their sizes in this call", BudgetWarning)
            chk(x()).sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        assert same([p.grad for p in m.parameters()], [p.grad for p in eager.parameters()])
    assert chk.sequence is not None


def test_measuring_within_a_checkpoint() -> None:
    m = model()
    eager, chk = copy.deepcopy(m), rotor.Checkpointable(m, mem_limit=2**20, costs="flops")
    for run in (chk, eager):
        checkpoint(run, x().requires_grad_(), use_reentrant=False).sum().backward()
    assert same([p.grad for p in m.parameters()], [p.grad for p in eager.parameters()])


class Renormalized(nn.BatchNorm1d):
    """Reads its running statistics in training."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert self.running_var is not None
        return super().forward(input) * self.running_var.sqrt()


class OwnStatistics(nn.Module):
    """Has statistics that no class of torch's keeps, and an operation that leaves their version counters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("var", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.batch_norm(x, self.mean, self.var, training=True)
        return out * self.var.sqrt() + self.mean


@pytest.mark.parametrize("make", [Renormalized, OwnStatistics])
def test_statistics_that_a_layer_reads_are_those_of_its_first_run(make: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    args = (32,) if make is Renormalized else ()
    m = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), make(*args), nn.Tanh())))
    eager = copy.deepcopy(m)
    chk = least(m, x())
    for _ in range(3):
        for run in (chk, eager):
            run.zero_grad()
            run(x()).square().mean().backward()
        assert same((p.grad for p in m.parameters()), (p.grad for p in eager.parameters()))
        assert same(m.buffers(), eager.buffers())


@pytest.mark.parametrize("between", [nn.Identity, nn.Softplus])
def test_a_recompute_does_not_stop_before_a_saved_tensor_is_filled(between: type[nn.Module]) -> None:
    """Autograd saves the noise of a random leaky ReLU, and then its kernel draws it; where nothing is negative, it
    draws none, and fills it.
    """
    torch.manual_seed(0)
    m = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), between(), nn.RReLU())))
    eager = copy.deepcopy(m)
    chk = least(m, x())
    for run in (chk, eager):
        torch.manual_seed(1)
        run(x()).square().mean().backward()
    assert same((p.grad for p in m.parameters()), (p.grad for p in eager.parameters()))


@pytest.mark.parametrize("share", [0.84, 0.9, 0.95])
def test_such_a_recompute_leaves_nothing_but_what_is_saved(share: float) -> None:
    """It runs to its end, and what it returns goes."""
    torch.manual_seed(0)
    m, sample = nn.Sequential(nn.Linear(48, 96), nn.RReLU(), nn.Linear(96, 48)), torch.randn(1024, 48)

    def step(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        run(sample).square().mean().backward()
        m.zero_grad()

    step(m)
    limit = int(share * measure_peak(lambda: step(m)))
    chk = rotor.Checkpointable(m, sample, costs="flops", mem_limit=limit)
    step(chk)
    assert measure_peak(lambda: step(chk)) <= limit


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).unflatten(-1, (2, 16)).transpose(1, 2)
        return F.scaled_dot_product_attention(h, h, h, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize(
    ("setting", "make"),
    [
        (lambda: torch.backends.mkldnn.flags(enabled=False), lambda: nn.Conv1d(32, 32, 3, padding=1)),
        (lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), Attention),
    ],
)
def test_settings_are_those_of_the_forward(setting: Callable[[], Any], make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    m = nn.Sequential(*(layer for _ in range(4) for layer in (make(), nn.Tanh())))
    eager, sample = copy.deepcopy(m), torch.randn(4, 32, 32)
    with setting():
        chk = least(m, sample)
    for run in (chk, eager):
        with setting():
            output = run(sample)
        output.square().mean().backward()
    assert same((p.grad for p in m.parameters()), (p.grad for p in eager.parameters()))


class Skips(nn.Module):
    """Leaves a layer out at random (layer drop)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x) if torch.rand(()).item() > 0.5 else x


def test_a_layer_that_is_left_out_at_random_is_measured_on_one_path() -> None:
    torch.manual_seed(0)
    m = nn.Sequential(*(layer for _ in range(5) for layer in (Skips(), nn.Linear(32, 32), nn.Tanh())))
    eager = copy.deepcopy(m)
    chk = rotor.Checkpointable(m, x())
    with pytest.raises(InfeasibleBudgetError) as error:
        chk.compute_sequence(100)
    chk.compute_sequence(error.value.min_budget)
    for run in (chk, eager):
        torch.manual_seed(1)
        run(x()).square().mean().backward()
    gradients = [[p.grad for p in run.parameters() if p.grad is not None] for run in (m, eager)]
    assert len(gradients[0]) == len(gradients[1])
    assert same(*gradients)


def test_cached_parametrizations_run_without_a_limit() -> None:
    torch.manual_seed(0)
    m = nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), nn.Tanh()))
    )
    eager = copy.deepcopy(m)
    chk = rotor.Checkpointable(m, mem_limit="1 MB", costs="flops")
    for _ in range(2):
        with nn.utils.parametrize.cached(), pytest.warns(BudgetWarning, match="cached"):
            chk(x()).square().mean().backward()
        with nn.utils.parametrize.cached():
            eager(x()).square().mean().backward()
    assert same((p.grad for p in m.parameters()), (p.grad for p in eager.parameters()))
    chk(x()).square().mean().backward()  # measured now
    eager(x()).square().mean().backward()
    assert same((p.grad for p in m.parameters()), (p.grad for p in eager.parameters()))


class OwnGradient(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda t: t.square().sum())(x) * x


def test_a_layer_that_cannot_be_measured_is_named() -> None:
    with pytest.raises(InputError, match=r"layer 1 \(1\) runs, but not as rotor has to run it.*Leave it out"):
        rotor.Checkpointable(nn.Sequential(nn.Linear(32, 32), OwnGradient()), x())


def test_the_gradient_of_an_output_may_be_laid_out_as_the_output() -> None:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1))
    sample = torch.randn(4, 8, 24, 24).to(memory_format=torch.channels_last)
    chk = least(m, sample)

    def step() -> None:
        chk.zero_grad()
        chk(sample).square().mean().backward()

    assert_in_limit(chk, step)


def test_what_is_replaced_within_a_layer_between_calls_is_noticed() -> None:
    """The walk over its modules is that of the last call, if nothing has changed."""
    torch.manual_seed(0)
    blocks = [rotor.models.utils.AtomicSequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()) for _ in range(4)]
    m = nn.Sequential(*blocks)
    eager = copy.deepcopy(m)
    chk = least(m, x())

    def grown(run: nn.Module) -> None:
        run[1].append(nn.GELU())

    def other_layer(run: nn.Module) -> None:
        torch.manual_seed(3)
        run[2][0] = nn.Linear(32, 32)

    def other_weight(run: nn.Module) -> None:
        run[0][0].weight = nn.Parameter(run[0][0].weight.detach() * 2)

    def other_buffer(run: nn.Module) -> None:
        run[3][1].running_mean = torch.ones(32)

    for change in (lambda _: None, grown, other_layer, other_weight, other_buffer, lambda _: None):
        for run, whole in ((chk, m), (eager, eager)):
            change(whole)
            run.zero_grad()
            run(x()).square().mean().backward()
        assert same((p.grad for p in m.parameters()), (p.grad for p in eager.parameters()))
        assert same(m.buffers(), eager.buffers())


def test_another_layout_of_the_input_is_measured_anew() -> None:
    """A linear layer copies it, and keeps the copy."""
    m = nn.Sequential(nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
    a = torch.randn(64, 64, 128, generator=torch.Generator().manual_seed(0))
    chk = rotor.Checkpointable(m, a, "16 MiB", costs="flops")
    for sample in (a, a.transpose(0, 1), a):

        def step(sample: torch.Tensor = sample) -> None:
            chk.zero_grad()
            chk(sample).sum().backward()

        assert_in_limit(chk, step)
        chk.zero_grad()
        assert measure_peak(step) <= chk.get_expected_memory()


def test_dropout_that_begins_is_measured() -> None:
    """With a rate of 0 it returns its input."""
    m = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Dropout(0.0))))
    chk = rotor.Checkpointable(m, x(1024), "8 MiB", costs="flops")
    for rate in (0.0, 0.1):
        for layer in m[1::2]:
            layer.p = rate

        def step() -> None:
            chk.zero_grad()
            chk(x(1024)).sum().backward()

        assert_in_limit(chk, step)
        chk.zero_grad()
        assert measure_peak(step) <= chk.get_expected_memory()


class Remembers(nn.Module):
    """Reads what its own run changes, held in some form."""

    def __init__(self, held: str) -> None:
        super().__init__()
        self.held, self.layer = held, nn.Linear(32, 32)
        self.mean, self.count, self.generators = torch.ones(()), [0], [torch.Generator()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.held == "tensor":
            self.mean = 0.5 * self.mean + 0.5 * x.detach().abs().mean()
            return torch.tanh(y * self.mean)
        if self.held == "list":
            self.count[0] += 1
            return torch.tanh(y * self.count[0])
        return torch.tanh(y * torch.rand(y.shape, generator=self.generators[0]))


@pytest.mark.parametrize("held", ["tensor", "list", "generator"])
def test_layers_that_read_what_their_run_changes_are_refused(held: str) -> None:
    """But as a buffer, a number or a generator of the layer's."""
    m = nn.Sequential(nn.Linear(32, 32), Remembers(held), nn.Linear(32, 32))
    with pytest.raises(InputError, match=r"layer 1 \(Remembers\) gives another output when it runs again"):
        rotor.Checkpointable(m, x(), 2**30, costs="flops")


class Configured(nn.Module):
    """Drops at a rate, repeats, and keeps a pair of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rate, self.times, self.pair, self.calls = nn.Linear(32, 32), 0.0, 1, (1.0, 2.0), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.times):
            x = torch.tanh(self.layer(x) * self.pair[0]) * self.pair[1]
        return F.dropout(x, self.rate) if self.rate else x


@pytest.mark.parametrize(("name", "value"), [("rate", 0.1), ("times", 3)])
def test_what_layers_are_told_to_do_is_measured_anew(name: str, value: Any) -> None:
    """The counter, which a run changes itself, is no reason to."""
    m = nn.Sequential(*(Configured() for _ in range(4)))
    chk = rotor.Checkpointable(m, x(1024), "4 MiB", costs="flops")

    def step() -> None:
        chk.zero_grad()
        chk(x(1024)).sum().backward()

    first = chk.chain
    assert_in_limit(chk, step)
    assert chk.chain is first
    for layer in m:
        setattr(layer, name, value)
    assert_in_limit(chk, step)
    chk.zero_grad()
    assert measure_peak(step) <= chk.get_expected_memory()
    assert chk.chain is not first


def test_a_pair_that_is_set_before_the_backward() -> None:
    m = nn.Sequential(*(Configured() for _ in range(4)))
    eager = copy.deepcopy(m)
    chk = least(m, x())
    for run in (chk, eager):
        y = run(x())
        for layer in run.model if run is chk else run:
            layer.pair = (5.0, 7.0)
        y.sum().backward()
    assert same((p.grad for p in m.parameters()), (p.grad for p in eager.parameters()))


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_other_kernels_are_measured_anew() -> None:
    m = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())))
    image = torch.randn(16, 8, 32, 32, generator=torch.Generator().manual_seed(0))
    chk = rotor.Checkpointable(m, image, "16 MiB", costs="flops")

    def step() -> None:
        chk.zero_grad()
        chk(image).sum().backward()

    assert_in_limit(chk, step)
    first = chk.chain
    with torch.backends.mkldnn.flags(enabled=False):
        assert_in_limit(chk, step)
        assert chk.chain is not first
        chk.zero_grad()
        assert measure_peak(step) <= chk.get_expected_memory()


class DrawsSometimes(nn.Module):
    """Draws from Python's generator, or NumPy's, where its input is large."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * (self.draw() if x.abs().max() > 100 else 0.5)


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["Python's", "NumPy's"])
def test_draws_beside_torch_on_a_path_that_was_not_measured_are_no_other_numbers(draw: Callable[[], float]) -> None:
    m = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), DrawsSometimes(draw))))
    chk = least(m, x())
    chk(x()).sum().backward()
    draw()
    chk(x()).sum().backward()
    with pytest.raises(RuntimeError, match=r"draws from Python's random module or NumPy's.*torch\.rand"):
        chk(1000 * x()).sum().backward()


@pytest.mark.parametrize("kwargs", [False, True])
def test_hooks_that_are_there_in_the_forward_run_again(kwargs: bool) -> None:
    """They are removed before the backward; those that are added meanwhile do not run."""

    def hook(_: nn.Module, *found: Any) -> Any:
        return 2 * found[-1]

    def gradients(layers: nn.Sequential, call: Callable[[Any], Any]) -> list[torch.Tensor]:
        handles = [m.register_forward_hook(hook, with_kwargs=kwargs) for m in (layers[1], layers[2])]
        loss = call(x()).square().sum()
        for handle in handles:
            handle.remove()
        added = layers[0].register_forward_pre_hook(lambda _, args: (3 * args[0],))
        loss.backward()
        added.remove()
        return [p.grad for p in layers.parameters() if p.grad is not None]

    m = model()
    eager = copy.deepcopy(m)
    chk = least(m, x())
    for ours, theirs in zip(gradients(m, chk), gradients(eager, eager), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("wanted", [False, True])
def test_parameters_that_are_frozen_or_thawed_before_the_backward(wanted: bool) -> None:
    """As discriminators are, between the losses of both networks."""

    def gradient(layers: nn.Module, call: Callable[[Any], Any]) -> torch.Tensor:
        given = x().requires_grad_()
        layers.requires_grad_(wanted)
        loss = call(given).square().sum()
        layers.requires_grad_(not wanted)
        return torch.autograd.grad(loss, given)[0]

    m = model()
    eager = copy.deepcopy(m)
    chk = least(m, x().requires_grad_())
    assert torch.equal(gradient(m, chk), gradient(eager, eager))
    assert [p.requires_grad for p in m.parameters()] == [not wanted] * 12


def test_a_first_call_that_is_measured_is_planned_before() -> None:
    chk = rotor.Checkpointable(model(), mem_limit=600_000)
    assert measure_peak(lambda: chk(input=x()).sum().backward()) <= 600_000


class KeepsItsInput(torch.autograd.Function):
    """In an attribute of ``ctx``, as older code does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ weight)
        ctx.save_for_backward(y, weight)
        ctx.x = x
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        y, weight = ctx.saved_tensors
        inner = gradient * (1 - y * y)
        return inner @ weight.t(), ctx.x.t() @ inner


class Holding(nn.Module):
    """A layer that holds what it is given, or what it returns."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.held = nn.Linear(32, 32), how, None
        if how == "a buffer":
            del self.held
            self.register_buffer("held", torch.zeros(256, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "a ctx":
            found: torch.Tensor = KeepsItsInput.apply(x, self.linear.weight)
            return found
        y = torch.tanh(self.linear(x))
        self.held = {"its input": x.detach(), "its output": y, "a buffer": y.detach()}[self.how]
        return y


@pytest.mark.parametrize("how", ["its input", "its output", "a buffer", "a ctx"])
def test_what_a_layer_holds_of_its_input_or_output_counts(how: str) -> None:
    m, sample = nn.Sequential(*(Holding(how) for _ in range(5))), x().requires_grad_()
    chk = least(m, sample)
    for _ in range(2):
        assert_in_limit(chk, lambda: chk(sample).square().mean().backward())
    plain = least(model(), x()).chain
    assert plain is not None and not any(stage.holds_input or stage.holds_output for stage in plain.stages)


def test_weights_that_a_hook_computes_anew_count() -> None:
    layers = (m for _ in range(4) for m in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        m = nn.Sequential(*(torch.nn.utils.weight_norm(k) if isinstance(k, nn.Linear) else k for k in layers))
    sample = x().requires_grad_()
    chk = least(m, sample)
    for _ in range(2):
        assert_in_limit(chk, lambda: chk(sample).square().mean().backward())


class Inner(nn.Module):
    """Takes a gradient within its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            return x + torch.autograd.grad(torch.tanh(y).sum(), y)[0]


def test_layers_that_cannot_run_again_are_refused_by_what_they_do() -> None:
    ids, x = torch.randint(0, 50, (32,)), torch.randn(32, 16)
    bounded = nn.Sequential(nn.Embedding(50, 16, max_norm=0.1), nn.Linear(16, 16))
    with pytest.raises(InputError, match=r"layer 0 \(0\) changes its parameter weight in place, as an Embedding with"):
        rotor.Checkpointable(bounded, ids, "1 MiB")
    with pytest.raises(
        InputError, match=r"layer 1 \(1\) runs, but .* it calls backward, or torch.autograd.grad, within"
    ):
        rotor.Checkpointable(nn.Sequential(nn.Linear(16, 16), Inner()), x, "1 MiB")


def test_each_function_has_a_name_or_none_has() -> None:
    functions: list[Callable[..., Any]] = [nn.Linear(16, 16), torch.tanh]
    operations = Sequence.parse("[Fck_0, Fe_1, Loss, B_1, Fe_0, B_0]")
    with pytest.raises(ValueError, match="there are 2 functions and 1 names"):
        rotor.CheckpointOptim.apply(functions, operations, ["one"], True, torch.randn(4, 16))
