"""The kernel that PyTorch takes for a convolution: on one CPU thread it depends on the number of images."""

from __future__ import annotations

import torch

from rkgb.graphs import D_graph, Ref

_LAST = 9
"""Arguments of ``aten._convolution`` on which the kernel depends: input, weight, bias, and how it is computed."""


def convolution_kernels(d: D_graph) -> dict[str, str]:
    """The kernel of each convolution on the CPU, by the name of its result. Nothing runs; ``d`` may be of any size."""
    found = {}
    for node in d.nodes:
        if node.op is torch.ops.aten._convolution.default and d.values[node.outputs[0]].device.type == "cpu":
            arguments = [_form(d, a) if isinstance(a, Ref) else a for a in node.args[:_LAST]]
            found[d.names[node.outputs[0]]] = str(torch._C._select_conv_backend(*arguments))
    return found


def _form(d: D_graph, ref: Ref) -> torch.Tensor:
    """A tensor of the value's shape and type, and of one element's memory."""
    value = d.values[ref.index]
    return torch.empty((), dtype=value.dtype).expand(value.shape)
