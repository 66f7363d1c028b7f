"""Recordings of torch's allocator are read, and replayed with every segment and every address."""

from __future__ import annotations

from typing import Any

import pytest
from allocator_model import MIB
from programs import load
from simulated_allocator import Allocator

from rkgb.errors import AllocatorError
from rockmate.planning.reserved import Alloc, Free

recorded = load("benchmarks/gpu_run/recorded.py")
read_segments, read_trace, replay_trace = recorded.read_segments, recorded.read_trace, recorded.replay_trace
EmptyCache, replay = recorded.EmptyCache, recorded.replay

BASE = 0x7F0000000000


def entry(action: str, address: int, size: int, stream: int = 0) -> dict[str, Any]:
    """One entry of ``torch.cuda.memory._snapshot()["device_traces"][0]``, as torch 2.9 writes it (frames left out)."""
    where = "device_free" if action == "oom" else "addr"
    return {"action": action, where: address, "size": size, "stream": stream, "time_us": 0, "compile_context": "N/A"}


def gone(address: int, size: int) -> list[dict[str, Any]]:
    return [entry("free_requested", address, size), entry("free_completed", address, size)]


# By the rules: the driver may put the second segment below the first, and then equal blocks are taken there.
STEP = [
    entry("segment_alloc", BASE + 64 * MIB, 20 * MIB),
    entry("alloc", BASE + 64 * MIB, 6 * MIB - 100),
    entry("segment_alloc", BASE, 20 * MIB),
    entry("alloc", BASE, 20 * MIB),
    *gone(BASE, 20 * MIB),
    *gone(BASE + 64 * MIB, 6 * MIB - 100),
    entry("snapshot", 0, 0),
    entry("alloc", BASE, 5 * MIB),
    entry("segment_alloc", BASE + 2**30, 2 * MIB),
    entry("alloc", BASE + 2**30, 300),
    entry("segment_free", BASE + 64 * MIB, 20 * MIB),
    entry("segment_alloc", BASE + 2**31, 30 * MIB),
    entry("alloc", BASE + 2**31, 30 * MIB),
    entry("oom", 7 * MIB, 80 * MIB),
]


def test_a_trace_replays_with_every_segment_and_address() -> None:
    trace = read_trace(STEP)
    assert EmptyCache() in trace.events and Alloc(300, BASE + 2**30) in trace.events
    assert [a.size // MIB for a in trace.actions] == [20, 20, 2, 20, 30]
    allocator = replay_trace(trace)
    assert allocator.peak == (35 * MIB + 300, 35 * MIB + 512, 52 * MIB)
    assert [(s.size // MIB, len(s.blocks)) for s in allocator.segments] == [(20, 2), (2, 2), (30, 1)]


def test_a_replay_elsewhere_has_the_same_sizes() -> None:
    """Without the recorded addresses only the choice between equal blocks can differ."""
    allocator = replay(read_trace(STEP).events)
    assert [(a.kind, a.size) for a in allocator.actions][:3] == [("segment_alloc", n * MIB) for n in (20, 20, 2)]


def test_a_trace_of_expandable_segments() -> None:
    before = [
        entry("segment_map", BASE, 40 * MIB),
        entry("alloc", BASE, 25 * MIB),
        entry("alloc", BASE + 25 * MIB, 3 * MIB),
        *gone(BASE, 25 * MIB),
        entry("segment_unmap", BASE, 20 * MIB),
    ]
    low = [entry("segment_map", BASE, 20 * MIB), entry("alloc", BASE, 22 * MIB)]
    high = [entry("segment_map", BASE + 40 * MIB, 20 * MIB), entry("alloc", BASE + 28 * MIB, 30 * MIB)]
    allocator = replay_trace(read_trace([*before, *high, *low]), expandable=True)
    assert allocator.peak == (55 * MIB, 55 * MIB, 60 * MIB)
    assert [(s.address, s.size) for s in allocator.segments] == [(BASE, 60 * MIB)]
    # The lowest place with room: 25 MiB before the block in use are too few for 30.
    with pytest.raises(AllocatorError, match="segment_map"):
        replay_trace(read_trace([*before, low[0], *high]), expandable=True)


def snapshot(allocator: Allocator, expandable: bool = False) -> list[dict[str, Any]]:
    """``torch.cuda.memory._snapshot()["segments"]`` of what ``allocator`` holds."""
    return [
        {
            "address": s.address,
            "total_size": s.size,
            "segment_type": "small" if s.small else "large",
            "is_expandable": expandable,
            "blocks": [
                {"address": a, "size": b, "requested_size": r, "state": "active_allocated" if r else "inactive"}
                for a, b, r in s.blocks
            ],
        }
        for s in allocator.segments
    ]


@pytest.mark.parametrize("expandable", [False, True])
def test_a_recording_may_begin_with_memory_in_use(expandable: bool) -> None:
    before = Allocator(expandable=expandable)
    _, second, _ = (before.malloc(size) for size in (5 * MIB, 50 * MIB, 5 * MIB))
    before.malloc(700)
    before.free(second)
    before.empty_cache()  # leaves a hole in an expandable segment, and gives 50 MiB back otherwise
    held = snapshot(before, expandable)
    again = Allocator(expandable=expandable)
    handles = again.adopt(read_segments(held))
    assert again.segments == before.segments and again.levels == before.levels
    live = [(a, r) for s in before.segments for a, _, r in s.blocks if r]
    trace = read_trace([e for a, r in live for e in gone(a, r)], held)
    assert replay_trace(trace, expandable).levels == (0, 0, before.reserved)
    assert again.malloc(40 * MIB) and before.malloc(40 * MIB)
    assert again.segments == before.segments
    for handle in handles.values():
        again.free(handle)
    again.empty_cache()
    assert [s.size for s in again.segments] == [60 * MIB if expandable else 40 * MIB]


def test_what_differs_is_named() -> None:
    other = [entry("segment_alloc", BASE, 22 * MIB), *STEP[1:]]
    with pytest.raises(AllocatorError, match=r"action 0 of the allocator is .*20971520.*; recorded was .*23068672"):
        replay_trace(read_trace(other))
    moved = [*STEP[:1], entry("alloc", BASE + 65 * MIB, 6 * MIB)]
    with pytest.raises(AllocatorError, match="6291456 bytes come to lie at") as e:
        replay_trace(read_trace(moved))
    assert e.value.__notes__ == [f"event 0: {Alloc(6 * MIB, BASE + 65 * MIB)}"]
    with pytest.raises(AllocatorError, match=r"ends before the recorded .*segment_alloc"):
        replay_trace(read_trace([*STEP[:2], entry("segment_alloc", 1, 2)]))


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(AllocatorError, match="entry 1 gives back 5 bytes at 0x1 that were taken before"):
        read_trace(gone(1, 5))
    with pytest.raises(AllocatorError, match="entry 1 is of a second stream, 7"):
        read_trace([STEP[0], entry("alloc", 1, 2, stream=7)])
    with pytest.raises(AllocatorError, match="'annotation', which is not known"):
        read_trace([entry("annotation", 1, 2)])


def test_events_that_cannot_be_are_named() -> None:
    with pytest.raises(AllocatorError, match="'a' is given back, but is not in use"):
        replay([Free("a")])
    with pytest.raises(AllocatorError, match="'a' is taken, but is in use") as e:
        replay([Alloc(1, "a"), Alloc(1, "a")])
    assert e.value.__notes__ == ["event 1: Alloc(size=1, name='a')"]
