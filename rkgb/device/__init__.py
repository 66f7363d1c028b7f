"""Kinds of devices: the CPU, and GPUs with CUDA's interface.

Whatever depends on the kind is a method of ``Kind``: random generators, the clock, measuring memory, workspaces of
kernels, settings of torch. To support another kind, write a class like ``Cpu`` and add it to ``KINDS``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rkgb.device.cpu import Cpu
from rkgb.device.cuda import Cuda
from rkgb.device.kind import Kind
from rkgb.errors import MeasureError, UnsupportedError

__all__ = [
    "KINDS",
    "Cpu",
    "Cuda",
    "Kind",
    "default_device",
    "device_in_use",
    "kind_of",
    "one_device",
]

KINDS: dict[str, Kind] = {kind.type: kind for kind in (Cpu(), Cuda())}
"""The kinds by torch's name of the device type. Autocast is read and set for each of them."""


def kind_of(device: torch.device) -> Kind:
    """The kind of ``device``. The meta device, which has no memory, is treated as the CPU."""
    return KINDS.get(device.type, KINDS["cpu"])


def default_device() -> str:
    """The device type that scripts use by default: "cuda" if the machine has a GPU, else "cpu"."""
    return next(name for name, kind in reversed(KINDS.items()) if kind.available())


def device_in_use() -> torch.device:
    """The GPU on which the program holds memory, or else the CPU. Raises ``MeasureError`` if there are several."""
    used = next(devices for kind in reversed(KINDS.values()) if (devices := kind.in_use()))
    if len(used) > 1:
        raise MeasureError(f"there is memory on {', '.join(map(str, used))}: say which of them to measure (device=…)")
    return used[0]


def one_device(
    parameters: Iterable[tuple[str, torch.device]], others: Iterable[tuple[str, torch.device]] = ()
) -> torch.device:
    """The one device of all ``parameters`` and ``others``, which are pairs of a name and a device.

    ``others`` may also lie on the CPU. Raises ``UnsupportedError``, which names the tensors, if there are two devices
    or one of an unknown kind.
    """
    home: tuple[str, torch.device] | None = None
    for required, named in ((True, parameters), (False, others)):
        for name, device in named:
            elsewhere = not required and device.type == "cpu"
            if device.type == "meta" or elsewhere or (home and device == home[1]):
                continue
            if device.type not in KINDS:
                raise UnsupportedError(
                    f"{name} is on {device}, and plans can be made for {' and '.join(KINDS)}: move the model and the "
                    "sample there"
                )
            if home:
                raise UnsupportedError(
                    f"{home[0]} is on {home[1]} and {name} on {device}, and a plan is for one device: its memory is "
                    "counted as one. Plan the submodules of each device instead of the whole module"
                )
            home = name, device
    return home[1] if home else torch.device("cpu")
