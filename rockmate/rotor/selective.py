"""Keeps the results of some operations of a stage, so that a recompute runs only the others.

An operation is called by its function and by how many calls of that function came before it in the run (``OpCall``).
A result can be kept if it is new memory and not read before an in-place operation changes it. Random results are kept
all or none, since a draw that is left out would change the later ones.
This is selective activation checkpointing as in ``torch.utils.checkpoint``, but the dynamic program decides which
results are kept, from their times and bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from rkgb.cost.memory import storage_bytes
from rkgb.storages import storage_key
from rkgb.trees import tensor_leaves

OpCall = tuple[Any, int]
"""An operation of a run: its function, and how many calls of this function came before."""

_CASTS = frozenset({torch.ops.aten._to_copy.default})
"""Autocast makes these in the first of several runs, and caches them for the next. Their results are not kept."""


@dataclass
class Kept:
    """``results`` of operations, and the in-place operations on them (``changes``)."""

    results: dict[OpCall, Any] = field(default_factory=dict)
    changes: set[OpCall] = field(default_factory=set)


def _is_in_place(func: Any) -> bool:
    """Whether ``func`` writes its first argument, a tensor, and returns it."""
    schema = func._schema
    return bool(schema.is_mutable) and schema.name.endswith("_") and str(schema.arguments[0].type) == "Tensor"


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


class _Counting(TorchDispatchMode):
    """Counts the calls of ``functions``. Each call of any operation comes by here, so little is done for the others."""

    def __init__(self, functions: Iterable[Any]) -> None:
        super().__init__()
        self.calls = {id(func): 0 for func in functions}

    def next_call(self, func: Any) -> OpCall | None:
        """What this call of ``func`` is named; None if calls of it are not counted."""
        number = self.calls.get(id(func))
        if number is None:
            return None
        self.calls[id(func)] = number + 1
        return func, number


class Keep(_Counting):
    """Runs a stage and puts the results of ``operations`` into ``kept``."""

    others: ClassVar[set[int]] = set()
    """The ids of functions that are known to be no in-place operations. torch never releases a function."""

    def __init__(self, operations: frozenset[OpCall], kept: Kept) -> None:
        super().__init__(func for func, _ in operations)
        self.operations, self.kept = operations, kept
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        call = self.next_call(func)
        if call is None and id(func) not in self.others:
            if _is_in_place(func):
                self.calls[id(func)] = 1
                call = func, 0
            else:
                self.others.add(id(func))
        if call is None:
            return out
        if call in self.operations:
            self.kept.results[call] = _detached(out)
            self.storages.update(map(storage_key, tensor_leaves(out)))
        elif _is_in_place(func) and storage_key(args[0]) in self.storages:
            self.kept.changes.add(call)
        return out


class Replay(_Counting):
    """Runs a stage with the kept results in place of the operations that computed them.

    A kept result that was changed in place has its final value, so these changes are skipped.
    """

    def __init__(self, kept: Kept) -> None:
        super().__init__(func for func, _ in (*kept.results, *kept.changes))
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call := self.next_call(func):
            if call in self.kept.results:
                return _detached(self.kept.results.pop(call))
            if call in self.kept.changes:
                return args[0]
        return func(*args, **(kwargs or {}))


@dataclass
class Result:
    """What one operation of a run made.

    ``bytes_of``: storage → bytes. ``spans``: marks of the device's clock before and after the operation, and those that
    changed the result in place. ``flops``: its counted floating-point operations. ``keepable``: whether a recompute may
    use the result in place of the operation. ``random``: whether numbers were drawn for it.
    """

    call: OpCall
    bytes_of: dict[int, int]
    spans: list[tuple[Any, Any]]
    flops: int
    random: bool
    keepable: bool = True


@dataclass
class Survey(TorchDispatchMode):
    """Lists what the operations of a run make in new memory. ``mark`` marks a moment of the device.

    A result that is read before an in-place change is not keepable: a recompute would read the final value. Nor is one
    that something else writes. ``draws``: whether numbers were drawn for anything that is not among ``made``.
    """

    mark: Callable[[], Any]
    made: list[Result] = field(default_factory=list)
    draws: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()
        self.alive: list[torch.Tensor] = []  # so that no other tensor gets the same address
        self.maker: dict[int, Result] = {}
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = self.mark()
        out = func(*args, **(kwargs or {}))
        span = start, self.mark()
        call = func, self.calls[func]
        self.calls[func] += 1
        read = {storage_key(t) for t in tensor_leaves((args, kwargs))}
        if func._schema.is_mutable:
            self._changed(func, args, read, span)
            return out
        new = {storage_key(t): storage_bytes(t) for t in tensor_leaves(out)}
        self.read |= read - new.keys()
        if read and _is_tensors(out) and not new.keys() & read and func not in _CASTS:
            counts = flop_registry.get(func._overloadpacket)
            flops = int(counts(*args, **(kwargs or {}), out_val=out)) if counts else 0
            result = Result(call, new, [span], flops, _draws(func))
            self.made.append(result)
            self.maker |= dict.fromkeys(new, result)
            self.alive += [t.detach() for t in tensor_leaves(out)]
        else:
            self.draws = self.draws or _draws(func)
        return out

    def _changed(self, func: Any, args: Any, read: set[int], span: tuple[Any, Any]) -> None:
        """``func`` has written some of the memory ``read``."""
        target = storage_key(args[0]) if _is_in_place(func) else None
        if target in self.maker:
            changed = self.maker[target]
            changed.spans.append(span)
            changed.random = changed.random or _draws(func)
        else:
            self.draws = self.draws or _draws(func)
        for storage in (read if target is None else {target} & self.read) & self.maker.keys():
            self.maker[storage].keepable = False
        self.read |= read - {target}


def _is_tensors(out: Any) -> bool:
    return all(isinstance(t, torch.Tensor) for t in (out if isinstance(out, tuple) else (out,)))


def _detached(out: Any) -> Any:
    return tuple(t.detach() for t in out) if isinstance(out, tuple) else out.detach()


def units(
    made: list[Result], times: list[int], draws: bool, ends: Collection[int]
) -> list[tuple[frozenset[OpCall], int, int]]:
    """Operations whose results are kept together, their bytes and time: each alone, but all random ones in one.

    ``times``: of each of ``made``. ``draws``: whether numbers are drawn for anything else. ``ends``: the storages of
    input and output, which are not kept.
    """
    found: list[tuple[frozenset[OpCall], int, int]] = []
    random: list[tuple[OpCall, int, int]] = []
    able = not draws
    for r, time in zip(made, times, strict=True):
        keepable = r.keepable and not any(storage in ends for storage in r.bytes_of)
        size = sum(r.bytes_of.values())
        if r.random:
            able = able and keepable
            random.append((r.call, size, time))
        elif keepable:
            found.append((frozenset([r.call]), size, time))
    if random and able:
        calls, sizes, taken = zip(*random, strict=True)
        found.append((frozenset(calls), sum(sizes), sum(taken)))
    return found


def nested_choices(able: list[tuple[frozenset[OpCall], int, int]], most: int, limit: int) -> list[frozenset[OpCall]]:
    """At most ``limit`` sets of operations whose results may be kept, largest first; each contains the next.

    ``able``: operations that are kept together, their bytes and their cost (``units``). Those of most cost per byte are
    in all sets. The sets hold up to ``most`` bytes, in equal steps.
    """
    ranked = sorted((u for u in able if u[2] > 0), key=lambda u: -u[2] / max(1, u[1]))
    held = list(accumulate(size for _, size, _ in ranked))
    lengths = sorted({bisect_right(held, most * k // limit) for k in range(1, limit + 1)} - {0}, reverse=True)
    return [frozenset().union(*(calls for calls, _, _ in ranked[:length])) for length in lengths]
