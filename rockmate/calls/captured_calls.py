"""The calls of the programs that TorchDynamo captured, each under plans of its own."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx

from rkgb.cost.memory import refuse_within_measurements
from rkgb.errors import GraphError, MeasureError
from rkgb.sample import Call
from rkgb.trace.patches import TRACING
from rkgb.warn import warn
from rockmate.calls.bound import rough_peak
from rockmate.calls.calls import Calls
from rockmate.calls.captured import captured_sources
from rockmate.calls.free import Extent, FreeCalls
from rockmate.calls.front import Front
from rockmate.calls.graph import device_of
from rockmate.calls.surroundings import witnesses
from rockmate.errors import BudgetWarning, CannotBeCalledError


class Planned(Exception):
    """A plan was made, and nothing is to run."""


class CapturedCalls(Calls):
    """The calls of one graph that TorchDynamo captured, and how often it was captured again."""

    def __init__(self, program: fx.GraphModule, front: Front) -> None:
        super().__init__(program, front)
        self.identity, self.repeated = identity_of(program), 0
        self.refused = False  # no plan can be made
        self.freely = FreeCalls(front)

    def call(self, *arguments: Any) -> Any:
        if self.refused or witnesses() != getattr(self.front.inside, "witnesses", witnesses()):
            return self.program.forward(*arguments)
        wanted = (a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad)
        if not torch.is_grad_enabled() or next(wanted, None) is None or not self.gives_gradients:
            return self.program.forward(*arguments)
        inputs, numbers = self.split.inputs(arguments) if self.split else (arguments, ())
        with TRACING if not self.ready else nullcontext():  # a thread may come while another is here for the first time
            if not self.ready:
                self.make_ready(inputs)
        with self.in_call(inputs):
            call = Call(tuple(inputs[k] for k in self.module.given), {})
            kind, missing = self.kind(call)
            trained = () if self.terms.always else self.module.trained
            made = sum(inputs[k].nbytes for name, k in trained if name in missing)  # bytes of gradients
            fits = not self.terms.always and self._fits(kind, missing, made, call, arguments)
            if self.front.only_plans:
                if fits:
                    self.front.note_free_call()
                else:
                    self.last = self.runnable(call, kind, missing, self.front.saved)
                    self.front.last = self
                raise Planned
            if fits:
                known = self.freely.is_known(kind, made)
                measured = self.freely.is_measured(known)
                if measured and not known:
                    refuse_within_measurements()  # it runs once as it is, to be looked at, and is measured afterwards
                run = self.freely.run_measured if measured else self.freely.run
                return run(kind, partial(self._without_plan, arguments))
            try:
                results = self.run(call, kind, missing)
            except CannotBeCalledError:
                return self.program.forward(*arguments)  # whose own error comes
            except GraphError as error:
                self._refuse(error)
                return self.program.forward(*arguments)
            self.front.last, self.front.ran_freely = self, False
            return self.split.joined(results, numbers) if self.split else results

    def _without_plan(self, arguments: tuple[Any, ...]) -> Any:
        """What the program returns; every tensor is kept, and pieces are compiled as under a plan."""
        if self.pieces is None:
            return self.program.forward(*arguments)
        inputs, numbers = self.split.inputs(arguments) if self.split else (arguments, ())
        results = self.tensors.forward(*inputs)
        return self.split.joined(results, numbers) if self.split else results

    def _refuse(self, error: GraphError) -> None:
        """Run without a plan from now on, if that is wanted; that memory is measured now says nothing of the graph."""
        if isinstance(error, MeasureError) or not self.terms.least or self.front.follows:
            raise error
        self.refused = True
        warn(
            f"{self.front.name} cannot be planned for such calls, which run as they are from now on, with no budget: "
            f"{error}",
            BudgetWarning,
        )

    # ---------------------------------------------------------------- budgets that do not bind

    def _fits(self, kind: Hashable, missing: frozenset[str], made: int, call: Call, arguments: tuple[Any, ...]) -> bool:
        """Whether the budget is so large that a call need not be planned, with others of its step or alone.

        ``made``: bytes of the gradients that the step makes.
        """
        if kind in self.freely.binding:
            return False
        if not self.freely.is_known(kind, made):
            budget = self.terms.bytes_known(device_of(arguments))
            if budget is None or self.front.has_exceeded():
                return False
            extent = self.freely.extents.get(kind)
            if extent is None:
                extent = Extent((self.sizeless(call), self.terms.made), self.results.counts(arguments))
                self.freely.note(kind, extent)
            rough = rough_peak(self.results.rough_bytes(extent.counts), arguments)
            if rough > budget and not self._larger_fits(extent, missing, made, budget):
                self.freely.binding.add(kind)  # to look at all sizes takes longer than a small step
                return False
            said, peak = self.front.described(self.module.names, call.leaves), int(min(rough, budget))
            self.freely.suppose(kind, device_of(arguments), said, peak, made)
        return self.freely.fits_beside(kind)

    def _larger_fits(self, extent: Extent, missing: frozenset[str], made: int, budget: int) -> bool:
        """Whether a call of no smaller sizes fits with everything kept, as was measured, or planned."""
        kinds = self.freely.larger(extent)
        if any(self.freely.is_known(kind, made) for kind in kinds):
            return True
        planners = (v.planner for kind in kinds if (v := self.cache.find(kind, missing)))
        return any(
            p.eager_peak <= budget and not p.graphs.K.has_dead_ends and not self.computes_unread for p in planners
        )


def identity_of(program: fx.GraphModule) -> Hashable:
    """Programs of equal identity do the same to the same inputs; None where that is not known.

    What a model's Python reads and only logs makes TorchDynamo capture again, but the program is the same.
    """
    nodes = list(program.graph.nodes)
    if any(n.op in ("get_attr", "call_module") for n in nodes):
        return None
    targets = tuple(n.target for n in nodes if n.op == "call_function")
    forms = tuple(_form(n.meta.get("example_value")) for n in nodes if n.op == "placeholder")
    return program.code, tuple(captured_sources(program)), targets, forms


def _form(example: Any) -> Hashable:
    """Of a parameter or another input, what the keys of plans do not tell: those have the forms of arguments."""
    if not isinstance(example, torch.Tensor):
        return str(type(example))
    lies = example.stride() if example.layout == torch.strided else ""
    told = (str(x) for x in (example.device, tuple(example.shape), lies, example.layout))
    return isinstance(example, torch.nn.Parameter), example.dtype, example.requires_grad, *told
