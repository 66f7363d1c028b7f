"""What a run of a stage changes in its modules, beside parameters: buffers and plain attributes.

A recompute must find both as the first run found them, or it may take another branch; and it must leave both as they
are, since eager mode runs the stage once.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.ao.quantization.fake_quantize import FakeQuantizeBase
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from rockmate.rotor.values import Parts


class Buffers:
    """The buffers of a stage before a run, with copies, to see afterwards which of them it changed in place.

    Batch norm's statistics are left out: in training nothing is computed from them. Some operations that write buffers
    leave version counters alone, so copies are compared; fake quantizations' statistics always count as changed. A
    buffer may change in some runs only (a codebook at every third step), so all are copied before each run, and those
    that never changed are released after it.
    """

    learned: ClassVar[weakref.WeakKeyDictionary[Any, frozenset[str]]] = weakref.WeakKeyDictionary()
    """The names of the buffers that any run of a module has changed in place."""

    def __init__(self, function: Any, parts: Parts, *, copied: bool = True) -> None:
        self.function, self.parts = function, parts
        statistics = statistics_of(parts)
        self.before = {n: (b, b._version) for n, b in parts.buffers.items() if n not in statistics}
        self.copies = {n: b.clone() for n, (b, _) in self.before.items() if copied}

    def learn(self) -> None:
        """After the run: note which buffers it changed in place."""
        if self.before:
            names = {n for n, (b, version) in self.before.items() if b._version != version}
            names |= {n for n, copy in self.copies.items() if not torch.equal(self.before[n][0], copy)}
            names |= quantizations_of(self.parts) & self.before.keys()
            self.learned[self.function] = changing(self.function) | names

    def changed(self) -> dict[str, torch.Tensor]:
        """Copies from before the run of all buffers that this run, or an earlier one, changed in place.

        A plan counts the copies of buffers that are known to change, so they are kept whether or not this run changes
        them.
        """
        self.learn()
        return {n: self.copies[n] for n in changing(self.function) if n in self.copies}


def changing(function: Any) -> frozenset[str]:
    """The names of the buffers that any run of the module ``function`` has changed in place so far."""
    return Buffers.learned.get(function, frozenset()) if isinstance(function, torch.nn.Module) else frozenset()


_FORWARDS = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)
"""These write running statistics in training, and compute nothing from them."""


def statistics_of(parts: Parts) -> dict[str, torch.Tensor]:
    """The running statistics that batch and instance norms update in training, by name.

    A class with a forward of its own may read its statistics, which are then buffers like others.
    """
    names = [
        prefix + name
        for prefix, m in parts.modules
        if isinstance(m, _NormBase) and m.training and m.track_running_stats and type(m).forward in _FORWARDS
        for name in ("running_mean", "running_var", "num_batches_tracked")
    ]
    return {name: parts.buffers[name] for name in names if name in parts.buffers}


def quantizations_of(parts: Parts) -> set[str]:
    """The names of the buffers of fake quantizations, which are computed with what they observe."""
    quantizers = ((prefix, m) for prefix, m in parts.modules if isinstance(m, FakeQuantizeBase))
    return {prefix + name for prefix, m in quantizers for name, _ in m.named_buffers()}


def configuration(parts: Parts) -> tuple[tuple[str, Hashable], ...]:
    """The plain attributes that no run was seen to change, by which people set what layers do.

    Of a float only whether it is 0: rates and factors change no memory, but for operations that are left out.
    """
    found: list[tuple[str, Hashable]] = []
    for module, _, own in _watched(parts):
        changed = Attributes.learned.get(module, _NONE)
        for name in own:
            value = module.__dict__[name]
            if _is_plain(value) and name not in changed:
                found.append((name, value != 0 if type(value) is float else value))
    return tuple(found)


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_NONE: frozenset[str] = frozenset()


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(item) in _PLAIN for item in value))


class _Own(NamedTuple):
    """The attributes of one module: all names, the values of plain ones; its buffers: names, and those that are set."""

    module: torch.nn.Module
    names: tuple[str, ...]
    plain: dict[str, Any]
    buffers: frozenset[str]
    filled: frozenset[str]


class Attributes:
    """The plain attributes of a stage's modules, and which buffers they had, at a moment.

    Plain are numbers, strings, None, and tuples of these. Other attributes are not held, as they may be activations of
    an earlier step. What is in lists and dicts is not restored.
    """

    learned: ClassVar[weakref.WeakKeyDictionary[torch.nn.Module, frozenset[str]]] = weakref.WeakKeyDictionary()
    """The names of the plain attributes of a module that any run of it has changed."""

    def __init__(self, parts: Parts) -> None:
        self.of = [
            _Own(
                m,
                names,
                {k: v for k in own if _is_plain(v := m.__dict__[k])},
                frozenset(m._buffers) if m._buffers else _NONE,
                frozenset([k for k, b in m._buffers.items() if b is not None]) if m._buffers else _NONE,
            )
            for m, names, own in _watched(parts)
        ]

    def learn(self) -> None:
        """After the run: note which plain attributes it changed."""
        for own in self.of:
            now = own.module.__dict__
            names = {name for name, value in own.plain.items() if now.get(name) != value}
            if names:
                self.learned[own.module] = self.learned.get(own.module, frozenset()) | names

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Meanwhile the modules have the attributes of that moment; afterwards those of now."""
        with _kept([own.module for own in self.of]):
            for own in self.of:
                attributes, buffers = own.module.__dict__, own.module._buffers
                if tuple(attributes) != own.names:
                    for name in attributes.keys() - set(own.names):
                        del attributes[name]
                attributes.update(own.plain)
                if buffers:
                    for name in buffers.keys() - own.filled:
                        if name in own.buffers:
                            buffers[name] = None
                        else:
                            del buffers[name]
            yield


@contextmanager
def attributes_kept(function: Any) -> Iterator[None]:
    """Afterwards attributes and buffers of the modules of ``function`` are the same objects as before."""
    with _kept([m for m, _, _ in _watched(Parts(function))]):
        yield


@contextmanager
def _kept(modules: list[torch.nn.Module]) -> Iterator[None]:
    kept = [(d, dict(d)) for m in modules for d in (m.__dict__, m._buffers) if d]
    bare = [m._buffers for m in modules if not m._buffers]
    try:
        yield
    finally:
        for buffers in bare:
            buffers.clear()
        for now, before in kept:
            if not (len(now) == len(before) and all(map(is_, now.values(), before.values())) and [*now] == [*before]):
                now.clear()
                now.update(before)


def _watched(parts: Parts) -> list[tuple[torch.nn.Module, tuple[str, ...], tuple[str, ...]]]:
    """Of ``parts.attributes``, the modules whose attributes Python holds."""
    return [found for found in parts.attributes if not isinstance(found[0], torch.jit.ScriptModule)]
