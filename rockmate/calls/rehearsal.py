"""Training steps on a sample, ahead of the first one: a plan of a followed forward needs them.

All that the steps change is put back: parameters, gradients, buffers and other tensors that modules hold, generators of
random numbers, attributes, containers and counters that the model's Python reaches (``Held``).
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import functools
import queue
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from rkgb.errors import UnsupportedError
from rkgb.randomness import random_state, set_random_state, watched_devices
from rkgb.sample import Call
from rkgb.trace.code import is_installed
from rkgb.trees import tensors_in

_MOST = 5000  # objects looked into beside the modules' own
_ONE_WAY = (collections.abc.Iterator, queue.Queue, queue.SimpleQueue)
_CONTAINERS = (dict, set, list, collections.deque, bytearray, array.array)
_NAMESPACES = (SimpleNamespace, argparse.Namespace, torch.optim.Optimizer, torch.nn.Module)


class Held:
    """What the modules of ``model`` hold and are ``given``, and what their code reaches by name: lists, dicts and their
    kind, objects of classes that are in no installed package, optimizers, other modules, arrays, generators of random
    numbers. ``tensors``: those that are found, which are not put back. ``one_way``: the names of iterators and queues,
    which cannot be put back.
    """

    def __init__(self, model: torch.nn.Module, given: Iterable[Any] = ()) -> None:
        self.one_way: list[str] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self._states: list[tuple[Any, Callable[[], Any], Callable[[Any], Any]]] = []  # with what reads and sets each
        self._seen: dict[int, Any] = {}  # keeps what it has seen, so that no other object gets its number
        self._left: collections.deque[tuple[str, Any]] = collections.deque()  # what it is called, and what it is
        self._left += (("an argument", x) for x in given)
        classes: dict[type, None] = {}
        for name, m in model.named_modules():
            self._seen[id(m)] = m
            self._keep_container(vars(m))
            self._left += ((f"the attribute {name}{'.' * bool(name)}{k}", v) for k, v in vars(m).items())
            classes.update(dict.fromkeys(type(m).__mro__))
        self._left += ((f"the class {c.__qualname__}", c) for c in classes)
        most = len(self._seen) + len(self._left) + _MOST
        while self._left and len(self._seen) < most:
            self._look(*self._left.popleft())

    def changed(self) -> bool:
        return any(not _same(now(), state) for state, now, _ in self._states)

    def put_back(self) -> None:
        for state, now, put in self._states:
            if not _same(now(), state):
                put(state)

    # ------------------------------------------------------------------------- looking

    def _keep(self, now: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._states.append((now(), now, put))

    def _keep_container(self, x: Any) -> None:
        copied = next((kind for kind in (dict, set) if isinstance(x, kind)), list)
        self._keep(partial(copied, x), partial(_refill, x))

    def _keep_numbers(self, held: Mapping[str, Any], names: Iterable[str], put: Callable[[str, Any], None]) -> None:
        numbers = [k for k in names if type(held[k]) in (int, float)]

        def put_all(state: dict[str, Any]) -> None:
            for k, v in state.items():
                put(k, v)

        self._keep(lambda: {k: held.get(k) for k in numbers}, put_all)

    def _look(self, place: str, x: Any) -> None:
        if isinstance(x, (str, bytes, int, float, type(None))) or id(x) in self._seen:
            return
        if isinstance(x, torch.Tensor):
            if id(x) not in self.tensors:
                self._left += (("a hook", hooks) for hooks in (x._backward_hooks, x._post_accumulate_grad_hooks))
            self.tensors[id(x)] = x
            return
        self._seen[id(x)] = x
        if isinstance(x, _ONE_WAY) and type(x) not in weakref.ProxyTypes:  # these have an iterator's methods
            self.one_way.append(place)
        elif isinstance(x, _CONTAINERS):
            self._keep_container(x)
            if isinstance(x, dict):
                self._left += ((f"{place}[{k!r}]", v) for k, v in x.items())
            elif isinstance(x, (list, collections.deque)):
                self._left += ((place, v) for v in x)
        elif isinstance(x, tuple):
            self._left += ((place, v) for v in x)
        elif isinstance(x, np.ndarray):
            if not x.dtype.hasobject and x.flags.writeable:
                self._keep(x.copy, partial(x.__setitem__, ...))
        elif state := _generator(x):
            self._keep(*state)
        else:
            self._look_at_code(place, x)

    def _look_at_code(self, place: str, x: Any) -> None:
        if isinstance(x, functools._lru_cache_wrapper):
            if x.cache_info().currsize == 0:
                self._keep(lambda: x.cache_info().currsize, lambda _: x.cache_clear())
            self._left.append((place, x.__wrapped__))
        elif isinstance(x, FunctionType):
            if not is_installed(x.__code__.co_filename) and not _foreign(x.__module__):
                self._look_at_function(x)
        elif isinstance(x, (MethodType, staticmethod, classmethod)):
            self._left += ((place, x.__func__), (place, getattr(x, "__self__", None)))
        elif isinstance(x, property):
            self._left += ((place, x.fget), (place, x.fset))
        elif type(x) in weakref.ProxyTypes:
            self._left.append((place, x.__repr__.__self__))
        elif isinstance(x, partial):
            self._left += ((place, v) for v in (x.func, *x.args, *x.keywords.values()))
        elif isinstance(x, type):
            if not _foreign(x.__module__):
                self._keep_numbers(vars(x), vars(x), partial(setattr, x))
                self._left += ((f"{place}.{k}", v) for k, v in vars(x).items() if not isinstance(v, _ONE_WAY))
        elif hasattr(x, "__dict__") and (_is_looked_into(x) or not _foreign(type(x).__module__)):
            self._keep_container(vars(x))
            self._left += ((f"{place}.{k}", v) for k, v in vars(x).items())
            self._left.append((f"the class {type(x).__qualname__}", type(x)))

    def _look_at_function(self, x: FunctionType) -> None:
        self._keep_container(vars(x))
        variables, names = x.__globals__, _names(x.__code__) & x.__globals__.keys()
        self._left += ((f"the variable {k}", variables[k]) for k in sorted(names))
        self._keep_numbers(variables, names, variables.__setitem__)
        for k, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            if cell != CellType():  # it holds something
                self._keep(partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents"))
                self._left.append((f"the variable {k}", cell.cell_contents))
        self._left += ((f"a default of {x.__qualname__}", v) for v in x.__defaults__ or ())


def _is_looked_into(x: Any) -> bool:
    """Whether ``x``, of a class of others', holds what the user gives it; this project's modules hold plans."""
    return isinstance(x, _NAMESPACES) and type(x).__module__.partition(".")[0] not in ("rkgb", "rockmate")


def _generator(x: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """How to read and set the state of a generator of random numbers; None if ``x`` is none."""
    if isinstance(x, torch.Generator):
        return lambda: x.get_state().numpy().copy(), lambda state: x.set_state(torch.from_numpy(state))
    if isinstance(x, random.Random) and not isinstance(x, random.SystemRandom):
        return x.getstate, x.setstate
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(x, numpy.RandomState):
        return partial(x.get_state, legacy=False), x.set_state
    if numpy is not None and isinstance(x, (numpy.Generator, numpy.BitGenerator)):
        bits = x if isinstance(x, numpy.BitGenerator) else x.bit_generator
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None


def _refill(x: Any, state: Any) -> None:
    if isinstance(x, array.array):
        del x[:]
    else:
        x.clear()
    (x.update if isinstance(x, (dict, set)) else x.extend)(state)


def _same(a: Any, b: Any) -> bool:
    """The same objects, in the same places; states of generators by value."""
    if a is b:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return [*a] == [*b] and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    return type(a) is type(b) and isinstance(a, (int, float, str, bytes, set)) and bool(a == b)


def _names(code: CodeType) -> set[str]:
    """The names in a function, and in those that it makes."""
    return {*code.co_names}.union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def _foreign(module: str | None) -> bool:
    """Of Python itself, torch, NumPy, this project or an installed package; what is made by ``exec`` names none."""
    if not isinstance(module, str):
        return False
    if module.partition(".")[0] in _FOREIGN:
        return True
    return is_installed(str(getattr(sys.modules.get(module), "__file__", "")))


_FOREIGN = frozenset({"torch", "numpy", "rkgb", "rockmate", "solvers"}) | sys.stdlib_module_names - {"__main__"}


MOST_STEPS = 5
"""Steps after which a plan is there, or none comes."""

USUAL_ROOM = 3
"""Times the bytes of the outputs that a loss has as room before a step has shown what it takes."""


def rehearse(step: Callable[[], Any], planned: Callable[[], bool], loss_memory: int | None) -> None:
    """Train until there is a plan. ``step`` is the forward; ``loss_memory``: bytes that the loss allocates.

    Outputs whose backward raises are none that training reads, and are left out.
    """
    read: list[int] | None = None  # the places of those that are read, if not all are
    for _ in range(MOST_STEPS):
        many, error = _train(step, read, loss_memory)
        if error is not None:
            read = [k for k in range(many) if _train(step, [k], 0)[1] is None] if read is None else []
            if not read:
                raise error
        elif not many or planned():
            return


def _train(step: Callable[[], Any], read: list[int] | None, loss_memory: int | None) -> tuple[int, RuntimeError | None]:
    """One step, from all outputs with gradients, or from those at the places ``read`` among them. How many it has, and
    what its backward raises.
    """
    leaves = ([x, getattr(x, "__dict__", None)] for x in pytree.tree_leaves(step()))  # data classes are leaves
    roots = [t for t in dict.fromkeys(tensors_in([*leaves])) if t.requires_grad]
    try:
        if roots:  # which loops hold meanwhile
            _loss(roots if read is None else [roots[k] for k in read], loss_memory).backward()
    except RuntimeError as error:
        return len(roots), error.with_traceback(None)  # whose frames hold the graph
    return len(roots), None


def _loss(roots: list[torch.Tensor], loss_memory: int | None) -> torch.Tensor:
    """A number with gradients for all outputs; one among these is the loss of the outputs that it is computed from."""
    numbers = [t for t in roots if t.dim() == 0]
    below = _computed_from(numbers)
    read = [t for t in roots if t.dim() == 0 or (t.grad_fn, t.output_nr) not in below]
    if len(read) == len(numbers) < len(roots):
        return torch.stack([t.real.to(torch.float64) if t.is_complex() else t.double() for t in numbers]).sum()
    size = sum(t.numel() * max(4, t.element_size()) for t in read)
    room = USUAL_ROOM * size if loss_memory is None else loss_memory
    loss: torch.Tensor = _Loss.apply(room, size if loss_memory is None else 0, *read)
    return loss


def _computed_from(tensors: list[torch.Tensor]) -> set[tuple[Any, ...]]:
    """What ``tensors`` are computed from: results of autograd's nodes, each as a node and a number."""
    found: set[tuple[Any, ...]] = set()
    left: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
    while left:
        new = {edge for edge in left.pop().next_functions if edge[0] is not None} - found
        found |= new
        left += (node for node, _ in new)
    return found


