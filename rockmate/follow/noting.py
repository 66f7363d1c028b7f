"""One operation of a followed forward, as it is noted: what memory it reads and writes, and if it may run again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rkgb.storages import counter_of, has_memory
from rockmate.follow.record import Datum, Ledger, Outside, Ref
from rockmate.run.slots import form_of

_STATISTICS = frozenset({"running_mean", "running_var"})
_RATES = frozenset({"dropout_p", "dropout", "p"})
_REPLACING = frozenset({"set_", "resize_", "resize_as_"})
"""Operations that give a tensor other memory."""

_COLLECTIVE = frozenset({"c10d", "fsdp"})
"""Operators that write what they do not say they write: all their tensors but those that are called inputs."""


class Notes(Protocol):
    """What is known of the forward so far: see ``rockmate.follow.tape.Tape``."""

    ledger: Ledger
    data: list[Datum]
    lasting: frozenset[int] | None

    def is_exposed(self, key: int, number: int | None) -> bool:
        """Whether other libraries may write into a storage, which is memory of datum ``number``."""

    def hand_on(self, datum: Datum, t: torch.Tensor) -> None:
        """``t`` of the datum is read."""

    def outside(self, t: torch.Tensor, key: int, copied: bool) -> Outside:
        """An argument in memory that is not followed."""


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

    @classmethod
    def of(cls, func: Any) -> Schema:
        """Of an operator; asking torch takes longer than a small operation."""
        known = _SCHEMAS.get(func)
        if known is None:
            schema = func._schema
            known = _SCHEMAS[func] = cls(
                tuple(a.name for a in schema.arguments),
                frozenset(a.name for a in schema.arguments if _is_written(a, func.namespace)),
                func.namespace in ("aten", "prims") and schema.name.partition("::")[2] not in _REPLACING,
                torch.Tag.nondeterministic_seeded in func.tags,
                "batch_norm" in schema.name,
            )
        return known


def _is_written(argument: Any, namespace: str) -> bool:
    if namespace in _COLLECTIVE:
        return "input" not in argument.name
    return argument.alias_info is not None and argument.alias_info.is_write


_SCHEMAS: dict[Any, Schema] = {}


class Noting:
    """One operation, as it is noted. ``reads``, ``writes``: data, the latter with the storage that is written.
    ``outside``, ``writes_outside``: storages of other memory, by key. ``pure``: it may give the same again.
    """

    __slots__ = ("args", "kwargs", "notes", "outside", "pure", "rates", "reads", "schema", "trains", "writes",
                 "writes_outside")  # fmt: skip

    def __init__(self, notes: Notes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.notes = notes
        self.schema = schema = Schema.of(func)
        self.reads: dict[int, None] = {}
        self.outside: dict[int, torch.UntypedStorage] = {}
        self.writes: dict[int, int] = {}
        self.writes_outside: dict[int, torch.UntypedStorage] = {}
        self.pure, self.rates, self.trains = schema.pure, [], False  # type: ignore[var-annotated]
        if schema.trains:
            given = dict(zip(schema.names, args, strict=False)) | kwargs
            self.trains = bool(given.get("training", given.get("train", True)))
        self.args = tuple([self._of(x, schema.names[k]) for k, x in enumerate(args)])
        self.kwargs = {key: self._of(x, key) for key, x in kwargs.items()}

    def reruns(self) -> bool:
        """Whether it gives the same again."""
        random = self.schema.random and not (self.rates and all(rate == 0 for rate in self.rates))
        return self.pure and not random and (self.trains or not self.writes_outside)

    def draws_from_given(self) -> bool:
        """Whether a generator is among its arguments."""
        given = (*self.args, *self.kwargs.values()) if self.schema.random else ()
        return any(isinstance(x, torch.Generator) for x in given)

    def has(self, key: int) -> bool:
        """Whether a storage from outside is among its arguments."""
        return key in self.outside or key in self.writes_outside

    def _of(self, x: Any, name: str) -> Any:
        if isinstance(x, torch.Tensor):
            if is_traceable_wrapper_subclass(x):  # its class takes the operation apart
                self.pure = False
                return [self._tensor(t, name) for t in flat(x)]
            return self._tensor(x, name)
        if type(x) in (list, tuple):
            return [self._of(y, name) for y in x]
        if name in _RATES:
            self.rates.append(x)
        return x

    def _tensor(self, t: torch.Tensor, name: str) -> Any:
        notes, statistics = self.notes, self.trains and name in _STATISTICS
        if not has_memory(t):
            self.pure = False
            return Outside(t, False)
        storage = t.untyped_storage()
        key = storage._cdata
        number, form = notes.ledger.at.get(key), form_of(t)
        if number is not None and notes.lasting is not None and isinstance(t, torch.nn.Parameter):
            notes.ledger.leave(key, notes.data[number].size)  # a sharded parameter's, which its first use allocates
            number = None
        if notes.is_exposed(key, number):
            self.pure = False
        writes = statistics or name in self.schema.writes
        if number is None:
            (self.writes_outside if writes else self.outside)[key] = storage
            return notes.outside(t, key, statistics)
        if notes.lasting is not None:
            notes.hand_on(notes.data[number], t)
        if writes:
            self.writes[number] = key
            datum = notes.data[number]
            if datum.counter is None and not t.is_inference():
                datum.counter = counter_of(t)  # it may be held from now on
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
