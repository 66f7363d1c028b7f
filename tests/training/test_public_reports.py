"""Situations of public bug reports about checkpointing, compilers and autograd, under a budget, against eager mode.

Each is what somebody did, not what was wrong in the library of the report.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from against_eager import assert_same, snapshot
from models import SEVERAL, outputs_of, randn, square_loss, tokens
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from rockmate import Attachment, attach, measure_peak

Batch = Callable[[int], tuple[Any, ...]]
WIDTH, ROWS = 16, 64
again = partial(checkpoint, use_reentrant=False)


def rows(k: int) -> tuple[Any, ...]:
    """The batch of step ``k``."""
    return (randn(ROWS, WIDTH, seed=k),)


def two(k: int) -> tuple[Any, ...]:
    """The same, and as many rows more."""
    return (*rows(k), randn(ROWS, WIDTH, seed=k + 9))


def blocks() -> nn.Sequential:
    """Keeps much more than its weights take."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh(), nn.Softplus())


class Net(nn.Module):
    """``middle(self, h, ...)``, which a report is about, between layers that can run again."""

    def __init__(self, middle: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.middle, self.first, self.last = middle, blocks(), blocks()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        h = self.middle(self, self.first(x), *rest, **named)
        return self.last(h) if isinstance(h, torch.Tensor) else (self.last(h[0]), *h[1:])


class Run:
    """A training: as it is, or under ``budget``."""

    def __init__(self, budget: str | None) -> None:
        self.budget = budget
        self.model: Any = None
        self.handle: Attachment | None = None
        self.again: Callable[[], Any] | None = None  # the last step

    def attach(self, model: nn.Module) -> nn.Module:
        self.model = model
        if self.budget is not None:
            self.handle = attach(model, self.budget, costs="flops", cache=False)
        return model

    def step(self, *args: Any, loss: Callable[[Any], torch.Tensor] = square_loss, **named: Any) -> Iterator[Any]:
        """One step; outputs, loss, gradients, buffers."""
        model = self.model

        def forward_and_backward() -> tuple[Any, torch.Tensor]:
            result = model(*args, **named)
            value = loss(result)
            value.backward()
            return result, value

        model.zero_grad()
        result, value = forward_and_backward()
        self.again = forward_and_backward
        for t in (*outputs_of(result), value):
            yield from (t.detach().clone(), t.requires_grad)
        yield from snapshot(model, *(t for t in args if isinstance(t, torch.Tensor) and t.is_leaf))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.05 * p.grad

    def __call__(self, model: nn.Module, batch: Batch = rows, **how: Any) -> Iterator[Any]:
        """Four steps of the attached ``model``."""
        self.attach(model)
        for k in range(4):
            yield from self.step(*batch(k), **how)

    def assert_within_budget(self) -> None:
        """The last step again is within the budget, and runs something again."""
        assert self.handle is not None and self.handle.plan is not None, str(self.handle)
        assert self.handle.plan.recomputed > 0, str(self.handle)
        if self.again is not None:
            self.model.zero_grad()
            self.again()
            self.model.zero_grad()
            peak = measure_peak(self.again, "cpu")
            assert peak <= self.handle.budget, f"peak {peak}, budget {self.handle.budget}"


Situation = Callable[[Run], Iterator[Any]]
SITUATIONS: dict[str, tuple[Situation, str]] = {}


def report(*names: str, share: str = "75%") -> Callable[[Situation], Situation]:
    """A situation of the reports ``names``. ``share``: the budget, with which something runs again."""

    def add(situation: Situation) -> Situation:
        SITUATIONS[" ".join((situation.__name__, *names))] = situation, share
        return situation

    return add


@report("pytorch#7617")
def inputs_without_gradients(run: Run) -> Iterator[Any]:
    """A part is checkpointed whose inputs need no gradient, but whose weights do."""
    yield from run(Net(lambda m, h: again(m.part, h.detach()), part=blocks()))


@report("transformers#21381", share="85%")
def frozen_below_a_reentrant_checkpoint(run: Run) -> Iterator[Any]:
    """The first layers are frozen, so a reentrant checkpoint after them cuts all gradients of its own weights."""
    model = Net(
        lambda m, h: checkpoint(m.part, h, use_reentrant=True) + m.bias,
        part=blocks(),
        bias=nn.Parameter(torch.ones(WIDTH)),
    )
    model.first.requires_grad_(False)
    yield from run(model)


@report("pytorch#96136", "pytorch-pfn-extras#117")
def a_norm_in_a_checkpoint(run: Run) -> Iterator[Any]:
    """A batch norm within a checkpoint updates its statistics in both runs, as in eager mode."""
    yield from run(
        Net(
            lambda m, h: again(m.part, h),
            part=nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Tanh()),
        )
    )


