"""The kernels of convolutions, which PyTorch chooses by their sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rkgb.graphs import D_graph, Ref

_LAST = 9
"""Arguments of ``aten._convolution`` on which the kernel depends: input, weight, bias, and how it is computed."""


def convolution_kernels(graphs: Sequence[D_graph], fit: Callable[[Sequence[int]], int]) -> dict[str, str]:
    """The kernel that PyTorch takes for each convolution on the CPU, by the name of its result: on one thread it
    depends on the number of images. Nothing runs. ``graphs``: the same one at some sizes; ``fit``: what a number of
    these becomes at the size that is asked for.
    """
    *_, d = graphs
    found = {}

    def argument(a: Any) -> Any:
        """A tensor of the value's shape and type, and of one element's memory."""
        if not isinstance(a, Ref):
            return a
        shapes = zip(*(other.values[a.index].shape for other in graphs), strict=True)
        return torch.empty((), dtype=d.values[a.index].dtype).expand([fit(sizes) for sizes in shapes])

    for node in d.nodes:
        if node.op is torch.ops.aten._convolution.default and d.values[node.outputs[0]].device.type == "cpu":
            arguments = map(argument, node.args[:_LAST])
            found[d.names[node.outputs[0]]] = str(torch._C._select_conv_backend(*arguments))
    return found
