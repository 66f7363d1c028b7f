"""A simulator of torch's caching allocator for CUDA, which knows how many bytes the allocator reserves.

An out-of-memory error depends on the bytes that the allocator holds (*reserved*). These depend on the order of all
allocations and releases. The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``, whose functions and constants
are named beside them, as they were in torch 2.6 and after 2.10; the constants are those of 2.13. One stream, no
graph capture, no private pools, and torch's defaults: ``expandable_segments`` off, ``max_split_size_mb`` unlimited,
``roundup_power2_divisions`` off, ``garbage_collection_threshold`` 0, ``large_segment_size_mb`` 20.

Where the driver puts a segment is not known: here each lies behind the one before. That decides only between free
blocks of equal size, of which the lowest is taken.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

from rkgb.errors import AllocatorError

GRAIN = 512  # kMinBlockSize
SMALL_SIZE = 2**20  # kSmallSize: the largest block of the small pool; the large pool keeps smaller remainders whole
SMALL_BUFFER = 2 * 2**20  # kSmallBuffer: segments of the small pool
LARGE_BUFFER = 20 * 2**20  # kLargeBuffer, since torch 2.10 large_segment_size(): the same of the large pool
MIN_LARGE = 10 * 2**20  # kMinLargeAlloc: from here on a segment is made for one block
ROUND_LARGE = 2 * 2**20  # kRoundLarge


def round_size(size: int) -> int:
    """Bytes of the block for a request of ``size`` bytes (``round_size``)."""
    return max(GRAIN, -(-size // GRAIN) * GRAIN)


def segment_size(size: int) -> int:
    """Bytes of the new segment when no free block has ``size`` bytes (``get_allocation_size``)."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    return LARGE_BUFFER if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


class Levels(NamedTuple):
    """``requested``: bytes that the program asked for. ``allocated``: bytes of their blocks. ``reserved``: bytes of all
    segments. ``torch.cuda.memory_stats`` calls them ``requested_bytes``, ``allocated_bytes`` and ``reserved_bytes``.
    """

    requested: int
    allocated: int
    reserved: int


@dataclass(slots=True, eq=False)
class Block:
    """A block of a segment (``Block``). ``small``: it is of the small pool. ``before``, ``after``: its neighbours."""

    address: int
    size: int
    small: bool
    requested: int = 0  # 0 in a free block
    before: Block | None = None
    after: Block | None = None


class Allocator:
    """The simulated allocator. The device has as much memory as is asked for."""

    def __init__(self) -> None:
        self.requested = self.allocated = self.reserved = 0
        self._at: dict[int, Block] = {}  # all blocks, by address
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (bytes, address), by whether small
        self._live: dict[int, Block | None] = {}  # handle -> block; None for a request of no bytes
        self._handles = 0
        self._end = 0  # address after all segments so far
        self.peak = self.levels

    @property
    def levels(self) -> Levels:
        """Bytes requested, allocated and reserved now. ``peak`` has the most of each since the last ``reset_peak``."""
        return Levels(self.requested, self.allocated, self.reserved)

    def reset_peak(self) -> None:
        """As ``torch.cuda.reset_peak_memory_stats``."""
        self.peak = self.levels

    def malloc(self, size: int) -> int:
        """Allocate ``size`` bytes; a handle to them. Raises ``AllocatorError`` for a negative size."""
        if size < 0:
            raise AllocatorError(f"{size} bytes cannot be allocated")
        if not size:  # NativeCachingAllocator::allocate returns a null pointer
            return self._use(None, 0)
        rounded = round_size(size)
        block = self._cached(rounded) or self._new(rounded)
        if self._is_split(block, block.size - rounded):
            self._put(self._cut(block, rounded))
        return self._use(block, size)

    def free(self, handle: int) -> None:
        """Release the block of ``handle``, which ``malloc`` returned (``free``, ``free_block``)."""
        block = self._known(handle)
        del self._live[handle]
        if block:
            self._count(-block.requested, -block.size, 0)
            block.requested = 0
            self._join(block)
            self._put(block)

    def _known(self, handle: int) -> Block | None:
        if handle not in self._live:
            raise AllocatorError(f"handle {handle} is in use no longer, or never was: it cannot be given back")
        return self._live[handle]

    def _use(self, block: Block | None, size: int) -> int:
        self._handles += 1
        self._live[self._handles] = block
        if block:
            block.requested = size
            self._count(size, block.size, 0)
        return self._handles

    def _count(self, requested: int, allocated: int, reserved: int) -> None:
        self.requested += requested
        self.allocated += allocated
        self.reserved += reserved
        self.peak = Levels(*map(max, self.peak, self.levels))

    def _cached(self, size: int) -> Block | None:
        """The smallest free block of at least ``size`` bytes, or None (``get_free_block``)."""
        free = self._free[size <= SMALL_SIZE]
        at = bisect_left(free, (size, -1))
        return self._take(self._at[free[at][1]]) if at < len(free) else None

    def _new(self, size: int) -> Block:
        """A block in a new segment from the driver (``alloc_block``)."""
        wanted = segment_size(size)
        block = self._at[self._end] = Block(self._end, wanted, size <= SMALL_SIZE)
        self._end += wanted
        self._count(0, 0, wanted)
        return block

    def _is_split(self, block: Block, rest: int) -> bool:
        """Whether the ``rest`` of ``block``, in bytes, becomes a free block (``should_split``)."""
        return rest >= GRAIN if block.small else rest > SMALL_SIZE

    def _put(self, block: Block) -> None:
        """Insert ``block`` into the free ones of its pool."""
        insort(self._free[block.small], (block.size, block.address))

    def _take(self, block: Block) -> Block:
        """``block``, removed from where ``_put`` inserted it."""
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.address))]
        return block

    def _cut(self, block: Block, size: int) -> Block:
        """Shorten ``block`` to ``size`` bytes, and return the rest as a new block."""
        rest = dataclasses.replace(block, address=block.address + size, size=block.size - size, before=block)
        if rest.after:
            rest.after.before = rest
        block.after, block.size = rest, size
        self._at[rest.address] = rest
        return rest

    def _unites(self, block: Block, other: Block) -> bool:
        """Whether a free ``block`` and its neighbour are to be one."""
        return not other.requested

    def _join(self, block: Block) -> None:
        """Unite ``block``, which is free and in no list, with its free neighbours (``try_merge_blocks``)."""
        for other in (block.before, block.after):
            if other is None or not self._unites(block, other):
                continue
            self._take(other)
            del self._at[other.address], self._at[block.address]
            if other is block.before:
                block.address, block.before = other.address, other.before
                if block.before:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after:
                    block.after.before = block
            block.size += other.size
            self._at[block.address] = block
