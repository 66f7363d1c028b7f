"""Runs without data: tensors are on the meta device, and so is what a program makes on its device meanwhile.

torch spells some calls otherwise there, and records none where its rules for sizes are Python. ``OnMeta`` makes them as
they are on a device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch._prims_common import suggest_memory_format
from torch.utils._device import _device_constructors

from rkgb.nodes import Node
from rkgb.storages import has_memory, storage_key
from rkgb.trace.attention import attention_on_cpu
from rkgb.trace.distinct import DistinctCalls
from rkgb.trace.quick import QuickRules
from rkgb.trace.tracer import untraced
from rkgb.trees import map_tensors, tensors_in

_C: Any = torch._C
_META = torch.device("meta")

_OF_VALUES = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
"""These make tensors of numbers, which are constants of a trace."""

_CONVOLUTIONS: dict[Any, tuple[int, bool]] = {
    torch.conv1d: (1, False),
    torch.conv2d: (2, False),
    torch.conv3d: (3, False),
    torch.conv_transpose1d: (1, True),
    torch.conv_transpose2d: (2, True),
    torch.conv_transpose3d: (3, True),
}
"""How many dimensions are moved over, and whether transposed. torch records them from inside, as ``_convolution``."""


def without_data(arguments: Sequence[Any]) -> list[Any] | None:
    """``arguments`` with tensors like theirs without data: of their sizes and strides, parameters for parameters. What
    is one tensor, or lies in one memory, does so again. Of a number on the CPU, which may be read, it is a copy.

    None if one of the tensors is no plain memory.
    """
    tensors = {id(a): a for a in arguments if isinstance(a, torch.Tensor)}
    if not all(type(t) in _PLAIN and has_memory(t) for t in tensors.values()):
        return None
    memory: dict[int, torch.UntypedStorage] = {}
    made = {k: _like(t, memory) for k, t in tensors.items()}
    return [made.get(id(a), a) for a in arguments]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _like(t: torch.Tensor, memory: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """``memory``: that without data, by that of tensors which have some."""
    if _is_number(t):
        return t.detach().clone()
    key = storage_key(t)
    if key not in memory:
        memory[key] = torch.UntypedStorage(t.untyped_storage().nbytes(), device=_META)
    made = torch.empty(0, dtype=t.dtype, device=_META)
    made.set_(memory[key], t.storage_offset(), t.shape, t.stride())
    if isinstance(t, torch.nn.Parameter):
        return torch.nn.Parameter(made, t.requires_grad)
    return made.requires_grad_(t.requires_grad)


def _is_number(t: torch.Tensor) -> bool:
    return not t.dim() and t.device.type == "cpu" and not t.requires_grad


class OnMeta:
    """Calls functions of a program: what it makes on ``device`` is made on the meta device. ``kind``: of the device.
    ``rules``: tell whether the last call would have drawn random numbers there. ``calls``: where a trace is to note
    what it calls. ``of_any_size``: a trace is to record where Python reads sizes.
    """

    def __init__(self, device: torch.device, calls: DistinctCalls | None = None, of_any_size: bool = False) -> None:
        self.usual = device.type == torch.get_default_device().type
        self.kind = device.type
        self.rules, self.calls, self.of_any_size = QuickRules(), calls, of_any_size

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(t.is_meta and not t.dim() for t in tensors_in((args, kwargs))):
            # What reads a number raises here. In a trace, the tracer would keep the argument for a call of a later one.
            _untraced(lambda: self._call(func, args, kwargs))
        with self.rules:
            return self._call(func, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _OF_VALUES:
            made = _untraced(lambda: func(*args, **kwargs))
            return _lying_as(made, lambda: _like(made, {}))
        if func in _CONVOLUTIONS:
            return _convolution(func, *args, **kwargs)
        if func in _ON_CPU and self.kind == "cpu":
            return _lying_as(func(*args, **kwargs), partial(_ON_CPU[func], *args, **kwargs))
        if func is torch.Tensor.__setitem__ and type(args[2]) in (int, float, bool):
            args = (*args[:2], _untraced(lambda: torch.tensor(args[2], dtype=args[0].dtype)))
        if kwargs.get("device") is not None or (self.usual and func in _device_constructors()):
            kwargs = {**kwargs, "device": _META}
        if any(isinstance(a, (torch.device, str)) for a in args) and getattr(func, "__name__", "") in ("to", "new"):
            args = tuple(_META if isinstance(a, (torch.device, str)) else a for a in args)
        return func(*args, **kwargs)


def _untraced(make: Callable[[], Any]) -> Any:
    with untraced(_C._get_tracing_state()):
        return make()


def _convolution(
    func: Any,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    *others: Any,
    **named: Any,
) -> torch.Tensor:
    dims, transposed = _CONVOLUTIONS[func]
    if isinstance(padding, str) or input.dim() != dims + 2:
        result: torch.Tensor = func(input, weight, bias, stride, padding, *others, **named)
        return result
    names = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    given = {**dict(zip(names, others, strict=False)), **named}

    def each(x: Any) -> list[int]:
        sizes = [x] if isinstance(x, int) else list(x)
        return sizes * dims if len(sizes) == 1 else sizes

    arguments = (
        *(input, weight, bias, each(stride), each(padding), each(given.get("dilation", 1)), transposed),
        *(each(given.get("output_padding", 0)), given.get("groups", 1)),
    )
    cudnn = torch.backends.cudnn
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    made = torch._convolution(*arguments, cudnn.benchmark, deterministic, cudnn.enabled, cudnn.allow_tf32)
    return _lying_as(made, partial(_convolution_there, *arguments))


def _convolution_there(*arguments: Any) -> torch.Tensor:
    """What ``_convolution`` makes of tensors without data. On a device channels come last if they do in one of two."""
    result: torch.Tensor = torch.ops.aten.convolution(*arguments[:9])
    formats = [suggest_memory_format(t) for t in arguments[:2]]
    last = next((form for form in formats if form is not torch.contiguous_format), torch.contiguous_format)
    return result.contiguous(memory_format=last)


def _group_norm_on_cpu(
    input: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> torch.Tensor:
    """What ``group_norm`` makes of tensors without data; where channels come last, they do so in it and its result."""
    input = input.contiguous(memory_format=suggest_memory_format(input))
    if weight is not None and weight.dtype != input.dtype:  # statistics are of the weight's type
        return _MixedGroupNorm.apply(input, weight, bias, groups)  # type: ignore[no-any-return]
    size = *input.shape[:2], math.prod(input.shape[2:])
    result: torch.Tensor = torch.ops.aten.native_group_norm(input, weight, bias, *size, groups, eps)[0]
    return result


class _MixedGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: int) -> Any:
        ctx.save_for_backward(x, weight, *(weight.new_empty(x.shape[0], groups) for _ in range(2)))
        return torch.empty_like(x)


_ON_CPU: dict[Any, Callable[..., torch.Tensor]] = {
    F.scaled_dot_product_attention: attention_on_cpu,
    torch.ops.aten.scaled_dot_product_attention.default: attention_on_cpu,
    torch.group_norm: _group_norm_on_cpu,
    torch.ops.aten.group_norm.default: _group_norm_on_cpu,
}
"""What stands for functions, and for the operators that they are recorded as, where tensors are on a CPU."""


def _lying_as(made: torch.Tensor, there: Callable[[], torch.Tensor]) -> torch.Tensor:
    """``made``, as it lies where ``there`` makes it, under the name that a trace has for it."""
    if _C._get_tracing_state() is None:
        return there()
    value = _C._get_value_trace(made)
    result: torch.Tensor = _untraced(there)
    value.inferTypeFrom(result)
    _C._set_value_trace(result, value)
    return result


def stood_for(argument: Any, device: torch.device) -> Any:
    """``argument`` of an operation, with ``device`` in place of the meta device."""
    if isinstance(argument, torch.device):
        return device if argument == _META else argument
    if isinstance(argument, (list, tuple)) and any(isinstance(a, torch.device) for a in argument):
        return type(argument)(stood_for(a, device) for a in argument)
    return argument


def node_on(node: Node, device: torch.device) -> Node:
    """``node`` with ``device`` in place of the meta device."""
    given = (*node.args, *(a for _, a in node.kwargs))
    if not any(isinstance(a, (torch.device, list, tuple)) and stood_for(a, device) is not a for a in given):
        return node
    kwargs = tuple((k, stood_for(a, device)) for k, a in node.kwargs)
    return dataclasses.replace(node, args=tuple(stood_for(a, device) for a in node.args), kwargs=kwargs)


def run_on_meta(node: Node, device: torch.device) -> Node:
    """``node`` as it is to run on the meta device, so that it makes and saves what it does on ``device``."""
    if next(tensors_in((node.args, node.kwargs)), None) is not None:
        # A number stays what it is: torch may have made it of one of Python's, which counts for types of results.
        args, kwargs = map_tensors((node.args, node.kwargs), lambda t: t if _is_number(t) else _like(t, {}))
        node = dataclasses.replace(node, args=args, kwargs=kwargs)
    if device.type == "cpu" and node.op in _ON_CPU:
        node = dataclasses.replace(node, op=_ON_CPU[node.op])
    elif node.op is torch.ops.aten._convolution.default:
        node = dataclasses.replace(node, op=_convolution_there)
    return node
