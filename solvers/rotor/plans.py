"""Algorithms that make checkpointing sequences, by name: ``ALGORITHMS[name](chain, limit, slots)``.

All return the fastest sequence of their kind whose walked peak is at most ``limit`` bytes. They raise
``InfeasibleError`` if they have none, with the smallest limit for which they have one.

``persistent``, ``rotor``: the optimal persistent sequence, the problem of the paper (``solvers.rotor.costs``), up to
slots of memory, so of a chain of at most 120 stages the sequences of all other algorithms are compared with it.
``no_checkpoint``: keep everything.
``sequential``: equal segments, each checkpointed but the last, as ``torch.utils.checkpoint.checkpoint_sequential``;
the number of segments is chosen. ``griewank``: binomial checkpointing as if all stages were alike (Griewank and
Walther, "Algorithm 799: Revolve", ACM TOMS 26, 2000), with the number of checkpoints that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from solvers.chain.revolve import Splits, binomial_splits
from solvers.chain.table import ChainTable
from solvers.errors import InfeasibleError
from solvers.rotor.chain import Chain
from solvers.rotor.costs import build, costs_of, from_table, of_least_memory
from solvers.rotor.ops import B, Fck, Fe, Fn, Loss, Operation, Sequence
from solvers.rotor.walk import Walked, walk_sequence

# The table rounds to slots, so sequences for a larger nominal limit may fit the real one.
_NOMINAL = (1.05, 1.6)
ALIKE = 0.01
"""Of a step's time: sequences that differ by less take as long, as far as times are measured."""

# A table's time grows with length³ · slots. Chains shorter than _LONG get up to _FINER times the slots at little cost.
_LONG, _FINER = 120, 8


