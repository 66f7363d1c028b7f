"""One operation of a followed forward, as it is noted: what memory it reads and writes, and if it may run again."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rkgb.storages import has_memory
from rockmate.follow.policy import Tape
from rockmate.follow.record import Outside, Ref
from rockmate.run.slots import form_of

_STATISTICS = frozenset({"running_mean", "running_var"})
_RATES = frozenset({"dropout_p", "dropout", "p"})
_REPLACING = frozenset({"set_", "resize_", "resize_as_"})
"""Operations that give a tensor other memory."""

_COLLECTIVE = frozenset({"c10d", "fsdp"})
"""Operators that write what they do not say they write: all their tensors but those that are called inputs."""


@dataclass(frozen=True, slots=True)
class Schema:
    """What is known of an operator. ``names`` of its arguments, by position and by name; ``writes``: those that it
    writes. ``pure``: torch describes it, and it gives no tensor other memory. ``random``: it may draw numbers.
    ``trains``: it is a batch norm.
    """

    names: tuple[str, ...]
    writes: frozenset[str]
    pure: bool
    random: bool
    trains: bool


@functools.cache  # asking torch takes longer than a small operation
def schema_of(func: Any) -> Schema:
    schema = func._schema
    return Schema(
        tuple(a.name for a in schema.arguments),
        frozenset(a.name for a in schema.arguments if _is_written(a, func.namespace)),
        func.namespace in ("aten", "prims") and schema.name.partition("::")[2] not in _REPLACING,
        torch.Tag.nondeterministic_seeded in func.tags,
        "batch_norm" in schema.name,
    )


def _is_written(argument: Any, namespace: str) -> bool:
    if namespace in _COLLECTIVE:
        return "input" not in argument.name
    return argument.alias_info is not None and argument.alias_info.is_write


class Noting:
    """One operation, as it is noted. ``reads``, ``writes``: data, the latter with the storage that is written.
    ``outside``, ``writes_outside``: storages of other memory, by key. ``pure``: it may give the same again. ``trains``:
    it writes running statistics.
    """

    def __init__(self, tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tape, self.schema = tape, (schema := schema_of(func))
        self.reads: dict[int, None] = {}
        self.outside: dict[int, torch.UntypedStorage] = {}
        self.writes: dict[int, int] = {}
        self.writes_outside: dict[int, torch.UntypedStorage] = {}
        given = dict(zip(schema.names, args, strict=False)) | kwargs if schema.trains or schema.random else {}
        self.trains = schema.trains and bool(given.get("training", given.get("train", True)))
        rates = [x for name, x in given.items() if name in _RATES and not isinstance(x, torch.Tensor)]
        self.pure = schema.pure and (not schema.random or (bool(rates) and all(rate == 0 for rate in rates)))
        self.args = tuple([self._of(x, schema.names[k]) for k, x in enumerate(args)])
        self.kwargs = {key: self._of(x, key) for key, x in kwargs.items()}

    def reruns(self) -> bool:
        """Whether it gives the same again."""
        return self.pure and (self.trains or not self.writes_outside)

    def draws_from_given(self) -> bool:
        """Whether a generator is among its arguments."""
        given = (*self.args, *self.kwargs.values()) if self.schema.random else ()
        return any(isinstance(x, torch.Generator) for x in given)

    def _of(self, x: Any, name: str) -> Any:
        if isinstance(x, torch.Tensor):
            if is_traceable_wrapper_subclass(x):  # its class takes the operation apart
                self.pure = False
                return [self._tensor(t, name) for t in flat(x)]
            return self._tensor(x, name)
        if type(x) in (list, tuple):
            return [self._of(y, name) for y in x]
        return x

    def _tensor(self, t: torch.Tensor, name: str) -> Any:
        tape, statistics = self.tape, self.trains and name in _STATISTICS
        if not has_memory(t):
            self.pure = False
            return Outside(t, False)
        storage = t.untyped_storage()
        key = storage._cdata
        number, form = tape.ledger.at.get(key), form_of(t)
        if number is not None and tape.lasting is not None and isinstance(t, torch.nn.Parameter):
            tape.ledger.leave(key, tape.data[number].size)  # a sharded parameter's, which its first use allocates
            number = None
        if tape.is_exposed(key, number):
            self.pure = False
        writes = statistics or name in self.schema.writes
        if number is None:
            (self.writes_outside if writes else self.outside)[key] = storage
            return tape.outside(t, key, statistics)
        if tape.lasting is not None:
            tape.hand_on(tape.data[number], t)
        if writes:
            self.writes[number] = key
            tape.data[number].count_writes(t)  # it may be held from now on
        self.reads[number] = None
        return Ref(number, form)


def flat(result: Any) -> Iterator[torch.Tensor]:
    """The tensors among the results of an operation, those of which others are made taken apart."""
    if isinstance(result, torch.Tensor):
        if is_traceable_wrapper_subclass(result):
            for name in result.__tensor_flatten__()[0]:
                yield from flat(getattr(result, name))
        else:
            yield result
    elif isinstance(result, (list, tuple)):
        for x in result:
            yield from flat(x)
