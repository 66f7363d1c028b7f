"""Whatever is recomputed: outputs, gradients, buffers and random numbers are eager's, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from models import ZOO, outputs_of, randn, square_loss
from torch import nn
from training import QUARTERS, Pair, assert_same, flatten, frontier_of, pair, recomputing, state, step

from rockmate import Rockmate

NAMES = [c.name for c in ZOO]
# These have no randomness and no buffers, and inputs that need gradients.
SMOOTH = ["mlp", "function"]
every_case = pytest.mark.parametrize("name", NAMES)
every_budget = pytest.mark.parametrize("quarter", QUARTERS)


@every_case
@every_budget
def test_plan_recomputes_exactly_where_the_frontier_says_so(name: str, quarter: int) -> None:
    assert (pair(name, quarter).rk.plan.recomputed > 0) == recomputing(name, quarter)


@every_case
def test_the_zoo_does_recompute(name: str) -> None:
    assert recomputing(name, 0) and not recomputing(name, 4)


@every_case
@every_budget
def test_optimizer_steps(name: str, quarter: int) -> None:
    p = pair(name, quarter)

    def train(model: nn.Module) -> Iterable[torch.Tensor | None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for seed in (1, 2):
            optimizer.zero_grad()
            yield from step(model, p.case.call(seed))
            yield from state(model)
            optimizer.step()
        yield from state(model)

    p.both(train)


@every_case
@pytest.mark.parametrize("quarter", (0, 2))
def test_gradients_accumulate(name: str, quarter: int) -> None:
    p = pair(name, quarter)

    def accumulate(model: nn.Module) -> Iterable[torch.Tensor | None]:
        for seed in (1, 2, 3):  # absent at first, then present
            yield from step(model, p.case.call(seed))
            yield from (x.grad for x in model.parameters())

    p.both(accumulate)


@every_case
@pytest.mark.parametrize("quarter", (0, 2))
@pytest.mark.parametrize("last_first", (False, True))
def test_two_forwards_before_their_backwards(name: str, quarter: int, last_first: bool) -> None:
    p = pair(name, quarter)

    def interleave(model: nn.Module) -> Iterable[torch.Tensor | None]:
        losses = []
        for seed in (1, 2):
            args, kwargs = p.case.call(seed)
            losses.append(square_loss(model(*args, **kwargs)))
        for loss in losses[::-1] if last_first else losses:
            loss.backward()
            yield loss
            yield from (x.grad for x in model.parameters())

    p.both(interleave)


@every_case
@pytest.mark.parametrize("quarter", (0, 2))
def test_two_forwards_in_one_loss(name: str, quarter: int) -> None:
    p = pair(name, quarter)

    def together(model: nn.Module) -> Iterable[torch.Tensor | None]:
        calls = [p.case.call(seed) for seed in (1, 2)]
        loss = square_loss([model(*args, **kwargs) for args, kwargs in calls])
        loss.backward()
        yield loss

    p.both(together)


@every_case
def test_second_backward_over_a_retained_graph(name: str) -> None:
    p = pair(name, 0)

    def twice(model: nn.Module) -> Iterable[torch.Tensor | None]:
        args, kwargs = p.case.call(1)
        loss = square_loss(model(*args, **kwargs))
        loss.backward(retain_graph=True)
        yield from (x.grad for x in model.parameters())
        loss.backward()

    p.both(twice)


@every_case
def test_a_spent_graph_refuses_a_second_backward(name: str) -> None:
    p = pair(name, 0)
    args, kwargs = p.case.call(1)
    loss = square_loss(p.rk(*args, **kwargs))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@every_case
def test_forward_without_a_backward_then_a_step(name: str) -> None:
    p = pair(name, 0)

    def drop_one(model: nn.Module) -> Iterable[torch.Tensor | None]:
        args, kwargs = p.case.call(1)
        model(*args, **kwargs)
        yield from step(model, p.case.call(2))

    p.both(drop_one)


@pytest.mark.parametrize("name", ["two_in_two_out", "dict_out"])
@pytest.mark.parametrize("used", (0, 1))
@pytest.mark.parametrize("quarter", (0, 2))
def test_only_one_output_is_used(name: str, used: int, quarter: int) -> None:
    p = pair(name, quarter)

    def part(model: nn.Module) -> Iterable[torch.Tensor | None]:
        call = p.case.call(1)
        result = outputs_of(model(*call[0], **call[1]))
        square_loss(result[used]).backward()
        yield from (t.grad for t in outputs_of(call))

    p.both(part)


@pytest.mark.parametrize("name", ["two_in_two_out", "dict_out"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_outputs_one_after_the_other(name: str, order: tuple[int, int]) -> None:
    p = pair(name, 0)

    def parts(model: nn.Module) -> Iterable[torch.Tensor | None]:
        call = p.case.call(1)
        result = outputs_of(model(*call[0], **call[1]))
        square_loss(result[order[0]]).backward(retain_graph=True)
        yield from (x.grad for x in model.parameters())
        square_loss(result[order[1]]).backward()
        yield from (t.grad for t in outputs_of(call))

    p.both(parts)


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("quarter", (0, 2, 4))
def test_double_backward(name: str, quarter: int) -> None:
    p = pair(name, quarter)

    def penalty(model: nn.Module) -> Iterable[torch.Tensor | None]:
        (x,), _ = p.case.call(1)
        (grad,) = torch.autograd.grad(square_loss(model(x)), x, create_graph=True)
        yield grad
        grad.square().sum().backward()
        yield x.grad

    p.both(penalty)


@pytest.mark.parametrize("name", [c.name for c in ZOO if any(t.requires_grad for t in outputs_of(c.call(1)))])
@pytest.mark.parametrize("quarter", (0, 2))
def test_autograd_grad_of_inputs_and_of_one_parameter(name: str, quarter: int) -> None:
    p = pair(name, quarter)

    def grads(model: nn.Module) -> Iterable[torch.Tensor | None]:
        for wanted in ("inputs", "parameter"):
            call = p.case.call(1)
            loss = square_loss(model(*call[0], **call[1]))
            inputs = [t for t in outputs_of(call) if t.requires_grad]
            parameter = [x for x in model.parameters() if x.requires_grad][0]
            yield from torch.autograd.grad(loss, inputs if wanted == "inputs" else parameter)

    p.both(grads)


@pytest.mark.parametrize("name", ["mlp", "tied", "resnet_basic", "gpt"])
def test_hooks_on_outputs_and_parameters_are_called_as_often_and_with_the_same(name: str) -> None:
    p = pair(name, 0)

    def hooked(model: nn.Module) -> Iterable[torch.Tensor | None]:
        seen: list[torch.Tensor] = []
        parameter = [x for x in model.parameters() if x.requires_grad][0]
        handles = [
            parameter.register_hook(lambda g: seen.append(g.clone()) or 2 * g),
            parameter.register_post_accumulate_grad_hook(lambda x: seen.append(x.grad.clone())),
        ]
        args, kwargs = p.case.call(1)
        result = outputs_of(model(*args, **kwargs))[0]
        result.register_hook(lambda g: seen.append(g.clone()) or 0.5 * g)
        square_loss(result).backward()
        for handle in handles:
            handle.remove()
        assert len(seen) == 3
        yield from seen

    p.both(hooked)


@every_case
def test_without_gradients_the_model_itself_runs(name: str) -> None:
    p = pair(name, 0)
    calls = []
    handle = p.rk.original.register_forward_hook(lambda *_: calls.append(1))

    def no_grad(model: nn.Module) -> Iterable[torch.Tensor | None]:
        args, kwargs = p.case.call(1)
        with torch.no_grad():
            yield from outputs_of(model(*args, **kwargs))
        model.eval()
        yield from outputs_of(model(*args, **kwargs))
        model.train()

    p.both(no_grad)
    handle.remove()
    assert len(calls) == 2


@every_case
def test_a_call_in_eval_mode_between_two_steps(name: str) -> None:
    p = pair(name, 0)

    def evaluate(model: nn.Module) -> Iterable[torch.Tensor | None]:
        yield from step(model, p.case.call(1))
        args, kwargs = p.case.call(2)
        model.eval()
        with torch.no_grad():
            yield from outputs_of(model(*args, **kwargs))
        model.train()
        yield from step(model, p.case.call(3))

    p.both(evaluate)


def test_smaller_last_batch() -> None:
    p = pair("resnet_basic", 0)

    def epoch(model: nn.Module) -> Iterable[torch.Tensor | None]:
        for batch in (4, 4, 3):
            yield from step(model, ((randn(batch, 3, 16, 16, seed=batch),), {}))

    p.both(epoch)


@every_case
def test_the_graph_holds_nothing_after_the_backward(name: str) -> None:
    p = pair(name, 0)
    call = p.case.call(1)
    loss = square_loss(p.rk(*call[0], **call[1]))
    loss.backward()
    first = [x.grad for x in p.rk.parameters() if x.grad is not None]
    before = flatten(first)
    step(p.eager, p.case.call(2))  # other work on the same allocator
    assert_same(flatten(first), before)


def test_weights_changed_between_steps_are_used() -> None:
    p = pair("mlp", 0)

    def change(model: nn.Module) -> Iterable[torch.Tensor | None]:
        yield from step(model, p.case.call(1))
        with torch.no_grad():
            for x in model.parameters():
                x.mul_(0.5)
        model.zero_grad()
        yield from step(model, p.case.call(1))

    p.both(change)


def test_a_replaced_parameter_is_used() -> None:
    torch.manual_seed(0)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)))
    x = randn(64, 16, seed=1)
    eager, model = models
    budget = frontier_of_model(model, x)
    rk = Rockmate(model, x, budget, costs="flops")
    assert rk.plan.recomputed
    for m in models:
        m[2].weight = nn.Parameter(torch.full((32, 32), 0.01))
    p = Pair(pair("mlp", 4).case, eager, rk)
    p.both(lambda m: step(m, ((x,), {})))


def frontier_of_model(model: nn.Module, x: torch.Tensor) -> int:
    """The smallest budget."""
    from rockmate import frontier

    return frontier(model, x, costs="flops").min_budget


def test_a_change_in_place_between_forward_and_backward_is_refused() -> None:
    p = pair("mlp", 0)
    args, kwargs = p.case.call(1)
    loss = square_loss(p.rk(*args, **kwargs))
    with torch.no_grad():
        for x in p.rk.parameters():
            x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autocast() -> None:
    p = pair("mlp", 4)
    (x,), _ = p.case.call(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        from rockmate import frontier

        found = frontier(p.rk.original, x, costs="flops")
        rk = Rockmate(p.rk.original, x, found.min_budget, costs="flops")
    assert rk.plan.recomputed

    def cast(model: nn.Module) -> Iterable[torch.Tensor | None]:
        call = p.case.call(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = square_loss(model(*call[0]))
        loss.backward()
        yield loss
        yield call[0][0].grad

    Pair(p.case, p.eager, rk).both(cast)


def test_cross_entropy_of_the_language_model() -> None:
    p = pair("gpt", 0)

    def learn(model: nn.Module) -> Iterable[torch.Tensor | None]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for seed in (1, 2, 3):
            (ids,), _ = p.case.call(seed)
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss

    p.both(learn)
    assert frontier_of("gpt").min_budget == p.rk.budget
