"""The optimizers of the process: which have stepped, and what their state takes, or will take."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from rkgb.trees import tensors_in

MOMENTS = 2
"""Times the bytes of a parameter that an optimizer's state is supposed to take before one is known: Adam's."""

_UNUSED = -1


class Optimizers:
    """Those that have stepped, or that were said. ``changes``: rises when one is known, and when it has state for more
    or fewer parameters.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._watches = False

    def watch(self) -> None:
        """From now on, those that step are known."""
        if not self._watches:
            register_optimizer_step_post_hook(self._stepped)
            self._watches = True

    def know(self, given: Iterable[Optimizer]) -> None:
        """These are known before their first step."""
        for optimizer in given:
            if optimizer not in self._counts:
                self._note(optimizer, _UNUSED)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self._counts.get(optimizer) != len(optimizer.state):
            self._note(optimizer, len(optimizer.state))

    def _note(self, optimizer: Optimizer, count: int) -> None:
        """``count``: parameters that have a state since its last step; ``_UNUSED`` before the first one."""
        self._counts[optimizer] = count
        self.changes += 1

    def state_bytes(self, trained: Mapping[int, torch.nn.Parameter], device: torch.device) -> tuple[int, int]:
        """Bytes on ``device`` of the optimizers' state for ``trained`` (by ``id``): what is there, and what is to come.

        Before an optimizer of one of these is known, ``MOMENTS`` of each are to come.
        """
        there = to_come = 0
        none_known = True
        for optimizer, count in list(self._counts.items()):
            mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in trained]
            none_known = none_known and not mine
            there += sum(_bytes_on(optimizer.state.get(p), {device.type}) for p in mine)
            if count == _UNUSED and (fresh := [p for p in mine if not optimizer.state.get(p)]):
                to_come += _bytes_to_come(optimizer, fresh, device)
        return there, to_come + none_known * MOMENTS * sum(map(local_bytes, trained.values()))


OPTIMIZERS = Optimizers()
"""Of this process."""


def _bytes_to_come(optimizer: Optimizer, fresh: list[torch.nn.Parameter], device: torch.device) -> int:
    """What a first step of ``optimizer`` allocates for ``fresh`` parameters, by one of a twin of it on stand-ins that
    have no memory; where it cannot step so, ``MOMENTS`` of each.
    """
    local = {id(p): getattr(p, "_local_tensor", p) for p in fresh}
    stand_ins = {k: torch.nn.Parameter(torch.empty_like(p, device="meta")) for k, p in local.items()}
    for p in stand_ins.values():
        p.grad = torch.empty_like(p)
    groups = [
        {**group, "params": [stand_ins[id(p)] for p in group["params"] if id(p) in stand_ins], "fused": False}
        for group in optimizer.param_groups
    ]
    state: defaultdict[Any, Any] = defaultdict(dict)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({**vars(optimizer), "param_groups": groups, "state": state})
    step: Any = type(optimizer).step
    try:
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(twin)  # no hooks of anybody's
    except Exception:  # noqa: BLE001 - others' optimizers may do anything, such as reading values
        return MOMENTS * sum(map(local_bytes, fresh))
    return _bytes_on(dict(state), {"meta", device.type})


def _bytes_on(state: Any, devices: set[str]) -> int:
    return sum(local_bytes(t) for t in tensors_in(state) if t.device.type in devices)


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes that ``tensor`` takes here: where ``fully_shard`` has sharded it, those of this rank's part."""
    size: int = getattr(tensor, "_local_tensor", tensor).nbytes
    return size
