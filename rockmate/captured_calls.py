"""The calls of the programs that TorchDynamo captured, each under plans of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from rkgb.patches import TRACING
from rockmate.artefact import SavedPlan
from rockmate.bound import rough_peak
from rockmate.budget import show_bytes
from rockmate.calls import Calls, Terms, call_key
from rockmate.captured import Captured, captured_sources
from rockmate.errors import BudgetWarning, InputError
from rockmate.executor import CallState
from rockmate.numbers import split
from rockmate.observe import WholeLook
from rockmate.tell import LOG, described, planned_line
from rockmate.variants import PlanCache, Variant


class Front:
    """What captured graphs have in common: the plans, and what is said of them.

    ``name``: of what is planned. ``terms``: what is asked of plans. ``last``: whose plan ran last. ``saved``: a plan
    that is to be taken.
    """

    def __init__(self, name: str, terms: Terms) -> None:
        self.name, self.terms, self.cache = name, terms, PlanCache()
        self.last: Calls | None = None
        self.saved: SavedPlan | None = None
        self._made = 0
        self._before: tuple[str, ...] | None = None

    @property
    def budget(self) -> int:
        """Bytes that one forward and its backward may allocate. It is set as it is given to ``attach``: shares are of
        the last call. When it is set, only the solver runs again.
        """
        if not isinstance(self.terms.budget, int):
            raise InputError("the budget is a share, or what is free: it is known in bytes once a call was planned")
        return self.terms.budget

    @property
    def only_plans(self) -> bool:
        """Whether this thread plans, and runs nothing."""
        return False

    def described(self, names: list[str], values: list[Any]) -> tuple[str, ...]:
        """A call in a few words."""
        return described(names, values, None)

    def tell(self, variant: Variant) -> None:
        """Say that a plan was made."""
        self._made += variant.planner.saved is None
        LOG.info("%s", planned_line(self.name, variant.call, variant.plan, self._made, self._before))
        self._before = variant.call


class Planned(Exception):
    """A plan was made, and nothing is to run."""


class CapturedCalls(Calls):
    """The calls of one graph that TorchDynamo captured."""

    module: Captured

    def __init__(self, program: fx.GraphModule, identity: Hashable, front: Front) -> None:
        """``identity``: see ``identity_of``."""
        self.program, self.identity, self.front = program, identity, front
        self.terms = front.terms
        self.split = split(program)
        self.ready = False
        self.spacious: dict[Hashable, tuple[str, ...]] = {}  # kinds of calls for which the budget does not bind
        self.binding: set[Hashable] = set()

    def call(self, *arguments: Any) -> Any:
        """What the program returns for ``arguments``."""
        wanted = (a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad)
        if not torch.is_grad_enabled() or next(wanted, None) is None:
            return self.program.forward(*arguments)
        inputs, numbers = self.split.inputs(arguments) if self.split else (arguments, ())
        with TRACING if not self.ready else nullcontext():  # a thread may come while another is here for the first time
            if not self.ready:
                program = self.split.program if self.split else self.program
                super().__init__(Captured(program, inputs), self.terms, self.front.cache)
                self.ready = True
        with self.module.holding(self.module.own_among(inputs)):
            return self._call(arguments, inputs, numbers)

    def _call(self, arguments: tuple[Any, ...], inputs: Sequence[Any], numbers: tuple[Any, ...]) -> Any:
        given = tuple(inputs[k] for k in self.module.given)
        if self.front.only_plans:
            self.front.last = self
            if not self._fits(given, arguments):
                self.last = self.variants(given, {}, self.front.saved)[0]
            raise Planned
        if self._fits(given, arguments):
            return self._run_freely(given, arguments)
        self.front.last = self
        results = self.run(given, {})
        return self.split.joined(results, numbers) if self.split else results

    def kind(self, leaves: list[Any], spec: Any) -> tuple[Hashable, frozenset[str]]:
        """As in ``Calls``; a plan is for one graph."""
        return (id(self), call_key(leaves, spec)), self.module.missing()

    def computed(
        self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[torch.Tensor], CallState | None]:
        """As in ``Calls``; where the plan is what the captured program does, that runs as it is."""
        if not variant.is_plain:
            return super().computed(variant, args, kwargs)
        result = self.module(*args)
        return result, [t for t in result if isinstance(t, torch.Tensor)], None

    def learner(self, variant: Variant, inputs: list[torch.Tensor]) -> Callable[[], None]:
        """As in ``Calls``; parameters and buffers are those of this call."""
        own = self.module.own()

        def learn() -> None:
            with self.module.holding(own):
                self._learn(variant, inputs)

        return learn

    def described(self, leaves: list[Any]) -> tuple[str, ...]:
        """By the names that arguments have in the model's forward."""
        return self.front.described(self.module.names, leaves)

    def planned(self, variant: Variant) -> None:
        """Say so."""
        self.front.tell(variant)

    # ---------------------------------------------------------------- budgets that do not bind

    def _fits(self, given: tuple[Any, ...], arguments: tuple[Any, ...]) -> bool:
        """Whether the budget is so large that a call need not be planned."""
        if self.terms.always:
            return False
        kind = self.kind(list(given), None)
        if kind in self.binding:
            return False
        if kind in self.spacious:
            return True
        budget = self.terms.bytes_known(_device_of(arguments))
        return budget is not None and rough_peak(self.program, arguments) <= budget

    def _run_freely(self, given: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        """Run the captured program as it is; the first such step is measured."""
        kind = self.kind(list(given), None)
        if kind in self.spacious or not WholeLook.possible():
            return self.program.forward(*arguments)
        call = self.described(list(given))
        budget = self.front.budget

        def measured(peak: int) -> None:
            if peak <= budget:
                self.spacious[kind] = call
                LOG.info(
                    "%s needs no plan for %s: a step took %s of %s",
                    self.front.name, ", ".join(call), show_bytes(peak), show_bytes(budget),
                )  # fmt: skip
                return
            self.binding.add(kind)
            warnings.warn(
                f"the last step took {show_bytes(peak)}, more than the budget of {show_bytes(budget)}, "
                "which the sizes of the results did not show. Later steps like it are planned.",
                BudgetWarning,
                stacklevel=3,
            )

        look = WholeLook(_device_of(arguments), measured)
        try:
            result = self.program.forward(*arguments)
        except BaseException:
            look.abandon()
            raise
        look.follow(result)
        return result


def _device_of(arguments: tuple[Any, ...]) -> torch.device:
    return next(a.device for a in arguments if isinstance(a, torch.Tensor))


def identity_of(program: fx.GraphModule) -> Hashable:
    """Programs of equal identity do the same to the same inputs; None where that is not known.

    What a model's Python reads and only logs makes TorchDynamo capture again, but the program is the same.
    """
    nodes = list(program.graph.nodes)
    if any(n.op in ("get_attr", "call_module") for n in nodes):
        return None
    targets = tuple(n.target for n in nodes if n.op == "call_function")
    return program.code, tuple(captured_sources(program)), targets
