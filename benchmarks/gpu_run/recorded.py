"""Recordings of torch's caching allocator for CUDA: read, and replayed by the simulated one, which must do the same.

On CUDA a step is recorded and replayed thus:

    start = torch.cuda.memory._snapshot()["segments"]
    torch.cuda.memory._record_memory_history(max_entries=10**7, context=None)
    step()
    recorded = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    peak = replay_trace(read_trace(recorded, start)).peak
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from gpu_run.allocator import Action, Allocator, Kind, Segment
from rkgb.errors import AllocatorError
from rockmate.planning.reserved import Alloc, Free


@dataclass(frozen=True, slots=True)
class EmptyCache:
    """Free segments go back to the driver, by ``torch.cuda.empty_cache()`` or because memory was short."""


Event = Alloc | Free | EmptyCache


@dataclass(frozen=True, slots=True)
class Trace:
    """A recording: the segments at its ``start``, ``events`` to replay, and the driver's ``actions`` that follow."""

    start: tuple[Segment, ...]

    events: tuple[Event, ...]
    actions: tuple[Action, ...]


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


_GIVES_BACK = ("segment_free", "segment_unmap")
_DRIVER = ("segment_alloc", "segment_map", *_GIVES_BACK)


def read_segments(segments: Iterable[Mapping[str, Any]]) -> tuple[Segment, ...]:
    """The segments in ``torch.cuda.memory._snapshot()["segments"]``, which must be of one device and one stream."""
    held = []
    for segment in segments:
        blocks = []
        for block in segment["blocks"]:
            used = block["requested_size"] if block["state"] != "inactive" else 0
            blocks.append((block["address"], block["size"], used))
        small = segment["segment_type"] == "small"
        held.append(Segment(segment["address"], segment["total_size"], small, tuple(blocks)))
    return tuple(held)


def read_trace(entries: Iterable[Mapping[str, Any]], start: Iterable[Mapping[str, Any]] = ()) -> Trace:
    """The trace in ``_snapshot()["device_traces"][0]``, which must be of one device and one stream.

    ``start``: the segments of a snapshot before the recording; not needed if the device was not used before. Names of
    events are addresses. Raises ``AllocatorError`` for an unknown action, a second stream, or the release of memory
    that is not in ``start``.

    Fields are those that ``torch/csrc/cuda/Module.cpp`` writes. The size of "alloc" is the request. "free_requested"
    comes before "free_completed", directly unless another stream uses the block. "segment_free" and "segment_unmap"
    become ``EmptyCache`` whatever their cause, so that a replay needs no limit. "oom" and "snapshot" are skipped.
    """
    held = read_segments(start)
    events: list[Event] = []
    actions: list[Action] = []
    live = {address for segment in held for address, _, requested in segment.blocks if requested}
    streams: set[Any] = set()
    last = ""
    for k, entry in enumerate(entries):
        kind, size = entry["action"], entry["size"]
        if kind in ("free_requested", "snapshot", "oom"):
            continue
        if kind == "alloc":
            live.add(entry["addr"])
            events.append(Alloc(size, entry["addr"]))
        elif kind == "free_completed":
            if entry["addr"] not in live:
                raise AllocatorError(
                    f"entry {k} gives back {size} bytes at {entry['addr']:#x} that were taken before the recording: "
                    f"give the segments of a snapshot from before it, and record all entries (max_entries)"
                )
            live.remove(entry["addr"])
            events.append(Free(entry["addr"]))
        elif kind in _DRIVER:
            if kind in _GIVES_BACK and last not in _GIVES_BACK:
                events.append(EmptyCache())
            actions.append(Action(cast(Kind, kind), entry["addr"], size))
        else:
            raise AllocatorError(f"entry {k} has the action {kind!r}, which is not known")
        last = kind
        streams.add(entry.get("stream", 0))
        if len(streams) > 1:
            raise AllocatorError(f"entry {k} is of a second stream, {entry['stream']}: only one is simulated")
    return Trace(held, tuple(events), tuple(actions))


class _Recorded(Allocator):
    """An allocator whose driver gives the addresses of a recording. Any difference from it raises an error."""

    def __init__(self, trace: Trace, expandable: bool) -> None:
        super().__init__(expandable=expandable)
        self._recorded = trace.actions
        self._taken = (event for event in trace.events if isinstance(event, Alloc))

    def malloc(self, size: int) -> int:
        handle = super().malloc(size)
        address, recorded = self.address(handle), next(self._taken).name
        if address != recorded:
            raise AllocatorError(f"{size} bytes come to lie at {address}; recorded was {recorded}")
        return handle

    def _place(self, size: int) -> int:
        coming = self._recorded[len(self.actions) :]
        return next((a.address for a in coming if a.kind not in _GIVES_BACK), super()._place(size))

    def _act(self, kind: Kind, address: int, size: int) -> None:
        super()._act(kind, address, size)
        at = len(self.actions) - 1
        recorded = self._recorded[at] if at < len(self._recorded) else None
        if recorded != self.actions[at]:
            raise AllocatorError(f"action {at} of the allocator is {self.actions[at]}; recorded was {recorded}")


def replay_trace(trace: Trace, expandable: bool = False) -> Allocator:
    """Replay a recording, and return the allocator after it.

    ``expandable``: whether the recording was made under ``expandable_segments:True``. Raises ``AllocatorError`` unless
    each action of the driver and the address of each block is as recorded.
    """
    allocator = _Recorded(trace, expandable)
    replay(trace.events, allocator, allocator.adopt(trace.start))
    if len(allocator.actions) < len(trace.actions):
        raise AllocatorError(f"the replay ends before the recorded {trace.actions[len(allocator.actions)]}")
    return allocator
