"""What graphs are made of: nodes and values, and what one run shows of them.

A *value* is what one assignment of the traced program defines; it is referred to by its index,
written ``Ref(i)``. Node arguments are constants, ``Ref``s, or lists and tuples of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of value ``index``."""

    index: int


@dataclass(frozen=True, slots=True)
class Mode:
    """The state of PyTorch that an operation runs in: grad mode, autocast per device type, kernels of attention.

    ``autocast`` is a tuple of (device type, dtype) of the device types for which it is on. ``attention`` is what
    ``torch.nn.attention.sdpa_kernel`` sets (see ``rkgb/trace/capture.py``), empty for what it was when rkgb was
    imported.
    """

    grad: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    attention: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value comes from that no operation makes.

    ``kind`` is "input" (``key``: position among the flattened tensor inputs), "parameter" or "buffer" (``key``:
    qualified name; other attributes that hold a tensor count as buffers), or "constant" (``key``: the tensor itself).
    """

    kind: str
    key: Any


@dataclass(frozen=True, slots=True)
class Node:
    """One assignment: ``outputs = op(*args, **kwargs)``.

    ``several``: the operation returns a list or tuple, whose elements are the outputs.
    ``line``: the user's source line, "file.py:12". ``path``: the qualified name of the submodule that runs it, empty
    for the module itself. ``label``: the display name, from D on (see ``rkgb/probe/names.py``).
    """

    op: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int, ...]
    several: bool
    mode: Mode
    line: str
    path: str = ""
    label: str = field(default="", compare=False)
    _reads: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = refs(self.args)
        for _, a in self.kwargs:
            found += refs(a)
        object.__setattr__(self, "_reads", tuple(dict.fromkeys(found)))

    def reads(self) -> tuple[int, ...]:
        """Indices of the values read, in order of first use."""
        return self._reads


def refs(arg: Any) -> list[int]:
    """The values that an argument refers to."""
    if isinstance(arg, Ref):
        return [arg.index]
    if isinstance(arg, (list, tuple)):
        return [v for a in arg if isinstance(a, (Ref, list, tuple)) for v in refs(a)]
    return []


def substitute(arg: Any, put: Callable[[int], Any]) -> Any:
    """``arg`` with every ``Ref(i)`` replaced by ``put(i)``."""
    if isinstance(arg, Ref):
        return put(arg.index)
    if isinstance(arg, (list, tuple)):
        return type(arg)(substitute(a, put) for a in arg)
    return arg


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of a tensor value after one run.

    ``storage`` indexes the graph's storages; values with the same storage share memory.
    ``requires_grad`` is the tensor's own answer. ``bytes`` is the tensor's, not the storage's.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    storage: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation. ``owner``: the node that allocates it, or None for inputs, parameters, buffers, constants."""

    bytes: int
    owner: int | None
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd saves when a node runs: known storages, and those private to the node (bytes of each)."""

    storages: tuple[int, ...]
    private: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What one run of a D node showed. ``writes``: storages changed in place; ``random``: it drew random numbers;
    ``unseen``: from a state that nobody can read or put back. ``context``: what an ``autograd.Function`` keeps as
    attributes.
    """

    writes: tuple[int, ...]
    random: bool
    saved: Saved
    unseen: bool = False
    context: Saved = Saved((), ())


@dataclass(frozen=True, slots=True)
class S_node:
    """One real operation with its body: the views and in-place operations on its result; or a guard; or a view of
    another node's result that is taken much later.

    ``ops``: indices of D nodes, in the order of the program. ``reads``: values of other nodes or
    sources; ``makes``: values that other nodes read or that are outputs. ``storages``: those of
    ``makes`` that the node allocates. ``saved``: what its backward reads. ``fixed``: it runs once and
    is never run again (it changes a buffer, or needs no gradient and nothing with a gradient).
    ``name``: of the operation; ``label``: its display name, that of one of its operations.
    """

    name: str
    ops: tuple[int, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    storages: tuple[int, ...]
    saved: Saved
    requires_grad: bool
    random: bool
    fixed: bool
    label: str = ""
