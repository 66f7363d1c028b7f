"""What a model's forward may change that is no tensor: it is as it was, or known to differ, when the model was traced.

A trace of the whole model runs forward several times, and a plan runs none of its Python. So what forward does to
Python's objects must be undone where no plan comes of it, and must not be left out where one does.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import functools
import gc
import queue
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from rkgb.errors import UnsupportedError
from rkgb.trace.code import is_installed

_MOST = 5000  # objects looked into
_ONE_WAY = (collections.abc.Iterator, queue.Queue, queue.SimpleQueue)
_SEQUENCES = (list, collections.deque, bytearray, array.array)
_NAMESPACES = (SimpleNamespace, argparse.Namespace)


@contextlib.contextmanager
def undone_if_it_fails(model: torch.nn.Module) -> Iterator[None]:
    """Trace ``model``. Where that fails, what its modules hold, and what their code reaches by name, is what it was:
    lists, dicts and their kind, objects of classes that are in no installed package, arrays, generators of random
    numbers. Raises ``UnsupportedError``, before anything runs, for iterators and queues, which cannot be put back, and
    where forward has drawn from a generator or counted in an object, which a plan would not do.
    """
    held = _Held(model)
    if held.one_way:
        raise UnsupportedError(
            f"{held.one_way[0]} is an iterator or a queue, and what forward takes from it could not be put back after "
            "a trace. Take it outside of forward, and give the model what was taken"
        )
    try:
        yield
        if what := held.moved():
            raise UnsupportedError(f"forward changes {what} in each call, which a plan would not do")
    except BaseException:
        held.put_back()
        raise


@dataclass(frozen=True)
class _Part:
    """An object at ``place``, as it was: ``put`` puts ``state`` back, which ``now`` reads. ``moves``: whether another
    state is a change that a plan would not do again.
    """

    place: str
    state: Any
    now: Callable[[], Any]
    put: Callable[[Any], Any]
    moves: Callable[[Any, Any], bool]


class _Held:
    """The parts that were found, nearest first."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parts: list[_Part] = []
        self.one_way: list[str] = []
        self._seen: dict[int, Any] = {}  # keeps what it has seen, so that no other object gets its number
        self._left: collections.deque[tuple[str, Any]] = collections.deque()  # where, and what
        classes: dict[type, None] = {}
        for name, m in model.named_modules():
            self._seen[id(m)] = m
            own = vars(m)
            self._keep_dict(f"the attributes of {name or 'the model'}", own, counts=False)
            self._left += ((f"the attribute {name}{'.' * bool(name)}{k}", v) for k, v in own.items())
            classes.update(dict.fromkeys(type(m).__mro__))
        self._left += ((f"the class {c.__qualname__}", c) for c in classes)
        own_attributes = len(self._left)
        while self._left and len(self._seen) < _MOST:
            own_attributes -= 1
            self._look(*self._left.popleft(), deep=own_attributes < 0)

    def moved(self) -> str:
        """The first part that a plan would leave as it is, though forward changes it; empty if there is none."""
        return next((p.place for p in self.parts if p.moves(p.state, p.now())), "")

    def put_back(self) -> None:
        """Everything is as it was."""
        for part in self.parts:
            if not _same(part.now(), part.state):
                part.put(part.state)

    # ------------------------------------------------------------------------- looking

    def _look(self, place: str, x: Any, deep: bool) -> None:
        if isinstance(x, (torch.Tensor, torch.nn.Module, str, bytes, int, float, type(None))) or id(x) in self._seen:
            return
        self._seen[id(x)] = x
        if isinstance(x, _ONE_WAY):
            self.one_way.append(place)
        elif isinstance(x, dict):
            self._keep_dict(place, x, counts=False)
            self._left += ((f"{place}[{k!r}]", v) for k, v in x.items())
        elif isinstance(x, _SEQUENCES):
            moves = _grown if deep else _never
            self.parts.append(_Part(place, list(x), lambda: list(x), lambda state: _refill(x, state), moves))
            self._left += ((place, v) for v in x) if isinstance(x, (list, collections.deque)) else ()
        elif isinstance(x, set):
            self.parts.append(_Part(place, set(x), lambda: set(x), lambda state: _refilled(x, state), _never))
        elif isinstance(x, tuple):
            self._left += ((place, v) for v in x)
        elif isinstance(x, np.ndarray):
            if not x.dtype.hasobject and x.flags.writeable:
                self.parts.append(_Part(place, x.copy(), lambda: x, lambda state: x.__setitem__(..., state), _differ))
        elif state := _generator(x):
            self.parts.append(_Part(place, state[0](), *state, _differ))
        else:
            self._look_at_code(place, x)

    def _look_at_code(self, place: str, x: Any) -> None:
        if isinstance(x, functools._lru_cache_wrapper):
            if x.cache_info().currsize == 0:
                moves = _differ if draws(getattr(x.__wrapped__, "__code__", None)) else _never
                self.parts.append(_Part(place, 0, lambda: x.cache_info().currsize, lambda _: x.cache_clear(), moves))
            self._left.append((place, x.__wrapped__))
        elif isinstance(x, FunctionType):
            if not is_installed(x.__code__.co_filename) and not _foreign(x.__module__):
                self._look_at_function(x)
        elif isinstance(x, (MethodType, staticmethod, classmethod)):
            self._left += ((place, v) for v in (x.__func__, getattr(x, "__self__", None)))
        elif isinstance(x, property):
            self._left.append((place, x.fget))
        elif isinstance(x, functools.partial):
            self._left += ((place, v) for v in (x.func, *x.args, *x.keywords.values()))
        elif isinstance(x, type):
            if not _foreign(x.__module__):
                self._keep_class(place, x)
                self._left += ((f"{place}.{k}", v) for k, v in vars(x).items() if not isinstance(v, _ONE_WAY))
        elif hasattr(x, "__dict__") and (isinstance(x, _NAMESPACES) or not _foreign(type(x).__module__)):
            self._keep_dict(place, vars(x), counts=True)
            self._left += ((f"{place}.{k}", v) for k, v in vars(x).items())
            self._left.append((f"the class {type(x).__qualname__}", type(x)))

    def _look_at_function(self, x: FunctionType) -> None:
        variables, names = x.__globals__, _names(x.__code__) & x.__globals__.keys()
        self._left += ((f"the variable {k}", variables[k]) for k in sorted(names))
        numbers = {k: variables[k] for k in names if type(variables[k]) in (int, float)}
        where = f"a global variable that {x.__qualname__} reads"
        now = lambda: {k: variables.get(k) for k in numbers}  # noqa: E731
        self.parts.append(_Part(where, numbers, now, variables.update, _counted))
        for k, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            if cell != CellType():  # it holds something
                self._keep_cell(f"the variable {k}", cell)
        self._left += ((f"a default of {x.__qualname__}", v) for v in x.__defaults__ or ())

    def _keep_cell(self, place: str, cell: CellType) -> None:
        put = functools.partial(setattr, cell, "cell_contents")
        moves = lambda before, now: _counted({0: before}, {0: now})  # noqa: E731
        self.parts.append(_Part(place, cell.cell_contents, lambda: cell.cell_contents, put, moves))
        self._left.append((place, cell.cell_contents))

    def _keep_dict(self, place: str, x: dict[Any, Any], *, counts: bool) -> None:
        moves = _counted if counts else _never
        self.parts.append(_Part(place, dict(x), lambda: dict(x), lambda state: _refilled(x, state), moves))

    def _keep_class(self, place: str, x: type) -> None:
        numbers = {k: v for k, v in vars(x).items() if type(v) in (int, float)}

        def put(state: dict[str, Any]) -> None:
            for k, v in state.items():
                setattr(x, k, v)

        self.parts.append(_Part(place, numbers, lambda: {k: vars(x).get(k) for k in numbers}, put, _counted))


