"""Allocations and releases as events, replayed by the simulated allocator."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rkgb.device.allocator import Allocator
from rkgb.errors import AllocatorError


@dataclass(frozen=True, slots=True)
class Alloc:
    """``size`` bytes are allocated under ``name``, which no other memory in use has."""

    size: int
    name: Hashable


@dataclass(frozen=True, slots=True)
class Free:
    """The memory of ``name`` is released."""

    name: Hashable


@dataclass(frozen=True, slots=True)
class EmptyCache:
    """Free segments go back to the driver, by ``torch.cuda.empty_cache()`` or because memory was short."""


Event = Alloc | Free | EmptyCache


def replay(
    events: Iterable[Event], allocator: Allocator | None = None, live: Mapping[Any, int] | None = None
) -> Allocator:
    """Apply ``events`` to ``allocator``, by default a new one, and return it.

    ``live``: name -> handle of the memory in use before. Raises ``AllocatorError`` with a note that names the event.
    """
    allocator = allocator or Allocator()
    handles: dict[Hashable, int] = dict(live or {})
    for k, event in enumerate(events):
        try:
            if isinstance(event, EmptyCache):
                allocator.empty_cache()
            elif isinstance(event, Free):
                if event.name not in handles:
                    raise AllocatorError(f"{event.name!r} is given back, but is not in use")
                allocator.free(handles.pop(event.name))
            elif event.name in handles:
                raise AllocatorError(f"{event.name!r} is taken, but is in use already")
            else:
                handles[event.name] = allocator.malloc(event.size)
        except AllocatorError as error:
            error.add_note(f"event {k}: {event}")
            raise
    return allocator
