"""The simulated allocator with what recordings have beside the requests: addresses, the driver's actions, segments that
are there at first, an emptied cache, and ``expandable_segments``.

The functions named are those of ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rkgb.device import allocator
from rkgb.device.allocator import GRAIN, LARGE_BUFFER, SMALL_BUFFER, SMALL_SIZE, segment_size

UNLIMITED = 2**60  # bytes of addresses of an expandable segment: torch takes 9/8 of the device's memory
PAGE = {True: SMALL_BUFFER, False: LARGE_BUFFER}  # by which expandable segments grow, by whether of the small pool

Kind = Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]


class Action(NamedTuple):
    """One request to the driver for memory, or its return; ``kind`` is named as in torch's traces."""

    kind: Kind
    address: int
    size: int


class Segment(NamedTuple):
    """A stretch of the device's memory.

    ``blocks``, in order and without a gap: (address, bytes, bytes requested of them); the last is 0 in a free block.
    """

    address: int
    size: int
    small: bool
    blocks: tuple[tuple[int, int, int], ...]


@dataclass(slots=True, eq=False)
class Block(allocator.Block):
    """``base``: address of its segment if expandable. ``mapped``: it has memory."""

    before: Block | None = None
    after: Block | None = None
    base: int | None = None
    mapped: bool = True