def _generator(x: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """How to read and set the state of a generator of random numbers; None if ``x`` is none."""
    if isinstance(x, random.Random) and not isinstance(x, random.SystemRandom):
        return x.getstate, x.setstate
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(x, numpy.RandomState):
        return lambda: x.get_state(legacy=False), x.set_state
    if numpy is not None and isinstance(x, (numpy.Generator, numpy.BitGenerator)):
        bits = x if isinstance(x, numpy.BitGenerator) else x.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


def _refill(x: Any, state: list[Any]) -> None:
    if isinstance(x, collections.deque):
        x.clear()
    else:
        del x[:]
    x.extend(state)


def _refilled(x: Any, state: Any) -> None:
    x.clear()
    x.update(state)


def _never(before: Any, now: Any) -> bool:
    return False


def _differ(before: Any, now: Any) -> bool:
    return not _same(before, now)


def _grown(before: list[Any], now: list[Any]) -> bool:
    return len(before) != len(now)


def _counted(before: dict[Any, Any], now: dict[Any, Any]) -> bool:
    """Whether a number is another one now."""
    return any(type(v) in (int, float) and type(now.get(k)) in (int, float) and now[k] != v for k, v in before.items())


def _same(a: Any, b: Any) -> bool:
    """The same objects, in the same places; states of generators by value."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [*a] == [*b] and all(a[k] is b[k] or _same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(x is y or _same(x, y) for x, y in zip(a, b, strict=True))
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


def check_effects() -> None:
    """While TorchDynamo calls its backend: raise ``UnsupportedError`` for what it would not do as Python does.

    The numbers that a ``random.Random`` gives become constants; a deque that was there before loses its ``maxlen``; a
    function with a cache is run again at each call.
    """
    tx = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
    effects, codes = tx.output.side_effects, list(torch._guards.TracingContext.get().traced_code)
    for x in effects.keepalive:
        if isinstance(x, random.Random):
            raise UnsupportedError("forward draws from a random.Random, whose numbers would be those of the capture")
        if isinstance(x, collections.deque) and x.maxlen is not None:
            modified = effects.is_modified(effects.id_to_variable[id(x)])
            if modified or any("maxlen" in code.co_names for code in codes):
                raise UnsupportedError(
                    f"forward changes a deque with maxlen={x.maxlen}, which TorchDynamo takes for one without: use a "
                    "list, and take from its front what is too old"
                )
    drawing = {c for c in codes if not is_installed(c.co_filename) and draws(c)}
    if drawing and any(_code_within(f) in drawing for f in gc.get_objects() if type(f) is functools._lru_cache_wrapper):
        raise UnsupportedError("a function with a cache (functools.lru_cache) draws random numbers")


def draws(code: CodeType | None) -> bool:
    """Whether a function may draw random numbers, by the names in it."""
    return code is not None and any(_DRAWS.search(name) for name in code.co_names)


_DRAWS = re.compile("rand|normal|uniform|bernoulli|multinomial|dropout|sample")


def _code_within(cached: Any) -> CodeType | None:
    return getattr(cached.__wrapped__, "__code__", None)
