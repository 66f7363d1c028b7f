"""What operators that a run calls below autograd write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# These operations change running statistics, on which their results in training do not depend. So they may be
# recomputed, on copies of the statistics. Other operations that read these run once, as does one that changes any other
# buffer. Version counters and most of their schemas do not show the writes.
STATISTICS = frozenset("batch_norm instance_norm native_batch_norm _batch_norm_impl_index cudnn_batch_norm".split())


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes to, running statistics among them: positions and names."""
    names = [x.name for x in func._schema.arguments]
    statistics = [(names.index(name), name) for name in ("running_mean", "running_var") if name in names]
    return *written_arguments(func), *statistics


@cache
def written_arguments(op: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes to, by its schema: positions and names."""
    arguments = enumerate(op._schema.arguments)
    return tuple((k, x.name) for k, x in arguments if x.alias_info is not None and x.alias_info.is_write)


def named(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an operator is given, by the names of its schema."""
    return dict(zip((x.name for x in op._schema.arguments), args, strict=False)) | dict(kwargs)


class WritesSeen(TorchDispatchMode):
    """Calls ``before_write`` with what an operator is about to write to, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.before_write: Callable[[list[Any]], None] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to skip its methods, torch would import TorchDynamo, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        writes = _written(func)
        if writes and self.before_write is not None:
            self.before_write([args[k] if k < len(args) else kwargs.get(argument) for k, argument in writes])
        return func(*args, **kwargs)
