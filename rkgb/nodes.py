"""What graphs are made of: nodes and values, and what one run shows of them.

A *value* is what one assignment of the traced program defines; it is referred to by its index,
written ``Ref(i)``. Node arguments are constants, ``Ref``s, or lists and tuples of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of value ``index``."""

    index: int


@dataclass(frozen=True, slots=True)
class Mode:
    """The state of PyTorch in which an operation runs: grad mode, autocast, and which attention kernels are on.

    ``autocast``: (device type, dtype) for each device type that has autocast on. ``attention``: what
    ``torch.nn.attention.sdpa_kernel`` sets (see ``rkgb/trace/attention.py``); empty if it is as at the import of rkgb.
    """

    grad: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    attention: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a value that no operation makes.

    ``kind`` is "input", "parameter", "buffer" or "constant". ``key`` is the position among the flattened tensor inputs
    for an input, the qualified name for a parameter or buffer, and the tensor for a constant. Other attributes that
    hold a tensor count as buffers. In a B of any size there is "number", a whole number among the inputs, by its
    position among these.
    """

    kind: str
    key: Any


@dataclass(frozen=True, slots=True)
class Node:
    """One assignment: ``outputs = op(*args, **kwargs)``.

    ``several``: the operation returns a list or tuple, whose elements are the outputs. ``line``: the user's source
    line, "file.py:12". ``path``: the qualified name of the submodule that runs the operation; empty for the module
    itself. ``label``: the display name; B has none (see ``rkgb/probe/names.py``).
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
        object.__setattr__(self, "_reads", tuple(dict.fromkeys(refs((self.args, self.kwargs)))))

    def reads(self) -> tuple[int, ...]:
        """Indices of the values read, in order of first use."""
        return self._reads

    def with_values(self, replacement: Callable[[int], Any], like: Node | None = None) -> Node:
        """The same operation with ``replacement(i)`` in place of every ``Ref(i)`` among its arguments, and the results
        and label of ``like``, if it is given.
        """
        args, kwargs = substitute((self.args, self.kwargs), replacement)
        like = like or self  # ``dataclasses.replace`` takes several times as long
        where = like.outputs, self.several, self.mode, self.line, self.path, like.label
        return Node(self.op, self.name, args, kwargs, *where)


def refs(arg: Any) -> list[int]:
    """The values that an argument refers to."""
    if isinstance(arg, Ref):
        return [arg.index]
    if isinstance(arg, (list, tuple)):
        return [v for a in arg if isinstance(a, (Ref, list, tuple)) for v in refs(a)]
    return []


def substitute(arg: Any, replacement: Callable[[int], Any]) -> Any:
    """``arg`` with every ``Ref(i)`` replaced by ``replacement(i)``."""
    if isinstance(arg, Ref):
        return replacement(arg.index)
    if isinstance(arg, (list, tuple)):
        return type(arg)(substitute(a, replacement) for a in arg)
    return arg


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor, as one run showed it.

    ``storage`` indexes the graph's storages: values with the same storage share memory. ``bytes`` is the size of the
    tensor; its storage may be larger. ``requires_grad`` is the tensor's attribute.
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
    """One allocation of ``bytes`` bytes.

    ``owner``: the D node that allocates it; None for the memory of an input, parameter, buffer or constant, whose value
    is ``source``.
    """

    bytes: int
    owner: int | None
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """The memory of saved tensors: storages of the graph, and the bytes of each allocation that only the node knows."""

    storages: tuple[int, ...]
    private: tuple[int, ...]


def kept_bytes(every: Iterable[Saved], storages: Sequence[Storage]) -> int:
    """Bytes of ``every`` saved tensor, each memory once, without that of inputs, parameters, buffers and constants."""
    private = 0
    known: set[int] = set()
    for saved in every:
        private += sum(saved.private)
        known.update(x for x in saved.storages if storages[x].owner is not None)
    return private + sum(storages[x].bytes for x in known)


@dataclass(frozen=True, slots=True)
class Facts:
    """What one run of a D node showed.

    ``writes``: the storages that it changed in place. ``drawn``: what it drew random numbers from, generators and
    devices (their default ones). ``unseen``: it drew from a state that can neither be read nor restored. ``saved``: its
    saved tensors. ``context``: what an ``autograd.Function`` keeps as attributes of its ``ctx``. ``spoilt``: a later
    node changes what it has saved in place, so that its backward raises an error.
    """

    writes: tuple[int, ...]
    drawn: tuple[torch.device | torch.Generator, ...]
    saved: Saved
    unseen: bool = False
    context: Saved = Saved((), ())
    spoilt: bool = False

    @property
    def random(self) -> bool:
        """Whether it drew random numbers."""
        return bool(self.drawn) or self.unseen


@dataclass(frozen=True, slots=True)
class S_node:
    """One operation that allocates, with the views of its result and the in-place operations on it.

    Two other kinds have a node of their own: a guard, and a view that is taken much later than the result was made.

    ``name``: of the operation. ``label``: its display name, unique in the graph. ``ops``: indices of D nodes, in the
    order of the program. ``reads``: values of sources and of other nodes. ``makes``: values that other nodes or the
    caller read. ``storages``: the memory of ``makes`` that this node allocates. ``saved``: the tensors that its
    backward reads. ``fixed``: the node runs once and is never recomputed (it changes a buffer, or neither needs
    gradients nor reads what does).
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