@report("pytorch#36383")
def a_view_that_is_changed_in_a_checkpoint(run: Run) -> Iterator[Any]:
    """What a checkpoint returns is a view that was changed in place."""
    yield from run(
        Net(
            lambda m, h: again(lambda t: (t + m.bias)[:].relu_(), h),
            bias=nn.Parameter(torch.ones(WIDTH)),
        )
    )


@report("pytorch#141896", share="85%")
def autocast_within_a_checkpoint(run: Run) -> Iterator[Any]:
    """A checkpointed function enters autocast itself and is called twice with the same weights."""

    def part(m: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m.part(h).float()

    def middle(m: Any, h: torch.Tensor) -> torch.Tensor:
        return again(part, m, again(part, m, h))

    yield from run(Net(middle, part=blocks()))


@report("pytorch#128035")
def an_input_in_a_graph_that_is_changed(run: Run) -> Iterator[Any]:
    """Forward changes an input that comes of other operations, and returns its value from before as well."""

    def middle(m: Any, h: torch.Tensor, t: torch.Tensor) -> Any:
        before = t.detach()
        t.mul_(2)
        return h + t, before

    run.attach(Net(middle))
    leaf = randn(ROWS, WIDTH, seed=9).requires_grad_()
    for k in range(4):
        made = leaf * 2
        yield from run.step(*rows(k), made)
        yield from (made.detach().clone(), leaf.grad.clone())
        run.again = None


class Overwrites(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x.clone(), x.sin()

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return one.mul_(0.5).add_(two)


@report("pytorch#141111")
def a_function_that_changes_the_gradient_it_gets(run: Run) -> Iterator[Any]:
    """The backward of a function writes into a gradient."""
    yield from run(Net(lambda m, h: torch.add(*Overwrites.apply(m.part(h))), part=blocks()))


@report("pytorch#114338")
def one_expression_with_and_without_gradients(run: Run) -> Iterator[Any]:
    """The same sum is computed with gradients and without; the results are not one tensor."""

    def middle(m: Any, h: torch.Tensor) -> Any:
        with torch.no_grad():
            constant = h + 1
        return h + 1, constant

    yield from run(Net(middle))


class OneSlot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, c)
        return a * b + c

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        a, c = ctx.saved_tensors
        return g * a, None, g * c


@report("pytorch#181146")
def one_tensor_in_all_slots_of_a_function(run: Run) -> Iterator[Any]:
    """A function gets one tensor three times, and its backward gives each place another gradient."""
    yield from run(Net(lambda m, h: OneSlot.apply(h, h, h)))


class InPlaceInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * w
        y += x
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w, y = ctx.saved_tensors
        return g * (w + 1), (g * x + 0 * y).sum(0)


@report("pytorch#180642", share="85%")
def a_function_that_adds_in_place(run: Run) -> Iterator[Any]:
    """The forward of a function adds into what it then saves and returns."""
    yield from run(Net(lambda m, h: InPlaceInside.apply(h, m.scale), scale=nn.Parameter(torch.ones(WIDTH))))


@report("pytorch#90844")
def a_parameter_that_forward_changes(run: Run) -> Iterator[Any]:
    """Forward adds to a parameter without gradients before it uses it."""

    def middle(m: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            m.scale.add_(0.01)
        return h * m.scale

    yield from run(Net(middle, scale=nn.Parameter(torch.ones(WIDTH))))


@report("pytorch#115255")
def hooks_of_saved_tensors_around_a_part(run: Run) -> Iterator[Any]:
    """Hooks that change nothing are around one layer in the middle of forward."""

    def middle(m: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            h = m.part(h)
        return h.relu()

    yield from run(Net(middle, part=blocks()))


@report("pytorch#34202", "pytorch#12013")
def a_layer_on_no_rows(run: Run) -> Iterator[Any]:
    """A mask chooses the rows for a layer: sometimes none."""

    def middle(m: Any, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.cat([m.part(h[mask]), h])[: len(h)]

    yield from run(
        Net(middle, part=nn.Linear(WIDTH, WIDTH)), lambda k: (*rows(k), torch.arange(ROWS) < (3 if k % 2 else 0))
    )


@report("pytorch#15223", "pytorch#31782")
def products_over_an_empty_dimension(run: Run) -> Iterator[Any]:
    """A cumulative product and a broadcast run over a dimension of size zero."""

    def middle(m: Any, h: torch.Tensor) -> torch.Tensor:
        empty = h[:, :0].cumprod(1) + h[:, :1] * m.scale[:, None].expand(-1, 0)[:1]
        return h + empty.sum() + torch.cat([empty, h], 1)

    yield from run(Net(middle, scale=nn.Parameter(torch.ones(WIDTH))))


@report("pytorch#178568")
def a_dict_that_parts_change(run: Run) -> Iterator[Any]:
    """One dict goes through all checkpointed parts, each of which replaces an entry of it."""

    def part(m: Any, table: dict[str, Any]) -> dict[str, Any]:
        table["x"] = m.part(table["x"])
        table["count"] += 1
        return table

    def middle(m: Any, h: torch.Tensor) -> torch.Tensor:
        table = {"x": h, "count": 0}
        for _ in range(2):
            table = again(part, m, table)
        return table["x"] * table["count"]

    yield from run(Net(middle, part=blocks()))


@report("pytorch#115774")
def a_cache_that_is_replaced(run: Run) -> Iterator[Any]:
    """Forward writes rows into a plain attribute, which the loop replaces by a new tensor."""

    def middle(m: Any, h: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        m.cache[at] = h.detach().mean(0)
        return h + m.cache.sum(0)

    model = run.attach(Net(middle, cache=torch.zeros(4, WIDTH)))
    for k in range(5):
        if k == 2:
            model.cache = torch.ones(4, WIDTH)
        yield from run.step(*rows(k), torch.tensor([k % 4]))
        yield model.cache.clone()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(largest)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (largest,) = ctx.saved_tensors
        scale = 1 / (1 + largest)
        largest.copy_(g.abs().max())
        return g * scale, None


@report("pytorch#112906")
def a_buffer_that_the_backward_writes(run: Run) -> Iterator[Any]:
    """The backward of a function scales by a buffer, in which it notes the largest gradient for the next step."""
    model = Net(lambda m, h: Scaled.apply(h, m.largest))
    model.register_buffer("largest", torch.zeros(()))
    yield from run(model)


@report("pytorch#188084")
def gradients_of_each_row_inside(run: Run) -> Iterator[Any]:
    """Forward maps the gradient of a function that selects columns over the rows."""

    def of_row(row: torch.Tensor) -> torch.Tensor:
        return torch.index_select(torch.stack([row[j] for j in range(4)]), 0, torch.tensor([0, 2])).square().sum()

    yield from run(Net(lambda m, h: h + torch.func.vmap(torch.func.grad(of_row))(h)))


@report("pytorch#97691")
def a_view_that_the_caller_changes(run: Run) -> Iterator[Any]:
    """Forward returns a view of what it made, which the loop changes in place before the loss."""

    def loss(result: Any) -> torch.Tensor:
        result[1].mul_(2)
        return square_loss(result)

    yield from run(Net(lambda m, h: (h, (h + 1).view(-1))), loss=loss)


@report("pytorch#169253")
def a_list_of_the_class(run: Run) -> Iterator[Any]:
    """Forward appends to a list that is an attribute of the class."""

    class Listing(Net):
        found: ClassVar[list[torch.Tensor]] = []

    def middle(m: Any, h: torch.Tensor) -> torch.Tensor:
        Listing.found.append(h.detach().sum())
        return h

    yield from run(Listing(middle))
    yield from Listing.found


@report("pytorch#62293")
def a_spectral_norm_in_two_calls(run: Run) -> Iterator[Any]:
    """A layer with a spectral norm, which moves on in each call, is called twice in a forward."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    yield from run(Net(lambda m, h: m.part(m.part(h).relu()), part=layer))


@report("pytorch#117758", "pytorch#115750")
def hooks_that_come_later(run: Run) -> Iterator[Any]:
    """Hooks on a layer, one of them for its backward, are registered after the first step and change values."""
    seen: list[torch.Tensor] = []
    model = run.attach(Net(lambda m, h: m.part(h), part=blocks()))
    for k in range(4):
        if k == 1:
            model.part.register_forward_hook(lambda m, args, out: seen.append(out.detach().sum()))
            model.part.register_full_backward_hook(lambda m, got, given: (got[0] * 2,))
        yield from run.step(*rows(k))
        yield len(seen)
    yield from seen


@report("pytorch#91468", "pytorch#146212")
def gradients_of_what_lies_between(run: Run) -> Iterator[Any]:
    """Forward calls ``retain_grad`` on an input and on what it makes, and hooks a tensor."""

    def middle(m: Any, h: torch.Tensor, x: torch.Tensor) -> Any:
        x.retain_grad()
        y = h * x
        y.retain_grad()
        y.register_hook(lambda g: g * 3)
        return y, y

    model = run.attach(Net(middle))
    for k in range(4):
        x = randn(ROWS, WIDTH, seed=k + 9).requires_grad_() * 2
        out = model(*rows(k), x)
        square_loss(out).backward()
        yield from (out[1].grad, x.grad, *snapshot(model))


@report("pytorch#100346", "pytorch#99455")
def a_random_leaf_made_in_forward(run: Run) -> Iterator[Any]:
    """Forward draws a tensor that requires grad, and returns it beside what it computes with it."""

    def middle(m: Any, h: torch.Tensor) -> Any:
        noise = torch.randn(WIDTH, requires_grad=True)
        return h + noise, noise

    yield from run(Net(middle))


@report("pytorch#10348", "pytorch#18853")
def an_exception_that_is_kept(run: Run) -> Iterator[Any]:
    """A forward fails in the middle, its exception is kept for a step, and training goes on."""
    kept: list[BaseException] = []

    def middle(m: Any, h: torch.Tensor, bad: bool) -> torch.Tensor:
        return h @ h if bad else h

    model = run.attach(Net(middle))
    for k in range(5):
        if k == 2:
            with pytest.raises(RuntimeError) as info:
                model(*rows(k), True)
            kept.append(info.value)
        yield from run.step(*rows(k), False)
    kept.clear()


@report("pytorch#123713")
def what_a_frozen_encoder_returns_is_made_a_leaf(run: Run) -> Iterator[Any]:
    """Forward computes without gradients, and has ``requires_grad_`` called on the result."""

    def middle(m: Any, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            code = m.part(x)
        return h * code.requires_grad_()

    yield from run(Net(middle, part=blocks()), two)


@report("pytorch#129362")
def weights_that_are_assigned(run: Run) -> Iterator[Any]:
    """``load_state_dict(assign=True)`` puts other parameters in the place of the first ones between steps."""
    model = run.attach(Net(lambda m, h: h.relu()))
    for k in range(4):
        if k == 2:
            state = {name: t.detach() * 0.5 for name, t in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
            model.requires_grad_(True)
        yield from run.step(*rows(k))
        yield list(model.state_dict())


@report("pytorch#120958")
def an_adapter_that_comes_and_is_fused(run: Run) -> Iterator[Any]:
    """An adapter is set on a layer after the first step, and two steps later fused into its weight and taken off."""
    model = run.attach(
        Net(
            lambda m, h: m.part(h) + (0 if m.adapter is None else m.adapter(h)),
            part=nn.Linear(WIDTH, WIDTH),
            adapter=None,
        )
    )
    for k in range(4):
        if k == 1:
            del model.adapter
            model.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        elif k == 3:
            with torch.no_grad():
                model.part.weight += model.adapter.weight
            model.adapter = None
        yield from run.step(*rows(k))


@report("pytorch#136662")
def a_derivative_of_writes_into_zeros(run: Run) -> Iterator[Any]:
    """Forward takes the gradient of a function that adds to a column of zeros twice."""

    def energy(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:, 0] += x[:, 2].abs()
        y[:, 0] += x[:, 2].square()
        return y.sum()

    yield from run(Net(lambda m, h: h + torch.func.grad(energy)(h)))


@report("espnet#3283", "NeMo#11272")
def accumulation_over_a_batch_that_is_not_finite(run: Run) -> Iterator[Any]:
    """Of three batches whose gradients are accumulated one gives nan; then all of them are dropped."""
    model = run.attach(Net(lambda m, h: h.relu()))
    for k in range(6):
        loss = square_loss(model(*rows(k) if k != 4 else (rows(k)[0] / 0,)))
        loss.backward()
        if k % 3 == 2:
            fine = all(bool(p.grad.isfinite().all()) for p in model.parameters())
            yield from (fine, *(snapshot(model) if fine else ()))
            model.zero_grad(set_to_none=False)
    yield from run.step(*rows(7))


@report("pytorch#196653")
def forces_as_gradients_within_forward(run: Run) -> Iterator[Any]:
    """Forward makes its positions a leaf, takes the gradient of an energy for them, and returns both."""

    def middle(m: Any, h: torch.Tensor, x: torch.Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        energy = m.part(leaf).sum()
        (force,) = torch.autograd.grad(energy, leaf, create_graph=True)
        return h + force, energy

    yield from run(
        Net(middle, part=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
        two,
    )


@report("pytorch#26596")
def an_embedding_that_renormalises_itself(run: Run) -> Iterator[Any]:
    """The rows of an embedding are renormalised in place by its call, after a copy of the weight was used."""

    def middle(m: Any, h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        scores = h @ m.part.weight.clone().t()
        return h + m.part(ids) + scores.sum(1, keepdim=True)

    yield from run(
        Net(middle, part=nn.Embedding(8, WIDTH, max_norm=1.0)), lambda k: (*rows(k), tokens(ROWS, high=8, seed=k))
    )


@report("pytorch#54580", "sktime#10928", share="85%")
def a_loss_term_kept_on_the_module(run: Run) -> Iterator[Any]:
    """Forward keeps a term of the loss as an attribute, with its graph; no copy can be made then."""

    def middle(m: Any, h: torch.Tensor) -> torch.Tensor:
        m.term = h.square().mean()
        return h

    model = run.attach(Net(middle, term=None))
    for k in range(4):
        yield from run.step(*rows(k), loss=lambda out: square_loss(out) + 0.1 * model.term)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    model.term = None
    yield sorted(copy.deepcopy(model).state_dict()) == sorted(model.state_dict())


@report("pytorch#81296", "pytorch#76464")
def hooks_of_a_shared_weight(run: Run) -> Iterator[Any]:
    """One weight is in two layers; hooks on the node that adds up its gradient, and behind it, run once a step."""
    calls: list[Any] = []
    model = Net(
        lambda m, h: again(m.two, m.one(h).relu()),
        one=nn.Linear(WIDTH, WIDTH),
        two=nn.Linear(WIDTH, WIDTH),
    )
    model.two.weight = model.one.weight
    node = model.one.weight.view_as(model.one.weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: calls.append("node"))
    model.one.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
    yield from run(model)
    yield from calls


@report("pytorch#138908", "pytorch#197582", "pytorch#198270")
def writes_at_indices_that_come_twice(run: Run) -> Iterator[Any]:
    """Rows at repeated indices are added to themselves, and the result to itself in the other order."""

    def middle(m: Any, h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = h.clone()
        y[ids] += y[ids]
        y.index_put_((ids,), y[ids] * 2.0)
        y.add_(y.flip(0))
        return y

    yield from run(Net(middle), lambda k: (*rows(k), torch.arange(8) % 2 + k))


@report("pytorch#180164", "pytorch#183986")
def a_slice_that_is_put_into_an_expanded_tensor(run: Run) -> Iterator[Any]:
    """Columns are put into a broadcast row, rows added to it, and one dimension summed."""

    def middle(m: Any, h: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        wide = m.row.expand(ROWS, WIDTH)
        y = torch.slice_scatter(wide, h[:, :4], 1, 2, 6)
        return h * y.sum(1, keepdim=True) + wide.index_add(0, ids, h[: len(ids)])

    yield from run(Net(middle, row=nn.Parameter(torch.ones(WIDTH))), lambda k: (*rows(k), torch.tensor([0, 0, k])))


class Codebook(nn.Module):
    """Moves its codes towards what it is given, and then looks the codes up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", randn(8, WIDTH, seed=3))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(h.detach(), self.codes).argmin(1)
        with torch.no_grad():
            hits = F.one_hot(nearest, 8).float()
            self.codes.mul_(0.9).add_(0.1 * (hits.t() @ h.detach()) / (hits.sum(0)[:, None] + 1))
        code = self.codes[nearest]
        return h + (code - h).detach() + 0.1 * (h - code.detach())


@report("vector-quantize-pytorch#49", "pytorch-vq-vae#5", share="85%")
def a_codebook_that_moves_before_it_is_read(run: Run) -> Iterator[Any]:
    """Forward updates a codebook in place and quantises with the new codes, straight through."""
    yield from run(Net(lambda m, h: m.part(h), part=Codebook()))


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        order = x.argsort(1).float()
        ctx.mark_non_differentiable(order)
        return x.sin(), x.cos(), order

    @staticmethod
    def backward(ctx: Any, one: Any, two: Any, none: Any) -> Any:
        (x,) = ctx.saved_tensors
        return (0 if one is None else one * x.cos()) - (0 if two is None else two * x.sin())


@report("pytorch#106391", "pytorch#134087", share="85%")
def an_output_of_a_function_that_gets_no_gradient(run: Run) -> Iterator[Any]:
    """Of three outputs of a function one has a gradient, one is not read, and one cannot have any."""

    def middle(m: Any, h: torch.Tensor) -> Any:
        one, _, order = Two.apply(h)
        return one, order

    yield from run(Net(middle))


@report("pytorch#194479", "functorch#1052")
def views_of_one_tensor_and_a_detached_one(run: Run) -> Iterator[Any]:
    """Forward returns two slices of what it made and the same without gradients."""

    class Slices(Net):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return y[:8], y[8:], y.detach()

    yield from run(Slices(lambda m, h: h.relu()))


@report("transformers#28056")
def keys_and_values_that_each_layer_appends(run: Run) -> Iterator[Any]:
    """Layers concatenate keys to a cache that is given as an argument, as with ``use_cache`` in training."""

    def middle(m: Any, h: torch.Tensor, past: list[Any]) -> Any:
        for number in range(2):
            keys = m.part(h)
            past[number] = keys if past[number] is None else torch.cat([past[number], keys])
            h = h + torch.softmax(h @ past[number].t(), -1) @ past[number]
        return h

    yield from run(Net(middle, part=nn.Linear(WIDTH, WIDTH)), lambda k: (*rows(k), [None, None]))
    run.again = None  # which would find the cache of the last step


@report("jax#18817", "pytorch#11093")
def checkpoints_within_checkpoints(run: Run) -> Iterator[Any]:
    """A chain is halved again and again, the second half of each being checkpointed; a sequential one follows."""

    def halves(layers: list[nn.Module]) -> Callable[[torch.Tensor], torch.Tensor]:
        if len(layers) == 1:
            return layers[0]
        one, two = halves(layers[: len(layers) // 2]), halves(layers[len(layers) // 2 :])
        return lambda x: again(two, one(x))

    def middle(m: Any, h: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(m.part, 2, halves([*m.part])(h), use_reentrant=False)

    yield from run(Net(middle, part=blocks()))


@report("pytorch#61519")
def a_hook_before_a_layer_that_works_in_place(run: Run) -> Iterator[Any]:
    """A layer with a hook for its backward is followed by one that works in place, which autograd refuses."""
    model = run.attach(Net(lambda m, h: m.part(h), part=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))))
    handle = model.part[0].register_full_backward_hook(lambda m, got, given: None)
    with pytest.raises(RuntimeError, match="modified inplace"):
        model(*rows(0))
    handle.remove()
    for k in range(4):
        yield from run.step(*rows(k))


@pytest.mark.filterwarnings("ignore:.*requires_grad=True. Gradients will be None:UserWarning", SEVERAL)
@pytest.mark.parametrize("name", SITUATIONS)
def test_situations_of_public_reports(name: str) -> None:
    situation, share = SITUATIONS[name]
    results = []
    for budget in (None, share):
        torch.manual_seed(0)
        run = Run(budget)
        results.append([*situation(run), torch.get_rng_state()])
    assert_same(results[1], results[0])
    run.assert_within_budget()
