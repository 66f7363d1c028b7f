"""Scripted modules (``torch.jit.script``), run operation by operation in Python.

The tracer would record a scripted module as one call, loops and branches included. Here Python takes the branches and
runs the loops. It reads the tensors that decide, and each read becomes a guard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rkgb.errors import UnsupportedError


def run_scripted(module: torch.jit.ScriptModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``module(*args, **kwargs)`` returns."""
    method: Any = module.forward
    graph = method.graph.copy()
    torch._C._jit_pass_inline(graph)
    bound = method.schema.arguments[1:]
    given = dict(zip((a.name for a in bound), args, strict=False)) | kwargs
    values = [given.get(a.name, a.default_value) for a in bound]
    env: dict[str, Any] = {}
    for value, given_value in zip(graph.inputs(), [module, *values], strict=True):
        env[value.debugName()] = given_value
    results = _block(graph, env)
    return results[0] if len(results) == 1 else tuple(results)


def _block(block: Any, env: dict[str, Any]) -> list[Any]:
    """Run the nodes of a graph or block, and return its values."""
    for node in block.nodes():
        outputs = [v.debugName() for v in node.outputs()]
        inputs = [env[v.debugName()] for v in node.inputs()]
        kind = node.kind()
        if kind == "prim::If":
            first, second = node.blocks()
            env.update(zip(outputs, _block(first if inputs[0] else second, env), strict=True))
        elif kind == "prim::Loop":
            env.update(zip(outputs, _loop(next(node.blocks()), inputs, env), strict=True))
        elif kind in ("prim::ListUnpack", "prim::TupleUnpack"):
            env.update(zip(outputs, inputs[0], strict=True))
        else:
            result = _value(node, kind, inputs)
            env.update(zip(outputs, result if len(outputs) > 1 else [result], strict=bool(outputs)))
    return [env[v.debugName()] for v in block.outputs()]


def _loop(body: Any, inputs: list[Any], env: dict[str, Any]) -> list[Any]:
    most, goes_on, *carried = inputs
    names = [v.debugName() for v in body.inputs()]
    turn = 0
    while turn < most and goes_on:
        env.update(zip(names, [turn, *carried], strict=True))
        goes_on, *carried = _block(body, env)
        turn += 1
    return carried


_CONSTRUCT: dict[str, Callable[..., Any]] = {
    "prim::ListConstruct": lambda *items: list(items),
    "prim::TupleConstruct": lambda *items: tuple(items),
    "prim::DictConstruct": lambda *items: dict(zip(items[::2], items[1::2], strict=True)),
    "prim::NumToTensor": torch.tensor,
    "prim::TupleIndex": lambda items, k: items[k],
    "prim::unchecked_cast": lambda x: x,
    "prim::unchecked_unwrap_optional": lambda x: x,
    "prim::Uninitialized": lambda: None,
    "prim::device": lambda t: t.device,
    "prim::dtype": lambda t: t.dtype,
    "prim::min": min,
    "prim::max": max,
    "aten::__is__": lambda a, b: a is b,
    "aten::__isnot__": lambda a, b: a is not b,
    "aten::Bool": bool,
    "aten::Int": int,
    "aten::Float": float,
    "aten::IntImplicit": int,
    "aten::FloatImplicit": float,
    "aten::ScalarImplicit": lambda t: t.item(),
    "aten::size": lambda t, dim=None: list(t.shape) if dim is None else t.shape[dim],
    "aten::dim": lambda t: t.dim(),
    "aten::len": len,
    "aten::append": lambda items, x: (items.append(x), items)[1],
    "aten::__getitem__": lambda items, k: items[k],
    "aten::__range_length": lambda low, high, step: len(range(low, high, step)),
    "aten::__derive_index": lambda k, start, step: start + k * step,
}


def _value(node: Any, kind: str, inputs: list[Any]) -> Any:
    if kind == "prim::Constant":
        return node.output().toIValue() if node.hasAttribute("value") else None
    if kind == "prim::GetAttr":
        return getattr(inputs[0], node.s("name"))
    if kind == "prim::RaiseException":
        raise UnsupportedError(f"a scripted module raises {inputs[0]!r} on this sample")
    if kind in _CONSTRUCT:
        return _CONSTRUCT[kind](*inputs)
    text = node.schema()
    if text == "(no schema)":
        raise UnsupportedError(f"a scripted module contains {kind}; give the Python module, unscripted, instead")
    schema = torch._C.parse_schema(text)
    namespace, name = schema.name.split("::")
    op = getattr(getattr(getattr(torch.ops, namespace), name), schema.overload_name or "default")
    positional = [x for x, a in zip(inputs, schema.arguments, strict=True) if not a.kwarg_only]
    keyword = {a.name: x for x, a in zip(inputs, schema.arguments, strict=True) if a.kwarg_only}
    return op(*positional, **keyword)
