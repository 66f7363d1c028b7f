"""A slow model of torch's allocator for the tests: no lists of free blocks, only what is in use and what has memory.

A range has memory in units: a segment of ``cudaMalloc`` is one, an expandable segment has pages. Free blocks are
found by looking: what lies between blocks in use where there is memory. The rules are written a second time, from
torch's source, and nothing is shared with ``rkgb/device/allocator.py`` and ``benchmarks/gpu_run/allocator.py``.
"""

from __future__ import annotations

MIB = 1 << 20


class Range:
    """Addresses from ``start`` to ``stop``; ``units`` says which stretches of ``page`` bytes have memory."""

    def __init__(self, start: int, stop: int, page: int, small: bool) -> None:
        self.start, self.stop, self.page, self.small = start, stop, page, small
        self.units: set[int] = set()
        self.used: dict[int, tuple[int, int]] = {}  # address -> (bytes of the block, bytes asked for)

    def mapped(self) -> list[tuple[int, int]]:
        """Stretches with memory, (start, stop), as long as can be."""
        found: list[tuple[int, int]] = []
        for unit in sorted(self.units):
            start = self.start + unit * self.page
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], start + self.page)
            else:
                found.append((start, start + self.page))
        return found

    def holes(self) -> list[tuple[int, int]]:
        """Stretches without memory."""
        edges = [self.start, *(edge for stretch in self.mapped() for edge in stretch), self.stop]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]

    def gaps(self) -> list[tuple[int, int]]:
        """Free blocks (start, stop)."""
        found = []
        for start, stop in self.mapped():
            for address in sorted(self.used):
                if start <= address < stop:
                    if start < address:
                        found.append((start, address))
                    start = address + self.used[address][0]
            if start < stop:
                found.append((start, stop))
        return found


class Model:
    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self.ranges: list[Range] = []
        self.end = 0

    @property
    def levels(self) -> tuple[int, int, int]:
        blocks = [block for r in self.ranges for block in r.used.values()]
        reserved = sum(len(r.units) * r.page for r in self.ranges)
        return sum(b[1] for b in blocks), sum(b[0] for b in blocks), reserved

    def malloc(self, asked: int) -> int:
        """The address."""
        size = (asked + 511) // 512 * 512
        small = size <= MIB
        place = self.best(size, small)
        if place is None:
            place = self.grow(size, small)
        owner, start, stop = place
        rest = stop - start - size
        split = rest >= 512 if small or self.expandable else rest > MIB
        owner.used[start] = (size if split else stop - start, asked)
        return start

    def free(self, address: int) -> None:
        for r in self.ranges:
            r.used.pop(address, None)

    def best(self, size: int, small: bool) -> tuple[Range, int, int] | None:
        found = [(b - a, a, b, r) for r in self.ranges if r.small == small for a, b in r.gaps()]
        found = sorted((f for f in found if f[0] >= size), key=lambda f: f[:2])
        if not found:
            return None
        chosen = found[0]
        if self.expandable:
            # The first free block of which the next larger one could not grow to less.
            def could_be(f: tuple[int, int, int, Range]) -> int:
                return f[0] + sum(b - a for a, b in f[3].holes() if a == f[2])

            for after in found[1:]:
                if could_be(after) >= could_be(chosen):
                    break
                chosen = after
        return chosen[3], chosen[1], chosen[2]

    def grow(self, size: int, small: bool) -> tuple[Range, int, int]:
        if self.expandable:
            return self.expand(size, small)
        unit = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        r = Range(self.end, self.end + unit, unit, small)
        r.units.add(0)
        self.end += unit
        self.ranges.append(r)
        return r, r.start, r.stop

    def expand(self, size: int, small: bool) -> tuple[Range, int, int]:
        r, start = self.room(size, small)
        while True:  # what is free has memory; a hole is given as much as is needed, all at once or nothing
            end = next((b for a, b in r.gaps() if a == start), start)
            if end - start >= size:
                return r, start, end
            hole = next(b for a, b in r.holes() if a == end)
            pages = -(-min(size - (end - start), hole - end) // r.page)
            first = (end - r.start) // r.page
            r.units |= set(range(first, first + pages))

    def room(self, size: int, small: bool) -> tuple[Range, int]:
        for r in sorted((r for r in self.ranges if r.small == small), key=lambda r: r.start):
            for start, _ in r.holes():
                begin = next((a for a, b in r.gaps() if b == start), start)
                end = min([a for a in r.used if a >= begin], default=r.stop)
                if end - begin >= size:
                    return r, begin
        page = 2 * MIB if small else 20 * MIB
        space = 1 << 60
        r = Range(self.end, self.end + (space + page - 1) // page * page, page, small)
        self.end = r.stop
        self.ranges.append(r)
        return r, r.start

    def release(self) -> None:
        kept = []
        for r in self.ranges:
            had_memory = bool(r.units)
            for unit in list(r.units):
                start = r.start + unit * r.page
                if all(a + size <= start or a >= start + r.page for a, (size, _) in r.used.items()):
                    r.units.remove(unit)
            if r.units or not had_memory:  # torch finds what to give back by its free blocks
                kept.append(r)
        self.ranges = kept
