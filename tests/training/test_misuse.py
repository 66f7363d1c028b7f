"""Arguments that cannot be used, and what would run an attached model past its plan: refused, or said, at once."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import assert_same, snapshot
from models import in_turn, randn
from torch import nn

from rockmate import (
    BudgetError,
    BudgetWarning,
    InputError,
    MeasureError,
    PlanError,
    Rockmate,
    UnsupportedError,
    attach,
    attached,
    detach,
    frontier,
    measure_peak,
    measure_step,
)
from rockmate.calls import others
from rockmate.calls.capture import Capture
from rockmate.demo.gpt import GPT
from rockmate.planning.options import checked_loss
from rockmate.planning.plan import Plan

X = randn(256, 32, seed=1)


def net() -> nn.Sequential:
    """Three blocks."""
    torch.manual_seed(0)
    layers = [[nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)] for _ in range(3)]
    return nn.Sequential(*(layer for block in layers for layer in block))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"costs": "nonsense"}, "costs='nonsense': choose \"measured\""),
    ({"loss_memory": -1}, "loss_memory=-1: give whole bytes"),
    ({"loss_memory": "abc"}, "the room for the loss .loss_memory. 'abc' is no amount of memory: give bytes"),
    ({"loss_memory": "200"}, "the room for the loss .loss_memory. '200' is 200 bytes: was \"200 GiB\" meant"),
    ({"loss_memory": "60%"}, "the room for the loss .loss_memory. '60%' is a share, and nothing says of what"),
    ({"on_infeasible": "x"}, "on_infeasible='x': give \"error\""),
    ({"progress": "x"}, "progress='x': give True"),
    ({"time_limit": "x"}, "time_limit='x': give a positive number"),
    ({"sample_kwargs": {"x": X}}, "sample_kwargs without a sample"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda x: str(x)[:20])
def test_arguments_are_refused_when_they_are_given(options: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(InputError, match=message):
        attach(model, "1 MiB", **options)
    assert attached(model) is None
    if next(iter(options)) not in ("on_infeasible", "sample_kwargs"):
        with pytest.raises(InputError, match=message):
            Rockmate(model, X, "1 MiB", **options)
    if "sample_kwargs" not in options:
        compiled = torch.compile(model, backend="rockmate", options={"budget": "1 MiB", **options})
        with pytest.raises(Exception, match=message):
            compiled(X)


def test_the_room_for_the_loss_may_be_text() -> None:
    plans = [Rockmate(net(), X, "90%", costs="flops", loss_memory=room).plan for room in ("64 KiB", 64 * 1024)]
    assert plans[0].room == plans[1].room
    assert [checked_loss(room) for room in (0, 200, "200 B")] == [0, 200, 200]


def test_what_comes_before_the_budget() -> None:
    with pytest.raises(InputError, match=r"the sample comes before the budget: Rockmate\(model, sample, budget\)"):
        Rockmate(net(), "60%", X)  # type: ignore[arg-type]
    model = net()
    with pytest.raises(InputError, match="the Sequential is in the list more than once: give each module once"):
        attach([model, model], "60%")
    for budget, meant in (("60", '"60 GiB" or "60%"'), (8, '"8 GiB"'), (0.6, '"0.6 GiB" or "60%"')):
        with pytest.raises(BudgetError, match=f"was {meant} meant"):
            attach(model, budget)


def test_a_plan_is_saved_and_not_pickled() -> None:
    plan = Rockmate(net(), X, "90%", costs="flops").plan
    with pytest.raises(PlanError, match=r"a plan is not pickled: plan.save\(path\) writes it"):
        torch.save(plan, io.BytesIO())
    assert copy.copy(plan) is copy.deepcopy(plan) is plan


def test_numpy_arrays_are_called_as_they_are_given() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, rows: Any) -> torch.Tensor:
            result: torch.Tensor = self.net(torch.from_numpy(rows))
            return result

    plan = Rockmate(Takes(), X.numpy(), "90%", costs="flops").plan
    assert isinstance(plan, Plan)
    assert plan.call == ("rows float32[256, 32]", "train")


def test_unknown_options_of_the_backend() -> None:
    compiled = torch.compile(net(), backend="rockmate", options={"budget": "1 MiB", "costz": "flops"})
    with pytest.raises(Exception, match="no option 'costz': there are budget, cache, compile, costs"):
        compiled(X)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a script may compile as a whole."""
    result: torch.Tensor = model(x).square().mean()
    return result


