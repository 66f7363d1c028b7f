"""The calls of the programs that TorchDynamo captured, each under plans of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from rkgb.cost.measure import Known
from rkgb.cost.memory import refuse_within_measurements
from rkgb.errors import GraphError
from rkgb.graphs import S_graph
from rkgb.probe.resize import Point, resized, sizes_of
from rkgb.sample import Call
from rkgb.trace.patches import TRACING
from rkgb.warn import warn
from rockmate.budget import show_bytes
from rockmate.calls.bound import rough_bytes, rough_peak
from rockmate.calls.calls import Calls
from rockmate.calls.captured import Captured, captured_sources
from rockmate.calls.families import Family
from rockmate.calls.front import Front
from rockmate.calls.keys import call_key
from rockmate.calls.look import WholeLook
from rockmate.calls.member import NO_ROOM, Member, carried_schedules, choice_of, outside, same_constants, schedules_of
from rockmate.calls.numbers import split
from rockmate.calls.steps import Forward, Steps
from rockmate.calls.variants import Variant
from rockmate.errors import BudgetWarning, CannotBeCalledError, VariantLimitError
from rockmate.planning.planner import Planner
from rockmate.planning.prepare import make_planner
from rockmate.planning.problem import problem_of
from rockmate.progress import Progress, Report
from rockmate.run.executor import CallState
from rockmate.tell import LOG
from solvers.interrupts import Heeded

SMALL, VARYING = 100, 16
"""Among the graphs of a step, one all of whose results take no more than this part of the budget runs as it is: the
first number is for all graphs, the second for those whose sizes differ in every step, as they follow from values."""

MANY_SIZES = 3
"""Sizes of a graph, from which on they are said to be others in every step."""


class Planned(Exception):
    """A plan was made, and nothing is to run."""


class Spacious(NamedTuple):
    """A kind of call for which the budget does not bind: its description, and the gradients that were missing then."""

    call: tuple[str, ...]
    missing: frozenset[str]


class CapturedCalls(Calls):
    """The calls of one graph that TorchDynamo captured."""

    module: Captured

    def __init__(self, program: fx.GraphModule, identity: Hashable, front: Front) -> None:
        """``identity``: see ``identity_of``."""
        self.program, self.identity, self.front = program, identity, front
        self.terms = front.terms
        self.split = split(program)
        self.tensors = self.split.program if self.split else program  # without computations with numbers
        self.free = False  # whatever the call, the budget does not bind
        self.refused = False  # no plan can be made
        self.ready = False
        self.now = threading.local()  # the arguments of the call that this thread is in
        self.spacious: dict[Hashable, Spacious] = {}  # kinds of calls for which the budget does not bind
        self.binding: set[Hashable] = set()

    def call(self, *arguments: Any) -> Any:
        """What the program returns for ``arguments``."""
        if self.free or self.refused:
            return self.program.forward(*arguments)
        wanted = (a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad)
        if not torch.is_grad_enabled() or next(wanted, None) is None:
            return self.program.forward(*arguments)
        inputs, numbers = self.split.inputs(arguments) if self.split else (arguments, ())
        with TRACING if not self.ready else nullcontext():  # a thread may come while another is here for the first time
            if not self.ready:
                super().__init__(Captured(self.tensors, inputs), self.front)
                self.ready = True
        with self._in_call(inputs):
            call = Call(tuple(inputs[k] for k in self.module.given), {})
            forward: Forward | None = getattr(self.front.inside, "forward", None)
            if forward is not None:
                return self._run_in_step(forward, call, inputs, numbers, arguments)
            fits = False
            if not self.terms.always:
                kind, missing = self.kind(call)
                fits = self._fits(kind, missing, arguments)
            if self.front.only_plans:
                if not fits:
                    self.last = self.variants(call, self.front.saved)[0]
                self.front.last = self
                raise Planned
            if fits:
                return self._run_freely(kind, missing, call, arguments)
            try:
                results = self.run(call)
            except CannotBeCalledError:
                return self.program.forward(*arguments)  # whose own error comes
            except (GraphError, VariantLimitError) as error:
                if not self.terms.least:
                    raise
                self.refused = True
                warn(
                    f"{self.front.name} cannot be planned for such calls, which run as they are from now on, with no "
                    f"budget: {error}",
                    BudgetWarning,
                )
                return self.program.forward(*arguments)
            self.front.last = self
            return self.split.joined(results, numbers) if self.split else results

    # -------------------------------------------------------------- one of several graphs of a step

    def _run_in_step(
        self, forward: Forward, call: Call, inputs: Sequence[Any], numbers: Any, arguments: tuple[Any, ...]
    ) -> Any:
        """Run this graph as its step's plan says; small ones run as they are."""
        key, missing = self.kind(call)
        steps = forward.steps
        member = next((m for m in steps.members.get(key, ()) if missing <= m.planner.missing), None)
        if member is None and key not in steps.small:
            member = self._larger_member(steps, call, missing)
        if member is None and key not in steps.small:
            if self._is_small(steps, call, arguments):
                steps.run_as_it_is(key)
            else:
                forward.mark("plan", len(forward.ran))
                member = self._member(steps, call, key)
                forward.mark("planned", len(forward.ran))
        if member is None:
            forward.small += 1
            return self.program.forward(*arguments)
        results = forward.run(self, call, member, inputs)
        return self.split.joined(results, numbers) if self.split else results

    def _larger_member(self, steps: Steps, call: Call, missing: frozenset[str]) -> Member | None:
        """A member of larger sizes whose program is the same at these."""
        kind = self.kind(call, sized=False)[0]
        for member in steps.of_any_size.get(kind, ()):
            if missing <= member.planner.missing and member.covers(call):
                return member
        return None

    def _is_small(self, steps: Steps, call: Call, arguments: tuple[Any, ...]) -> bool:
        """Whether planning this graph would gain next to nothing."""
        budget = self.terms.bytes_known(_device_of(arguments)) or self.front.parameter_bytes
        varies = steps.sizes[self.kind(call, sized=False)[0]] >= MANY_SIZES
        return rough_bytes(self.program, arguments) * (VARYING if varies else SMALL) <= budget

    def _member(self, steps: Steps, call: Call, key: Hashable) -> Member | None:
        """Plan this graph as a part of longer steps; None if that cannot be done."""
        refuse_within_measurements()
        try:
            with TRACING, Heeded(), Progress(self.terms.progress) as report:
                kind = self.kind(call, sized=False)[0]
                member = self._resized_member(steps, call, kind, report) or self._traced_member(call, kind, report)
        except (GraphError, CannotBeCalledError) as error:
            LOG.info("%s: a graph of the step runs as it is, since it cannot be planned: %s", self.front.name, error)
            steps.run_as_it_is(key)
            return None
        steps.sizes[kind] += 1
        if member.of_any_size:
            steps.of_any_size.setdefault(kind, []).insert(0, member)
        member.base = next(
            (m for m in steps.every if m.family is member.family and m.base is m and m.covers(call)), member
        )
        steps.remember(key, member)
        steps.news = steps.news or member.base is member
        return member

    def _resized_member(self, steps: Steps, call: Call, kind: Hashable, report: Report) -> Member | None:
        for family in self.front.families.running(kind):
            like = steps.latest.get(family)
            if like is None:
                continue
            report("resize", 0.0)
            with self.planning(call), self.module_ready():
                s = resized(family.points, family.skeleton, self.module, call)
                if s is None:
                    continue
                planner = like.planner.at_other_sizes(s, self._known_of(s, family), self.module, call.tensors)
            return self._made_member(planner, call, family, like)
        return None

    def _traced_member(self, call: Call, kind: Hashable, report: Report) -> Member:
        families = self.front.families

        def known_of(s: S_graph) -> Known:
            return self._known_of(s, families.of(s))

        with self.planning(call), self.module_ready():
            planner = make_planner(self.module, call, self.terms.options, report, None, known_of, outside)
        point = Point(sizes_of(call.tensors), planner.graphs.S)
        family = families.of(planner.graphs.S)
        if family is None:
            family = families.new(planner, point)
        else:
            family.add(point)
        family.kinds.add(kind)
        return self._made_member(planner, call, family, None)

    def _made_member(self, planner: Planner, call: Call, family: Family, like: Member | None) -> Member:
        said = self.front.described(self.names(call), call.leaves)
        planner = replace(planner, room=NO_ROOM, problem=problem_of(planner.graphs, NO_ROOM), call=said)
        schedules = schedules_of(planner) if like is None else carried_schedules(planner, like.schedules)
        choices = tuple(choice_of(planner.problem, plan, planner.beside) for plan in schedules)
        free = like is not None and same_constants(planner.graphs.S, like.planner.graphs.S)
        shapes = tuple(tuple(t.shape) for t in call.tensors)
        return Member(planner, said, family, schedules, choices, shapes, free)

    @contextmanager
    def _in_call(self, inputs: Sequence[Any]) -> Iterator[None]:
        self.now.inputs = inputs
        try:
            yield
        finally:
            self.now.inputs = None

    @contextmanager
    def module_ready(self) -> Iterator[None]:
        """Parameters and buffers are those of the call that this thread is in."""
        with self.module.holding(self.now.inputs):
            yield

    def sources(self, variant: Variant, inputs: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """As in ``Calls``; nothing is looked up in modules."""
        return self.module.values_of(variant.program.s.d.sources, inputs, self.now.inputs)

    def kind(self, call: Call, sized: bool = True) -> tuple[Hashable, frozenset[str]]:
        """As in ``Calls``; a plan is for one graph. Without sizes, numbers that a graph is given do not count."""
        missing = self.module.missing_among(self.now.inputs)
        if not sized:
            return call_key(call.tensors, None, sized), missing
        return (id(self), call_key(call.leaves, None)), missing

    def computed(self, variant: Variant, call: Call) -> tuple[Any, list[torch.Tensor], CallState | None]:
        """As in ``Calls``; where the plan is what the captured program does, that runs as it is."""
        if not variant.is_plain:
            return super().computed(variant, call)
        result = self.tensors.forward(*self.now.inputs)
        return result, [t for t in result if isinstance(t, torch.Tensor)], None

    def learner(self, variant: Variant, inputs: list[torch.Tensor]) -> Callable[[], None]:
        """As in ``Calls``; parameters and buffers are those of this call."""
        all_inputs = self.now.inputs

        def learn() -> None:
            with self._in_call(all_inputs):
                self._learn(variant, inputs)

        return learn

    def names(self, call: Call) -> list[str]:
        """Those that arguments have in the model's forward."""
        return self.module.names

    # ---------------------------------------------------------------- budgets that do not bind

    def _known_to_fit(self, kind: Hashable, missing: frozenset[str]) -> bool:
        return kind in self.spacious and missing <= self.spacious[kind].missing

    def _fits(self, kind: Hashable, missing: frozenset[str], arguments: tuple[Any, ...]) -> bool:
        """Whether the budget is so large that a call need not be planned."""
        if kind in self.binding:
            return False
        if self._known_to_fit(kind, missing):
            return True
        budget = self.terms.bytes_known(_device_of(arguments))
        if budget is None:
            return False
        fits = rough_peak(self.program, arguments) <= budget
        if not fits:
            self.binding.add(kind)  # to look at all sizes takes longer than a small step
        return fits

    def _run_freely(self, kind: Hashable, missing: frozenset[str], call: Call, arguments: tuple[Any, ...]) -> Any:
        """Run the captured program as it is; the first such step is measured."""
        if self._known_to_fit(kind, missing) or not WholeLook.possible():
            return self.program.forward(*arguments)
        said, budget = self.front.described(self.module.names, call.leaves), self.front.budget

        def measured(peak: int) -> None:
            if peak <= budget:
                self.spacious[kind] = Spacious(said, missing)
                self.free = self.split is None and len(missing) == self.module.trained
                LOG.info(
                    "%s needs no plan for %s: a step took %s of %s",
                    self.front.name, ", ".join(said), show_bytes(peak), show_bytes(budget),
                )  # fmt: skip
                return
            self.binding.add(kind)
            warn(
                f"the last step took {show_bytes(peak)}, more than the budget of {show_bytes(budget)}, "
                "which the sizes of the results did not show. Later steps like it are planned.",
                BudgetWarning,
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
    forms = tuple(_form(n.meta.get("example_value")) for n in nodes if n.op == "placeholder")
    return program.code, tuple(captured_sources(program)), targets, forms


def _form(example: Any) -> Hashable:
    """Of a parameter or another input, what the keys of plans do not tell: those have the forms of arguments."""
    if not isinstance(example, torch.Tensor):
        return str(type(example))
    own = isinstance(example, torch.nn.Parameter)
    return (
        own,
        example.dtype,
        example.requires_grad,
        str(example.device),
        str(tuple(example.shape)),
        str(example.stride()) if own and example.layout == torch.strided else "",
        str(example.layout),
    )
