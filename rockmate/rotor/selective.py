"""Keeps the results of some operations of a stage, so that a recompute runs only the others.

An operation is known by its *place*: a hash of the functions that the run has called up to it. So a run that takes
another path than the one that was surveyed has other places from there on. Then nothing is kept, or what was kept is
not used, and the recompute runs everything.

A result can be kept if it is new memory and not read before an in-place operation changes it. Random results are kept
all or none, since a draw that is left out would change the later ones. This is selective activation checkpointing as in
``torch.utils.checkpoint``, but the dynamic program decides which results are kept, from their times and bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from rkgb.cost.memory import storage_bytes
from rkgb.randomness import Drawn, random_state
from rkgb.storages import storage_key
from rkgb.trace.operators import written_arguments
from rkgb.trees import tensor_leaves

_UNCOUNTED: dict[int, bool] = {id(torch.ops.aten._to_copy.default): True}
"""By the id of a function, whether it has no place. torch never releases a function.

Autocast casts a weight in the first of several runs, and caches it for the next. Hooks of modules and of saved tensors
take views.
"""


def _is_uncounted(func: Any) -> bool:
    known = _UNCOUNTED.get(id(func))
    if known is None:
        returns = () if isinstance(func, HigherOrderOperator) else func._schema.returns
        known = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        _UNCOUNTED[id(func)] = known
    return known


@dataclass(frozen=True, slots=True)
class Choice:
    """What one way keeps. It is false where nothing is.

    ``places``: of the operations whose results are kept. ``changes``: places of the in-place operations on these
    results, each with the place of what it changes. ``end``: the last place of the run that was surveyed.
    """

    places: frozenset[int] = frozenset()
    changes: tuple[tuple[int, int], ...] = ()
    end: int = 0

    def __bool__(self) -> bool:
        return bool(self.places)


NOTHING = Choice()


@dataclass
class Kept:
    """``results`` of operations by place, and the places of the in-place operations on them (``changes``)."""

    results: dict[int, Any] = field(default_factory=dict)
    changes: frozenset[int] = frozenset()


class _Placing(TorchDispatchMode):
    """Follows the places of a run. Every operation comes by here, so little is done for each."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.place = 0

    def advance(self, func: Any) -> int:
        """The place of this call of ``func``; 0 if it has none."""
        if _is_uncounted(func):
            return 0
        self.place = place = hash((self.place, id(func)))
        return place


_WRITTEN: dict[int, tuple[tuple[int, str], ...]] = {}
"""By the id of a function, its arguments that it writes: positions and names."""

_ALL = ((-1, ""),)


