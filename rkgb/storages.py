"""Which memory a tensor lies in, and how often it was written."""

from __future__ import annotations

import torch


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