def test_an_attached_model_in_a_compiled_function_says_that_it_is_not_planned() -> None:
    model, eager = net(), net()
    attach(model, "60%", costs="flops", on_infeasible="least")
    step = torch.compile(loss, backend="eager")
    with pytest.warns(BudgetWarning, match="Sequential is attached, but called within code that torch.compile makes"):
        ours = step(model, X)
    ours.backward()
    step(model, X).backward()  # is said once
    for _ in range(2):
        theirs = loss(eager, X)
        theirs.backward()
    assert_same([ours, *snapshot(model)], [theirs, *snapshot(eager)])


def test_it_is_said_too_where_the_compiler_comes_after_attach() -> None:
    script = (
        "import torch, rockmate, sys\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())\n"
        "original = torch.compile\n"
        "rockmate.attach(model, '1 MiB')\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "torch.compile(lambda x: model(x).sum(), backend='eager')(torch.ones(2, 8)).backward()\n"
        "assert torch.compile is original\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "BudgetWarning: Sequential is attached, but called within code" in done.stderr


@pytest.mark.parametrize("budget", ["16 KiB", "1 GiB"])
def test_a_script_may_end_between_forward_and_backward(budget: str) -> None:
    script = (
        "import torch, rockmate\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))\n"
        f"rockmate.attach(model, {budget!r}, on_infeasible='least')\n"
        "loss = model(torch.ones(64, 32)).sum()\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Own(nn.Module):
    """A class of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net(x)
        return result


def test_an_attached_model_that_is_compiled_runs_under_its_plan() -> None:
    model, eager = Own(), Own()
    handle = attach(model, "60%", costs="flops", on_infeasible="least")
    compiled = torch.compile(model, backend="eager")
    assert_same([loss(compiled, X)], [loss(eager, X)])  # type: ignore[arg-type]
    assert handle.plan is not None


@pytest.mark.parametrize("when", ["before", "after", "after it was planned"])
def test_a_part_of_an_attached_model_that_is_attached_too(when: str) -> None:
    class Whole(nn.Sequential):  # a name for each case, since a text is said once
        pass

    Whole.__name__ = f"Whole that is attached, a part {when}"
    whole = Whole(net(), nn.Linear(32, 8))
    eager = copy.deepcopy(whole)
    if when == "before":
        attach(whole[0], "80%", costs="flops")
    attach(whole, "80%", costs="flops")
    if when == "after it was planned":
        for model in (whole, eager):
            model(X).square().mean().backward()
    with pytest.warns(BudgetWarning, match=rf"and so is {Whole.__name__}, .* its own budget does not hold"):
        if when != "before":
            attach(whole[0], "80%", costs="flops")
        whole(X).square().mean().backward()
    eager(X).square().mean().backward()
    assert_same(snapshot(whole), snapshot(eager))


class Features(nn.Module):
    """A model as timm has them: two methods that run its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(32, 32), nn.ModuleList([net()]), nn.Linear(32, 8)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """What the head reads."""
        x = self.stem(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits."""
        return self.head(self.forward_features(x))  # type: ignore[no-any-return]

    def loss(self, y: torch.Tensor) -> torch.Tensor:
        """No layer runs here."""
        return y.square().mean()

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        """A method that calls the module."""
        return self.loss(self(x))

    def step_by_parts(self, x: torch.Tensor) -> torch.Tensor:
        """A method that calls another one, which calls layers."""
        return self.loss(self.head(self.forward_features(x)))


class Around(nn.Module):
    """A module around the one that is attached."""

    def __init__(self, model: Features, name: str = "forward_features") -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What a part of the model makes."""
        return getattr(self.model, self.name)(x)  # type: ignore[no-any-return]


PAST_THE_PLAN: dict[str, tuple[Callable[[Any], torch.Tensor], str]] = {
    "method": (lambda m: m.forward_features(X), r"\.forward_features runs layers of .*the first one is stem"),
    "method of a method": (lambda m: m.step_by_parts(X), r"\.step_by_parts runs layers"),
    "forward": (lambda m: m.forward(X), r"\.forward runs layers"),
    "another module": (lambda m: Around(m)(X), r"\.forward_features runs layers"),
    "layer in another module": (lambda m: Around(m, "stem")(X), "^a call of stem runs layers"),
    "layer": (lambda m: m.head(X), "^a call of head runs layers"),
    "layer in a list": (lambda m: m.blocks[0](X), r"^a call of blocks\.0 runs layers"),
    "gradient of an input alone": (
        lambda m: m.requires_grad_(False).forward_features(X.clone().requires_grad_()),
        r"\.forward_features runs layers",
    ),
}


def renamed(name: str) -> Features:
    """A model of a class of its own, since a text is said once."""
    return type(f"Features, {name}", (Features,), {})()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("what", "planned"), in_turn(PAST_THE_PLAN, [False, True]))
def test_layers_that_run_past_the_plan_are_said_once(what: str, planned: bool) -> None:
    model = renamed(f"{what}, {planned}")
    attach(model, "80%", costs="flops")
    if planned:
        model(X).square().mean().backward()
    run, said = PAST_THE_PLAN[what]
    with pytest.warns(BudgetWarning, match=said):
        run(model).sum().backward()
    run(model).sum().backward()
    model(X).sum()


@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.filterwarnings("ignore:Linear is attached, and so is")
def test_what_runs_no_layers_past_the_plan_is_not_said(followed: bool) -> None:
    model = renamed(f"nothing is said, {followed}")
    model.head(X).sum().backward()  # before
    if followed:
        model.blocks[0].register_full_backward_hook(lambda *_: None)
    model.stem.register_forward_hook(lambda _, __, y: y * 2)
    attach(model, "80%", costs="flops")
    attach(model.head, "1 MiB", costs="flops")
    for _ in range(3):
        model.training_step(X).backward()
    model.head(X).sum().backward()  # under a plan of its own
    model.eval()(X).sum().backward()
    with torch.no_grad():
        model.forward_features(X)
    model.requires_grad_(False).forward_features(X)
    again = copy.deepcopy(model.requires_grad_())
    again.forward_features(X).sum().backward()
    copy.copy(model.requires_grad_())(X).sum().backward()  # another module with these layers
    nn.Sequential(model.stem)(X).sum().backward()
    detach(model)
    model.forward_features(X).sum().backward()


def test_a_call_that_no_plan_can_be_for_is_a_call() -> None:
    class Unlike(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model = renamed("under a mode")
    attach(model, "80%", costs="flops")
    with Unlike(), pytest.warns(BudgetWarning, match="the model itself runs") as said:
        model(X).sum().backward()
    assert len(said) == 1


def test_methods_of_a_rockmate_that_run_layers() -> None:
    model = renamed("Rockmate")
    rk = Rockmate(model, X, "80%", costs="flops")
    rk.training_step(X).backward()
    for unplanned in (model, rk.original):
        unplanned.forward_features(X).sum().backward()
        unplanned(X).sum().backward()
    rk.head(X).sum().backward()
    with pytest.warns(BudgetWarning, match=r"\.forward_features runs layers of .*without a plan"):
        rk.forward_features(X).sum().backward()


def test_results_of_parts_that_are_checkpointed_count_where_a_budget_seems_to_suffice() -> None:
    model = Features()
    handle = attach(model, "60%", costs="flops")

    def step() -> None:
        model(X).square().mean().backward()

    for _ in range(3):
        step()  # a step beyond the budget would be said
    assert measure_peak(step) <= handle.budget


@pytest.mark.parametrize("hooked", [False, True])
def test_what_is_captured_does_not_know_that_layers_are_watched(hooked: bool) -> None:
    plans = []
    for watched in (False, True):
        model = Features()
        if hooked:
            for layer in (model.stem, model.blocks[0], model.head):
                layer.register_forward_hook(lambda _, __, y: y * 2)
        handle = attach(model, "60%", costs="flops")
        if not watched:
            others.unwatch_layers(model, handle)
        for _ in range(3):
            model(X).square().mean().backward()
        assert handle.plans_made == 1
        plans.append(str(handle.plan.graph.s))  # type: ignore[union-attr]
    assert plans[0] == plans[1]


def test_no_replicas_of_attached_models() -> None:
    model = net()
    attach(model, "1 MiB")
    with pytest.raises(InputError, match=r"DataParallel copies modules.*attach"):
        model._replicate_for_data_parallel()
    detach(model)
    assert attached(model._replicate_for_data_parallel()) is None


def test_layers_that_get_their_size_in_the_first_call() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.LazyLinear(128), nn.GELU(), nn.Dropout(0.1), nn.LazyLinear(32), nn.LazyBatchNorm1d())

    model, eager = make(), make()
    handle = attach(model, "80%", costs="flops")
    results = []
    for m in (model, eager):
        torch.manual_seed(5)
        if m is model:
            with pytest.warns(BudgetWarning, match="layers get their sizes in this call"):
                results.append([loss(m, X)])
        else:
            results.append([loss(m, X)])
        for _ in range(3):
            results[-1].append(loss(m, X))
            results[-1][-1].backward()
        results[-1] += snapshot(m)
    assert_same(*results)
    assert handle.plan is not None and handle.plan.recomputed


def test_a_value_that_is_another_one_at_each_call() -> None:
    """A value that is another one at each call, in a model of which nothing is captured: it is followed."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.generator = net(), torch.Generator().manual_seed(1)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            drawn = torch.rand((), generator=self.generator).item()
            result: torch.Tensor = self.net(x) * drawn
            return result

    eager, model = Reads(), Reads()
    eager.load_state_dict(model.state_dict())
    handle = attach(model, "75%", costs="flops")
    for _ in range(4):
        torch.manual_seed(1)
        theirs = eager(X)
        theirs.square().mean().backward()
        torch.manual_seed(1)
        ours = model(X)
        ours.square().mean().backward()
        assert torch.equal(ours, theirs)
    assert handle.plan is not None
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


def _small() -> tuple[nn.Module, torch.Tensor, int]:
    """A model, a sample, and what a step takes."""
    torch.manual_seed(0)
    model, ids = GPT(2, 32, 4, 16, 64), torch.randint(64, (4, 16))
    eager = copy.deepcopy(model)
    return model, ids, measure_peak(lambda: eager(ids).sum().backward())


def _two_calls(model: nn.Module, ids: torch.Tensor) -> None:
    loss = model(ids).sum() + model(ids).sum()
    loss.backward()


@pytest.mark.parametrize("sizes", [(64, 64, 64, 64), (64, 32, 16)])
def test_several_calls_each_of_which_needs_no_plan(sizes: tuple[int, ...]) -> None:
    """Each call alone is far below the budget, which all of them exceed together: so it is said once, and planned."""
    model, ids, peak = _small()
    calls = [ids.repeat(2, 1)[:, :n] for n in sizes]
    attach(model, int(2.4 * peak), costs="flops")

    def step() -> None:
        model.zero_grad()
        sum(model(x).sum() for x in calls).backward()

    with pytest.warns(BudgetWarning, match=r"GPT was called \d times before a backward") as said:
        for _ in range(8):
            step()
    assert len([w for w in said if "times before a backward" in str(w.message)]) == 1
    model.zero_grad()
    assert measure_peak(step) <= 2.4 * peak


def test_several_calls_that_fit_together() -> None:
    """Nothing is said, and the steps are within the budget."""
    model, ids, peak = _small()
    attach(model, 2 * peak, costs="flops")
    for _ in range(3):
        _two_calls(model, ids)
    assert measure_peak(lambda: _two_calls(model, ids)) <= 2 * peak


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_no_inputs_of_plans(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(5, 32)], layout=layout)
    model = net()
    attach(model, "60%", costs="flops")
    with pytest.raises(UnsupportedError, match="a nested tensor is among the inputs"):
        model(nested)
    detach(model)
    with pytest.raises(UnsupportedError, match="a nested tensor is among the inputs"):
        Rockmate(model, nested, "60%", costs="flops")
    attach(model, "60%", costs="flops", on_infeasible="least")
    with pytest.warns(BudgetWarning, match="runs as it is from now on"):
        assert model(nested).is_nested
    assert model(nested).is_nested


def test_a_model_on_the_meta_device_has_no_values() -> None:
    model = net().to("meta")
    for x in (X, X.to("meta")):
        with pytest.raises(InputError, match=r"0\.weight of the model is on the meta device, and has no values"):
            Rockmate(model, x, "60%")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_that_holds_its_own_handle_is_copied(copied: Any) -> None:
    model = Holds()
    model.handle = attach(model, "80%", costs="flops")
    model(X).square().mean().backward()
    other = copied(model)
    assert attached(model) is model.handle
    assert attached(other) is None
    assert_same([*other.state_dict().values()], [*model.state_dict().values()])
    assert torch.equal(other(X), model(X))


class Holds(nn.Module):
    """Has its handle as an attribute, which comes before its parameters."""

    def __init__(self) -> None:
        self.handle: Any = None
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x)
        return y


def saved_in(folder: str) -> None:
    Rockmate(net(), X, "1 MiB", costs="flops").plan.save(f"{folder}/plan.json")


ARGUMENTS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no function": (lambda: measure_peak(3), MeasureError, "give a function without arguments that runs a step"),
    "no step": (lambda: measure_step(3), MeasureError, "give a function without arguments that runs a step"),
    "no device": (lambda: measure_peak(list, device="foo"), MeasureError, "device='foo' is no device"),
    "no folder": (lambda: saved_in("nowhere"), PlanError, "Give a file in a folder that is there"),
    "no path": (lambda: Rockmate(net(), X, "1 MiB", costs="flops").plan.save(5), PlanError, "5 is no path"),
    "no bytes": (lambda: frontier(net(), X, costs="flops").overhead("1 MiB"), ValueError, "give a number of bytes"),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments_of_no_use_are_refused_with_a_remedy(what: str) -> None:
    call, kind, text = ARGUMENTS[what]
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize("fallback", [False, True])
def test_arguments_that_contain_themselves(fallback: bool) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, given: dict[str, Any]) -> torch.Tensor:
            y: torch.Tensor = self.net(given["x"])
            return y

    given: dict[str, Any] = {"x": X}
    given["self"] = given
    model = Takes()
    attach(model, "80%", costs="flops", on_infeasible="least" if fallback else "error")
    if fallback:
        with pytest.warns(BudgetWarning, match="runs as it is from now on"):
            assert torch.equal(model(given), model.net(X))
    else:
        with pytest.raises(UnsupportedError, match="a container that is in itself"):
            model(given)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_what_torch_jit_makes_of_an_attached_model_is_said_to_have_no_plan() -> None:
    model = net()
    attach(model, "60%")
    with pytest.warns(BudgetWarning, match=r"Sequential is attached, and what torch\.jit\.script makes"):
        torch.jit.script(nn.Sequential(model, nn.ReLU()))
    detach(model)
    torch.jit.script(model)


def test_an_input_without_values_is_refused() -> None:
    model = net()
    attach(model, "60%")
    with pytest.raises(InputError, match="an input is on the meta device, where it has no values: make it on cpu"):
        model(X.to("meta"))
    model(X).sum().backward()


class Refusing(nn.Module):
    """Refuses to compute as long as it is told so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.refuses = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x).tanh()
        if self.refuses:
            raise ValueError("not now")
        return y


@pytest.mark.parametrize("budget", ["90%", "200 KiB"])
def test_a_call_that_fails_again_is_not_captured_again(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[object] = []
    own = Capture.run

    def run(self: Capture, model: nn.Module, call: Any) -> Any:
        captured.append(call)
        return own(self, model, call)

    monkeypatch.setattr(Capture, "run", run)
    model, eager, x = Refusing(), Refusing(), torch.randn(64, 32)
    handle = attach(model, budget, costs="flops", cache=False)
    for _ in range(4):
        with pytest.raises(ValueError, match="not now"):
            model(x)
    assert len(captured) == 1
    model.refuses = eager.refuses = False
    for _ in range(3):
        for m in (model, eager):
            m(x).square().mean().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True))
    assert handle.ran_freely or handle.plan is not None
