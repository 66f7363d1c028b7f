"""What to say where a budget is too small: the least one, what sets it, and where in the model that is."""

from __future__ import annotations

from math import ceil

from rkgb.blocks.fingerprint import describe_inputs
from rkgb.Ktools import K_graph
from rkgb.nodes import Node
from rkgb.trace.casts import NAMES_OF_RECURRENT
from rockmate.budget import show_at_least, show_at_most, show_bytes
from rockmate.planning.report import line_of_call
from solvers import Bwd, Problem, Run, Step

MOST = 0.75
"""From this share of the least budget on, it is said that one operation takes it."""

_LAYERS = 4
"""The place of ``num_layers`` among the arguments of recurrent operations."""

SAME = 0.99
"""From this share of eager's peak on, there is nothing to save."""


def too_small(
    k: K_graph,
    problem: Problem,
    budget: int,
    least: int,
    eager: int,
    at: Step | None,
    kept: int = 0,
    stopped: str = "",
    declared: int | None = None,
) -> str:
    """The message for a ``budget`` below ``least``, which the step ``at`` of ``problem`` sets; ``eager``: bytes without
    recomputation.

    ``kept``: bytes that are left free through the backward for a loss that the next step will show. ``stopped``: what
    ended the search early, so that a smaller budget may do. ``declared``: bytes that the user said the loss
    takes; 0 where there is nothing to say, as a step has shown it.

    Read as a budget, the figure that stands for ``least`` can be planned.
    """
    gradients = parameter_gradients(k, at)
    share = f", of which {show_bytes(gradients)} are gradients of parameters" if gradients else ""
    if stopped:
        return (
            f"no plan was found for a budget of {show_at_most(budget)}: the search was stopped {stopped}, and the "
            f"smallest budget that it has a plan for is {show_at_least(least)}; without recomputation the "
            f"step takes {show_at_least(eager)}. Give the search more time, or raise the budget.{_unseen(kept, least)}"
        )
    call = line_of_call(describe_inputs(k.s))
    return (
        f"no plan fits a budget of {show_at_most(budget)}{f' for {call}' if call else ''}: the smallest that can be "
        f"planned is {show_at_least(least)}{share}; without recomputation the step takes "
        f"{show_at_least(eager)}. What sets it is {place_of(k, at)}. {_limit(least, eager, gradients, at)}"
        f"{_alone(k, problem, least, at)}{_advice(at, declared)}"
        f"{_unseen(kept, least)}"
    )


def least_share(least: int, eager: int) -> str:
    """The ``least`` budget as a share of ``eager``, the bytes without recomputation, with which there is a plan."""
    return f"{ceil(100 * least / max(1, eager))}%"


def saves_nothing(least: int, eager: int) -> bool:
    """Whether the ``least`` bytes that can be planned are as good as those of a step without recomputation."""
    return least >= SAME * eager


def _limit(least: int, eager: int, gradients: int, at: Step | None) -> str:
    """Why recomputation does not help, where it does not."""
    if not saves_nothing(least, eager):
        return ""
    what = "what that operation needs" if isinstance(at, (Run, Bwd)) else "outputs and the loss"
    beside = "gradients of parameters and " if gradients else ""
    return f"Recomputation saves next to nothing here: nearly all of it is {beside}{what}. "


def _alone(k: K_graph, problem: Problem, least: int, at: Step | None) -> str:
    """What the operation at ``at`` reads and allocates, where that is most of the ``least`` bytes."""
    if not isinstance(at, (Run, Bwd)):
        return ""
    node, op = problem.nodes[at.node], _op_of(k, at.node)
    backward, reads, takes = node.backward, node.reads, node.peak
    if isinstance(at, Bwd) and backward is not None:
        reads, takes = backward.reads, backward.peak - backward.before
    alone = takes + sum(problem.data[d].size for d in reads)
    if alone < MOST * least:
        return ""
    layers = op.args[_LAYERS] if op.name in NAMES_OF_RECURRENT else 1
    split = (
        f" Its {layers} layers are one operation of torch's: with a module for each (num_layers=1), each can run again "
        "by itself, and a smaller budget has a plan."
    )
    return f"This operation alone takes {show_bytes(alone)}, which no plan divides.{split * (layers > 1)} "


def _op_of(k: K_graph, number: int) -> Node:
    """The operation that gives node ``number`` its name."""
    node, d = k.s.nodes[number], k.s.d
    return next((d.nodes[i] for i in node.ops if d.nodes[i].name == node.name), d.nodes[node.ops[0]])


def parameter_gradients(k: K_graph, at: Step | None) -> int:
    """Bytes of the gradients of parameters that are there at the step ``at`` and were not before the step."""
    if not isinstance(at, (Run, Bwd)):
        return 0
    begun = range(at.node, len(k.nodes)) if isinstance(at, Bwd) else range(0)
    read = {v for i in begun if k.nodes[i].backward for v in k.s.nodes[i].reads}
    return min(k.gradient_bytes, sum(k.s.d.values[v].bytes for v in k.missing & read))


def place_of(k: K_graph, at: Step | None) -> str:
    """The step in the user's words: "the backward of gelu in layers.2 at models.py:120"."""
    if not isinstance(at, (Run, Bwd)):
        return "the loss, between forward and backward"
    op = _op_of(k, at.node)
    what = "the backward" if isinstance(at, Bwd) else "the forward"
    return f"{what} of {op.name}" + (f" in {op.path}" if op.path else "") + (f" at {op.line}" if op.line else "")


def _unseen(kept: int, least: int) -> str:
    """What is left free for the loss, where that is much."""
    if kept < (1 - SAME) * least:
        return ""
    return (
        f" No step has shown yet what the loss keeps through the backward, and {show_bytes(kept)} are left free for "
        "it. If it keeps less, take a step under a larger budget first, then set .budget to this one."
    )


def _advice(at: Step | None, declared: int | None) -> str:
    if isinstance(at, (Run, Bwd)) or declared == 0:
        return "Raise the budget or make the batch smaller."
    loss = (
        "say what the loss takes (loss_memory=)"
        if declared is None
        else f"declare less than loss_memory={declared} ({show_bytes(declared)}) where the loss takes less"
    )
    return f"Raise the budget, make the batch smaller, or {loss}."
