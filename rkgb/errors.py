"""Errors of graph building; each says what happened, where in the user's code, and what to do next."""

from __future__ import annotations


class GraphError(Exception):
    """Base of all errors raised by ``rkgb``."""


class TraceError(GraphError):
    """The module cannot be traced into one graph."""


class UnsupportedError(TraceError):
    """The module does something that no graph can represent, which the message names."""


class MismatchError(GraphError):
    """The traced program and the module give different results on the sample."""


class MeasureError(GraphError):
    """Memory cannot be measured now."""


class PlanWanted(MeasureError):
    """What is measured needs a plan, or costs, which cannot be found meanwhile."""


BACKWARD_INSIDE = (
    "{what} at {line} is an autograd.Function that runs a backward of modules inside its own, as reversible layers do: "
    "parameters get gradients that no plan can foresee. Pass the parameters to the function and return their gradients "
    "(torch.autograd.grad inside its backward), or plan the submodules around it instead."
)


class RenderWarning(UserWarning):
    """A picture of a graph could not be made; its source was written instead."""


class AllocatorError(GraphError):
    """A request to the simulated allocator is not possible, or a replay differs from the recording."""


def runs_functions(operator: str, line: str) -> UnsupportedError:
    """The error for one of torch's operators that run functions (``torch.cond``), called at ``line``."""
    return UnsupportedError(
        f"forward calls torch's operator {operator!r}{line}, which runs functions of its own, and no plan can be made "
        "of these. Compute both sides and choose with torch.where, write the loop in Python, or move it out of forward."
    )
