"""A simulator of torch's caching allocator for CUDA, which knows how many bytes the allocator reserves.

An out-of-memory error depends on the bytes that the allocator holds (*reserved*). These depend on the order of all
allocations and releases. The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``, whose functions and constants
are named beside them, as they were in torch 2.6 and after 2.10; the constants are those of 2.13. One stream, no
graph capture, no private pools, and torch's defaults: ``max_split_size_mb`` unlimited,
``roundup_power2_divisions`` off, ``garbage_collection_threshold`` 0, ``large_segment_size_mb`` 20.

Where the driver puts a segment is not known: here each lies behind the one before. That decides only between free
blocks of equal size, of which the lowest is taken.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from rkgb.device.allocator_blocks import Action, Block, Blocks, Kind, Levels, Pool, Segment, reach
from rkgb.errors import AllocatorError

GRAIN = 512  # kMinBlockSize
SMALL_SIZE = 2**20  # kSmallSize: the largest block of the small pool; the large pool keeps smaller remainders whole
SMALL_BUFFER = 2 * 2**20  # kSmallBuffer: segments, and pages of expandable ones, of the small pool
LARGE_BUFFER = 20 * 2**20  # kLargeBuffer, since torch 2.10 large_segment_size(): the same of the large pool
MIN_LARGE = 10 * 2**20  # kMinLargeAlloc: from here on a segment is made for one block
ROUND_LARGE = 2 * 2**20  # kRoundLarge
UNLIMITED = 2**60  # bytes of addresses of an expandable segment: torch takes 9/8 of the device's memory


def round_size(size: int) -> int:
    """Bytes of the block for a request of ``size`` bytes (``round_size``)."""
    return max(GRAIN, -(-size // GRAIN) * GRAIN)


def segment_size(size: int) -> int:
    """Bytes of the new segment when no free block has ``size`` bytes (``get_allocation_size``)."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    return LARGE_BUFFER if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


