"""Which memory a tensor lies in, and how often it was written."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

_DATA: Any = torch._C.TensorBase.data


def memory_of(t: torch.Tensor) -> torch.UntypedStorage:
    """The allocation that a tensor lies in; of a sparse tensor, that of its values."""
    if t.layout == torch.strided:
        return t.untyped_storage()
    return (t._values() if t.layout == torch.sparse_coo else t.values()).untyped_storage()


def storage_key(t: torch.Tensor) -> int:
    """A number that is equal for tensors in the same memory, as long as these tensors live."""
    memory = t.untyped_storage() if t.layout == torch.strided else memory_of(t)
    key: int = memory._cdata
    return key


def version_of(t: torch.Tensor) -> int:
    """The version counter of ``t``; 0 for a tensor made in inference mode, which has none."""
    return 0 if t.is_inference() else t._version


def versions_of(tensors: Collection[torch.Tensor]) -> list[int]:
    """``version_of`` each of ``tensors``, in less time."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # one was made in inference mode
        return [version_of(t) for t in tensors]


def alias_of(t: torch.Tensor) -> torch.Tensor:
    """``t`` without its graph, with its version counter, also where operations run below autograd."""
    key = torch._C.DispatchKey.ADInplaceOrView
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        return t.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def counter_of(t: torch.Tensor) -> torch.Tensor:
    """A tensor of no memory with the version counter of ``t``."""
    counter = alias_of(t)
    _DATA.__set__(counter, torch.empty(0, dtype=t.dtype, device=t.device))  # whoever watches for new memory is not told
    return counter


def has_memory(t: torch.Tensor) -> bool:
    """Whether ``t`` lies in one storage, in strides, and is not what ``vmap`` and its like make of some."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(t)
    return t.layout == torch.strided and not t.is_nested and torch._C._has_storage(t) and not wrapped
