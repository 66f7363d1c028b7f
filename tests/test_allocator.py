"""The simulated allocator: rules of torch's source by hand, and random programs beside a slow model of it."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from allocator_model import MIB, Model
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_allocator import Allocator

from rkgb.device import allocator as product
from rkgb.device.allocator import round_size, segment_size
from rkgb.errors import AllocatorError


def layout(allocator: Allocator) -> list[list[tuple[int, bool]]]:
    """(bytes, whether in use) of every block of every segment."""
    return [[(size, bool(requested)) for _, size, requested in segment.blocks] for segment in allocator.segments]


@pytest.mark.parametrize(("size", "block"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_round_size(size: int, block: int) -> None:
    assert round_size(size) == block


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),  # kSmallBuffer up to kSmallSize
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),  # kLargeBuffer below kMinLargeAlloc
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # else multiples of kRoundLarge
        (10 * MIB + 512, 12 * MIB),
        (25 * MIB, 26 * MIB),
    ],
)
def test_get_allocation_size(size: int, segment: int) -> None:
    assert segment_size(size) == segment
    allocator = Allocator()
    allocator.malloc(size)
    assert (allocator.requested, allocator.reserved) == (size, segment)


def test_should_split_small_pool_from_512_bytes() -> None:
    allocator = Allocator()
    allocator.malloc(MIB)
    allocator.malloc(MIB - 512)
    assert layout(allocator) == [[(MIB, True), (MIB - 512, True), (512, False)]]


def test_should_split_large_pool_only_above_1_mib() -> None:
    allocator = Allocator()
    kept = allocator.malloc(11 * MIB)  # 1 MiB of the segment of 12 MiB remains, which is not more than kSmallSize
    assert layout(allocator) == [[(12 * MIB, True)]]
    assert allocator.levels == (11 * MIB, 12 * MIB, 12 * MIB)
    allocator.free(kept)
    allocator.malloc(11 * MIB - 512)
    assert layout(allocator) == [[(11 * MIB - 512, True), (MIB + 512, False)]]


def test_should_split_expandable_segments_from_512_bytes() -> None:
    allocator = Allocator(expandable=True)
    allocator.malloc(20 * MIB - 512)
    assert layout(allocator) == [[(20 * MIB - 512, True), (512, False)]]


def test_get_free_block_takes_the_smallest_then_the_lowest() -> None:
    allocator = Allocator()
    sizes = [12 * MIB, 30 * MIB, 12 * MIB, 14 * MIB]
    handles = [allocator.malloc(size) for size in sizes]
    addresses = [allocator.address(h) for h in handles]
    for handle in handles:
        allocator.free(handle)
    order = [addresses.index(allocator.address(allocator.malloc(12 * MIB))) for _ in range(4)]
    assert order == [0, 2, 3, 1]  # the 2 MiB that remain of 14 are split off, the 18 of 30 as well
    assert allocator.reserved == sum(sizes)


def test_get_pool_keeps_small_and_large_apart() -> None:
    allocator = Allocator()
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(MIB)
    assert allocator.reserved == 22 * MIB


def test_try_merge_blocks_unites_free_neighbours() -> None:
    allocator = Allocator()
    a, b, c, _ = (allocator.malloc(4 * MIB) for _ in range(4))
    allocator.free(a)
    allocator.free(c)
    assert layout(allocator) == [
        [(4 * MIB, False), (4 * MIB, True), (4 * MIB, False), (4 * MIB, True), (4 * MIB, False)]
    ]
    allocator.free(b)
    assert layout(allocator) == [[(12 * MIB, False), (4 * MIB, True), (4 * MIB, False)]]


def test_release_cached_blocks_gives_back_whole_segments_only() -> None:
    allocator = Allocator()
    allocator.free(allocator.malloc(30 * MIB))
    kept = allocator.malloc(4 * MIB)  # in the 30 MiB
    allocator.free(allocator.malloc(28 * MIB))
    assert allocator.reserved == 58 * MIB
    allocator.empty_cache()  # the free 28 MiB go, 26 of 30 stay
    assert allocator.reserved == 30 * MIB
    assert allocator.address(kept) == 0


def test_try_allocate_expandable_block_grows_by_pages() -> None:
    allocator = Allocator(expandable=True)
    a = allocator.malloc(15 * MIB)
    allocator.malloc(15 * MIB)  # the 5 MiB that are left, and one page more
    assert layout(allocator) == [[(15 * MIB, True), (15 * MIB, True), (10 * MIB, False)]]
    allocator.malloc(512)
    assert allocator.reserved == 42 * MIB
    allocator.free(a)
    assert [action.kind for action in allocator.actions] == ["segment_map"] * 3


def test_unmap_block_gives_back_whole_pages_only() -> None:
    allocator = Allocator(expandable=True)
    a, b, c = (allocator.malloc(size * MIB) for size in (5, 50, 5))
    allocator.free(b)
    allocator.empty_cache()  # of 5 to 55, the page from 20 to 40
    assert [(s.address, s.size) for s in allocator.segments] == [(0, 20 * MIB), (40 * MIB, 20 * MIB)]
    allocator.malloc(40 * MIB)  # find_expandable_block: free, without memory, free
    assert layout(allocator) == [[(5 * MIB, True), (40 * MIB, True), (10 * MIB, False), (5 * MIB, True)]]
    for handle in (a, c):
        allocator.free(handle)
    assert allocator.peak.reserved == 60 * MIB


def test_map_block_fills_several_holes() -> None:
    allocator = Allocator(expandable=True)
    a, b, c = (allocator.malloc(20 * MIB) for _ in range(3))
    allocator.free(a)
    allocator.free(c)
    allocator.empty_cache()
    allocator.free(b)
    for handle in [allocator.malloc(MIB) for _ in range(3)]:
        allocator.free(handle)  # 4 MiB of the small pool are held
    before = len(allocator.actions)
    handle = allocator.malloc(50 * MIB)
    mapped = [(a.address // MIB, a.size // MIB) for a in allocator.actions[before:] if a.kind == "segment_map"]
    assert mapped == [(0, 20), (40, 20)]
    assert (allocator.address(handle), allocator.reserved) == (0, 64 * MIB)


def test_get_free_block_prefers_what_cannot_expand() -> None:
    """``expandable_size``: a free block at the end counts with all addresses behind it."""
    allocator = Allocator(expandable=True)
    allocator.malloc(5 * MIB)
    hole = allocator.malloc(12 * MIB)
    allocator.malloc(13 * MIB)  # 10 MiB are left at the end
    where = allocator.address(hole)
    allocator.free(hole)
    assert allocator.address(allocator.malloc(8 * MIB)) == where


def test_get_free_block_takes_the_lowest_of_equal_expandable_blocks() -> None:
    allocator = Allocator(expandable=True)
    handles = [allocator.malloc(4 * MIB) for _ in range(5)]
    lowest = allocator.address(handles[1])
    for handle in (handles[3], handles[1]):
        allocator.free(handle)
    assert allocator.address(allocator.malloc(3 * MIB)) == lowest


def test_nothing_has_no_block() -> None:
    allocator = Allocator()
    handle = allocator.malloc(0)
    assert (allocator.address(handle), allocator.levels) == (None, (0, 0, 0))
    allocator.free(handle)
    with pytest.raises(AllocatorError, match="in use no longer"):
        allocator.free(handle)
    with pytest.raises(AllocatorError, match="-1 bytes"):
        allocator.malloc(-1)


# Sizes at the edges of the rules, and any others.
SIZES = st.one_of(
    st.sampled_from([1, 512, 513, MIB // 2, MIB - 512, MIB, MIB + 1, 3 * MIB, 10 * MIB - 512, 10 * MIB, 11 * MIB]),
    st.integers(1, 3 * MIB),
    st.integers(1, 45).map(lambda n: n * MIB),
)
# None empties the cache; a number takes so many bytes, a fraction gives back one of what is in use.
PROGRAMS = st.lists(st.one_of(SIZES, SIZES, st.floats(0, 0.999), st.floats(0, 0.999), st.none()), max_size=60)


def long_program(seed: int) -> list[float | None]:
    """Half pages, many of them given back before the cache is emptied: expandable segments get several holes."""
    random = Random(seed)
    takes = random.uniform(0.3, 0.5)
    weights = [takes, 0.9 - takes, 0.1]
    return [random.choices([random.randint(1, 12) * 10 * MIB, random.random(), None], weights)[0] for _ in range(80)]


@settings(max_examples=400, deadline=None)
@given(PROGRAMS | st.integers(0, 2**32).map(long_program), st.booleans())
def test_random_programs_as_the_model(program: list[float | None], expandable: bool) -> None:
    allocator, model = Allocator(expandable), Model(expandable)
    live: list[tuple[int, int]] = []
    before = allocator.peak
    for event in program:
        if event is None:
            allocator.empty_cache()
            model.release()
        elif isinstance(event, int):
            address = model.malloc(event)
            handle = allocator.malloc(event)
            assert allocator.address(handle) == address
            live.append((handle, address))
        elif live:
            handle, address = live.pop(int(event * len(live)))
            allocator.free(handle)
            model.free(address)
        assert allocator.levels == model.levels
        stretches = [(a, b - a) for r in model.ranges for a, b in r.mapped()]
        assert [(s.address, s.size) for s in allocator.segments] == sorted(stretches)
        assert allocator.peak >= before and all(a >= b for a, b in zip(allocator.peak, before, strict=True))
        before = allocator.peak


@settings(max_examples=200, deadline=None)
@given(PROGRAMS | st.integers(0, 2**32).map(long_program))
def test_programs_that_empty_no_cache_as_the_model(program: list[float | None]) -> None:
    """Plans are predicted with the allocator alone, without what recordings have beside it."""
    allocator, model = product.Allocator(), Model(expandable=False)
    live: list[tuple[int, int]] = []
    for event in program:
        if isinstance(event, int):
            live.append((allocator.malloc(event), model.malloc(event)))
        elif event is not None and live:
            handle, address = live.pop(int(event * len(live)))
            allocator.free(handle)
            model.free(address)
        assert allocator.levels == model.levels


@settings(max_examples=200, deadline=None)
@given(PROGRAMS | st.integers(0, 2**32).map(long_program), st.booleans())
def test_blocks_never_overlap_and_unite_when_all_is_free(program: list[float | None], expandable: bool) -> None:
    allocator = Allocator(expandable)
    live: list[int] = []
    for event in program:
        if event is None:
            allocator.empty_cache()
        elif isinstance(event, int):
            live.append(allocator.malloc(event))
        elif live:
            allocator.free(live.pop(int(event * len(live))))
        blocks = [block for segment in allocator.segments for block in segment.blocks]
        assert all(a + size <= b for (a, size, _), (b, _, _) in pairwise(blocks))
        assert sum(size for _, size, _ in blocks) == allocator.reserved
        assert sum(size for _, size, requested in blocks if requested) == allocator.allocated >= allocator.requested
        used = {address for address, _, requested in blocks if requested}
        assert used == {allocator.address(handle) for handle in live}
    for handle in live:
        allocator.free(handle)
    assert all(len(segment.blocks) == 1 for segment in allocator.segments)
    assert allocator.levels == (0, 0, allocator.reserved)
    allocator.empty_cache()
    assert allocator.segments == () and allocator.reserved == 0