def _addresses(pool: Pool) -> int:
    """Bytes of addresses of an expandable segment (``ExpandableSegment``)."""
    return -(-UNLIMITED // pool.page) * pool.page


class Allocator:
    """The simulated allocator.

    The device has as much memory as is asked for. ``expandable``: whether ``expandable_segments`` is on.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.expandable = expandable
        self.requested = self.allocated = self.reserved = 0
        self.actions: list[Action] = []
        self._small, self._large = Pool(True, SMALL_BUFFER), Pool(False, LARGE_BUFFER)
        self._blocks = Blocks()
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

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, by address. Of an expandable one each mapped stretch counts, as in torch's snapshots."""
        return self._blocks.segments()

    def address(self, handle: int) -> int | None:
        """The address of the block of ``handle``; None for a request of no bytes."""
        block = self._known(handle)
        return block.address if block else None

    def malloc(self, size: int) -> int:
        """Allocate ``size`` bytes; a handle to them. Raises ``AllocatorError`` for a negative size."""
        if size < 0:
            raise AllocatorError(f"{size} bytes cannot be allocated")
        if not size:  # NativeCachingAllocator::allocate returns a null pointer
            return self._use(None, 0)
        rounded = round_size(size)
        pool = self._small if rounded <= SMALL_SIZE else self._large
        block = self._cached(pool, rounded) or self._new(pool, rounded)
        self._split(block, rounded)
        return self._use(block, size)

    def free(self, handle: int) -> None:
        """Release the block of ``handle``, which ``malloc`` returned (``free``, ``free_block``)."""
        block = self._known(handle)
        del self._live[handle]
        if block:
            self._count(-block.requested, -block.size, 0)
            block.requested = 0
            self._blocks.join(block)
            self._blocks.put(block)

    def empty_cache(self) -> None:
        """Return free segments, and free pages of expandable ones, to the driver (``release_cached_blocks``)."""
        for pool in (self._large, self._small):
            free = [self._blocks.at[address] for _, address in pool.free]
            for block in free:
                if block.base is None and not block.before and not block.after:
                    self._blocks.take(block)
                    self._blocks.drop(block)
                    self._act("segment_free", block.address, block.size)
            for block in free:
                if block.base is not None:
                    self._unmap(block)

    def adopt(self, segments: Iterable[Segment]) -> dict[int, int]:
        """Start with ``segments``; address -> handle, for their blocks in use.

        All expandable segments of one pool are taken to be parts of one, which begins at the lowest address.
        """
        ordered = sorted(segments, key=lambda s: s.address)
        pools = [group for small in (True, False) if (group := [s for s in ordered if s.small == small])]
        handles: dict[int, int] = {}
        for group in pools if self.expandable else ([s] for s in ordered):
            pool, base = self._small if group[0].small else self._large, group[0].address
            size = _addresses(pool) if self.expandable else group[0].size
            rest = Block(base, size, pool, base if self.expandable else None, mapped=not self.expandable)
            piece, self._end = self._blocks.add(rest), max(self._end, base + size)
            for address, size, requested in (block for s in group for block in s.blocks):
                piece = rest
                if address > rest.address:
                    piece = self._blocks.cut(rest, address - rest.address)
                    self._blocks.put(rest)
                rest = self._blocks.cut(piece, size) if size < piece.size else piece
                piece.mapped = True
                self._count(0, 0, size)
                if requested:
                    handles[address] = self._use(piece, requested)
                else:
                    self._blocks.put(piece)
            if rest is not piece:
                self._blocks.put(rest)
        return handles

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

    def _act(self, kind: Kind, address: int, size: int) -> None:
        self.actions.append(Action(kind, address, size))
        self._count(0, 0, size if kind in ("segment_alloc", "segment_map") else -size)

    def _place(self, size: int) -> int:
        """The address of a new segment."""
        address, self._end = self._end, self._end + size
        return address

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The smallest free block of at least ``size`` bytes, or None (``get_free_block``).

        The unmapped addresses behind an expandable block count as part of it.
        """
        at = bisect_left(pool.free, (size, -1))
        if at == len(pool.free):
            return None
        block = self._blocks.at[pool.free[at][1]]
        for _, address in pool.free[at + 1 :] if self.expandable else ():
            if reach(self._blocks.at[address]) >= reach(block):
                break
            block = self._blocks.at[address]
        self._blocks.take(block)
        return block

    def _new(self, pool: Pool, size: int) -> Block:
        """A block in a new segment from the driver (``alloc_block``)."""
        if self.expandable:
            return self._expand(pool, size)
        wanted = segment_size(size)
        block = self._blocks.add(Block(self._place(wanted), wanted, pool))
        self._act("segment_alloc", block.address, wanted)
        return block

    def _split(self, block: Block, size: int) -> None:
        """Cut ``block`` to ``size`` bytes; the rest becomes a free block if it is large enough (``should_split``)."""
        rest = block.size - size
        if rest >= GRAIN if block.pool.small or self.expandable else rest > SMALL_SIZE:
            self._blocks.put(self._blocks.cut(block, size))

    def _expand(self, pool: Pool, size: int) -> Block:
        """A free block with pages mapped behind it (``try_allocate_expandable_block``)."""
        block = self._room(pool, size)
        if not block.mapped:
            self._map(block, min(block.size, size))
        while block.size < size:
            following = block.after
            assert following is not None, "the addresses have room"
            self._map(following, min(size - block.size, following.size))
            block = following
        self._blocks.take(block)
        return block

    def _room(self, pool: Pool, size: int) -> Block:
        """The lowest addresses with room for ``size`` bytes, free or unmapped (``find_expandable_block``)."""
        for address in pool.unmapped:
            block = self._blocks.at[address]
            at: Block | None
            start = at = block.before if block.before and not block.before.requested else block
            room = 0
            while at and room < size and not at.requested:
                room += at.size
                at = at.after
            if room >= size:
                return start
        size = _addresses(pool)
        base = self._place(size)
        fresh = self._blocks.add(Block(base, size, pool, base, mapped=False))
        self._blocks.put(fresh)
        return fresh

    def _map(self, block: Block, size: int) -> None:
        """Map pages to the first ``size`` bytes of ``block`` (``map_block``)."""
        size = -(-size // block.pool.page) * block.pool.page
        self._blocks.take(block)
        if size < block.size:
            self._blocks.put(self._blocks.cut(block, size))
        block.mapped = True
        address = block.address
        self._blocks.join(block)
        self._blocks.put(block)
        self._act("segment_map", address, size)

    def _unmap(self, block: Block) -> None:
        """Return the whole pages within ``block`` to the driver (``unmap_block``), and the addresses of a segment that
        has no page left.
        """
        base, page = block.base or 0, block.pool.page
        start = base - (base - block.address) // page * page
        stop = base + (block.address + block.size - base) // page * page
        if start >= stop:
            return
        self._blocks.take(block)
        if start > block.address:
            rest = self._blocks.cut(block, start - block.address)
            self._blocks.put(block)
            block = rest
        if stop < start + block.size:
            self._blocks.put(self._blocks.cut(block, stop - start))
        block.mapped = False
        self._blocks.join(block)
        self._act("segment_unmap", start, stop - start)
        if block.before or block.after:
            self._blocks.put(block)
        else:
            self._blocks.drop(block)  # release_expandable_segment
