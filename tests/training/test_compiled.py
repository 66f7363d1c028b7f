"""Plans with compiled pieces: bits do not depend on the budget, predicted memory holds, and results are near eager's.

With ``costs="flops"`` every piece runs compiled, whatever it takes on the machine.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vision
from against_eager import assert_same, snapshot
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rockmate
from rkgb.device import Cpu
from rockmate import InputError, Rockmate, UnsupportedError, measure_peak
from rockmate.demo.gpt import GPT
from rockmate.errors import PieceError
from rockmate.pieces import inductor
from rockmate.pieces.kernels import no_warnings
from rockmate.pieces.piece import Runner

vision.import_can_go_on()  # before transformers looks for torchvision

Make = Callable[[], nn.Module]


class Block(nn.Module):
    """A layer with all that goes wrong: a norm, activations, a gate, dropout, a residual."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return x + self.drop(self.down(F.silu(gate) * value))


def blocks(p: float = 0.1, count: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(32, p) for _ in range(count)))


def rows(count: int = 64) -> torch.Tensor:
    return torch.linspace(-2, 2, count * 32).sin().view(count, 32)


def square(result: Any) -> torch.Tensor:
    return result.float().square().mean()


def planned(model: nn.Module, *args: Any, budget: Any = "100%", **options: Any) -> Rockmate:
    return Rockmate(model, args, budget, costs="flops", compile=True, cache=False, **options)


def trained(model: nn.Module, call: nn.Module, args: Any, loss: Callable[[Any], torch.Tensor] = square) -> list[Any]:
    """Losses, and everything's state after two steps."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        found = loss(call(*args))
        found.backward()
        optimizer.step()
        losses.append(found.detach().clone())
    optimizer.zero_grad()
    (last := loss(call(*args))).backward()
    return [*losses, last.detach().clone(), *snapshot(model)]


def assert_bits_of_any_budget(
    rk: Rockmate, args: Any, loss: Callable[[Any], torch.Tensor] = square, around: Any = contextlib.nullcontext
) -> None:
    """Training under budgets down to the least has the bits of keeping everything; each peak is the predicted one."""
    model, start = rk.original, copy.deepcopy(rk.original.state_dict())

    def clear() -> None:
        for p in model.parameters():
            p.grad = None

    def run() -> list[Any]:
        model.load_state_dict(start)
        clear()
        with around():
            return trained(model, rk, args, loss)

    def peak() -> int:
        def step() -> None:
            with around():
                found = loss(rk(*args))
            found.backward()

        clear()
        step()
        clear()
        return measure_peak(step, "cpu")

    expected = run()
    peak()
    found = rk.frontier()
    for budget in (found.min_budget + (found.max_budget - found.min_budget) // 2, found.min_budget):
        clear()
        rk.budget = budget
        with around():
            rk(*args)
        assert rk.plan.recomputed > 0
        assert_same(run(), expected)
        measured = peak()
        assert measured <= rk.budget
        assert measured <= rk.plan.predicted_peak + Cpu.scalars


def assert_near_eager(make: Make, args: Any, loss: Callable[[Any], torch.Tensor] = square) -> None:
    """One step's loss, gradients and buffers are as near to those in double precision as eager mode's are, up to a
    factor for the other order of sums.
    """
    double = [a.double() if a.is_floating_point() else a for a in args]

    def results(model: nn.Module, call: nn.Module, given: Any) -> list[torch.Tensor]:
        loss(call(*given)).backward()
        found = (*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers())
        return [t.double() for t in found]

    exact_model, eager_model, model = make().double(), make(), make()
    exact = results(exact_model, exact_model, double)
    eager = results(eager_model, eager_model, args)
    ours = results(model, planned(model, *args), args)

    def distance(found: list[torch.Tensor]) -> float:
        return max(float((a - b).norm() / (b.norm() + 1e-30)) for a, b in zip(found, exact, strict=True))

    assert distance(ours) <= 4 * distance(eager)


def tokens(rows: int, length: int) -> torch.Tensor:
    return (torch.arange(rows * length) * 7919 % 61).view(rows, length)


def gpt(p: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return GPT(2, 32, 2, 32, 64, dropout=p)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def resnet() -> nn.Module:
    """The stem of torchvision's ResNet-18 and two of its blocks, narrow ones, channels last."""
    models = pytest.importorskip("torchvision").models.resnet
    torch.manual_seed(0)
    down = nn.Sequential(nn.Conv2d(16, 32, 1, 2, bias=False), nn.BatchNorm2d(32))
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), models.BasicBlock(16, 16),
        models.BasicBlock(16, 32, 2, down), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last)


