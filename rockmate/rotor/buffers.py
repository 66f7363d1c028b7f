"""Which buffers a layer changes when it runs, and what they were before."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch.ao.quantization.fake_quantize import FakeQuantizeBase
from torch.nn.modules.batchnorm import _NormBase


class Buffers:
    """The buffers of a function before a run, to see afterwards which ones it changes.

    Which ones a module changes is learned at its first run, with copies of all; later only those are copied. Batch
    norm's statistics need no copy: in training nothing is computed from them. Those of fake quantizations always count
    as changed: what they are written by leaves version counters alone.
    """

    learned: ClassVar[weakref.WeakKeyDictionary[Any, frozenset[str]]] = weakref.WeakKeyDictionary()

    def __init__(self, function: Any) -> None:
        self.function = function
        self.copies: dict[str, torch.Tensor] = {}
        self.before: dict[str, tuple[torch.Tensor, int]] = {}
        if isinstance(function, torch.nn.Module):
            known = self.learned.get(function)
            buffers = dict(function.named_buffers())
            statistics = statistics_of(function, buffers)
            self.before = {n: (b, b._version) for n, b in buffers.items() if n not in statistics}
            self.copies = {n: b.clone() for n, (b, _) in self.before.items() if known is None or n in known}

    def changed(self) -> dict[str, torch.Tensor]:
        """What the buffers that the run changed were before it."""
        if not self.before:
            return {}
        assert isinstance(self.function, torch.nn.Module)
        after = dict(self.function.named_buffers())
        names = {n for n, (b, version) in self.before.items() if after.get(n) is not b or b._version != version}
        names |= quantizations_of(self.function) & self.before.keys()
        late = names - self.copies.keys()
        if late:
            raise RuntimeError(
                f"{type(self.function).__name__} changed {', '.join(sorted(late))}, which it did not before"
            )
        self.learned[self.function] = self.learned.get(self.function, frozenset()) | names
        return {n: self.copies[n] for n in names}


def statistics_of(module: torch.nn.Module, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The running statistics that batch and instance norms update in training, by their names in ``buffers``."""
    names = [
        f"{prefix}.{name}" if prefix else name
        for prefix, m in module.named_modules()
        if isinstance(m, _NormBase) and m.training and m.track_running_stats
        for name in ("running_mean", "running_var", "num_batches_tracked")
    ]
    return {name: buffers[name] for name in names if name in buffers}


def quantizations_of(module: torch.nn.Module) -> set[str]:
    """The names of the buffers of fake quantizations, which are computed with what they observe."""
    quantizers = ((prefix, m) for prefix, m in module.named_modules() if isinstance(m, FakeQuantizeBase))
    return {f"{prefix}.{name}" if prefix else name for prefix, m in quantizers for name, _ in m.named_buffers()}