class _Loss(torch.autograd.Function):
    """Reads all outputs, takes room as losses do, and has gradients as large as the outputs."""

    @staticmethod
    def forward(ctx: Any, room: int, kept: int, *roots: torch.Tensor) -> torch.Tensor:
        device = roots[0].device
        torch.empty(room, dtype=torch.uint8, device=device)
        ctx.kept = torch.empty(kept, dtype=torch.uint8, device=device)
        ctx.forms = [(t.shape, t.dtype, t.device) for t in roots]
        return torch.zeros((), device=device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        made = (torch.full(shape, 1e-3, dtype=dtype, device=device) for shape, dtype, device in ctx.forms)
        return (None, None, *made)


@contextlib.contextmanager
def put_back(model: torch.nn.Module, call: Call) -> Iterator[None]:
    """Train ``model`` on ``call`` within: afterwards all is as it was. Raises ``UnsupportedError`` for iterators and
    queues, which cannot be put back.
    """
    held = Held(model, [*call.args, *call.kwargs.values()])
    if held.one_way:
        raise UnsupportedError(
            f"{held.one_way[0]} is an iterator or a queue, and what forward takes from it could not be put back after "
            "the steps that a plan needs ahead of training. Take it outside of forward, or attach the model without "
            "a sample"
        )
    tensors = _tensors_of(model, [*call.tensors, *held.tensors.values()])
    values = [(t, t._version, t.detach(), t.detach().to("cpu", copy=True)) for t in tensors if not t.is_meta]
    gradients = [(t, t.grad) for t in tensors if t.is_leaf]
    for t, gradient in gradients:
        if gradient is not None:
            t.grad = gradient.detach().clone()
    devices = watched_devices(tensors)
    states = [(device, random_state(device)) for device in devices]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.enable_grad():
            yield
    finally:
        held.put_back()
        with torch.no_grad():
            for t, version, memory, value in values:
                if t.shape != memory.shape or t.data_ptr() != memory.data_ptr():
                    t.data = memory  # it got other memory, or another size
                if t._version != version or not torch.equal(t.detach().cpu(), value):
                    t.data.copy_(value)
        for t, gradient in gradients:
            t.grad = gradient
        for device, state in states:
            set_random_state(device, state)
        random.setstate(python)
        np.random.set_state(numpy)


def _tensors_of(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The ``inputs``, parameters, buffers, and other tensors that modules hold, each once."""
    found: dict[int, torch.Tensor] = {}
    own = [*model.parameters(), *model.buffers()]  # those of scripted modules are among no attributes
    for held in (inputs, own, *(v for m in model.modules() for v in vars(m).values())):
        values = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else [held]
        found.update((id(t), t) for t in values if isinstance(t, torch.Tensor))
    return [t for t in found.values() if t.layout == torch.strided and not t.is_nested]
