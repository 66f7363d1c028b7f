"""A random module trained in eager mode and under budgets: everything must be equal, and the budget must hold."""

from __future__ import annotations

import contextlib
import copy
import gc
import linecache
import logging
import random
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from models import part_way
from random_modules import BEFORE, STEPS, RandomModule, random_module
from torch import nn
from torch.utils import _pytree as pytree

import rkgb.warn
import rockmate
from rkgb.cost.memory import measure_peak
from rkgb.device import kind_of
from rockmate import BudgetWarning, GraphError, InfeasibleBudgetError, InputError, MeasureError
from rockmate.errors import RockmateError
from rockmate.follow.plan import FollowedPlan

RATE = 0.05
"""The rate at which steps change parameters."""


def loaded(source: str) -> Any:
    """The module of Python that ``source`` is; tracebacks show its lines."""
    name = "random_module"
    found = sys.modules[name] = types.ModuleType(name)
    file = f"{name}_{abs(hash(source))}.py"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), vars(found))
    return found


def calls_share_a_step(source: str) -> bool:
    """Whether a step is one of two calls."""
    return STEPS["two calls"].splitlines()[0] in source


class Training:
    """Steps of the module of ``source``. ``call``: what is called. ``states``: what was there after each step.
    ``eager_peak``: bytes of a step in eager mode.
    """

    def __init__(self, source: str, eager_peak: int = 0) -> None:
        self.source, self.code, self.eager_peak = source, loaded(source), eager_peak
        torch.manual_seed(0)
        self.model: nn.Module = self.code.Net()
        self.call: Callable[..., Any] = self.model
        self.states: list[dict[str, Any]] = []
        self.held: Any = None
        torch.manual_seed(5)

    @property
    def ways(self) -> int:
        """How many ways of computing there may be, each with a plan and a least budget of its own: others where calls
        share a step, or add to gradients that are there.
        """
        found = 4 if "self.count %" in self.source or " else " in self.source.partition("def batch")[0] else 1
        accumulates = BEFORE["accumulation"] in self.source
        return 2 * found if calls_share_a_step(self.source) or accumulates else found

    @property
    def differentiates(self) -> bool:
        """Whether what the last step computed has gradients; returned inputs have none to hand on."""
        results = pytree.tree_leaves(self.held[0])
        return any(isinstance(t, torch.Tensor) and t.grad_fn is not None for t in results)

    def lead(self) -> None:
        """Steps in which each way comes twice, so that it is planned."""
        for _ in range(2 * self.ways):
            self.step()

    def step(self) -> None:
        """A step that is not measured."""
        self._begin()
        self._run()
        self._end()

    def measured_step(self) -> int | None:
        """A step, and its peak in bytes; None where a plan has to be made in it."""
        self._begin()
        as_given = copy.deepcopy(self.arguments)  # a forward that is given up may have changed them
        try:
            peak = measure_peak(self._run, "cpu")
        except MeasureError:
            self.arguments = as_given
            self._run()
            peak = None
        self._end()
        return peak

    def _begin(self) -> None:
        self.held = None
        self.arguments = self.code.batch(len(self.states))
        for p in self.model.parameters():
            p.grad = None
        self.code.before(self.call, self.arguments)

    def _run(self) -> None:
        self.held = self.code.step(self.call, self.arguments)

    def _end(self) -> None:
        self.states.append(dict(self._state()))
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-RATE)

    def _state(self) -> Iterator[tuple[str, Any]]:
        """All that a step gives or changes, under its name."""
        result, loss = self.held
        yield "loss", _copy(loss)
        yield "result", _copy(result)
        yield "arguments", _copy(self.arguments)
        yield "gradients of arguments", [_copy(t.grad) for t in self.arguments]
        for name, p in self.model.named_parameters():
            yield f"parameter {name}", _copy(p)
            yield f"gradient of {name}", _copy(p.grad)
        yield from ((f"buffer {name}", _copy(b)) for name, b in self.model.named_buffers())
        yield from ((f"attribute {name}", _copy(x)) for name, x in vars(self.model).items() if name[0] != "_")
        yield "generator", torch.get_rng_state()


