"""The modules and values of a layer at a moment, what its runs change in the modules, and what decides its memory.

A second run must find parameters, buffers and plain attributes as the first run found them, or it may take another
branch; and it must leave all as it is now, since eager mode runs the layer once. Plain attributes are numbers, strings,
None, and tuples of these. Others are not held, as they may be activations of an earlier step; what is in lists and
dicts is not put back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import nn
from torch.ao.quantization.fake_quantize import FakeQuantizeBase
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from rkgb.randomness import RandomSource, generators_in, random_state, watched_devices
from rkgb.settings import settings
from rkgb.storages import versions_of
from rkgb.trace.capture import current_mode
from rkgb.trees import replaced, tensors_of

Function = Callable[[Any], Any]
"""A stage: a module or a function of one value (a tensor, or a structure of tensors)."""

Dict = dict[str, Any]
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_OF_ALL = frozenset(vars(nn.Module())) - {"training"}
_HELD = [k for k in vars(nn.Module()) if k.startswith(("_modules", "_parameters", "_buffers", "_forward"))]
_NORMS = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)
"""These write running statistics in training, and compute nothing from them."""

_changed_buffers = weakref.WeakKeyDictionary[Any, frozenset[str]]()
_changed_attributes = weakref.WeakKeyDictionary[Any, frozenset[str]]()
HIDING = weakref.WeakSet[Any]()
"""Layers that may leave a random state that they draw from as it was, or set it: ``torch.random.fork_rng``."""


def changing(function: Function) -> frozenset[str]:
    """The names of the buffers that any run of the layer ``function`` has changed in place so far."""
    return _changed_buffers.get(function, frozenset()) if isinstance(function, nn.Module) else frozenset()


class Moment:
    """A layer (a plain function has no modules) when a run of it begins.

    ``modules``: each once, with names that end with a dot. ``parameters``, ``buffers``: each once, by name; ``owned``:
    both, with their ``versions``, and which ``want`` a gradient. ``statistics``: the buffers that batch and instance
    norms update in training; a class with a forward of its own may read its statistics, which are then buffers like
    others. ``held``: the dictionaries of modules, parameters, buffers and hooks, and what they held; ``places``: where
    in them each of ``owned`` is. ``plain``: each module, the names and classes of its attributes, those of its own that
    are plain, and with these its ``held`` dictionaries and generators; no classes where that is all. ``fixed``: the
    dictionaries in which nothing may change, which had the items ``then``, or are ``empty``. ``generators``: what
    modules hold of them. ``known``: an earlier moment; where nothing but versions differs, the two share all else.
    """

    def __init__(self, function: Function, known: Moment | None = None) -> None:
        if known and known.function is function and known.is_still_so():
            vars(self).update(vars(known))
        else:
            self._look(function)
        self.versions, self.want = versions_of(self.owned.values()), [t.requires_grad for t in self.owned.values()]

    def _look(self, function: Function) -> None:
        self.function = function
        named = function.named_modules() if isinstance(function, nn.Module) else ()
        self.modules = [(f"{name}." if name else "", module) for name, module in named]
        self.parameters, self.buffers = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        self.held, self.places = list[tuple[Dict, Dict]](), dict[str, list[tuple[Dict, str]]]()
        names_of: dict[int, str] = {}
        for prefix, module in self.modules:
            for owned, tensors in (self.parameters, module._parameters), (self.buffers, module._buffers):
                for k, t in tensors.items():
                    if t is not None:
                        name = names_of.setdefault(id(t), prefix + k)
                        owned.setdefault(name, t)
                        self.places.setdefault(name, []).append((tensors, k))
            self.held += [(d, d.copy()) for d in map(vars(module).__getitem__, _HELD)]
        self.owned: dict[str, torch.Tensor] = self.parameters | self.buffers
        norms = [p for p, m in self.modules if isinstance(m, _NormBase) and m.training and type(m).forward in _NORMS]
        names = [p + k for p in norms for k in ("running_mean", "running_var", "num_batches_tracked")]
        self.statistics = {name: self.buffers[name] for name in names if name in self.buffers}
        self.plain: list[tuple[nn.Module, list[str], list[type | None] | None, Dict, Dict]] = []
        self.fixed, self.empty = ([d for d, _ in self.held if bool(d) is full] for full in (True, False))
        self.generators: list[torch.Generator] = []
        for _, module in self.modules:
            attributes = vars(module)
            own = {k: v for k, v in attributes.items() if k not in _OF_ALL}
            plain = {k: v for k, v in own.items() if _is_plain(v)}
            generators = {k: v for k, v in own.items() if k not in plain and generators_in([v])}
            same = {k: attributes[k] for k in ("_modules", "_parameters", "_buffers")} | plain | generators
            # A tuple may be plain later: it is no class, so that it is looked at each time.
            classes = [None if type(v) is tuple and k not in plain else type(v) for k, v in attributes.items()]
            all_stay = attributes.keys() <= same.keys() | _OF_ALL
            self.fixed += [attributes] if all_stay else []
            self.plain.append((module, [*attributes], None if all_stay else classes, plain, same))
            self.generators += generators.values()
        self.then = self._now()

    def _now(self) -> tuple[list[int], list[str], list[Any]]:
        values = chain.from_iterable(map(methodcaller("values"), self.fixed))
        return [*map(len, self.fixed)], [*chain.from_iterable(self.fixed)], [*values]

    def is_still_so(self) -> bool:
        """Whether the layer has the same modules, parameters, buffers, plain attributes and generators now."""
        sizes, keys, values = self._now()
        if any(self.empty) or (sizes, keys) != self.then[:2] or not all(map(is_, values, self.then[2])):
            return False
        for module, names, classes, _, same in self.plain:
            if classes is None:
                continue
            attributes = vars(module)
            alike = [*map(type, attributes.values())] == classes and [*attributes] == names
            if not (alike and all(map(is_, map(attributes.get, same), same.values()))):
                return False
        return True

    @cached_property
    def configuration(self) -> tuple[tuple[str, Hashable], ...]:
        """The plain attributes that no run was seen to change, by which people set what layers do.

        Of a float only whether it is 0: rates and factors change no memory, but for operations that are left out.
        """
        found: list[tuple[str, Hashable]] = []
        for module, _, _, plain, _ in self.plain:
            changed = _changed_attributes.get(module, frozenset())
            found += [(k, v != 0 if type(v) is float else v) for k, v in plain.items() if k not in changed]
        return tuple(found)

    def generator_states(self, x: Any, but: Collection[RandomSource] = ()) -> dict[RandomSource, torch.Tensor]:
        """The states of generators, ``but`` these, that a run on the input ``x`` may draw from: those of modules, and
        the default ones of the CPU and of the devices of ``x`` and the parameters.
        """
        devices = watched_devices((*tensors_of(x), *self.parameters.values()))
        sources: list[RandomSource] = [*devices, *self.generators]
        return {source: random_state(source) for source in sources if source not in but}

    def drawn(self, states: dict[RandomSource, torch.Tensor]) -> dict[RandomSource, torch.Tensor]:
        """After a run that began with these states: those of the generators that it may have drawn from."""
        return {d: s for d, s in states.items() if self.function in HIDING or not torch.equal(s, random_state(d))}

    def copies(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers, to see later which the run changed: some operations leave version counters alone."""
        return {n: b.clone() for n, b in self.buffers.items() if n not in self.statistics}

    def learn_buffers(self, copies: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """After the run: note which buffers it changed in place, statistics of norms left out, but all that fake
        quantizations observe. Returns the ``copies`` of buffers that any run so far changed, which a plan counts.
        """
        if len(self.buffers) > len(self.statistics):
            names = {n for n in self.written() if n in self.buffers}
            names |= {n for n, copy in copies.items() if not torch.equal(self.buffers[n], copy)}
            quantizers = [(prefix, m) for prefix, m in self.modules if isinstance(m, FakeQuantizeBase)]
            names |= {prefix + k for prefix, m in quantizers for k, _ in m.named_buffers()} & self.buffers.keys()
            _changed_buffers[self.function] = changing(self.function) | names - self.statistics.keys()
        return {n: copies[n] for n in changing(self.function) if n in copies}

    def learn_attributes(self) -> None:
        """After the run: note which plain attributes it changed."""
        for module, _, _, plain, _ in self.plain:
            if names := {k for k, v in plain.items() if vars(module).get(k) != v}:
                _changed_attributes[module] = _changed_attributes.get(module, frozenset()) | names

    def written(self) -> list[str]:
        """The names of the parameters and buffers that were changed in place since."""
        versions = zip(self.owned, versions_of(self.owned.values()), self.versions, strict=True)
        return [name for name, now, then in versions if now != then]

    def check(self, name: str, scratch: dict[str, torch.Tensor]) -> None:
        """Raise ``RuntimeError`` if layer ``name`` has a tensor that was changed in place since, but ``scratch``."""
        for k in self.written():
            if k not in scratch:
                parameter = isinstance(self.owned[k], nn.Parameter)
                before = "optimizer.step()" if parameter else "the next forward, or what else changes it"
                raise RuntimeError(
                    f"{k} of {name} was changed in place between forward and backward, and the layer has to run "
                    f"again: call backward before {before}"
                )

    @contextmanager
    def again(self, instead: dict[str, torch.Tensor]) -> Iterator[None]:
        """Meanwhile the layer is as it was then, but for tensors ``instead`` of some; afterwards as it is now."""
        attributes = [(vars(m), vars(m).copy()) for _, m in self.modules]
        held = self.held if (so := self.is_still_so()) else [(d, d.copy()) for d, _ in self.held]
        turned = [t for t, then in zip(self.owned.values(), self.want, strict=True) if t.requires_grad != then]
        try:
            for t in turned:
                t.requires_grad_(not t.requires_grad)
            if not so:
                _restore(self.held)
                for module, names, _, _, same in self.plain:
                    for name in vars(module).keys() - names:
                        del vars(module)[name]
                    vars(module).update(same)
            for name, t in instead.items():
                for d, k in self.places[name]:
                    d[k] = t
            yield
        finally:
            for t in turned:
                t.requires_grad_(not t.requires_grad)
            _restore([*held, *attributes])


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _restore(held: list[tuple[Dict, Dict]]) -> None:
    """Give each dictionary the items that it held then, in their order."""
    for d, then in held:
        if (d or then) and not (all(map(is_, d.values(), then.values())) and [*d] == [*then]):
            d.clear()
            d.update(then)


class Held:
    """A value from which a stage is recomputed, as it is now and without its history."""

    def __init__(self, x: Any) -> None:
        self.value, self.versions = detached(x), versions_of(tensors_of(x))

    def read(self, name: str) -> Any:
        """The value; ``name`` is the stage's. Raises ``RuntimeError`` if it was changed in place since."""
        if versions_of(tensors_of(self.value)) != self.versions:
            raise RuntimeError(
                f"the input of {name} was changed in place between forward and backward, and the layer has to run "
                "again from it: change a copy of it, or call backward first"
            )
        return self.value


def detached(value: Any) -> Any:
    """The same memory without history, requiring grad where the original does, in containers of its own."""
    return replaced(value, lambda t: t.detach().requires_grad_(t.requires_grad))


class Situation:
    """A call of ``layers`` as they are now with ``x``: what must be equal in a call that a plan for it is to fit, and
    what must not be more there.

    ``fixed``: layers and their modes, autocast, torch's settings, plain attributes of layers, kinds of parameters and
    inputs, and how inputs lie. ``most``: whether each parameter and input requires grad, the buffers of each layer that
    runs are known to change in place, of which copies are kept for a recompute, and the sizes of inputs.
    """

    def __init__(self, layers: Sequence[Moment], x: Any) -> None:
        inputs = tensors_of(x)
        parameters = [p for of in layers for p in of.parameters.values()]
        self.fixed = (
            *(replace(current_mode(), grad=True), settings()),
            *((of.modules, of.configuration, of.function in HIDING) for of in layers),
            *((p.dtype, p.device, p.shape) for p in parameters),
            *((t.dtype, t.device, t.dim()) for t in inputs),
            *(t.layout if t.layout != torch.strided or t.is_contiguous() else t.stride() for t in inputs),
        )
        wants = (t.requires_grad for t in (*parameters, *inputs))
        changed = (changing(of.function) for of in layers)
        self.most: tuple[Any, ...] = (*wants, *changed, *(size for t in inputs for size in t.shape))

    def covers(self, other: Situation) -> bool:
        """Whether a call in ``other`` needs at most the memory of one in this situation."""
        return self.fixed == other.fixed and all(a >= b for a, b in zip(self.most, other.most, strict=True))
