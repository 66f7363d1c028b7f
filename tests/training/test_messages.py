"""What is printed holds: budgets that errors name can be given, and lines of the log tell what took time or memory."""

from __future__ import annotations

import copy
import gc
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import randn
from torch import nn

import rockmate
from rockmate import InfeasibleBudgetError, InputError, attach, frontier
from rockmate.budget import show_bytes
from rockmate.calls import capture, front
from rockmate.integrations import Meter

Step = Callable[[nn.Module], None]
X, Y = randn(128, 16, seed=1), randn(128, 16, seed=2)


class Mlp(nn.Module):
    """``branches`` on a value, so that it is followed; with ``hidden``, returns two results."""

    def __init__(self, *, branches: bool = False, hidden: bool = False, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.GELU())))
        self.branches, self.hidden = branches, hidden

    def forward(self, x: torch.Tensor) -> Any:
        """One graph, unless it branches."""
        if self.branches and x.sum().item() > 1e9:
            x = x + 1
        y = self.layers(x)
        return (y, self.layers(y)) if self.hidden else y


def small_loss(model: nn.Module) -> None:
    model(X).mean().backward()


def large_loss(model: nn.Module) -> None:
    """Keeps much more than is left for it before it was seen."""
    y = model(X)
    torch.stack([(k * y).exp().tanh().mean() for k in range(1, 9)]).sum().backward()


def passing_loss(model: nn.Module) -> None:
    """Takes more than is left for it, and keeps nothing."""
    y = model(X)
    torch.cat([y.detach()] * 6)
    y.mean().backward()


def two_calls(model: nn.Module) -> None:
    (model(X).mean() + model(Y).mean()).backward()


def last_result(model: nn.Module) -> None:
    model(X)[1].mean().backward()


def trained(budget: Any, options: dict[str, Any], step: Step, **more: Any) -> rockmate.calls.attachment.Attachment:
    """Attached under ``budget``, for three steps."""
    torch.manual_seed(0)
    model = Mlp(**options)
    handle = attach(model, budget, costs="flops", cache=False, **more)
    for _ in range(3):
        step(model)
        model.zero_grad()
    return handle


BRANCHES, HIDDEN = {"branches": True}, {"hidden": True}
REFUSED: dict[str, tuple[Any, dict[str, Any], Step, dict[str, Any], bool]] = {
    "at first sight": ("20 KiB", {}, small_loss, {}, True),
    "at the sample": ("1%", {}, small_loss, {"sample": X}, True),
    "small loss": ("1%", {}, small_loss, {}, False),
    "large loss": ("60 KiB", {}, large_loss, {}, False),
    "large loss of a sample": ("60 KiB", {}, large_loss, {"sample": X}, False),
    "several calls": ("60 KiB", {}, two_calls, {}, False),
    "followed": ("1%", BRANCHES, small_loss, {}, True),
    "followed, large loss": ("20 KiB", BRANCHES, large_loss, {}, True),
    "several results": ("1%", HIDDEN, last_result, {}, False),
}
"""Budget, options of the model, step, options of ``attach``, and whether a share is said."""