def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    known = _WRITTEN.get(id(func))
    if known is None:
        known = _ALL
        if not isinstance(func, HigherOrderOperator):
            known = written_arguments(func)
        _WRITTEN[id(func)] = known
    return known


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that ``func`` may write: of a function made of functions, all that it gets."""
    which = _written_arguments(func)
    if which is _ALL:
        return tensor_leaves((args, kwargs))
    return tensor_leaves([args[k] if k < len(args) else (kwargs or {}).get(name) for k, name in which])


def _target(func: Any, args: Any) -> torch.Tensor | None:
    """The tensor that an in-place operation writes and returns; None for another function."""
    which = _written_arguments(func)
    in_place = len(which) == 1 and which[0][0] == 0 and func._schema.name.endswith("_")
    return args[0] if in_place and isinstance(args[0], torch.Tensor) else None


class Keep(_Placing):
    """Runs a stage and puts the results of a ``choice`` into ``kept``, unless the run is not the one surveyed."""

    def __init__(self, choice: Choice, kept: Kept) -> None:
        super().__init__()
        self.choice, self.kept = choice, kept
        self.changes = dict(choice.changes)
        self.to_come = Counter(self.changes.values())
        self.place_of: dict[int, int] = {}  # of each storage of a kept result
        self.unfinished: set[int] = set()  # those of them that will be changed
        self.as_surveyed = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.unfinished:
            self._look(func, args, kwargs)
        out = func(*args, **(kwargs or {}))
        place = self.advance(func)
        if _written_arguments(func):
            self._note_change(func, args, kwargs, place)
        elif place in self.choice.places:
            self.kept.results[place] = _detached(out)
            storages = [*map(storage_key, tensor_leaves(out))]
            self.place_of.update(dict.fromkeys(storages, place))
            if self.to_come[place]:
                self.unfinished.update(storages)
        return out

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        """What will be changed must not be read before."""
        target = _target(func, args)
        read = {storage_key(t) for t in tensor_leaves((args, kwargs)) if t is not target}
        if not read.isdisjoint(self.unfinished):
            self.as_surveyed = False

    def _note_change(self, func: Any, args: Any, kwargs: Any, place: int) -> None:
        written = map(storage_key, _written(func, args, kwargs))
        changed = {self.place_of[storage] for storage in written if storage in self.place_of}
        expected = self.changes.get(place)
        if changed != (set() if expected is None else {expected}):
            self.as_surveyed = False
        elif expected is not None:
            self.to_come[expected] -= 1
            if not self.to_come[expected]:
                self.unfinished -= {storage for storage, of in self.place_of.items() if of == expected}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.as_surveyed and not self.unfinished and self.place == self.choice.end:
            self.kept.changes = frozenset(self.changes)
        else:
            self.kept.results.clear()


class Replay(_Placing):
    """Runs a stage with the kept results in place of the operations that computed them, which are taken from ``kept``.

    A kept result that was changed in place has its final value, so these changes are skipped.
    """

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self.advance(func)
        if place in self.kept.results:
            return _detached(self.kept.results.pop(place))
        if place in self.kept.changes:
            return args[0]
        return func(*args, **(kwargs or {}))


@dataclass
class Result:
    """What one operation of a run made.

    ``bytes_of``: storage → bytes. ``spans``: marks of the device's clock before and after the operation, and those that
    changed the result in place. ``flops``: its counted floating-point operations. ``random``: whether numbers were
    drawn for it. ``changes``: places of the operations that changed it in place. ``keepable``: whether a recompute may
    use the result in place of the operation.
    """

    place: int
    bytes_of: dict[int, int]
    spans: list[tuple[Any, Any]]
    flops: int
    random: bool
    changes: list[int] = field(default_factory=list)
    keepable: bool = True

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(self.bytes_of.values())


class Survey(_Placing):
    """Lists what the operations of a run make in new memory. ``mark`` marks a moment of the device.

    A result that is read before an in-place change is not keepable: a recompute would read the final value. Nor is one
    that something else writes. ``sources``: the generators that may be drawn from. ``draws``: whether numbers were
    drawn for anything that is not among ``made``. ``opaque``: whether some operations could not be seen.
    """

    def __init__(self, mark: Callable[[], Any], sources: Iterable[Drawn]) -> None:
        super().__init__()
        self.mark = mark
        self.made: list[Result] = []
        self.draws = self.opaque = False
        self.states = {source: random_state(source) for source in sources}
        self.alive: list[torch.Tensor] = []  # so that no other tensor gets the same address
        self.maker: dict[int, Result] = {}
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = self.mark()
        out = func(*args, **(kwargs or {}))
        span = start, self.mark()
        place, draws = self.advance(func), self._has_drawn()
        read = {storage_key(t) for t in tensor_leaves((args, kwargs))}
        if isinstance(func, HigherOrderOperator):
            self.opaque = True
        elif _written_arguments(func):
            self._note_change(_target(func, args), _written(func, args, kwargs), read, place, span, draws)
        else:
            new = {storage_key(t): storage_bytes(t) for t in tensor_leaves(out)}
            self.read |= read - new.keys()
            if place and read and _is_tensors(out) and not new.keys() & read:
                counts = flop_registry.get(func._overloadpacket)
                flops = int(counts(*args, **(kwargs or {}), out_val=out)) if counts else 0
                result = Result(place, new, [span], flops, draws)
                self.made.append(result)
                self.maker |= dict.fromkeys(new, result)
                self.alive += [t.detach() for t in tensor_leaves(out)]
            else:
                self.draws = self.draws or draws
        return out

    def _has_drawn(self) -> bool:
        now = {source: random_state(source) for source in self.states}
        drawn = any(not torch.equal(now[source], state) for source, state in self.states.items())
        self.states = now
        return drawn

    def _note_change(
        self,
        changed_in_place: torch.Tensor | None,
        written: list[torch.Tensor],
        read: set[int],
        place: int,
        span: tuple[Any, Any],
        draws: bool,
    ) -> None:
        """A tensor was changed in place, or some tensors were ``written`` otherwise."""
        target = None if changed_in_place is None else storage_key(changed_in_place)
        if target in self.maker:
            changed = self.maker[target]
            changed.spans.append(span)
            changed.changes.append(place)
            changed.random = changed.random or draws
        else:
            self.draws = self.draws or draws
        for storage in map(storage_key, written):
            if storage in self.maker and (target is None or storage in self.read):
                self.maker[storage].keepable = False
        self.read |= read - {target}

    def choice(self, places: frozenset[int]) -> Choice:
        """To keep the results of ``places``."""
        changes = [(change, r.place) for r in self.made if r.place in places for change in r.changes]
        return Choice(places, tuple(changes), self.place)


def _is_tensors(out: Any) -> bool:
    return all(isinstance(t, torch.Tensor) for t in (out if isinstance(out, tuple) else (out,)))


def _detached(out: Any) -> Any:
    return tuple(t.detach() for t in out) if isinstance(out, tuple) else out.detach()


def units(
    made: list[Result], times: list[int], draws: bool, ends: Collection[int]
) -> list[tuple[frozenset[int], int, int]]:
    """Places of results that are kept together, their bytes and time: each alone, but all random ones in one.

    ``times``: of each of ``made``. ``draws``: whether numbers are drawn for anything else. ``ends``: the storages of
    input and output, which are not kept.
    """
    found: list[tuple[frozenset[int], int, int]] = []
    random: list[tuple[int, int, int]] = []
    able = not draws
    for r, time in zip(made, times, strict=True):
        keepable = r.keepable and not any(storage in ends for storage in r.bytes_of)
        if r.random:
            able = able and keepable
            random.append((r.place, r.bytes, time))
        elif keepable:
            found.append((frozenset([r.place]), r.bytes, time))
    if random and able:
        places, sizes, taken = zip(*random, strict=True)
        found.append((frozenset(places), sum(sizes), sum(taken)))
    return found


def nested_choices(able: list[tuple[frozenset[int], int, int]], most: int, limit: int) -> list[frozenset[int]]:
    """At most ``limit`` sets of places whose results may be kept, largest first; each contains the next.

    ``able``: places that are kept together, their bytes and their cost (``units``). Those of most cost per byte are in
    all sets. The sets hold up to ``most`` bytes, in equal steps.
    """
    ranked = sorted((u for u in able if u[2] > 0), key=lambda u: -u[2] / max(1, u[1]))
    held = list(accumulate(size for _, size, _ in ranked))
    lengths = sorted({bisect_right(held, most * k // limit) for k in range(1, limit + 1)} - {0}, reverse=True)
    return [frozenset().union(*(places for places, _, _ in ranked[:length])) for length in lengths]
