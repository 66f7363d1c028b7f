"""Settings of torch, of the whole process, on which results or the memory of kernels depend."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence

import torch

from rkgb.device import KINDS
from rkgb.device.kind import Setting

_SETTINGS = (
    Setting(torch.get_default_dtype, torch.set_default_dtype),
    Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(setting for kind in KINDS.values() for setting in kind.settings),
)


def settings() -> tuple[Hashable, ...]:
    return tuple(setting.read() for setting in _SETTINGS)


def are_in_force(values: Sequence[Hashable]) -> bool:
    """Whether ``values``, which are ``settings()`` of another time, are those of now, as far as they can be set."""
    pairs = zip(_SETTINGS, values, strict=True)
    return all(setting.write is None or setting.read() == value for setting, value in pairs)


@contextlib.contextmanager
def under_settings(values: Sequence[Hashable]) -> Iterator[None]:
    """Run under ``values``, which are ``settings()`` of another time; those that cannot be set stay as they are."""
    before = settings()
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Sequence[Hashable]) -> None:
    for setting, value in zip(_SETTINGS, values, strict=True):  # each is read again: some follow from those before
        if setting.write is not None and setting.read() != value:
            setting.write(value)
