"""Blocks of the simulated allocator (``rkgb/device/allocator.py``): their neighbours, and pools of free ones.

They correspond to ``Block`` and ``BlockPool`` in ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]


class Action(NamedTuple):
    """One request to the driver for memory, or its return; ``kind`` is named as in torch's traces."""

    kind: Kind
    address: int
    size: int


class Levels(NamedTuple):
    """``requested``: bytes that the program asked for. ``allocated``: bytes of their blocks. ``reserved``: bytes of all
    segments. ``torch.cuda.memory_stats`` calls them ``requested_bytes``, ``allocated_bytes`` and ``reserved_bytes``.
    """

    requested: int
    allocated: int
    reserved: int


class Segment(NamedTuple):
    """A stretch of the device's memory.

    ``blocks``, in order and without a gap: (address, bytes, bytes requested of them); the last is 0 in a free block.
    """

    address: int
    size: int
    small: bool
    blocks: tuple[tuple[int, int, int], ...]


@dataclass(slots=True, eq=False)
class Pool:
    """Free blocks of one size class. ``page``: bytes by which its expandable segments grow."""

    small: bool
    page: int
    free: list[tuple[int, int]] = field(default_factory=list)  # (bytes, address), ordered: BlockComparatorSize
    unmapped: list[int] = field(default_factory=list)  # addresses, ordered: BlockComparatorAddress


@dataclass(slots=True, eq=False)
class Block:
    """A block of a segment. ``before``, ``after``: its neighbours. ``base``: address of its segment if expandable."""

    address: int
    size: int
    pool: Pool
    base: int | None = None
    mapped: bool = True
    requested: int = 0  # 0 in a free block
    before: Block | None = None
    after: Block | None = None


class Blocks:
    """All blocks, by address. Each is in use, or in a list of its pool, or was taken out of it by a caller."""

    def __init__(self) -> None:
        self.at: dict[int, Block] = {}

    def add(self, block: Block) -> Block:
        """Register ``block``, which is in no list."""
        self.at[block.address] = block
        return block

    def drop(self, block: Block) -> None:
        """Remove ``block``, which is in no list."""
        del self.at[block.address]

    def put(self, block: Block) -> None:
        """Insert ``block`` into its pool: into the free blocks if it is mapped, else into the unmapped addresses."""
        if block.mapped:
            insort(block.pool.free, (block.size, block.address))
        else:
            insort(block.pool.unmapped, block.address)

    def take(self, block: Block) -> None:
        """Remove ``block`` from the list of its pool that ``put`` inserted it into."""
        if block.mapped:
            del block.pool.free[bisect_left(block.pool.free, (block.size, block.address))]
        else:
            del block.pool.unmapped[bisect_left(block.pool.unmapped, block.address)]

    def cut(self, block: Block, size: int) -> Block:
        """Shorten ``block`` to ``size`` bytes, and return the rest as a new block."""
        rest = Block(block.address + size, block.size - size, block.pool, block.base, block.mapped)
        rest.before, rest.after = block, block.after
        if rest.after:
            rest.after.before = rest
        block.after, block.size = rest, size
        return self.add(rest)

    def join(self, block: Block) -> None:
        """Unite ``block``, which is in no list, with its free neighbours (``try_merge_blocks``)."""
        for other in (block.before, block.after):
            if other is None or other.requested or other.mapped != block.mapped:
                continue
            self.take(other)
            self.drop(other)
            self.drop(block)
            if other is block.before:
                block.address, block.before = other.address, other.before
                if block.before:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after:
                    block.after.before = block
            block.size += other.size
            self.add(block)

    def segments(self) -> tuple[Segment, ...]:
        """Stretches of mapped blocks, by address."""
        stretches = []
        for block in sorted(self.at.values(), key=lambda b: b.address):
            if not block.mapped or (block.before and block.before.mapped):
                continue
            blocks = []
            at: Block | None = block
            while at and at.mapped:
                blocks.append((at.address, at.size, at.requested))
                at = at.after
            stretches.append(Segment(block.address, sum(b[1] for b in blocks), block.pool.small, tuple(blocks)))
        return tuple(stretches)


def reach(block: Block) -> int:
    """Bytes of a free block and of the addresses behind it that have no memory yet (``expandable_size``)."""
    return block.size + (block.after.size if block.after and not block.after.mapped else 0)
