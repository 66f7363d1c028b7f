"""From a module to its graphs: one call for each stage, every graph kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rkgb.blocks.classes import classes
from rkgb.blocks.cut import cut
from rkgb.blocks.simplify import D_to_S
from rkgb.blocks.summary import Summary, summarize
from rkgb.Btools import trace
from rkgb.cost.measure import Known, check_costs, measure_nodes
from rkgb.cost.usage import Usage, supposed, turned_strides
from rkgb.device import kind_of, one_device
from rkgb.graphs import B_graph, D_graph, S_graph
from rkgb.Ktools import K_graph, S_to_K, with_extra
from rkgb.notebook import Displayed
from rkgb.probe.check import checked
from rkgb.sample import Call, Sample, call_of, check_module
from rkgb.trace.patches import TRACING
from rkgb.trace.preserved import attributes_preserved

Graph = B_graph | D_graph | S_graph | K_graph

Shows = Callable[[], tuple[B_graph, D_graph] | None]


@dataclass(frozen=True, repr=False)
class Graphs(Displayed):
    """All graphs of one module. ``S`` is cut into blocks; ``classes`` has the number of each block's class.

    ``known``: the costs measured so far, for other uses of the outputs. A notebook shows the chain of blocks.
    """

    B: B_graph
    D: D_graph
    S: S_graph
    classes: tuple[int, ...]
    K: K_graph
    known: Known = field(default_factory=Known, compare=False)

    def summary(self) -> Summary:
        """How large the graphs are; prints as one line."""
        return summarize(self.D, self.S, self.classes)

    def __repr__(self) -> str:
        return f"<Graphs: {self.summary()}>"


def make_S(
    model: torch.nn.Module,
    sample: Sample,
    sample_kwargs: dict[str, Any] | None = None,
    report: Callable[[str, float], None] = lambda phase, part: None,
    shown: Shows = lambda: None,
) -> tuple[B_graph, D_graph, S_graph]:
    """The graphs that need no costs: B, D, and S cut into blocks. Arguments as for ``make_all_graphs``."""
    check_module(model)
    call = call_of(sample, sample_kwargs)
    inputs = ((f"tensor {k} of the sample", t.device) for k, t in enumerate(call.tensors))
    buffers = ((name, t.device) for name, t in model.named_buffers())
    device = one_device(((name, t.device) for name, t in model.named_parameters()), (*buffers, *inputs))
    kind_of(device).warm_up(device)
    report("trace", 0.0)
    b, d = shown() or _run(model, call)
    one_device([("the model", device)], ((d.names[v], value.device) for v, value in d.values.items()))
    report("simplify", 0.0)
    s = cut(D_to_S(d))
    return b, s.d, s


def _run(model: torch.nn.Module, call: Call) -> tuple[B_graph, D_graph]:
    """B and D, from runs on the sample."""
    with attributes_preserved(model):
        with torch.enable_grad():
            b, expected = trace(model, call)
        return b, checked(b, model, call, expected)


def make_K(
    s: S_graph,
    model: torch.nn.Module,
    inputs: list[torch.Tensor],
    costs: str,
    usage: Usage,
    known: Known,
    missing: frozenset[int] | None = None,
    report: Callable[[float], None] = lambda _: None,
) -> K_graph:
    """Measure the nodes whose costs are not in ``known``, and make K.

    Where ``usage`` does not say how the gradients of the roots lie in memory, figures are for contiguous ones. What
    others, and views, take above these is ``K_backward.extra``.
    """
    may_turn = frozenset(k for k in usage.roots if turned_strides(s.d.values[s.d.outputs[k]]))
    open_ = usage.turned is None and may_turn

    def differentiated_for(one: Usage, start: float, stop: float) -> K_graph:
        measured = measure_nodes(
            s, model, inputs, costs, one, known, report=lambda part: report(start + part * (stop - start))
        )
        return S_to_K(s, model, inputs, measured, one, missing)

    most = 0.9 if open_ else 1.0  # few nodes see how the gradients of roots lie
    k = differentiated_for(dataclasses.replace(usage, turned=(usage.turned or frozenset()) & may_turn), 0.0, most)
    if open_:
        views = frozenset((root, ()) for root in usage.roots)
        try:
            k = with_extra(k, differentiated_for(dataclasses.replace(usage, turned=may_turn, viewed=views), most, 1.0))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            pass  # an operator takes no such gradient: a loss that gives it fails in eager mode, too
    return dataclasses.replace(k, usage=usage)


def make_all_graphs(
    model: torch.nn.Module,
    sample: Sample,
    sample_kwargs: dict[str, Any] | None = None,
    *,
    costs: str = "measured",
    report: Callable[[str, float], None] = lambda phase, part: None,
    known_of: Callable[[S_graph], Known] = lambda _: Known(),
    usage_of: Callable[[D_graph], Usage] = supposed,
    shown: Shows = lambda: None,
) -> Graphs:
    """Trace ``model`` on ``sample`` and build all graphs.

    Args:
        model: Any module whose tensors lie on one device.
        sample: A tensor, a tuple of positional arguments, or a dict of keyword arguments.
        sample_kwargs: Keyword arguments beside a tuple.
        costs: "measured", or "flops" for times by a roofline model, which are the same in every run.
        report: Called with a phase, when it starts and now and then later, and how much of it is done (0 to 1).
        known_of: Returns the known costs of an S graph.
        usage_of: Returns what the caller does with the outputs of a D graph.
        shown: Returns B and D as far as they show without running the model; None if they do not.

    Raises:
        TraceError: the module cannot be traced.
        MismatchError: the traced program and the module give different results.
    """
    check_costs(costs)
    with TRACING:  # counting operations sets hooks of all modules, which another thread's trace would meet
        call = call_of(sample, sample_kwargs)
        b, d, s = make_S(model, call, report=report, shown=shown)
        report("measure", 0.0)
        known = known_of(s)
        k = make_K(s, model, call.tensors, costs, usage_of(d), known, report=partial(report, "measure"))
    return Graphs(b, d, s, tuple(classes(s)), k, known)