def _addresses(small: bool) -> int:
    """Bytes of addresses of an expandable segment (``ExpandableSegment``)."""
    return -(-UNLIMITED // PAGE[small]) * PAGE[small]


def _reach(block: Block) -> int:
    """Bytes of a free block and of the addresses behind it that have no memory yet (``expandable_size``)."""
    return block.size + (block.after.size if block.after and not block.after.mapped else 0)


class Allocator(allocator.Allocator):
    """The simulated allocator. ``expandable``: whether ``expandable_segments`` is on."""

    _at: dict[int, Block]

    def __init__(self, expandable: bool = False) -> None:
        super().__init__()
        self.expandable = expandable
        self.actions: list[Action] = []
        self._unmapped: dict[bool, list[int]] = {True: [], False: []}  # addresses, ordered: BlockComparatorAddress

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, by address. Of an expandable one each mapped stretch counts, as in torch's snapshots."""
        stretches = []
        for block in sorted(self._at.values(), key=lambda b: b.address):
            if not block.mapped or (block.before and block.before.mapped):
                continue
            blocks = []
            at: Block | None = block
            while at and at.mapped:
                blocks.append((at.address, at.size, at.requested))
                at = at.after
            stretches.append(Segment(block.address, sum(b[1] for b in blocks), block.small, tuple(blocks)))
        return tuple(stretches)

    def address(self, handle: int) -> int | None:
        """The address of the block of ``handle``; None for a request of no bytes."""
        block = self._known(handle)
        return block.address if block else None

    def empty_cache(self) -> None:
        """Return free segments, and free pages of expandable ones, to the driver (``release_cached_blocks``)."""
        for small in (False, True):
            free = [self._at[address] for _, address in self._free[small]]
            for block in free:
                if block.base is None and not block.before and not block.after:
                    del self._at[self._take(block).address]
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
            small, base = group[0].small, group[0].address
            size = _addresses(small) if self.expandable else group[0].size
            rest = Block(base, size, small, base=base if self.expandable else None, mapped=not self.expandable)
            piece = self._at[base] = rest
            self._end = max(self._end, base + size)
            for address, size, requested in (block for s in group for block in s.blocks):
                piece = rest
                if address > rest.address:
                    piece = self._cut(rest, address - rest.address)
                    self._put(rest)
                rest = self._cut(piece, size) if size < piece.size else piece
                piece.mapped = True
                self._count(0, 0, size)
                if requested:
                    handles[address] = self._use(piece, requested)
                else:
                    self._put(piece)
            if rest is not piece:
                self._put(rest)
        return handles

    def _act(self, kind: Kind, address: int, size: int) -> None:
        self.actions.append(Action(kind, address, size))
        self._count(0, 0, size if kind in ("segment_alloc", "segment_map") else -size)

    def _place(self, size: int) -> int:
        """The address of a new segment."""
        address, self._end = self._end, self._end + size
        return address

    def _cached(self, size: int) -> Block | None:
        """The unmapped addresses behind an expandable block count as part of it."""
        free = self._free[size <= SMALL_SIZE]
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        block = self._at[free[at][1]]
        for _, address in free[at + 1 :] if self.expandable else ():
            if _reach(self._at[address]) >= _reach(block):
                break
            block = self._at[address]
        return self._take(block)

    def _new(self, size: int) -> Block:
        if self.expandable:
            return self._expand(size <= SMALL_SIZE, size)
        wanted = segment_size(size)
        address = self._place(wanted)
        block = self._at[address] = Block(address, wanted, size <= SMALL_SIZE)
        self._act("segment_alloc", address, wanted)
        return block

    def _is_split(self, block: allocator.Block, rest: int) -> bool:
        return rest >= GRAIN if self.expandable else super()._is_split(block, rest)

    def _put(self, block: Block) -> None:
        """Into the free blocks if it is mapped, else into the unmapped addresses."""
        if block.mapped:
            super()._put(block)
        else:
            insort(self._unmapped[block.small], block.address)

    def _take(self, block: Block) -> Block:
        if block.mapped:
            super()._take(block)
        else:
            self._unmapped[block.small].remove(block.address)
        return block

    def _cut(self, block: Block, size: int) -> Block:
        rest = super()._cut(block, size)
        assert isinstance(rest, Block)
        return rest

    def _unites(self, block: Block, other: Block) -> bool:
        return super()._unites(block, other) and other.mapped == block.mapped

    def _expand(self, small: bool, size: int) -> Block:
        """A free block with pages mapped behind it (``try_allocate_expandable_block``)."""
        block = self._room(small, size)
        if not block.mapped:
            self._map(block, min(block.size, size))
        while block.size < size:
            following = block.after
            assert following is not None, "the addresses have room"
            self._map(following, min(size - block.size, following.size))
            block = following
        return self._take(block)

    def _room(self, small: bool, size: int) -> Block:
        """The lowest addresses with room for ``size`` bytes, free or unmapped (``find_expandable_block``)."""
        for address in self._unmapped[small]:
            block = self._at[address]
            at: Block | None
            start = at = block.before if block.before and not block.before.requested else block
            room = 0
            while at and room < size and not at.requested:
                room += at.size
                at = at.after
            if room >= size:
                return start
        size = _addresses(small)
        base = self._place(size)
        fresh = self._at[base] = Block(base, size, small, base=base, mapped=False)
        self._put(fresh)
        return fresh

    def _map(self, block: Block, size: int) -> None:
        """Map pages to the first ``size`` bytes of ``block`` (``map_block``)."""
        size = -(-size // PAGE[block.small]) * PAGE[block.small]
        self._take(block)
        if size < block.size:
            self._put(self._cut(block, size))
        block.mapped = True
        address = block.address
        self._join(block)
        self._put(block)
        self._act("segment_map", address, size)

    def _unmap(self, block: Block) -> None:
        """Return the whole pages within ``block`` to the driver (``unmap_block``), and the addresses of a segment that
        has no page left.
        """
        base, page = block.base or 0, PAGE[block.small]
        start = base - (base - block.address) // page * page
        stop = base + (block.address + block.size - base) // page * page
        if start >= stop:
            return
        self._take(block)
        if start > block.address:
            rest = self._cut(block, start - block.address)
            self._put(block)
            block = rest
        if stop < start + block.size:
            self._put(self._cut(block, stop - start))
        block.mapped = False
        self._join(block)
        self._act("segment_unmap", start, stop - start)
        if block.before or block.after:
            self._put(block)
        else:
            del self._at[block.address]  # release_expandable_segment