@pytest.mark.filterwarnings("ignore:.*(plan of least memory runs|called 2 times):rockmate.BudgetWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_budgets_that_an_error_names_can_be_given_from_the_start(name: str) -> None:
    budget, options, step, more, share_said = REFUSED[name]
    with pytest.raises(InfeasibleBudgetError) as error:
        trained(budget, options, step, **more)
    said = str(error.value)
    least = re.search(
        r"smallest (?:that|budget that the calls) can be planned (?:is|for together is) ([\d.]+ \w+)", said
    )
    first, shares = re.search(r"a budget of ([\d.]+ \w+) has a plan", said), re.findall(r'is "(\d+%)"', said)
    assert least is not None and len(shares) == share_said
    for found in (first[1] if first else least[1], *shares):
        trained(found, options, step, **more)


@pytest.mark.filterwarnings("ignore:.*called 2 times:rockmate.BudgetWarning")
@pytest.mark.parametrize("options", [{}, BRANCHES])
def test_a_least_budget_of_one_call_says_so_where_others_may_come(options: dict[str, Any]) -> None:
    """Where calls of a step are planned together, the error is for all of them."""

    def said(step: Step, budget: str) -> str:
        with pytest.raises(InfeasibleBudgetError) as error:
            trained(budget, options, step)
        return str(error.value)

    single, several = trained("100 KiB", options, small_loss), trained("120 KiB", options, two_calls)
    for handle, words in ((single, ""), (several, "This is for one call of 2: all calls")):
        with pytest.raises(InfeasibleBudgetError) as error:
            handle.budget = "1 KiB"
        assert words in str(error.value) and ("one call" in str(error.value)) == bool(words)
    if not options:
        assert "one call" not in said(two_calls, "60 KiB")
        assert "This is for one call: all calls" in said(two_calls, "1 KiB")


@pytest.mark.filterwarnings("ignore:.*The plan of least memory runs instead:rockmate.BudgetWarning")
def test_a_share_that_no_plan_fits_before_the_loss_was_seen_is_one_of_the_step_with_it() -> None:
    """The first step runs with least memory, and the share is of what it took."""
    model = Mlp(depth=6)
    handle = attach(model, "100%", costs="flops", cache=False)
    passing_loss(model)
    curve, before = handle.frontier(), frontier(Mlp(depth=6), X, costs="flops")
    least, supposed = curve.min_budget / curve.max_budget, before.min_budget / before.max_budget
    assert 1.02 * least < supposed
    share = (least + supposed) / 2
    handle = trained(f"{100 * share:.2f}%", {"depth": 6}, passing_loss)
    assert handle.budget == pytest.approx(share * curve.max_budget, rel=1e-3)


def test_a_share_is_not_said_of_another_step_than_the_first() -> None:
    model = Mlp()
    attach(model, "60 KiB", costs="flops", cache=False, sample=X)
    with pytest.raises(InfeasibleBudgetError) as error:
        model(randn(4096, 16, seed=1))
    assert "%" not in str(error.value)


def test_the_last_share_of_a_frontier_can_be_given() -> None:
    text = str(frontier(Mlp(), X, costs="flops"))
    last = text.splitlines()[-1].split()
    attach(Mlp(), f"{last[2]}%", costs="flops", cache=False, sample=X)
    assert float(last[2]) % 1, "rounded to whole ones it would not do"


MISTAKES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a sample before the budget": (lambda m: attach(m, (X, X), "60%"), "attach: too many positional arguments"),  # type: ignore[call-overload]
    "modules one by one": (lambda m: attach(m, m, "60%"), r"Call it as attach\(model, budget, \*, sample=None"),  # type: ignore[call-overload]
    "no budget": (attach, "missing a required argument: 'budget'"),  # type: ignore[call-overload]
    "a misspelt option": (lambda m: attach(m, "60%", smaple=X), "there is no argument 'smaple'"),  # type: ignore[call-overload]
    "no sample": (lambda m: rockmate.Rockmate(m, budget="60%"), r"Call it as Rockmate\(model, sample, budget=None"),  # type: ignore[call-arg]
    "two samples": (lambda m: rockmate.Rockmate(m, X, X, "60%"), "Rockmate: too many positional arguments"),  # type: ignore[call-arg]
    "an option of attach": (lambda m: rockmate.Rockmate(m, X, "60%", optimizer=None), "argument 'optimizer'"),  # type: ignore[call-arg]
    "nothing": (lambda m: rockmate.Rockmate(), "the module comes first"),
    "a frontier with a budget": (lambda m: frontier(m, X, "60%"), r"Call it as frontier\(model, sample, \*,"),  # type: ignore[call-arg]
    "no sizes": (lambda m: rockmate.estimate(m, X), "estimate: missing a required argument: 'sizes'"),  # type: ignore[call-arg]
    "sizes one by one": (lambda m: rockmate.estimate(m, X, 8, 16, 32), r"estimate\(model, sample, sizes, budget=None"),  # type: ignore[call-arg]
    "no function": (lambda m: rockmate.measure_peak(), "measure_peak: missing a required argument"),  # type: ignore[call-arg]
    "no model": (lambda m: rockmate.detach(), r"Call it as detach\(model\)"),  # type: ignore[call-arg]
    "a meter's options": (lambda m: Meter("8 GiB", smaple=X), "argument 'smaple'"),
    "a meter of a model": (lambda m: Meter(m, "8 GiB"), r"Meter\(budget, \*, plain_steps=0"),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("name", MISTAKES)
def test_calls_with_other_arguments_say_what_these_are(name: str) -> None:
    call, message = MISTAKES[name]
    with pytest.raises(InputError, match=message):
        call(Mlp())


@pytest.mark.parametrize("function", [Mlp(), lambda x: x], ids=["a module", "takes an argument"])
def test_what_is_measured_takes_no_arguments(function: Any) -> None:
    with pytest.raises(rockmate.MeasureError, match="give a function without arguments"):
        rockmate.measure_peak(function)


@pytest.mark.filterwarnings("ignore:.*The plan of least memory runs instead:rockmate.BudgetWarning")
@pytest.mark.parametrize("first", [128, 32])
def test_the_largest_size_is_not_asked_for_where_it_came_first(first: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "rockmate")
    model = Mlp()
    attach(model, "70%", costs="flops", cache=False, sample=X[:first], on_infeasible="least")
    for rows in (first, 112, 120, 128):
        model(X[:rows]).mean().backward()
        model.zero_grad()
    (line,) = (m for m in caplog.messages if "have come so far" in m)
    assert ("give a call of the largest size" in line) == (first == 32)


def test_a_step_that_took_more_than_the_budget_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The figure is that of the step, which kept everything as eager mode does, but for the loss's numbers."""
    caplog.set_level(logging.INFO, "rockmate")
    torch.manual_seed(0)
    model = Mlp()
    eager = copy.deepcopy(model)
    large_loss(copy.deepcopy(eager))
    peak = rockmate.measure_peak(lambda: large_loss(eager))
    attach(model, "100%", costs="flops", cache=False)
    for _ in range(3):
        large_loss(model)
        model.zero_grad()
    (line,) = (m for m in caplog.messages if "that step took" in m)
    assert f"that step took {show_bytes(peak - 64)} of " in line or f"that step took {show_bytes(peak)} of " in line


def test_a_followed_step_that_took_more_than_the_budget_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rockmate")
    trained("160 KiB", BRANCHES, large_loss)
    (line,) = (m for m in caplog.messages if "planned a followed step" in m)
    assert re.search(r"; the step that was observed took [\d.]+ KiB$", line)


def test_a_capture_that_takes_long_has_a_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no plan is made of it, as the budget does not bind or the plan is there."""
    monkeypatch.setattr(front, "LONG", 0.0)
    caplog.set_level(logging.INFO, "rockmate")
    model = Mlp()
    handle = attach(model, "70%", costs="flops", cache=False)
    small_loss(model)
    caplog.clear()
    torch._dynamo.reset()
    model.zero_grad()
    small_loss(model)
    assert any("captured another kind of call in" in m for m in caplog.messages) and handle.plans_made == 1


def test_a_frontier_says_of_which_calls_it_is_where_there_are_several() -> None:
    model = Mlp()
    handle = attach(model, "70%", costs="flops", cache=False)
    for rows in (128, 128, 100):
        if rows == 100:
            assert "float32" not in str(handle.frontier()), "there is one kind"
        model(X[:rows]).mean().backward()
        model.zero_grad()
    assert handle.plan is not None
    curve = handle.frontier()
    assert str(curve).splitlines()[0] == f"for x float32[{128 if '128' in handle.plan.call[0] else 100}, 16], train"
    assert "float32" in curve._repr_html_()


@pytest.mark.parametrize("word", ["of", "flase", "Of", "onn"])
def test_a_misspelt_word_is_no_folder_of_the_cache(word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"was cache=(True|False) meant"):
        attach(Mlp(), "60%", cache=word)
    monkeypatch.setenv("ROCKMATE_CACHE", word)
    with pytest.raises(InputError, match=r"was ROCKMATE_CACHE=(on|off|false) meant"):
        attach(Mlp(), "60%")
    attach(Mlp(), "60%", cache=f"./{word}")
    attach(Mlp(), "60%", cache="plans")
    (tmp_path / word).mkdir()
    attach(Mlp(), "60%", cache=word)
    assert [path.name for path in tmp_path.iterdir()] == [word]


def test_who_binds_what_attach_returned_hears_that_it_is_no_model() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    handle = attach(model, "1 MiB")
    with pytest.raises(AttributeError, match=r"no attribute 'parameters': attach works in place.*handle = rockmate"):
        handle.parameters()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no attribute 'plam'$"):
        handle.plam  # type: ignore[attr-defined]  # noqa: B018
    del model
    gc.collect()
    with pytest.raises(InputError, match="is gone: attach works in place"):
        handle.model  # noqa: B018


def test_a_misspelt_argument_is_named() -> None:
    with pytest.raises(InputError, match=r"attach: there is no argument 'buget'\. Call it as attach\(model, budget"):
        attach(nn.Linear(8, 8), buget="1 MiB")  # type: ignore[call-overload]


def test_a_loss_that_is_declared_counts_in_the_first_step() -> None:
    """A budget that is far more than what the model takes is none to spare beside such a loss."""
    model, x = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), torch.randn(512, 16)
    plans = []
    for loss_memory in (None, "15.5 MiB"):
        handle = attach(model, "16 MiB", costs="flops", loss_memory=loss_memory)
        model(x).square().mean().backward()
        plans.append(handle.plan is not None)
        handle.detach()
    assert plans == [False, True]


class Counts(nn.Module):
    """Reads a number from its input, so that it is followed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x[: int((x[:, 0] > -100).sum())])
        return y