def images() -> torch.Tensor:
    found = torch.linspace(-3, 3, 4 * 3 * 16 * 16).sin().view(4, 3, 16, 16)
    return found.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "make, args, loss",
    [
        (gpt, (tokens(4, 32),), square),
        (llama, (tokens(4, 32),), lambda out: square(out.logits)),
        (resnet, (images(),), square),
        (blocks, (rows(),), square),
    ],
    ids=["gpt", "llama", "resnet", "blocks"],
)
def test_bits_do_not_depend_on_the_budget(make: Make, args: Any, loss: Callable[[Any], torch.Tensor]) -> None:
    rk = planned(make(), *args)
    assert "of them compiled" in str(rk.plan)
    assert_bits_of_any_budget(rk, args, loss)


@pytest.mark.parametrize(
    "make, args, loss",
    [
        (lambda: gpt(0.0), (tokens(4, 32),), square),
        (llama, (tokens(4, 32),), lambda out: square(out.logits)),
        (resnet, (images(),), square),
        (lambda: blocks(0.0), (rows(),), square),
    ],
    ids=["gpt", "llama", "resnet", "blocks"],
)
def test_results_are_near_eager(make: Make, args: Any, loss: Callable[[Any], torch.Tensor]) -> None:
    assert_near_eager(make, args, loss)


def bfloat16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def test_autocast() -> None:
    with bfloat16():
        rk = planned(blocks(), rows())
    assert "autocast bfloat16" in rk.plan.call
    assert_bits_of_any_budget(rk, (rows(),), around=bfloat16)


def test_float16_with_a_scaler() -> None:
    results = []
    for budget in ("100%", "75%"):
        model = blocks()
        handle = rockmate.attach(model, budget, costs="flops", compile=True, cache=False)
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=64.0), torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = square(model(rows()))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([loss.detach(), torch.tensor(scaler.get_scale()), *snapshot(model)])
        assert handle.plan is not None
    assert_same(*results)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:  # type: ignore[attr-defined]
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_checkpointed_layers_are_compiled_as_others() -> None:
    plain = planned(blocks(), rows())
    rk = planned(Checkpointed(), rows(), budget="85%")
    assert rk.plan.pieces.split(",")[:2] == plain.plan.pieces.split(",")[:2]
    assert_same(trained(rk.original, rk, (rows(),)), trained(plain.original, plain, (rows(),)))