def _copy(found: Any) -> Any:
    """Tensors as they are now, and states of generators, in what else they are in."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return leaf.get_state()
        return (leaf.detach().clone(), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(one, found)


def differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    """What is not equal bit for bit."""
    found = []
    for step, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        names = [name for name in {**a, **b} if name not in a or name not in b or not _equal(a[name], b[name])]
        found += [f"step {step}: {name} differs" for name in names]
    return found


def _equal(a: Any, b: Any) -> bool:
    (ours, form), (theirs, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return form == other and all(map(_same, ours, theirs))


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    alike = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    return alike and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@dataclass
class Outcome:
    """Of one module trained in one way. ``verdict``: "planned", "refused" (with the reason), "failed" (with what went
    wrong), "not promised" (a ``BudgetWarning`` said so), or "not run", as eager mode
    fails. Sizes are bytes; None where there is no plan, and where the step was not measured. ``least``: the minimum
    that an error stated.
    """

    way: str
    fraction: float
    verdict: str = "planned"
    reason: str = ""
    least: int = 0
    budget: int = 0
    predicted: int | None = None
    measured: int | None = None
    warned: list[str] = field(default_factory=list)

    @property
    def leading(self) -> int | str:
        """The budget of the steps that lead: of the first one, unless another one was seen to need more."""
        return self.least or "100%"

    def be(self, verdict: str, reason: str) -> None:
        self.verdict, self.reason = verdict, reason


def under_rockmate(training: Training, outcome: Outcome) -> Any:
    """Steps of a ``Rockmate`` that runs nothing again, then of the budget."""
    arguments = training.code.batch(0)
    rk = training.call = rockmate.Rockmate(training.model, arguments, outcome.leading, costs="flops", cache=False)
    return _then_budgeted(training, outcome, rk)


def under_attach(training: Training, outcome: Outcome) -> Any:
    """The same of an attached model."""
    handle = rockmate.attach(training.model, outcome.leading, costs="flops", cache=False)
    return _then_budgeted(training, outcome, handle)


def _then_budgeted(training: Training, outcome: Outcome, planned: Any) -> Any:
    training.lead()
    if planned.plan is not None:
        planned.budget = max(outcome.least, part_way(planned.frontier(), outcome.fraction))
    return planned


def under_attach_at_once(training: Training, outcome: Outcome) -> Any:
    """Steps of a model that was attached with the budget in bytes: a share of what eager mode takes."""
    budget = max(outcome.least, round(training.eager_peak * (0.3 + 0.7 * outcome.fraction)))
    handle = rockmate.attach(training.model, budget, costs="flops", cache=False)
    training.lead()
    return handle


def under_attach_compiled(training: Training, outcome: Outcome) -> Any:
    """The same with compiled pieces."""
    budget = max(outcome.least, round(training.eager_peak * (0.3 + 0.7 * outcome.fraction)))
    handle = rockmate.attach(training.model, budget, **COMPILED)
    training.lead()
    return handle


COMPILED: dict[str, Any] = {"costs": "flops", "cache": False, "compile": True}
WAYS = {
    "attach": under_attach, "attach at once": under_attach_at_once, "Rockmate": under_rockmate,
    "compiled": under_attach_compiled,
}  # fmt: skip


class Eager:
    """A module trained in eager mode: its states, and the peak of its last step. ``fails``: with what, if it does."""

    def __init__(self, source: str) -> None:
        self.source, self.fails, self.peak = source, "", 0
        try:
            with _heard([]):
                training = self.begun()
                training.lead()
                training.step()
                differentiates = training.differentiates
                self.peak = training.measured_step() or 0
                if not (differentiates and training.differentiates):
                    self.fails = "no backward comes to what the module computes"
                    return
        except Exception as error:  # noqa: BLE001 - whatever fails in eager mode is not compared
            self.fails = f"{type(error).__name__}: {error}"
            return
        self.states = training.states

    def begun(self) -> Training:
        """A training that has not made a step."""
        return Training(self.source)


class Compiled(Eager):
    """The same with compiled pieces, under a budget for which nothing runs again: what other budgets must equal."""

    def begun(self) -> Training:
        budget = 2 * Eager(self.source).peak + 2**20
        torch.compiler.reset()
        training = super().begun()
        self.handle = rockmate.attach(training.model, budget, **COMPILED)
        return training


def reference(way: str) -> type[Eager]:
    """The kind of training that one in this way is compared with."""
    return Compiled if way == "compiled" else Eager


def outcome_of(eager: Eager, way: str, fraction: float) -> Outcome:
    """What comes of the training in one way, under a budget at ``fraction`` of the way from the least to eager's; it is
    compared with ``eager``.
    """
    outcome = Outcome(way, fraction)
    if eager.fails:
        outcome.be("not run", eager.fails)
        return outcome
    for _ in range(1 + Training(eager.source).ways):
        _run(eager, outcome)
        if outcome.verdict != "infeasible":
            return outcome
    shared = calls_share_a_step(eager.source)  # whose least is known when both calls have been observed
    outcome.be("refused" if shared else "failed", f"the stated minimum does not hold: {outcome.reason}")
    return outcome


def _run(eager: Eager, outcome: Outcome) -> None:
    """Fill ``outcome``; where its budget is infeasible, with the least one that was stated."""
    outcome.be("planned", "")
    outcome.warned.clear()
    torch.compiler.reset()
    rkgb.warn._said.clear()
    training = Training(eager.source, eager.peak)
    try:
        with _heard(outcome.warned):
            planned = WAYS[outcome.way](training, outcome)
            training.step()
            outcome.measured = training.measured_step()
        outcome.budget = planned.budget
    except InfeasibleBudgetError as error:
        outcome.least = max(error.min_budget, outcome.least + 1)
        outcome.be("infeasible", str(error))
    except (RockmateError, GraphError) as error:
        gone = isinstance(error, rockmate.GoneError)  # eager mode has it
        outcome.be("failed" if gone else "refused", f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - whatever is raised where eager mode raises nothing is a find
        outcome.be("failed", f"{type(error).__name__}: {error}")
    if different := differences(training.states, eager.states):
        other = "another budget's" if outcome.way == "compiled" else "eager mode's"
        outcome.be("failed", f"not {other}: {', '.join(different[:4])}")
    elif outcome.verdict == "planned":
        free = isinstance(planned, rockmate.Attachment) and planned.ran_freely
        of_step = not free and not calls_share_a_step(eager.source)  # else no plan is of this step
        _judge(outcome, _plan_of(planned) if of_step else None)


def _plan_of(planned: Any) -> Any:
    """The plan of the last call; None where that computed something new, which was observed."""
    try:
        return planned.plan
    except InputError:
        return None


def _judge(outcome: Outcome, plan: Any) -> None:
    """Whether the budget and the prediction hold. A prediction leaves out the numbers of the loss itself."""
    outcome.predicted = None if plan is None else plan.predicted_peak
    measured, most = outcome.measured, outcome.budget
    if measured is not None and outcome.predicted is not None:
        most = min(most, outcome.predicted + kind_of(torch.device("cpu")).scalars)
    if measured is None or measured <= most:
        return
    reason = (
        f"{'followed, ' if isinstance(plan, FollowedPlan) else ''}"
        f"{'above the budget' if measured > outcome.budget else 'above the prediction'}: {measured}, not {most} bytes"
    )
    outcome.be("not promised" if outcome.warned else "failed", reason)


@contextlib.contextmanager
def _heard(said: list[str]) -> Iterator[None]:
    """Collects what ``BudgetWarning``s say; other warnings are no matter."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            said += [str(w.message) for w in heard if issubclass(w.category, BudgetWarning)]


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Much shorter, where many modules are trained: Python's collector, which planning and measuring call, leaves out
    what is there now, which is all of TorchDynamo; and torch's own logs are not formatted, which pytest asks for.
    """
    outcome_of(Eager(random_module(0).source), "attach", 1.0)  # imports TorchDynamo
    gc.freeze()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
        gc.unfreeze()


def fraction_of(module: RandomModule, way: str) -> float:
    """Where the budget of a module lies in a way of training, between the least (0) and eager's peak (1)."""
    draw = random.Random(f"{module.number} {way}")
    return draw.choice((0.0, round(draw.random(), 2), 1.0))


def ways_of(module: RandomModule) -> list[str]:
    """In which the module can be trained with eager kernels: a ``Rockmate`` is for models of one graph."""
    return [way for way in WAYS if way != "compiled" and not (way == "Rockmate" and module.breaks)]


def sort_of(outcome: Outcome) -> str:
    """The verdict, and its reason up to where what differs from module to module begins."""
    words = re.split(r"[\d(]", outcome.reason)[0].rstrip(" :")
    return f"{outcome.verdict}: {words}" if words else outcome.verdict


def smallest(module: RandomModule, outcome: Outcome, tries: int = 80) -> RandomModule:
    """``module`` without what ``outcome`` does not need, as far as so many ``tries`` find that."""
    wanted, left = sort_of(outcome), [*module.smaller()]
    while left and tries:
        tries -= 1
        smaller, *left = left
        if sort_of(outcome_of(reference(outcome.way)(smaller.source), outcome.way, outcome.fraction)) == wanted:
            module, left = smaller, [*smaller.smaller()]
    return module
