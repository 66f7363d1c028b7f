"""Numbers that tensors are multiplied by, where nothing runs again.

Then the captured program runs as it is, and autograd saves each such number as a tensor of its own. In other programs
they are constants, which are there before the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from rkgb.graphs import D_graph, S_graph
from solvers import Bwd, Loss, Run, Schedule, Walk

# Their derivatives do not read the numbers.
_UNREAD = frozenset(
    "add add_ sub sub_ rsub where fill fill_ copy_ masked_fill masked_fill_ index_put index_put_".split()
)


def bytes_of_numbers(s: S_graph, device: torch.device) -> list[int]:
    """For each node, the most bytes of numbers that autograd may save for its backward."""
    return [sum(_saved(s.d, op, device) for op in node.ops) for node in s.nodes]


def _saved(d: D_graph, op: int, device: torch.device) -> int:
    node = d.nodes[op]
    if node.name in _UNREAD or not any(d.values[v].requires_grad for v in node.reads()):
        return 0
    numbers = (a for a in node.args if isinstance(a, torch.Tensor) and not a.shape and a.device == device)
    return sum(a.nbytes for a in numbers)


def peak_with_numbers(walked: Walk, schedule: Schedule, numbers: Sequence[int]) -> int:
    """The peak of a ``schedule`` that runs nothing again, with the numbers that are saved until their backward."""
    if sum(isinstance(step, Run) for step in schedule) > len(numbers):
        return walked.peak
    so_far = [*itertools.accumulate(numbers)]

    def more(step: object) -> int:
        return so_far[step.node] if isinstance(step, Run | Bwd) else so_far[-1] if isinstance(step, Loss) else 0

    return max((level + more(step) for level, step in zip(walked.timeline, schedule, strict=True)), default=0)