class Adapted(nn.Module):
    """Frozen and tied weights with low-rank adapters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.head = nn.Embedding(64, 32), Block(32, 0.1), nn.Linear(32, 64, bias=False)
        self.second = Block(32, 0.0).requires_grad_(False)
        self.head.weight = self.embed.weight
        self.a, self.b = nn.Parameter(0.1 * torch.ones(32, 4)), nn.Parameter(0.1 * torch.ones(4, 32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(ids))
        return self.head(torch.tanh(self.second(x) + 2.0 * (x @ self.a @ self.b)))


def test_tied_frozen_and_adapted_weights() -> None:
    torch.manual_seed(0)
    ids = tokens(4, 16)
    assert_bits_of_any_budget(planned(Adapted(), ids), (ids,))


def test_gradients_may_lie_in_another_way_than_results() -> None:
    """A cache of keys is a result, whose gradient the piece that makes it is to get in another layout."""
    model = llama()
    model.config.use_cache = True
    rk = planned(model, tokens(2, 16), budget="85%")
    rk(tokens(2, 16)).logits.float().square().mean().backward()
    assert "of them compiled: 0" not in str(rk.plan)


def test_other_sizes() -> None:
    """A batch of another size has kernels of its own, the same under every budget."""
    results = []
    for budget in ("100%", "80%"):
        model = blocks()
        handle = rockmate.attach(model, budget, sample=rows(), costs="flops", compile=True, cache=False)
        for count in (64, 48, 80, 64):
            torch.manual_seed(count)
            model.zero_grad()
            square(model(rows(count))).backward()
            results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert not handle.reason
    for first, second in zip(results[:4], results[4:], strict=True):
        assert_same(second, first)


def test_a_fraction_that_changes_in_each_step_is_not_compiled_each_time() -> None:
    class Anneals(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.slope = blocks(0.0, 2), 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.slope *= 0.9
            return F.leaky_relu(self.layers(x) * 2 + 1, self.slope).tanh()

    model, said = Anneals(), []
    handle = rockmate.attach(model, "75%", costs="flops", compile=True, cache=False)
    for _ in range(4):
        square(model(rows())).backward()
        assert handle.plan is not None
        said.append(handle.plan.pieces)
    assert said[3] == said[2] == said[1]


def test_attach_rockmate_and_the_backend_give_the_same_bits() -> None:
    """Where the budget does not bind, too."""
    rk = planned(blocks(), rows(), budget="100%")
    expected = trained(rk.original, rk, (rows(),))
    for budget in ("2 GiB", "90%"):
        model = blocks()
        rockmate.attach(model, budget, costs="flops", compile=True, cache=False)
        assert_same(trained(model, model, (rows(),)), expected)
    model = blocks()
    options = {"budget": "2 GiB", "costs": "flops", "compile": True, "cache": False}
    assert_same(trained(model, torch.compile(model, backend="rockmate", options=options), (rows(),)), expected)


def test_resuming_goes_on_with_the_same_bits() -> None:
    """From a state that was saved, and a copy of the model."""
    rk = planned(blocks(), rows(), budget="80%")
    trained(rk.original, rk, (rows(),))
    state = copy.deepcopy(rk.original.state_dict())
    expected = trained(rk.original, rk, (rows(),))
    again = planned(blocks(), rows(), budget="100%")
    again.original.load_state_dict(state)
    assert_same(trained(again.original, again, (rows(),)), expected)
    copied = pickle.loads(pickle.dumps(rk))
    copied.original.load_state_dict(state)
    assert_same(trained(copied.original, copied, (rows(),)), expected)


def test_a_saved_plan_runs_with_compiled_pieces(tmp_path: Path) -> None:
    rk = planned(blocks(), rows(), budget="85%")
    rk.plan.save(tmp_path / "plan.json")
    loaded = Rockmate(blocks(), rows(), plan=tmp_path / "plan.json", compile=True)
    assert_same(trained(loaded.original, loaded, (rows(),)), trained(rk.original, rk, (rows(),)))
    with pytest.raises(rockmate.PlanError, match="another graph"):
        Rockmate(blocks(), rows(), plan=tmp_path / "plan.json")


def test_draws_follow_from_the_seed() -> None:
    """Reproducible from ``manual_seed``; other steps and other layers have other masks."""
    model = nn.Sequential(nn.Linear(32, 32), *(nn.Sequential(nn.Tanh(), nn.Dropout(0.5)) for _ in range(2)))
    rk = planned(model, rows())

    def zeros(seed: int | None) -> torch.Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        return (rk(rows()) == 0).detach()

    first, second, again = zeros(1), zeros(None), zeros(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_compiled_modules_are_taken_under_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    plain = planned(blocks(), rows(), budget="85%")
    expected = trained(plain.original, plain, (rows(),))
    model = blocks()
    model.compile(backend="eager")
    model[0].compile(backend="eager")
    compiled = model._compiled_call_impl
    with caplog.at_level(logging.INFO, "rockmate"):
        handle = rockmate.attach(model, "85%", costs="flops", compile=True, cache=False)
    assert "of the model itself, 0 is not used" in caplog.text
    assert_same(trained(model, model, (rows(),)), expected)
    assert not handle.reason
    rockmate.detach(model)
    assert model._compiled_call_impl is compiled
    with pytest.raises(InputError, match="Say compile=True"):
        rockmate.attach(model, "85%")


def test_a_layer_that_torch_compile_has_wrapped() -> None:
    plain = planned(blocks(), rows(), budget="85%")
    expected = trained(plain.original, plain, (rows(),))
    model = blocks()
    model[1] = torch.compile(model[1], backend="eager")
    rk = planned(model, rows(), budget="85%")
    assert_same(trained(rk.original, rk, (rows(),)), expected)
    with pytest.raises(InputError, match=r"_orig_mod"):
        planned(torch.compile(blocks(), backend="eager"), rows())


def test_where_compiling_does_not_pay_eager_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "pays", lambda _: False)
    eager, model = blocks(0.0), blocks(0.0)
    rk = Rockmate(model, rows(), "85%", compile=True, cache=False)
    assert "of them compiled: 0" in str(rk.plan)
    assert_same(trained(model, rk, (rows(),)), trained(eager, eager, (rows(),)))


def test_compilers_work_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of all pieces is there before it is waited for the compilers of one."""
    with no_warnings():
        from torch._inductor import compile_fx
        from torch._inductor.async_compile import AsyncCompile
    events: list[str] = []
    made, wait = compile_fx.compile_fx_inner, AsyncCompile.wait

    def noted(word: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: (events.append(word), call(*args, **options))[1]

    monkeypatch.setattr(compile_fx, "compile_fx_inner", noted("code", made))
    monkeypatch.setattr(AsyncCompile, "wait", noted("wait", wait))
    planned(blocks(), rows())
    assert events.count("code") > 2
    assert "code" not in events[events.index("wait") :]


def test_the_vector_unit_is_the_one_that_inductor_takes() -> None:
    with no_warnings():
        from torch._inductor import cpu_vec_isa
    with inductor._vector_unit():
        found = cpu_vec_isa.pick_vec_isa()
    assert found == cpu_vec_isa.pick_vec_isa()


@pytest.mark.parametrize("pays", [True, False])
def test_the_choice_is_kept_for_the_next_process(pays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So are the costs of pieces; else the last bits would follow from a clock in each start of a script."""
    monkeypatch.setattr(Runner, "pays", lambda _: pays)
    first = Rockmate(blocks(0.0), rows(), "85%", compile=True, cache=tmp_path)
    monkeypatch.setattr(Runner, "pays", lambda _: pytest.fail("it was timed again"))
    second = Rockmate(blocks(0.0), rows(), "85%", compile=True, cache=tmp_path)
    assert "measure" in first.plan.setup_seconds
    assert "measure" not in second.plan.setup_seconds
    results = [trained(rk.original, rk, (rows(),)) for rk in (first, second)]
    assert_same(*results)


def test_without_a_cache_the_choice_is_kept_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two budgets, or two models of one script, would differ in the last bits."""
    x = rows()[1:]
    monkeypatch.setattr(Runner, "pays", lambda _: True)
    first = Rockmate(blocks(0.0), x, "85%", compile=True, cache=False)
    assert "of them compiled: 0" not in str(first.plan)
    monkeypatch.setattr(Runner, "pays", lambda _: False)
    second = Rockmate(blocks(0.0), x, "95%", compile=True, cache=False)
    assert_same(*(trained(rk.original, rk, (x,)) for rk in (first, second)))


def test_a_call_that_is_followed_runs_eager_kernels(caplog: pytest.LogCaptureFixture) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = blocks(0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            return self.layers[1](x) if float(x.detach().sum()) > -1e9 else x

    model = Reads()
    with caplog.at_level(logging.INFO, "rockmate"):
        rockmate.attach(model, "2 GiB", compile=True, cache=False)
        square(model(rows())).backward()
    assert "runs eager kernels" in caplog.text
    model.layers[0].compile(backend="eager")
    rockmate.detach(model)
    rockmate.attach(model, "2 GiB", compile=True, cache=False)
    with pytest.raises(rockmate.UnsupportedError, match=r"its submodule 'layers\.0' was compiled"):
        model(rows())


def test_a_gradient_of_which_only_rounding_is_left_is_no_error() -> None:
    """A bias before a batch norm has none, and two rows that are nearly alike make of one last bit many."""

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias, self.norm = nn.Parameter(torch.zeros(384)), nn.BatchNorm1d(384)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm((x + self.bias).mean(1))

    x = torch.linspace(-9, 9, 16 * 384).sin().view(1, 16, 384)
    planned(Twins(), torch.cat([x, x + torch.linspace(1e-3, 1, 384)]))


def test_a_number_at_a_step_may_be_on_its_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that round otherwise before ``round`` differ by a whole step there."""

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            below = 0.25 * (1 - torch.finfo(torch.float32).eps / 2)
            self.weight = nn.Parameter(torch.tensor([0.1, below, 0.7]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ ((self.weight * 2).round() * 3 + self.weight * 0.5)[:, None]

    def beyond(self: Runner, compiled: bool, moved: int = 0) -> list[torch.Tensor]:
        result, *gradients = run(self, compiled, moved)
        return [result + 3 * compiled * torch.tensor([0.0, 1.0, 0.0]), *gradients]

    run = Runner.run
    monkeypatch.setattr(Runner, "run", beyond)
    planned(Steps(), torch.ones(2, 3))


def test_types_within_a_piece_say_how_exact_it_is() -> None:
    """A kernel keeps more of a number than eager mode does that rounds it half-way."""

    class Rounds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 1.25).half().float().tanh()

    planned(nn.Sequential(nn.Linear(32, 32), Rounds(), nn.Linear(32, 32)), rows(2))


HEADS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "two copies": lambda z: (z.clone(), z.clone()),
    "copies that lie otherwise": lambda z: (z.clone(), z.t().contiguous().t(), z.clone().view(-1)),
    "a copy of what is saved": lambda z: (z.exp().clone(), z.sin()),
    "copies of what is saved": lambda z: (lambda e: (e.clone(), torch.cat([e]), e.to(e.dtype, copy=True)))(z.exp()),
    "views": lambda z: (z.view(-1), z.t(), z[0]),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=list(HEADS))
def test_results_may_be_changed_in_place(head: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
    """Inductor gives one memory to results that are equal, and saves one instead of what it is a copy of."""

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for layer in self.layers:
                x = F.gelu(layer(x))
            return head((x * 2 + 1).sigmoid() * 3)

    found = []
    for attaches in (False, True):
        torch.manual_seed(0)
        model, x = Several().double(), torch.randn(64, 32, dtype=torch.double)
        if attaches:
            rockmate.attach(model, "90%", sample=x, compile=True)
        outputs = model(x)
        outputs[0].mul_(2)
        torch.stack([y.square().sum() for y in outputs]).sum().backward()
        found.append([*(y.detach() for y in outputs), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found)


def halved_without_gradient(x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x) * 2
    with torch.no_grad():
        y *= 0.5
    return y + 1


def changed_after_it_was_read(x: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(x * 1.5) * 2
    x.add_(1)
    return gate + x.tanh()


def with_a_negative_view(x: torch.Tensor) -> torch.Tensor:
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2))).conj()
    return torch.cat([z.real * 2 + 1, z.imag.tanh() * 3], -1)


def put_into_memory_without_gradient(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(64, 32)
    y[:, :16] = x[:, :16].tanh() * 2
    y[:, 16:] = x[:, 16:]
    return y.sin() * x + 1


def detached_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.tanh() * 2
    z = (y.sin() + 1).detach_()
    return y * z + x


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * factor

    return torch.compiler.allow_in_graph(function)


half, twice = times(0.5), times(2.0)


def by_functions_of_one_name(x: torch.Tensor) -> torch.Tensor:
    return twice((half(x) + 1) @ torch.eye(32)) + 1


FUNCTIONS = (
    halved_without_gradient, changed_after_it_was_read, with_a_negative_view, put_into_memory_without_gradient,
    detached_in_place, by_functions_of_one_name,
)  # fmt: skip


class Between(nn.Module):
    """``function`` after each product; what has been seen so far is a buffer, which is read before it changes."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.function = nn.ModuleList(nn.Linear(32, 32) for _ in range(2)), function
        self.aside = nn.LayerNorm(32)
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = self.function(layer(x))
        near = torch.exp(-(x - self.mean).square())
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return near.sin() + 1, self.aside(near) * 2


class Teacher(nn.Module):
    """Its forward moves the weights of one part towards those of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pupil, self.teacher = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch._foreach_lerp_([*self.teacher.parameters()], [*self.pupil.parameters()], 0.1)
            self.teacher.weight.mul_(0.5)
            aim = self.teacher(x)
        return (self.pupil(x).tanh() * 2 - aim).square() + 1


def test_parameters_that_forward_changes_change_once() -> None:
    """Also where pieces are looked at, which takes runs of the forward."""
    args = (rows().flatten(0, -2)[:, :32],)
    assert_near_eager(Teacher, args)
    model, eager = Teacher(), Teacher()
    rk = planned(model, *args)
    assert "of them compiled" in str(rk.plan)
    assert_same([*model.parameters()], [*eager.parameters()])
    for _ in range(2):
        rk(*args), eager(*args)
        assert_same([*model.parameters()], [*eager.parameters()])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_near_eager(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Each there where eager mode has it: the loss leaves an output out."""
    found = []
    for attaches in (False, True):
        model = Between(function)
        if attaches:
            rockmate.attach(model, "90%", sample=rows(), costs="flops", cache=False, compile=True)
        square(model(rows())[0]).backward()
        found.append([*(p.grad for p in model.parameters()), model.mean])
    assert [g is None for g in found[1]] == [g is None for g in found[0]]
    torch.testing.assert_close(*([g for g in part if g is not None] for part in found))


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="compile='yes': give True or False"):
        Rockmate(blocks(), rows(), "1 MiB", compile="yes")  # type: ignore[arg-type]

    def wrong(self: Runner, compiled: bool, moved: int = 0) -> list[torch.Tensor]:
        return [t + 0.1 * compiled for t in run(self, compiled, moved)]

    run = Runner.run
    with monkeypatch.context() as patched:
        patched.setattr(Runner, "run", wrong)
        with pytest.raises(PieceError, match=r"the compiled piece layer_norm.* differs from eager kernels in result 0"):
            planned(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh()), rows())

    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(PieceError, match=r"needs a C\+\+ compiler.*install g\+\+"):
        rockmate.attach(blocks(), "1 MiB", compile=True)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:backward was called with retain_graph")
@pytest.mark.parametrize("share", ["100%", "70%"])
def test_second_derivatives_are_refused(share: str) -> None:
    """Also where autograd comes to no operation of a piece's backward, or the gradient needs none."""
    model, x = blocks(0.0, 2), rows()
    rockmate.attach(model, share, sample=x, costs="flops", cache=False, compile=True)
    weights = list(model.parameters())
    with pytest.raises(UnsupportedError, match="gradients of gradients are wanted"):
        torch.autograd.grad(model(x).square().mean(), weights, create_graph=True)
    given = x.clone().requires_grad_()
    with pytest.raises(UnsupportedError, match="attach the model without compile=True"):
        torch.autograd.grad(model(given).sum(), given, create_graph=True)
    model(x).square().mean().backward()


def test_threads_capture_trace_and_run_beside_each_other() -> None:
    """Each has a model of its own. One runs pieces while another captures, or traces the class that all pieces have."""
    models, found = [blocks(0.0) for _ in range(3)], {}

    def train(k: int) -> None:
        rockmate.attach(models[k], "75%", costs="flops", compile=True, cache=False, progress=False)
        for count in (64, 32, 48):
            square(models[k](rows(count))).backward()
        found[k] = [p.grad for p in models[k].parameters()]

    threads = [threading.Thread(target=train, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    train(2)
    assert_same(found[0], found[2])
    assert_same(found[1], found[2])


def test_the_plan_lists_pieces_with_their_lines() -> None:
    rk = Rockmate(blocks(), rows(), "80%", costs="flops", cache=False, compile=True)
    assert "× silu, mul at test_compiled.py:" in str(rk.plan)