def test_a_share_of_a_followed_step_does_not_shrink_with_smaller_batches() -> None:
    model = Counts()
    handle = attach(model, "60%", sample=torch.randn(512, 16), costs="flops")
    budgets = [handle.budget]
    for rows in (16, 16, 48, 512, 16, 640):
        model(torch.randn(rows, 16)).square().mean().backward()
        budgets.append(handle.budget)
        for p in model.parameters():
            p.grad = None
    assert handle.reason
    assert all(isinstance(b, int) for b in budgets)
    assert min(budgets) >= budgets[4] > 0.9 * budgets[0]
    assert budgets[-1] == max(budgets) > budgets[4]


def test_what_is_printed_of_a_handle_says_why_there_is_no_plan() -> None:
    model = Mlp()
    handle = attach(model, "8 GiB", costs="flops", cache=False)
    assert repr(handle) == "<rockmate.attach: Mlp, budget 8.0 GiB, 0 plans: no step with gradients yet>"
    small_loss(model)
    assert handle.plan is None
    assert repr(handle).endswith("0 plans: the budget does not bind>")
    handle.budget = "70%"
    model.zero_grad()
    small_loss(model)
    assert handle.plan is not None
    assert repr(handle).endswith(", 1 plan>")
    handle.detach()
    assert repr(handle).endswith("0 plans: detached>")
    tall = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(8, 8), nn.GELU())))
    handle = attach(tall, "2 MiB", costs="flops", cache=False)
    tall(torch.randn(2048, 8)).mean().backward()
    assert repr(handle).endswith("0 plans: a step was measured, and the next one like it is planned>")
    tall(torch.randn(2048, 8)).mean().backward()
    assert repr(handle).endswith(", 1 plan>")


