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

from bisect import bisect_right
from collections.abc import Callable, Iterable

from solvers.chain.revolve import binomial
from solvers.chain.table import ChainTable
from solvers.errors import InfeasibleError
from solvers.rotor.chain import Chain
from solvers.rotor.costs import build, costs_of, of_least_memory
from solvers.rotor.ops import Loss, Sequence
from solvers.rotor.walk import walk_sequence

_NOMINAL = 1.6
"""Of the limit: the table rounds to slots, so sequences for a larger nominal limit may fit the real one."""

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
    unit = max(1, limit // slots)
    table = ChainTable(costs_of(chain, unit), unit, int(_NOMINAL * slots))
    fitting: list[Sequence] = []

    def peak(m: int) -> int:
        sequence = Sequence(build(chain.length, table.choice, m), name)
        found = walk_sequence(chain, sequence).peak
        if found <= limit:
            fitting.append(sequence)
        return found

    bisect_right(table.breakpoints(), limit, key=peak)  # walked peaks grow with the nominal memory, but for rounding
    if chain.length <= _LONG or not fitting:
        least = Sequence(of_least_memory(costs_of(chain)), name)
        fitting += [least, *sequential_sequences(chain), *_revolve_sequences(chain)]
    return _fastest(chain, limit, fitting)


def simplest(chain: Chain, limit: int, slots: int) -> Sequence:
    """Equal segments, if their step takes at most ``ALIKE`` longer than that of ``persistent``, else the latter.

    For measured times, which are not known better than that.
    """
    fastest = persistent(chain, limit, slots)
    most = (1 + ALIKE) * walk_sequence(chain, fastest).time
    walked = [(walk_sequence(chain, segments), segments) for segments in sequential_sequences(chain)]
    alike = [(found.time, segments) for found, segments in walked if found.peak <= limit and found.time <= most]
    return min(alike, key=lambda pair: pair[0])[1] if alike else fastest


def no_checkpoint_sequence(chain: Chain) -> Sequence:
    """Keep everything, recompute nothing."""
    return Sequence(segments_sequence(chain, 1), "no_checkpoint")


def segments_sequence(chain: Chain, segments: int) -> Sequence:
    """``segments`` segments of equal length, all checkpointed but the last, which takes the remainder."""
    length, size = chain.length, chain.length // segments

    def choose(i: int, j: int, m: int) -> tuple[int | None, int, int]:
        return (None, i + size, m) if j == length and i < size * (segments - 1) else (0, i + 1, m)

    return Sequence(build(length, choose, 0), f"sequential({segments} segments)")


def sequential_sequences(chain: Chain) -> Iterable[Sequence]:
    """Every number of segments."""
    return (segments_sequence(chain, n) for n in range(1, chain.length + 1))


def _revolve_sequences(chain: Chain) -> Iterable[Sequence]:
    """One sequence for each useful number of checkpoints. With most of them, each stage runs twice at most."""
    return (revolve_sequence(chain, c) for c in range(chain.length))


def revolve_sequence(chain: Chain, checkpoints: int) -> Sequence:
    """Fewest forward runs when at most ``checkpoints`` values beside the input are stored at a time."""
    made = build(chain.length, binomial(chain.length), checkpoints)
    return Sequence(made, f"griewank({checkpoints} checkpoints)")


def _fastest(chain: Chain, limit: int, sequences: Iterable[Sequence]) -> Sequence:
    walked = [(walk_sequence(chain, sequence), sequence) for sequence in sequences]
    fitting = [(found.time, sequence) for found, sequence in walked if found.peak <= limit]
    if fitting:
        return min(fitting, key=lambda pair: pair[0])[1]
    least = min((found for found, _ in walked), key=lambda found: found.peak)
    at = next(moment.operation for moment in least.moments if moment.peak == least.peak)
    where = repr(at) if isinstance(at, Loss) else f"{at!r} ({chain.stages[at.index].name})"
    message = f"no sequence fits {limit} bytes; the smallest limit that one fits is {least.peak} bytes, set by {where}"
    raise InfeasibleError(message, least.peak, where)


ALGORITHMS: dict[str, Callable[[Chain, int, int], Sequence]] = {
    "persistent": persistent,
    "rotor": persistent,
    "no_checkpoint": lambda chain, limit, _: _fastest(chain, limit, [no_checkpoint_sequence(chain)]),
    "sequential": lambda chain, limit, _: _fastest(chain, limit, sequential_sequences(chain)),
    "griewank": lambda chain, limit, _: _fastest(chain, limit, _revolve_sequences(chain)),
}
