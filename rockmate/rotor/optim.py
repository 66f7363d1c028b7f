"""``CheckpointOptim``: a checkpointing sequence as one autograd function, with the interface that rotor documents."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rkgb.trees import tensor_leaves
from rockmate.errors import InputError
from rockmate.rotor.execution import Call
from rockmate.rotor.parts import Function
from solvers.rotor.ops import Operation, Sequence


class CheckpointOptim(torch.autograd.Function):
    """``CheckpointOptim.apply(functions, sequence, names, preserve_rng_state, *arg)``: run a chain by a sequence.

    ``functions``: the stages, each from one value to the next. ``sequence``: Fn, Fck, Fe, B and Loss. ``names``: of the
    functions; if given, every operation is announced on stderr. ``preserve_rng_state``: whether a stage that runs again
    draws the same random numbers. ``arg``: one tensor, or several, which the first stage gets as a tuple.

    Gradients of parameters are accumulated into ``.grad`` in the backward, those of ``arg`` are returned. This is for
    programs that bring their own sequence. ``Checkpointable`` runs the same chain without a function around it, so that
    ``torch.autograd.grad`` and ``retain_graph`` work too.

    Raises ``ValueError`` for a backward operation in the forward phase or ``Loss`` in the backward phase,
    ``AttributeError`` for an object that is no operation, ``InputError`` if no ``arg`` requires grad: autograd would
    then never call the backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        functions: Many[Function],
        sequence: Sequence | Many[Operation],
        names: Many[str] | None,
        preserve_rng_state: bool,
        *arg: Any,
    ) -> Any:
        """The output of the last function."""
        if not any(t.requires_grad for t in arg if isinstance(t, torch.Tensor)):
            raise InputError(
                "no input of CheckpointOptim requires grad, so its backward would never run and the parameters would "
                "get no gradient: call input.requires_grad_() first, or use Checkpointable, which does not need it"
            )
        leaves = tuple(t.detach().requires_grad_(t.requires_grad) for t in arg)
        call = Call(functions, sequence, names, preserve_rng_state)
        with torch.enable_grad():
            output = call.forward(leaves[0] if len(leaves) == 1 else leaves)
        ctx.leaves, ctx.outputs = leaves, tensor_leaves(output)
        return pytree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """The gradients of ``arg``."""
        if ctx.outputs is None:
            raise RuntimeError("CheckpointOptim runs its backward once; Checkpointable supports retain_graph")
        pairs = [(t, g) for t, g in zip(ctx.outputs, grads, strict=True) if t.requires_grad and g is not None]
        leaves, ctx.outputs, ctx.leaves = ctx.leaves, None, None
        ends = [t for t, _ in pairs]
        gradients = [g for _, g in pairs]
        del pairs, grads
        torch.autograd.backward(ends, gradients)
        return (None, None, None, None, *(t.grad for t in leaves))
