"""Runs each distinct node once before a plan that was loaded, so that its kernels allocate their workspaces first."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from rkgb.blocks.classes import nodes_key
from rkgb.cost.alone import NodeRun, gradients_watched, is_parameter
from rkgb.cost.layouts import differentiated
from rkgb.cost.node import first_use
from rkgb.cost.usage import differentiable
from rkgb.device import kind_of
from rkgb.graphs import S_graph, S_node
from rkgb.program import source_values
from rkgb.trace.preserved import preserved


def warm(s: S_graph, model: torch.nn.Module, inputs: list[torch.Tensor]) -> None:
    """Run each distinct node once on zeros, forward and backward, in the threads in which a plan runs it.

    Nothing runs on devices whose kernels keep no workspaces. The memory needed is that of one node.
    """
    seen: set[Hashable] = set()
    with preserved(model, inputs, s.d.structure.written), torch.enable_grad():
        for node, fed in zip(s.nodes, differentiated(s, [s.d.outputs[k] for k in differentiable(s.d)]), strict=True):
            device = s.d.values[node.makes[0]].device if node.makes else torch.device("cpu")
            key = nodes_key(s.d, [node]), fed
            if not kind_of(device).keeps_workspaces or key in seen:
                continue
            seen.add(key)
            with gradients_watched(model, s.d, node):
                _run(NodeRun(s.d, node, on_zeros(s, node, model, inputs), fed, (None,) * len(fed)))


def _run(run: NodeRun) -> None:
    try:
        first_use(run)
    except Exception:  # noqa: BLE001 - an operation may refuse zeros; the first step is then its first use
        return


def on_zeros(s: S_graph, node: S_node, model: torch.nn.Module, inputs: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Inputs for a run of the node alone: parameters and sparse inputs themselves, and zeros in place of all others."""
    forms = {v: s.d.values[v] for v in node.reads}
    own = {v for v, x in forms.items() if is_parameter(s.d, v) or len(x.stride) != len(x.shape)}
    values = source_values({v: s.d.sources[v] for v in own}, model, inputs)
    for v, x in forms.items():
        if v not in own:
            values[v] = torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=x.device).zero_()
    return values
