"""Graphs as text: what the texts of B, D, S and K have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rkgb.nodes import Node, Ref, Value


def header(stage: str, made_by: Sequence[str]) -> str:
    """The first line of a graph's text: the last of the passes that made it."""
    return f"# {stage}, made by {made_by[-1] if made_by else 'hand'}"


def format_program(
    names: Sequence[str], nodes: Sequence[Node], outputs: Sequence[int], values: Mapping[int, Value] | None = None
) -> str:
    """The nodes as a readable program, one assignment a line, with the user's source line behind it."""

    def show(arg: Any) -> str:
        if isinstance(arg, Ref):
            return names[arg.index]
        if isinstance(arg, (list, tuple)):
            return "[" + ", ".join(show(a) for a in arg) + "]"
        if isinstance(arg, torch.Tensor):
            return f"tensor({arg.item()})" if arg.numel() == 1 else f"tensor{list(arg.shape)}"
        return str(arg)

    lines = []
    for node in nodes:
        arguments = [show(a) for a in node.args] + [f"{k}={show(a)}" for k, a in node.kwargs]
        left = ", ".join(names[v] for v in node.outputs) or "()"
        kind = ""
        if values and node.outputs and node.outputs[0] in values:
            kind = f": {form(values[node.outputs[0]])}"
        name = str(node.op) if node.name == "guard" else node.name
        lines.append(f"{left}{kind} = {name}({', '.join(arguments)})" + (f"  # {node.line}" if node.line else ""))
    return "\n".join([*lines, f"return {', '.join(names[v] for v in outputs)}"])


def form(value: Value) -> str:
    """Type and shape of a tensor: "float32[2, 16]"."""
    return f"{str(value.dtype)[6:]}{list(value.shape)}"


def annotation(value: Value, grad: bool, storage: str, size: int | None, device: torch.device) -> str:
    """``form``, followed by what differs from the default: contiguous strides, ``grad`` and ``device``.

    ``storage``: the name of the tensor's memory, empty if it is the tensor's own. ``size``: the bytes of that memory;
    None if they are the tensor's, or were told before.
    """
    contiguous = torch.empty(value.shape, device="meta").stride()
    parts = [
        form(value),
        "" if value.stride == contiguous else f"strides {list(value.stride)}",
        f"in {storage}" if storage else "",
        "" if size is None else f"of {size} bytes",
        "" if value.device == device else f"on {value.device}",
        "" if value.requires_grad == grad else "grad" if value.requires_grad else "no grad",
    ]
    return " ".join(part for part in parts if part)
