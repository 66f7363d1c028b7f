"""A digest of an S graph: equal for the same module on the same shapes, on every machine and in every process."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch

from rkgb.graphs import Node, Ref, S_graph, Value

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def fingerprint(s: S_graph) -> str:
    """SHA-256 (hexadecimal) of operations, arguments, types and shapes, shared memory, and the grouping in S.

    Contents of tensors, names, source lines and device numbers do not count.
    """
    d = s.d
    lines = [f"source {v} {source.kind} {_key(source.key)}" for v, source in sorted(d.sources.items())]
    for node, facts in zip(d.nodes, d.facts, strict=True):
        lines.append(f"{node.outputs} = {_operation(node)} writes {facts.writes} random {facts.random} {facts.saved}")
    lines += [f"value {v} {_form(value)}" for v, value in sorted(d.values.items())]
    lines += [f"node {n.ops} {n.storages} {n.saved} {n.fixed}" for n in s.nodes]
    lines.append(f"outputs {d.outputs} blocks {s.blocks}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def describe_inputs(s: S_graph) -> tuple[str, ...]:
    """What the graph is called with: "float32[32, 16]" for each tensor."""
    inputs = sorted((source.key, v) for v, source in s.d.sources.items() if source.kind == "input")
    values = [s.d.values.get(v) for _, v in inputs]
    return tuple(f"{str(v.dtype)[6:]}{list(v.shape)}" if v else "not used" for v in values)


def _key(key: Any) -> str:
    return "tensor" if isinstance(key, torch.Tensor) else str(key)


def _operation(node: Node) -> str:
    keywords = tuple((k, _argument(a)) for k, a in node.kwargs)
    return _ADDRESS.sub("", f"{node.name} {node.op} {_argument(node.args)} {keywords} {node.mode}")


def _argument(a: Any) -> Any:
    if isinstance(a, Ref):
        return a
    if isinstance(a, (list, tuple)):
        return [_argument(x) for x in a]
    if isinstance(a, torch.Tensor):
        return f"tensor {a.tolist()}" if a.numel() <= 1 else f"tensor {a.dtype} {list(a.shape)}"
    return a.type if isinstance(a, torch.device) else a


def _form(v: Value) -> str:
    return f"{v.shape} {v.stride} {v.dtype} {v.device.type} {v.requires_grad} {v.storage}"