@pytest.mark.parametrize("budget", ["50%", "8 GiB"])
def test_what_is_printed_of_a_handle_where_nothing_needs_a_gradient(budget: str) -> None:
    """Nor is a call planned whose results have no gradient."""
    model = Mlp().requires_grad_(False)
    handle = attach(model, budget, costs="flops", cache=False)
    for _ in range(2):
        model(X)
    assert repr(handle).endswith("0 plans: no step with gradients yet, as no parameter needs one>")
    model = Mlp()
    model.layers.register_forward_hook(lambda layers, args, y: y.detach())
    handle = attach(model, "50%", costs="flops", cache=False)
    model(X)
    assert repr(handle).endswith("0 plans: no step with gradients yet>")


def test_what_is_printed_of_a_followed_handle_says_that_the_last_call_was_new() -> None:
    torch.manual_seed(0)
    model = Mlp(branches=True)
    handle = attach(model, "70%", costs="flops", cache=False)
    for _ in range(2):
        small_loss(model)
        model.zero_grad()
    assert repr(handle).endswith(", 1 plan>")
    model.layers.append(nn.Tanh())
    model(X)
    assert handle.plan is None
    assert repr(handle).endswith(", 1 plan; none for what the last call computed, which is new or fits no plan>")


DECLARED: dict[str, tuple[Any, bool, str]] = {
    "nothing": (None, False, "or say what the loss takes (loss_memory=)."),
    "much": ("1 MiB", False, "or declare less than loss_memory=1048576 (1.0 MiB) where the loss takes less."),
    "seen": (None, True, "Raise the budget or make the batch smaller."),
}


@pytest.mark.parametrize("name", DECLARED)
def test_a_loss_is_to_be_declared_only_where_that_was_not_done(name: str) -> None:
    declared, seen, advice = DECLARED[name]
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    x = randn(64, 16, seed=1)
    if seen:
        handle = attach(model, "60%", costs="flops", cache=False, on_infeasible="least")
        with pytest.warns(rockmate.BudgetWarning, match="plan of least memory"):
            for _ in range(2):
                model(x).square().mean().backward()
                model.zero_grad()
        with pytest.raises(InfeasibleBudgetError) as error:
            handle.budget = "12 KiB"
    else:
        x = x if declared else randn(64, 4, seed=1)
        model = model if declared else nn.Sequential(nn.Tanh(), nn.Linear(4, 256))
        with pytest.raises(InfeasibleBudgetError) as error:
            attach(model, "16 KiB", costs="flops", cache=False, sample=x, loss_memory=declared)
    assert "is the loss, between forward and backward" in str(error.value)
    assert advice in str(error.value)
    assert seen != ("loss_memory" in str(error.value))


