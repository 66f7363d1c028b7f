"""The modules and values of a layer at a moment, what its runs change in the modules, and what decides its memory.

A second run must find parameters, buffers and plain attributes as the first run found them, or it may take another
branch; and it must leave all as it is now, since eager mode runs the layer once. Plain attributes are numbers, strings,
None, and tuples of these. Others are not held, as they may be activations of an earlier step; what is in lists and
dicts is not put back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.ao.quantization.fake_quantize import FakeQuantizeBase
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from rkgb.randomness import Drawn, generators_in, random_state, watched_devices
from rkgb.settings import settings
from rkgb.storages import version_of
from rkgb.trace.capture import current_mode
from rkgb.trees import tensor_leaves

Function = Callable[[Any], Any]
"""A stage: a module or a function of one value (a tensor, or a structure of tensors)."""

Dict = dict[str, Any]
_Learned = weakref.WeakKeyDictionary[Any, frozenset[str]]
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_OF_ALL = frozenset(vars(nn.Module())) - {"training"}
_NORMS = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)
"""These write running statistics in training, and compute nothing from them."""

_changed_buffers: _Learned = weakref.WeakKeyDictionary()
_changed_attributes: _Learned = weakref.WeakKeyDictionary()


def changing(function: Function) -> frozenset[str]:
    """The names of the buffers that any run of the layer ``function`` has changed in place so far."""
    return _changed_buffers.get(function, frozenset()) if isinstance(function, nn.Module) else frozenset()


class Moment:
    """A layer when a run of it begins. A plain function has no modules.

    ``modules``: each once, with names that end with a dot. ``parameters``, ``buffers``: each once, by name; ``owned``:
    both, with their ``versions``. ``statistics``: the buffers that batch and instance norms update in training; a class
    with a forward of its own may read its statistics, which are then buffers like others. ``held``: the dictionaries of
    modules, parameters and buffers, and what they held. ``plain``: each module, the names of its attributes, and those
    of its own that are plain. ``generators``: what modules hold of them.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        named = function.named_modules() if isinstance(function, nn.Module) else ()
        self.modules = [(f"{name}." if name else "", module) for name, module in named]
        self.parameters: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.held: list[tuple[Dict, Dict]] = []
        seen: set[int] = set()
        for prefix, module in self.modules:
            parts = module._modules, module._parameters, module._buffers
            for owned, tensors in zip((self.parameters, self.buffers), parts[1:], strict=True):
                for k, t in tensors.items():
                    if t is not None and id(t) not in seen:
                        seen.add(id(t))
                        owned[prefix + k] = t
            self.held += [(d, d.copy()) for d in parts]
        self.owned = self.parameters | self.buffers
        self.versions = [version_of(t) for t in self.owned.values()]
        norms = [p for p, m in self.modules if isinstance(m, _NormBase) and m.training and type(m).forward in _NORMS]
        names = [p + k for p in norms for k in ("running_mean", "running_var", "num_batches_tracked")]
        self.statistics = {name: self.buffers[name] for name in names if name in self.buffers}
        self.plain: list[tuple[nn.Module, list[str], Dict]] = []
        self.generators: list[torch.Generator] = []
        for _, module in self.modules:
            own = {k: v for k, v in vars(module).items() if k not in _OF_ALL}
            plain = {k: v for k, v in own.items() if type(v) in _PLAIN or _is_plain_tuple(v)}
            self.plain.append((module, [*vars(module)], plain))
            if len(plain) < len(own):
                self.generators += generators_in(own.values())

    def configuration(self) -> tuple[tuple[str, Hashable], ...]:
        """The plain attributes that no run was seen to change, by which people set what layers do.

        Of a float only whether it is 0: rates and factors change no memory, but for operations that are left out.
        """
        found: list[tuple[str, Hashable]] = []
        for module, _, plain in self.plain:
            changed = _changed_attributes.get(module, frozenset())
            found += [(k, v != 0 if type(v) is float else v) for k, v in plain.items() if k not in changed]
        return tuple(found)

    def generator_states(self, x: Any) -> dict[Drawn, torch.Tensor]:
        """The states of the generators that a run on the input ``x`` may draw from: those of the modules, and the
        default ones of the CPU and of the devices of ``x`` and the parameters.
        """
        devices = watched_devices((*tensor_leaves(x), *self.parameters.values()))
        sources: list[Drawn] = [*devices, *self.generators]
        return {source: random_state(source) for source in sources}

    def copies(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers, to see later which of them the run changed: some operations leave version counters
        alone. A buffer may change in some runs only (a codebook at every third step), so all are copied.
        """
        return {n: b.clone() for n, b in self.buffers.items() if n not in self.statistics}

    def learn_buffers(self, copies: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """After the run: note which buffers it changed in place, statistics of norms left out.

        Returns of the ``copies`` those of buffers that this run, or an earlier one, changed: a plan counts them. What
        fake quantizations observe always counts as changed.
        """
        if len(self.buffers) > len(self.statistics):
            versions = zip(self.owned.items(), self.versions, strict=True)
            names = {n for (n, t), then in versions if n in self.buffers and version_of(t) != then}
            names |= {n for n, copy in copies.items() if not torch.equal(self.buffers[n], copy)}
            quantizers = [(prefix, m) for prefix, m in self.modules if isinstance(m, FakeQuantizeBase)]
            names |= {prefix + k for prefix, m in quantizers for k, _ in m.named_buffers()} & self.buffers.keys()
            _changed_buffers[self.function] = changing(self.function) | names - self.statistics.keys()
        return {n: copies[n] for n in changing(self.function) if n in copies}

    def learn_attributes(self) -> None:
        """After the run: note which plain attributes it changed."""
        for module, _, plain in self.plain:
            if names := {k for k, v in plain.items() if vars(module).get(k) != v}:
                _changed_attributes[module] = _changed_attributes.get(module, frozenset()) | names

    def check(self, name: str, scratch: dict[str, torch.Tensor]) -> None:
        """Raise ``RuntimeError`` if a parameter or buffer of the layer called ``name`` was changed in place since.

        ``scratch``: those of which there is a copy.
        """
        for (k, t), then in zip(self.owned.items(), self.versions, strict=True):
            if version_of(t) != then and k not in scratch:
                parameter = isinstance(t, nn.Parameter)
                before = "optimizer.step()" if parameter else "the next forward, or what else changes it"
                raise RuntimeError(
                    f"{k} of {name} was changed in place between forward and backward, and the layer has to run "
                    f"again: call backward before {before}"
                )

    @contextmanager
    def again(self, instead: dict[str, torch.Tensor]) -> Iterator[None]:
        """Meanwhile the layer is as it was then, with other tensors ``instead`` of some parameters and buffers;
        afterwards it is as it is now.
        """
        swapped = {id(self.owned[name]): t for name, t in instead.items()}
        with self.kept():
            for d, then in self.held:
                _put(d, {k: swapped.get(id(t), t) for k, t in then.items()} if swapped else then)
            for module, names, plain in self.plain:
                attributes = vars(module)
                for name in attributes.keys() - names:
                    del attributes[name]
                attributes.update(plain)
            yield

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Afterwards the modules have the same attributes, parameters and buffers as now."""
        now = [(d, d.copy()) for d in (*(d for d, _ in self.held), *(vars(m) for _, m in self.modules))]
        try:
            yield
        finally:
            for d, then in now:
                _put(d, then)


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and _PLAIN.issuperset(map(type, value))


def _put(d: Dict, then: Dict) -> None:
    """Give ``d`` the items ``then``, in their order."""
    if (d or then) and not (all(map(is_, d.values(), then.values())) and [*d] == [*then]):
        d.clear()
        d.update(then)


class Held:
    """A value from which a stage is recomputed, as it is now and without its history."""

    def __init__(self, x: Any) -> None:
        self.value, self.versions = detached(x), versions_of(x)

    def read(self, name: str) -> Any:
        """The value; ``name`` is the stage's. Raises ``RuntimeError`` if it was changed in place since."""
        if versions_of(self.value) != self.versions:
            raise RuntimeError(
                f"the input of {name} was changed in place between forward and backward, and the layer has to run "
                "again from it: change a copy of it, or call backward first"
            )
        return self.value


def versions_of(value: Any) -> list[int]:
    """The version counters of the tensors in ``value``."""
    return [version_of(t) for t in tensor_leaves(value)]


def detached(value: Any) -> Any:
    """The same memory without history, requiring grad where the original does."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return pytree.tree_map_only(torch.Tensor, detached, value)


class Situation:
    """A call of ``functions`` with ``x``: what must be equal in a call that a plan for it is to fit, and what must not
    be more there.

    ``fixed``: layers and their modes, autocast, torch's settings, plain attributes of layers, kinds of parameters and
    inputs, and how inputs lie. ``most``: whether each parameter and input requires grad, the buffers of each layer that
    runs are known to change in place, of which copies are kept for a recompute, and the sizes of inputs.
    """

    def __init__(self, functions: Sequence[nn.Module], x: Any) -> None:
        layers, inputs = [*map(Moment, functions)], tensor_leaves(x)
        parameters = [p for of in layers for p in of.parameters.values()]
        self.fixed = (
            *((m, m.training) for of in layers for _, m in of.modules),
            *(replace(current_mode(), grad=True), settings()),
            *(of.configuration() for of in layers),
            *((p.dtype, p.device, p.shape) for p in parameters),
            *(
                (t.dtype, t.device, t.dim(), t.layout if t.layout != torch.strided or t.is_contiguous() else t.stride())
                for t in inputs
            ),
        )
        wants = (t.requires_grad for t in (*parameters, *inputs))
        self.most: tuple[Any, ...] = (*wants, *map(changing, functions), *(size for t in inputs for size in t.shape))

    def covers(self, other: Situation) -> bool:
        """Whether a call in ``other`` needs at most the memory of one in this situation."""
        return self.fixed == other.fixed and all(a >= b for a, b in zip(self.most, other.most, strict=True))