def persistent(chain: Chain, limit: int, slots: int) -> Sequence:
    """The fastest persistent sequence within ``limit`` bytes. ``slots``: of the table; short chains get more."""
    name = f"persistent({limit} bytes, {slots} slots)"
    slots *= max(1, min(_FINER, (_LONG // chain.length) ** 2))
    everything = no_checkpoint_sequence(chain)
    if walk_sequence(chain, everything).peak <= limit:
        return everything
    fitting: list[Sequence] = []
    for nominal in _NOMINAL:
        if not _from_table(chain, limit, max(1, int(nominal * limit / slots)), slots, name, fitting):
            break
    if chain.length > _LONG and fitting:
        return _fastest(chain, limit, fitting)
    least = Sequence(of_least_memory(costs_of(chain)), name)
    return _fastest(chain, limit, [*fitting, least, *sequential_sequences(chain), *_revolve_sequences(chain)])


def simplest(chain: Chain, limit: int, slots: int) -> Sequence:
    """Equal segments, if their step takes at most ``ALIKE`` longer than that of ``persistent``, else the latter.

    For measured times, which are not known better than that.
    """
    fastest = persistent(chain, limit, slots)
    try:
        segments = sequential(chain, limit, slots)
    except InfeasibleError:
        return fastest
    alike = walk_sequence(chain, segments).time <= (1 + ALIKE) * walk_sequence(chain, fastest).time
    return segments if alike else fastest


def _from_table(chain: Chain, limit: int, unit: int, slots: int, name: str, fitting: list[Sequence]) -> bool:
    """Add sequences whose walked peak fits, the last of the largest nominal memory; whether the table ends there.

    Except for rounding, walked peaks grow with the nominal memory, so bisection finds it.
    """
    table = ChainTable(costs_of(chain, unit), unit, slots)
    steps = table.breakpoints()
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        sequence = Sequence(from_table(table, steps[middle]), name)
        if walk_sequence(chain, sequence).peak <= limit:
            fitting.append(sequence)
            low = middle + 1
        else:
            high = middle
    return bool(steps) and low == len(steps)


def no_checkpoint_sequence(chain: Chain) -> Sequence:
    """Keep everything, recompute nothing."""
    return replace(segments_sequence(chain, 1), algorithm="no_checkpoint")


def no_checkpoint(chain: Chain, limit: int, slots: int = 0) -> Sequence:
    """Keep everything."""
    return _fastest(chain, limit, [no_checkpoint_sequence(chain)])


def segments_sequence(chain: Chain, segments: int) -> Sequence:
    """``segments`` segments of equal length, all checkpointed but the last, which takes the remainder."""
    length, size = chain.length, chain.length // segments
    starts = [k * size for k in range(segments)]
    done: list[Operation] = []
    for start in starts[:-1]:
        done += [Fck(start), *(Fn(j) for j in range(start + 1, start + size))]
    last = starts[-1]
    done += [*(Fe(j) for j in range(last, length)), Loss(), *(B(j) for j in reversed(range(last, length)))]
    for start in reversed(starts[:-1]):
        stages = range(start, start + size)
        done += [*(Fe(j) for j in stages), *(B(j) for j in reversed(stages))]
    return Sequence(tuple(done), f"sequential({segments} segments)")


def sequential_sequences(chain: Chain) -> Iterable[Sequence]:
    """Every number of segments."""
    return (segments_sequence(chain, n) for n in range(1, chain.length + 1))


def sequential(chain: Chain, limit: int, slots: int = 0) -> Sequence:
    """Equal segments, in the number that fits and is fastest."""
    return _fastest(chain, limit, sequential_sequences(chain))


def griewank(chain: Chain, limit: int, slots: int = 0) -> Sequence:
    """Binomial checkpointing with at most ``c`` checkpoints beside the input; the ``c`` that fits and is fastest."""
    return _fastest(chain, limit, _revolve_sequences(chain))


def _revolve_sequences(chain: Chain) -> Iterable[Sequence]:
    """One sequence for each useful number of checkpoints. With most of them, each stage runs twice at most."""
    most = max(0, chain.length - 1)
    splits = binomial_splits(chain.length, most)
    return (revolve_sequence(chain, c, splits) for c in range(most + 1))


def revolve_sequence(chain: Chain, checkpoints: int, splits: Splits | None = None) -> Sequence:
    """Fewest forward runs when at most ``checkpoints`` values beside the input are stored at a time."""
    splits, length = splits or binomial_splits(chain.length, checkpoints), chain.length

    def choose(i: int, j: int, c: int) -> tuple[int | None, int, int]:
        size = min(j, length - 1) - i + 1
        return (0, i + 1, c) if size == 1 else (None, i + splits[c][size], max(0, c - 1))

    return Sequence(build(length, choose, checkpoints), f"griewank({checkpoints} checkpoints)")


def _fastest(chain: Chain, limit: int, sequences: Iterable[Sequence]) -> Sequence:
    walked = [(walk_sequence(chain, sequence), sequence) for sequence in sequences]
    fitting = [(found.time, sequence) for found, sequence in walked if found.peak <= limit]
    if not fitting:
        raise infeasible(chain, limit, [found for found, _ in walked])
    return min(fitting, key=lambda pair: pair[0])[1]


def infeasible(chain: Chain, limit: int, tried: Iterable[Walked]) -> InfeasibleError:
    """The error for a limit that none of the sequences ``tried`` fits."""
    least = min(tried, key=lambda walked: walked.peak)
    operation = least.tightest.operation
    where = repr(operation) if isinstance(operation, Loss) else f"{operation!r} ({chain.stages[operation.index].name})"
    return InfeasibleError(
        f"no sequence fits {limit} bytes; the smallest limit that one fits is {least.peak} bytes, set by {where}",
        least.peak,
        where,
    )


ALGORITHMS: dict[str, Callable[[Chain, int, int], Sequence]] = {
    "persistent": persistent,
    "rotor": persistent,
    "no_checkpoint": no_checkpoint,
    "sequential": sequential,
    "griewank": griewank,
}