def test_a_share_above_the_whole_is_said_to_bind_for_larger_steps_only() -> None:
    model = Mlp()
    with pytest.warns(rockmate.BudgetWarning, match="'130%' is more than the step takes.*larger steps only"):
        handle = attach(model, "130%", costs="flops", cache=False)
    small_loss(model)
    assert handle.plan is None or handle.plan.recomputed == 0
    attach(Mlp(), "100%", costs="flops", cache=False)  # and nothing is said


class Recurrent(nn.Module):
    """Four layers, as one operation or as four."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        one = [nn.LSTM(32, 32, num_layers=4, batch_first=True)]
        self.layers = nn.ModuleList([nn.LSTM(32, 32, batch_first=True) for _ in range(4)] if apart else one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (rows, length, 32)."""
        for layer in self.layers:
            x = layer(x)[0]
        return x


def test_an_operation_that_takes_most_of_the_least_budget_is_named_with_what_divides_it() -> None:
    x, errors = randn(16, 64, 32, seed=1), []
    for apart in (False, True):
        with pytest.raises(InfeasibleBudgetError) as error:
            attach(Recurrent(apart), "20 KiB", costs="flops", cache=False, sample=x)
        errors.append(error.value)
    whole, divided = errors
    assert re.search(r"This operation alone takes [\d.]+ MiB, which no plan divides\. Its 4 layers are", str(whole))
    assert "layers are" not in str(divided)
    assert divided.min_budget < 0.5 * whole.min_budget


def test_an_operation_among_others_is_not_said_to_take_it_all() -> None:
    with pytest.raises(InfeasibleBudgetError) as error:
        attach(Mlp(depth=8), "8 KiB", costs="flops", cache=False, sample=X)
    assert "alone" not in str(error.value)


@pytest.mark.parametrize("sample", [None, X], ids=["in training", "of a sample"])
def test_a_defect_of_a_capture_is_said_once_and_training_goes_on(
    sample: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(capture, "check_values", broken)
    monkeypatch.setattr("rkgb.warn._said", set())
    caplog.set_level(logging.DEBUG, "rockmate")
    model = Mlp()
    with pytest.warns(
        rockmate.errors.PlanningWarning, match="defect of torch or of rockmate .KeyError: 'lost'.*report"
    ):
        handle = attach(model, "80%", costs="flops", cache=False, sample=sample)
        small_loss(model)
    for _ in range(2):
        model.zero_grad()
        small_loss(model)
    assert handle.plan is not None
    assert handle.reason == "KeyError: 'lost'"
    assert any(record.exc_info for record in caplog.records)


def test_an_error_of_the_model_is_no_defect_of_a_capture() -> None:
    model = Mlp()
    attach(model, "80%", costs="flops", cache=False)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(randn(128, 15, seed=1))
    small_loss(model)


class Scored(nn.Module):
    """Looks up ``sparse`` embeddings, and returns one loss, or with ``several`` of them, two."""

    def __init__(self, *, sparse: bool, several: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.several = nn.Embedding(500, 32, sparse=sparse), several
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, head: torch.Tensor, tail: torch.Tensor) -> Any:
        """A loss."""
        h, t = self.embedding(head), self.embedding(tail)
        scores = self.mlp(torch.cat([h[:, None].expand_as(t), t], -1))[..., 0]
        loss = -(scores - (h[:, None] - t).norm(p=1, dim=-1)).sigmoid().log().mean()
        return (loss, scores.square().mean()) if self.several else loss


@pytest.mark.filterwarnings("ignore:Scored. no plan fits:rockmate.BudgetWarning")  # of the first step
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_least_share_is_stated_where_a_later_step_refuses_one(sparse: bool, several: bool) -> None:
    """Only bytes were. The share holds, and the one below does not."""
    head, tail = torch.arange(64), torch.arange(64 * 16).view(64, 16) % 500

    def train(share: str) -> None:
        model = Scored(sparse=sparse, several=several)
        attach(model, share, costs="flops", cache=False)
        for _ in range(4):
            losses = model(head, tail)
            (sum(losses) if several else losses).backward()
            model.zero_grad()

    with pytest.raises(InfeasibleBudgetError, match="As a share of eager") as refused:
        train("40%")
    found = re.search(r'"(\d+)%"', str(refused.value))
    assert found
    train(f"{found[1]}%")
    with pytest.raises(InfeasibleBudgetError):
        train(f"{int(found[1]) - 2}%")
