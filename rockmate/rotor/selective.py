"""Keeps the results of a stage's expensive operations, so that a recompute runs only the cheap ones.

Expensive operations are those that PyTorch's flop counter counts: matrix products, convolutions, attention. They are
numbered in the order in which a run calls them. This is selective activation checkpointing as in
``torch.utils.checkpoint``, but the dynamic program decides which results are kept, from their times and bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from rkgb.cost.memory import storage_bytes
from rkgb.storages import storage_key
from rkgb.trees import tensor_leaves


@dataclass
class Kept:
    """``results``: of expensive operations, by number. ``changes``: numbers of the in-place operations on them."""

    results: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    changes: set[int] = field(default_factory=set)


def _is_expensive(func: Any) -> bool:
    random = torch.Tag.nondeterministic_seeded in func.tags  # must run again, for later draws to be the same
    return func._overloadpacket in flop_registry and not random


def _is_in_place(func: Any) -> bool:
    return bool(func._schema.is_mutable) and str(func._overloadpacket).endswith("_")


class Keep(TorchDispatchMode):
    """Runs a stage and puts the results of the expensive operations ``numbers`` into ``kept``."""

    def __init__(self, numbers: frozenset[int], kept: Kept) -> None:
        super().__init__()
        self.numbers, self.kept = numbers, kept
        self.expensive = self.in_place = 0
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_expensive(func):
            if self.expensive in self.numbers:
                results = tuple(t.detach() for t in tensor_leaves(out))
                self.kept.results[self.expensive] = results
                self.storages |= {storage_key(t) for t in results}
            self.expensive += 1
        elif _is_in_place(func):
            if storage_key(args[0]) in self.storages:
                self.kept.changes.add(self.in_place)
            self.in_place += 1
        return out


class Replay(TorchDispatchMode):
    """Runs a stage with the kept results in place of the operations that computed them.

    A kept result that was changed in place has its final value, so these changes are skipped.
    """

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept
        self.expensive = self.in_place = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_expensive(func):
            number = self.expensive
            self.expensive += 1
            if number in self.kept.results:
                results = tuple(t.detach() for t in self.kept.results.pop(number))
                return results[0] if len(results) == 1 else results
        elif _is_in_place(func):
            number = self.in_place
            self.in_place += 1
            if number in self.kept.changes:
                return args[0]
        return func(*args, **(kwargs or {}))


@dataclass
class Expensive:
    """One expensive operation in a run.

    ``results``: storage → bytes of its results. ``span``: marks of the device's clock before and after it. ``flops``:
    its counted floating-point operations. ``keepable``: whether a recompute may use its kept results.
    """

    results: dict[int, int]
    span: tuple[Any, Any]
    flops: int
    keepable: bool = True


@dataclass
class Survey(TorchDispatchMode):
    """Lists the expensive operations of a run. ``mark`` marks a moment of the device.

    A result that is read before an in-place change is not keepable: a recompute would read the final value.
    """

    mark: Callable[[], Any]
    operations: list[Expensive] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.alive: list[torch.Tensor] = []  # so that no other tensor gets the same address
        self.owner: dict[int, Expensive] = {}
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = self.mark()
        out = func(*args, **(kwargs or {}))
        span = start, self.mark()
        read = {storage_key(t) for t in tensor_leaves((args, kwargs))}
        made = {storage_key(t): storage_bytes(t) for t in tensor_leaves(out)}
        if _is_in_place(func):
            target = storage_key(args[0])
            if target in self.owner and target in self.read:
                self.owner[target].keepable = False
            self.read |= read - {target}
        else:
            self.read |= read - made.keys()
        if _is_expensive(func):
            flops = int(flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out))
            operation = Expensive(made, span, flops, keepable=not (made.keys() & read))
            self.operations.append(operation)
            self.owner |= dict.fromkeys(made, operation)
            self.alive += [t.detach() for t in tensor_leaves(out)]
        return out


def nested_choices(operations: list[tuple[int, int, int]], limit: int) -> list[frozenset[int]]:
    """At most ``limit`` sets of operations whose results may be kept, largest first; each contains the next.

    ``operations``: (number, bytes, cost) of each. The operations of most cost per byte are in all sets.
    """
    ranked = sorted(operations, key=lambda o: (-o[2] / max(1, o[1]), o[0]))
    lengths = sorted({round(len(ranked) * k / limit) for k in range(1, limit + 1)} - {0}, reverse=True)
    return [frozenset(number for number, _, _ in ranked[:length]) for length in lengths]
